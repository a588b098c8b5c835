"""From a step and a budget to a schedule that fits. Knows no torch.

- `planner`: the planners by name, one `Desk` for each step
- `simulate`: bytes and seconds of a schedule
- `activations`: forward storages that backward reads again
- `schedules`: a step's schedule as what each graph runs, and the bytes besides the graphs
- `auto`, `mu_two`, `baselines`: how each planner chooses
- `values`: which storages values refer to; `bounds`: how good a plan can be at best, proven
- `anneal`: the search of `auto`, over sequences of runs; `native`: its inner loops, in C
- `repeats`: equal blocks in a row; `representative`, `spread`: a step with few of them, and its plans in all
- `search`: plans as sets of runs, and the archive of the best
- `tied`, `parts`: one plan for all runs of a graph that runs several times
- `link`: transfers to a store on one clock with the compute; `releases`, `placing`: where values leave and
  come back; `swap_sets`, `swaps`: which do
- `exchange`: what a process holds to exchange parameters and gradients with others
- `collector`: planning without Python's collector of cycles
- `decisions`, `hints`: a plan in words; what would lower the floor
- `abstract`: graphs of bytes and costs alone, for `lowtide solve`
"""
