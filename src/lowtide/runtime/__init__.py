"""Put a plan to work inside the user's own training loop.

- `apply`: route a model's calls through its plan, in place; which plan is at work
- `runner`: what a planned model calls instead of its own code
- `replan`: schedules for graphs that come later: other batch shapes, other situations
- `incomplete_steps`: the facts of steps around such graphs, and bytes reserved for an unknown loss
- `backend`: the torch.compile backend that rewrites every graph by its schedule
- `rewrite`: the forward and backward graphs of a schedule
- `executor`: what runs the two graphs, op by op or compiled by Inductor, and solutions for compiled code
- `graph_call`: nodes of autograd around a graph: autocast cache, gradient handover
- `backward`: backward passes, for whichever outputs got a gradient
- `observer`: what the user's loop does with the model, and notices where it departs from the plan
- `loop_watch`: the bytes of a loss that was not given
- `compile_backend`: `torch.compile(backend="lowtide")`
"""
