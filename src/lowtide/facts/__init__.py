"""Frozen records that the stages exchange, and how they are written. Nothing here knows torch.

- `step`: one training step: nodes, storages, remats, graphs, activations
- `plan`: what a planner answers: runs, decisions, the solution
- `sharding`: how parameters are divided among processes
- `serial`: both as JSON and back
- `sizes`: bytes as people write them; `units`: as they read them
- `files`: files that are never half written
"""

from lowtide.facts.plan import Decision, Offload, Reserve, Schedule, Solution
from lowtide.facts.step import (
    UPDATE,
    Action,
    Activation,
    Graph,
    GraphRun,
    Kind,
    Node,
    Region,
    Remat,
    Run,
    Step,
    Storage,
    TransferSpeed,
)

__all__ = [
    "UPDATE",
    "Action",
    "Activation",
    "Decision",
    "Graph",
    "GraphRun",
    "Kind",
    "Node",
    "Offload",
    "Region",
    "Remat",
    "Reserve",
    "Run",
    "Schedule",
    "Solution",
    "Step",
    "Storage",
    "TransferSpeed",
]
