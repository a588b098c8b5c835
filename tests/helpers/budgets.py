"""Budgets taken from what was found on the spot: kernels of other processors need other workspaces."""

from lowtide.profiles import Profile


def between(found: Profile, share: float) -> int:
    """A budget that can be met: 0 is the lowest reachable peak, 1 the peak without recompute."""
    low, high = found.floor_bytes, max(found.floor_bytes, found.peak_bytes)
    return low + int((high - low) * share)
