"""The search space of the planners: remats of a step, and sequences of runs that a search changes.

- `table`: a step as plain tuples, for inner loops; which storages its values refer to
- `remat_sets`: a schedule as the set of its remats
- `dropped_storages`: bytes while storages are dropped one by one
- `problem`: ops that read and make storages, as flat arrays for the compiled search
- `step_problem`: a step as such a problem, and sequences of its ops as schedules
- `archive`: the Pareto front of peaks and seconds, for all budgets
"""
