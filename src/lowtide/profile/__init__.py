"""What the ops of a step cost: seconds, and bytes held inside.

Two ways: `profile_calls` times every distinct op alone, on random data, in little memory;
`GraphProfiler` runs the whole graph for real.
"""

from lowtide.profile.cache import CostCache
from lowtide.profile.calls import OpCall, OpCost, call_of, signature
from lowtide.profile.device import Device, device_for
from lowtide.profile.ops import profile_calls, scaled_cost

__all__ = [
    "CostCache",
    "Device",
    "OpCall",
    "OpCost",
    "call_of",
    "device_for",
    "profile_calls",
    "scaled_cost",
    "signature",
]
