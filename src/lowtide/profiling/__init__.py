"""What the ops of a step cost: seconds, and bytes held inside.

Two ways: op by op, each distinct one alone, on random data and in little memory; or the whole graph, run
for real, in the memory of the step.

- `costing`: the costs of a captured step, op by op
- `known`: those of another batch shape, scaled; `hurry`: where most are to be
- `ops`: time and inner memory of single calls; `trials`: one of them under measurement
- `samples`, `rules`: random inputs that an op accepts
- `shrink`, `work`: a smaller call of the same op, and how much work a call is
- `layouts`: how results really lie in memory
- `cache`: costs measured before, on disk
- `whole_run`, `interpreter`: the costs of a captured step from real runs of its graphs
- `device`: the clock and the allocator of a device; `faults`: what taking memory from the system costs
"""
