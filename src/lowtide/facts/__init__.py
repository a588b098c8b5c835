"""Frozen records that the stages exchange, and how they are written. Nothing here knows torch.

- `step`: one training step: nodes, storages, remats, graphs, activations
- `plan`: a planner's answer: schedule, decisions, solution; names of planners and executors
- `levers`: changes of a loop that lower the floor of its step
- `pipeline`: the place of a model in a pipeline
- `sharding`: how parameters are divided among processes
- `meshes`: how many GPUs share samples, layers, blocks and the sequence of a step
- `gpus`: published figures of GPUs
- `sizes`: sizes and budgets as people write them
- `serial`: steps and solutions as JSON and back
- `host_memory`: memory of this machine that is free
- `auto_budget`: the budget `auto`, from the memory that is free
- `files`: files written whole or not at all, and where caches go
"""

from lowtide.facts.plan import Decision, Offload, Reserve, ReservedBytes, Schedule, Solution
from lowtide.facts.step import (
    EARLIER,
    FETCH,
    FRAMES,
    LAST_OUTPUTS,
    PIPELINE,
    RESERVED,
    TEMPORARIES,
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
    "EARLIER",
    "FETCH",
    "FRAMES",
    "LAST_OUTPUTS",
    "PIPELINE",
    "RESERVED",
    "TEMPORARIES",
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
    "ReservedBytes",
    "Run",
    "Schedule",
    "Solution",
    "Step",
    "Storage",
    "TransferSpeed",
]
