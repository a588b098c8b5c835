"""Torch's default random generators, one for each device: read, set, kept while lowtide runs its own ops.

`torch.random.fork_rng` keeps the CPU's generator alone, or those of all accelerators: the first loses what a
step draws on its device; the second starts every device of the machine, and warns where there are several.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def random_state(device: str) -> torch.Tensor:
    """The state of a device's default generator."""
    if device == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: torch.Tensor, device: str) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def with_generators(devices: Iterable[torch.device]) -> list[str]:
    """The names of the devices that have a generator, each with its index; always that of the CPU, which any
    step may draw from."""
    found = {"cpu"}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            index = torch.accelerator.current_device_index() if device.index is None else device.index
            found.add(f"{device.type}:{index}")
    return sorted(found)


@contextmanager
def generators_kept(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the states of the CPU's generator and of those of `devices` at the end.

    `torch.manual_seed` seeds the generators of all devices: code inside that seeds one device seeds its
    generator alone.
    """
    before = {device: random_state(device) for device in with_generators(devices)}
    try:
        yield
    finally:
        for device, state in before.items():
            set_random_state(state, device)
