"""How good a plan can be at best: proven lower bounds of seconds and of bytes.

- `needs`: which storages a step needs when, and which remats can make them anew
- `cuts`: one moment of a step as a minimum cut, and the cut for a price per byte
- `curve`: the bounds of all budgets from the cuts at several moments
"""
