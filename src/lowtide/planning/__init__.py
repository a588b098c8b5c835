"""From a step and a budget to a schedule that fits. Imports no torch.

What a schedule is, and what it costs:

- `simulate`: the live bytes and seconds of a schedule; `transfer_model`: its transfers to a store and back
- `schedules`: the schedule of a step as one schedule for each graph, and the bytes besides the graphs;
  `graph_fetches`: when a graph reads its resting weights
- `eager_checkpoints`: the user's own calls of torch.utils.checkpoint, as eager runs them
- `activations`: the forward storages that backward reads again

From a step to a solution:

- `log_lines`: lines of the log about steps and decisions
- `registry`: the planners by name; `planning_problem`: what each of them gets
- `baselines`: `none`, `all`, `every-block`, `sqrt`; `mu_two`: `mu-two`
- `variants`: `auto`, as one flat list of the forms of a step and a search over them
- `auto`: the search of one form; `repeated_blocks`: where it starts in a step of many equal blocks
- `offload_sets`: which values to offload; `transfer_schedule`: when their transfers begin and end
- `resting_forms`: the form of a step whose optimizer's state rests on a store
- `resting_weights`: the form of a step whose weights rest on a store
- `resting_sets`: what rests, as forms of a step, and the cheapest plan over all of them
- `search`: the search space and its annealing; `native`: its inner loops, in C
- `needs`, `cuts`, `lower_bounds`: what a step needs when, as minimum cuts at time points: proven lower bounds
- `planner`: the solutions of one step; `repeated_graphs`: that of a step whose graphs run several times;
  `mixed_runs`: two schedules for the runs of one graph; `graph_passes`: what the passes of its graphs need
- `repeated_calls`: the step of several calls of a model, from that of one
- `pipeline_bytes`: what a pipeline keeps live around the calls of one of its stages
- `rounded_step`: a step in the form that rounds, beside its exact form
- `stages`: a stage of many equal blocks, from a step of a few
- `mesh_search`: the fastest mesh of GPUs; `mesh_estimates`: peak and seconds of one mesh; `mesh_seconds`: its
  seconds; `link_seconds`: those of exchanges
- `decisions`: a solution in words, and what would lower the floor

Beside them:

- `allocator`: the bytes that an accelerator's caching allocator reserves for a schedule
- `reserved_budget`: solutions within a budget of allocated or of reserved bytes on an accelerator
- `abstract`: graphs of bytes and costs alone, for `lowtide solve`
"""
