"""Measured peaks and times, and results compared with eager to the last bit.

- `fresh_process`: run a function in a fresh process
- `measure_step`: the canonical training step, its peak by two methods, and its time
- `comparison`: training with a plan and without it, from the same start, compared step by step
- `verify_plan`: verify a plan: its results, its peak and its time
- `verdict`: the answer in words, and notes on unreliable measurements
"""
