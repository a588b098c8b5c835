"""What the ops of a step cost: seconds, and bytes held inside.

Two ways: `profile_calls` times every distinct op alone, on random data, in little memory;
`GraphProfiler` runs the whole graph for real.
"""

from lowtide.profiling.cache import CostCache
from lowtide.profiling.device import Device, device_for
from lowtide.profiling.interpreter import GraphProfiler, NodeRun
from lowtide.profiling.ops import cost_by_bytes, profile_calls, scaled_cost
from lowtide.torchside.calls import OpCall, OpCost, call_of, signature

__all__ = [
    "CostCache",
    "Device",
    "GraphProfiler",
    "NodeRun",
    "OpCall",
    "OpCost",
    "call_of",
    "cost_by_bytes",
    "device_for",
    "profile_calls",
    "scaled_cost",
    "signature",
]
