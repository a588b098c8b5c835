"""Experiments on one target, each a function that tells its progress and returns frozen records.

- `sweep`: batch sizes; `curve`: peak against time; `compare`: other ways to save memory
- `contenders`, `trial`, `mistakes`: those ways, one of them tried, what it got wrong
- `measured`, `whole_run`, `machine`: a plan or a step run for real, if this machine can hold it
"""
