"""The search space of the planners: remats of a step, and sequences of runs that a search changes.

- `table`: a step as plain tuples, sets of remats, and storages behind values
- `dropped_storages`: schedules that retain some storages and drop the others
- `problem`: ops that read and make storages, as flat arrays for the compiled search
- `step_problem`: a step as such a problem, sequences of its ops as schedules, and the Pareto front of these
"""
