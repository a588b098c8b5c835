"""Annealing of sequences of runs.

- `problem`: a step or a graph as flat arrays, and the search itself
- `steps`: from a step to its problem, and from sequences back to runs
"""
