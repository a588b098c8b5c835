"""Put a plan to work inside the user's own training loop.

- `apply`: route a model's calls through its plan, in place; the plan of a model
- `resting_model`: the weights of a model that rest on the store, laid there and brought back
- `runner`: what a planned model calls instead of its own code
- `call_schedules`: what a runner asks for the schedules of its graphs
- `replan`: schedules for later graphs: other batch shapes, other settings
- `counted_loop`: the base of `replan`: what is counted of the loop, and when that outgrows the budget
- `seen_loop`: on that base, schedules that leave room for the loop's own tensors and for longer paths
- `incomplete_steps`: the facts of steps around such graphs
- `loop_reserve`: what a plan's own graphs leave to the loop: an unknown loss, and other tensors of a step
- `backend`: the torch.compile backend that rewrites every graph by its schedule
- `rewrite`: the forward and backward graphs of a schedule
- `fetches`: the reads of resting weights as ops of a graph, before it is rewritten
- `executor`: run the two graphs op by op or compiled by Inductor; solutions for compiled code
- `graph_call`: nodes of autograd around a graph: autocast cache, gradient handover
- `shared_gradients`: gradients of tensors that several graphs use leave their graph as soon as they are made
- `continued_sums`: sums of gradients that begin with those of later uses of an input
- `backward`: backward passes, by the outputs that got a gradient
- `observer`: events of the user's loop, and warnings where the loop departs from the plan
- `loop_messages`: the texts of these warnings
- `model_marker`: notices copies of a planned model, and gradients that bypass its plan
- `loop_watch`: the bytes that the loop makes between forward and backward pass
- `loop_tensors`: the bytes that the loop makes for every step beside the model
- `loop_look`: has these counted, and gradients that are live when a step begins
- `kept_outputs`: the bytes of earlier outputs that the loop keeps live through the forward pass
- `pending_calls`: calls of a step before its backward pass, and graphs planned for all of them together
- `compile_backend`: `torch.compile(backend="lowtide")`
"""
