"""How good a plan can be at best: proven lower bounds of seconds and of bytes.

- `needs`: which storages a step needs when, and which remats can make them anew
- `cuts`: one time point of a step as a network, and its minimum cut for a price per byte
- `lower_bounds`: the bounds of all budgets from the cuts at several time points
"""
