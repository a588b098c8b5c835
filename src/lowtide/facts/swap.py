"""Where swapped values go, as the user says it."""

from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import LowtideError


@dataclass(frozen=True, slots=True)
class SwapTo:
    """`kind` is `disk`, with a `folder`, or `host`."""

    kind: str
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


def parse_swap(text: str) -> SwapTo:
    """`disk:/scratch` or `host`; a folder is found from anywhere then, also where it was relative."""
    kind, _, folder = str(text).partition(":")
    if kind == "disk" and folder:
        return SwapTo(kind, str(Path(folder).expanduser().absolute()))
    if kind == "host" and not folder:
        return SwapTo(kind)
    raise LowtideError(
        f"cannot swap to {text!r}: write 'disk:FOLDER' with a folder on a local disk, or 'host' where the "
        "model is on an accelerator"
    )
