"""The errors of lowtide.

LowtideError
├── BadSize             a size or budget that cannot be read
├── BudgetTooSmall      no plan fits; says the lowest reachable peak
├── CaptureError        the step cannot be captured as a graph
├── FreshProcessError   a job in a fresh process failed there
│   └── CannotMoveToFreshProcess    its model cannot be sent to another process
├── NotApplicable       a contender of `lowtide compare` does not apply to this model
├── NotEnoughMemory     a step needs more memory than the machine has free
├── PlanMismatch        a plan made for another model, shape or torch version
├── RankError           another process of the group failed, or did not come
├── StoreError          the store of offloaded values is full, broken or missing
├── TargetError         the command line's TARGET cannot be loaded
├── Unsupported         a call at run time for which no exact result can be given
├── UnsupportedTorch    torch is too old; an ImportError, too
└── UsageError          options of a command contradict each other

`NotApplicable`, `NotEnoughMemory` and `UsageError` are defined in the code that raises them.
"""

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.units import round_up_size, size_and_bytes

if TYPE_CHECKING:
    from lowtide.facts.levers import Lever


class LowtideError(Exception):
    """Base of all errors that are for users to read."""


class BadSize(LowtideError):
    """A size that cannot be read; `message` says more than that where more is known."""

    def __init__(self, text: object, message: str = "") -> None:
        super().__init__(
            message
            or f"cannot read the size {text!r}: write bytes (8000000000), "
            "a size ('8GiB', '500MB') or a share of the step's peak ('60%')"
        )


class CaptureError(LowtideError):
    pass


class PlanMismatch(LowtideError):
    pass


class RankError(LowtideError):
    """Process `rank` of the group failed or did not come. `kind` is the type of its exception, if there was
    one."""

    def __init__(self, rank: int, message: str, *, kind: str = "") -> None:
        self.rank, self.kind = rank, kind
        super().__init__(message)


class StoreError(LowtideError):
    pass


class TargetError(LowtideError):
    """A TARGET that cannot be loaded. The message has one line, even if the TARGET has several."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class FreshProcessError(LowtideError):
    """A job in a fresh process failed. `kind` is the type of the exception there; `details` its
    traceback and whatever the process printed."""

    def __init__(self, message: str, *, kind: str = "", details: str = "") -> None:
        self.kind, self.details = kind, details
        super().__init__(message)


class CannotMoveToFreshProcess(FreshProcessError):
    """The model, batch, optimizer or loss cannot be pickled here or cannot be imported there."""


class Unsupported(LowtideError):
    pass


class UnsupportedTorch(LowtideError, ImportError):
    """The installed torch is too old. An `ImportError` as well, since it is raised while importing."""


class BudgetTooSmall(LowtideError):
    """No plan fits into the budget. `floor_bytes` is the lowest reachable peak, set at `node`; for a budget
    `of` reserved bytes, the least that any plan was found to reserve.

    `levers` are changes of the loop that lower the floor, the lowest floor first. The message is one line:
    what sets the floor (`hint`), and a `remedy`. Levers follow as notes of the exception (PEP 678), which a
    traceback shows; the remedy is then the last of them.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        floor_bytes: int,
        node: str,
        hint: str = "",
        remedy: str = "Try that budget, or a smaller batch.",
        of: str = "",
    ) -> None:
        self.budget_bytes, self.floor_bytes, self.node, self.of = budget_bytes, floor_bytes, node, of
        self.remedy = remedy
        self.levers: tuple[Lever, ...] = ()
        if of:
            super().__init__(
                f"cannot fit in {size_and_bytes(budget_bytes)} {of}: the least that a plan was found to "
                f"reserve is {size_and_bytes(floor_bytes)}. Try that budget, a smaller batch, or "
                "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment."
            )
            return
        self._cause = (
            f"cannot fit in {size_and_bytes(budget_bytes)}: the lowest reachable peak is "
            f"{size_and_bytes(floor_bytes)}, at '{node}'.{f' {hint}' if hint else ''}"
        )
        super().__init__(f"{self._cause}{f' {remedy}' if remedy else ''}")

    def name_levers(self, levers: "Sequence[Lever]", lines: "Sequence[str]") -> None:
        """Add levers to the error, with the `lines` that say them in Python; none change nothing."""
        if not levers:
            return
        self.levers = tuple(levers)
        self.remedy = self.remedy.replace("that budget", f"a budget of {round_up_size(self.floor_bytes)}")
        self.args = (self._cause,)
        for line in (*lines, *([self.remedy] if self.remedy else [])):
            self.add_note(line)


NO_MEMORY_LEFT = (
    "DefaultCPUAllocator",
    "out of memory",
    "Cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""Parts of the texts of errors of other types: of torch's allocator on a CPU, of drivers, of libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, Python or the system had no memory left: the error itself, or what caused it.

    Recognized by the name of its type, since torch is not imported for it.
    """
    at: BaseException | None = error
    while at is not None:
        kinds = {kind.__name__ for kind in type(at).__mro__} | {getattr(at, "kind", "")}
        if kinds & {"OutOfMemoryError", "MemoryError"}:
            return True
        if isinstance(at, OSError) and at.errno == errno.ENOMEM:
            return True
        if isinstance(at, RuntimeError | LowtideError) and any(words in str(at) for words in NO_MEMORY_LEFT):
            return True
        at = at.__cause__
    return False
