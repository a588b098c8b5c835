"""Where swapped values go, as the user says it."""

from dataclasses import dataclass

from lowtide.errors import LowtideError


@dataclass(frozen=True, slots=True)
class SwapTo:
    """`kind` is `disk`, with a `folder`, or `host`."""

    kind: str
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


def parse_swap(text: str) -> SwapTo:
    """`disk:/scratch` or `host`."""
    kind, _, folder = str(text).partition(":")
    if (kind == "disk" and folder) or (kind == "host" and not folder):
        return SwapTo(kind, folder)
    raise LowtideError(
        f"cannot swap to {text!r}: write 'disk:FOLDER' with a folder on a local disk, or 'host' where the "
        "model is on an accelerator"
    )
