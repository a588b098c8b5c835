"""Measured peaks and times, and results compared with eager to the last bit.

- `fresh_process`, `child`: run a function in a fresh process; that process's side
- `peak`: the peak of a function, by two methods
- `measure_step`: the canonical training step, its peak and its time
- `comparison`: training with a plan and without it, from the same start, compared step by step
- `verify_plan`: a plan proven: its results, its peak and its time
- `verdict`: the answer in words, and notes on what was not measured well
"""
