"""Put a plan to work inside the user's own training loop.

- `apply`: route a model's calls through its plan, in place; the plan of a model
- `runner`: what a planned model calls instead of its own code
- `call_schedules`: what a runner asks for the schedules of its graphs
- `replan`: schedules for later graphs: other batch shapes, other settings
- `incomplete_steps`: the facts of steps around such graphs, and bytes reserved for an unknown loss
- `backend`: the torch.compile backend that rewrites every graph by its schedule
- `rewrite`: the forward and backward graphs of a schedule
- `executor`: run the two graphs op by op or compiled by Inductor; solutions for compiled code
- `graph_call`: nodes of autograd around a graph: autocast cache, gradient handover
- `shared_gradients`: gradients of tensors that several graphs use leave their graph as soon as they are made
- `continued_sums`: sums of gradients that begin with those of later uses of an input
- `backward`: backward passes, by the outputs that got a gradient
- `observer`: events of the user's loop, and warnings where the loop departs from the plan
- `loop_messages`: the texts of these warnings
- `model_marker`: notices copies of a planned model, and gradients that bypass its plan
- `loop_watch`: the bytes that the loop makes between forward and backward pass
- `kept_outputs`: the bytes of earlier outputs that the loop keeps live through the forward pass
- `pending_calls`: calls of a step before its backward pass, and graphs planned for all of them together
- `compile_backend`: `torch.compile(backend="lowtide")`
"""
