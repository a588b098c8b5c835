"""A row of the table of clients."""

from dataclasses import dataclass


@dataclass(slots=True)
class ClientRow:
    """What became of a client. Numbers are 0 where it did not get so far.

    `compared`: how many losses, gradients and results. Peaks are of the last two of a few steps, without
    `beside_bytes`, which belong to neither model, optimizer nor batch. `set_up_seconds`: what the whole
    training took longer by a plan, nearly all of it to capture, profile and plan.
    """

    client: str
    library: str
    version: str
    loop: str
    outcome: str = "failed"
    words: str = ""
    compared: int = 0
    eager_peak_bytes: int = 0
    floor_bytes: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    peak_bytes: int = 0
    beside_bytes: int = 0
    num_graphs: int = 0
    eager_seconds: float = 0.0
    set_up_seconds: float = 0.0
    warnings: str = ""
    day: str = ""
