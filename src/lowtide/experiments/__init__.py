"""Experiments on one target: functions that report progress and return frozen records.

- `sweep_rows`: batch sizes side by side
- `fit`: the largest and the fastest size in a budget; `fit_search`: the search for one budget;
  `profiled_sizes`: the profiled sizes; `interpolate`: sizes that were not captured
- `compare_methods`: other methods to save memory; `contenders`: these methods; `trial`: a trial of one method
- `measured`: plans, and points of a trade-off curve, measured in real runs
- `out_of_memory`: why a loop ran out of memory, and what would fit
- `remat_regions`: one of these methods, the package torch_remat
- `pipeline_stages`: a model cut into the stages of a pipeline, each profiled in one process
- `mesh_steps`: the step of one GPU of a mesh; `decoder_search`, `target_search`: the fastest mesh
- `planner_curves`: the trade-off curves of several planners
- `checkup`: a small model on this machine; `machine`: its memory, and the dependencies of lowtide
"""
