"""The costs of the ops of a step: seconds and workspace bytes.

A profile either measures each distinct op alone, on random data and in little memory; or it runs the whole
graphs, in the memory of the step.

- `costing`: a captured step with the costs of its ops, measured or scaled from known ones
- `op_costs`: times and workspaces of single calls, in rounds; `op_trials`: one call under measurement
- `repeat_trials`: ops of other libraries, tried before a plan may run them again
- `formula_costs`: the bytes of eager's formulas of gradients
- `work`: bytes and flops of a call, and a smaller call of the same op
- `library_workspaces`: bytes that libraries keep on an accelerator
- `samples`: random inputs that an op accepts
- `real_strides`: the strides of real results
- `cache`: costs measured before, on disk
- `whole_run`: real runs of whole graphs
- `roofline`: costs on an absent GPU, from its published rates
- `transfer_speed`: the measured speed of an offload store
- `free_memory`: the memory that a device has free; `peak_counter`: the most that it had in use
- `devices`: the clock and the allocator of a device; `device_clock`: times without launches, by events
"""
