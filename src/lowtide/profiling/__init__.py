"""What the ops of a step cost: seconds, and workspace bytes.

Two ways: op by op, each distinct one alone, on random data and in little memory; or the whole graph, run for
real, in the memory of the step.

- `costing`: a captured step with the costs of its ops, measured or scaled from known ones
- `op_costs`: times and workspaces of single calls, in rounds; `op_trials`: one call under measurement
- `work`: bytes and flops of a call, and a smaller call of the same op
- `samples`: random inputs that an op accepts
- `real_strides`: the strides that results really have
- `cache`: costs measured before, on disk
- `whole_run`: the second way, real runs of the graphs
- `roofline`: costs on a GPU that is not there, from its published rates
- `transfer_speed`: how fast an offload store writes and reads
- `devices`: the clock and the allocator of a device
"""
