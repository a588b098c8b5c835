"""The optimizer's step: what it allocates, and how it goes in chunks or in the backward pass.

- `joined_optimizers`: several optimizers as one, and steps with a closure
- `shadow_optimizer`: the user's optimizer over other tensors; estimates of steps that cannot be traced
- `optimizer_trace`: what `optimizer.step()` allocates, op by op
- `split_step`: the step for some parameters, or some rows of one, at a time
- `split_check`: whether a split step gives the same bits, and what its chunks allocate
- `resting_state`: which of the optimizer's state rests on a store, and the blocks for its rows
- `chunk_buffers`: when chunks read, compute and write, and the bytes of their blocks
- `resting_step`: a step in chunks whose state is read from a store and written back
- `step_in_backward`: the step for each parameter as soon as its gradient is final
- `awaited_step`: the `optimizer.step()` of the loop, which must come next
- `updated_parameter`: what refuses reads of parameters and gradients until then
"""
