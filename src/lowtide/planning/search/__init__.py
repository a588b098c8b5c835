"""Plans as sets of runs, and the walk below a target.

- `table`: a step as plain tuples, for inner loops
- `runs`: one plan under construction, its bytes kept up to date
- `moves`, `descent`: evict a block, merge a copy back; walk below a target
- `archive`: the best plans of all budgets
- `lazy`: the plan that follows from a set of kept storages
"""
