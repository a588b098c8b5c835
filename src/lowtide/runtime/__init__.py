"""Put a plan to work inside the user's own training loop.

- `rewrite`: the forward and backward graphs of a schedule
- `executor`: who runs them
- `inductor`: those that Inductor compiles, and plans that count with what its code holds
- `backend`: the torch.compile backend that rewrites every graph by its plan
- `backward`: backward passes, for whichever outputs got a gradient
- `fans`: gradients of several graphs that autograd adds up in eager's order
- `shared_casts`: gradients of several calls that autocast's casts of a weight add up, as eager rounds them
- `pending`: the call whose backward pass has not come yet
- `loop_watch`, `layout_watch`, `kept_graphs`, `bypass`: notice what the loop does that the plan does not
  count on; `notices` say it
- `expected_loss`: room for a loss that is not known yet
- `runner`: what a planned model calls instead of its own code
- `apply`: a plan put to work on a model, in place
- `replan`: plans for graphs that come later: other batch shapes, other situations
- `steps`: the facts of a step around such graphs
- `compile_backend`: `torch.compile(backend="lowtide")`
"""
