"""The optimizer's step: what it allocates, and how it goes in chunks or in the backward pass.

- `joined_optimizers`: several optimizers as one, and steps with a closure
- `shadow_optimizer`: the user's optimizer over other tensors; estimates of steps that cannot be traced
- `optimizer_trace`: what `optimizer.step()` allocates, op by op
- `split_step`: the step for some parameters, or some rows of one, at a time
- `split_check`: whether a split step gives the same bits, and what its chunks allocate
- `step_in_backward`: the step for each parameter as soon as its gradient is final
- `awaited_step`: the `optimizer.step()` of the loop, which must come next
- `updated_parameter`: what refuses reads of parameters and gradients until then
"""
