"""What is true: measured peaks and times, and results compared with eager to the last bit.

- `train_step`: the canonical step, and the bytes that are there before it
- `peak`, `clock`: its peak by two methods; its time
- `peak_notes`, `time_notes`, `verdict`: where peaks disagree; what time went into; the answer in words
- `measure`: both in fresh processes
- `fresh`, `child`: a function in a fresh process, and that process's side
- `comparison`: a plan against eager, step by step
- `verification`: a plan proven: its results, its peak and its time
"""
