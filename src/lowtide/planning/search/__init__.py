"""The search for cheap plans below a target.

- `table`: a step as plain tuples, for inner loops
- `runs`: one plan under construction, its bytes kept up to date
- `moves`, `descent`: evict a block, merge a copy back; walk below a target
- `archive`, `polish`: the best plans of all budgets; better ones between two of them
- `lazy`: the plan that follows from a set of kept storages
- `annealing`: sequences of runs in any order, for abstract graphs
"""
