"""Annealing of sequences of runs.

- `problem`: a step or a graph as flat arrays, and the search itself
- `classes`: readers of a storage that can do with less of it than others
- `steps`: from a step to its problem, and from sequences back to runs
"""
