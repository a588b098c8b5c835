"""Experiments on one target, each a function that tells its progress and returns frozen records.

- `sweep`: batch sizes; `curve`: peak against time; `compare`: other ways to save memory
- `fit`, `fit_search`, `fit_records`, `probe`, `guess`: the largest and the fastest size
- `sizes`: those that are looked at for it
- `between`, `inside`: a step of a size that nobody captured, and what its ops hold inside
- `checkup`, `surroundings`: a small model on this machine; what it stands on there
- `contenders`, `trial`, `mistakes`: those ways, one of them tried, what it got wrong
- `measured`, `whole_run`, `machine`: a plan or a step run for real, if this machine can hold it
"""
