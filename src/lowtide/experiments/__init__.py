"""Experiments on one target, each a function that tells its progress and returns frozen records.

- `sweep_rows`: batch sizes side by side
- `fit`: the largest and the fastest size in a budget; `fit_search`: the search for one budget;
  `profiled_sizes`: the sizes that it profiles; `interpolate`: sizes that were not captured
- `compare_methods`: other methods to save memory; `contenders`: these methods; `trial`: one of them tried
- `measured`: plans, and points of a trade-off curve, run for real
- `checkup`: a small model on this machine; `machine`: its memory, and all that lowtide depends on
"""
