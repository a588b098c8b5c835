"""What lowtide raises.

LowtideError
├── CaptureError        the step cannot be captured as a graph
├── BudgetTooSmall      no plan fits; says the lowest reachable peak
├── PlanMismatch        a plan made for another model, shape or torch version
├── TargetError         the command line's TARGET cannot be loaded
├── FreshProcessError   a job in a fresh process failed there
│   └── CannotMoveToFreshProcess    its model cannot be sent to another process
├── UnsupportedTorch    torch is too old; an ImportError, too
└── Unsupported         asked at run time for what an exact result cannot be given for
"""


class LowtideError(Exception):
    """Base of all errors that are for users to read."""


class CaptureError(LowtideError):
    pass


class PlanMismatch(LowtideError):
    pass


class TargetError(LowtideError):
    pass


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
    """No plan fits into the budget. `floor_bytes` is the lowest reachable peak, set at `node`."""

    def __init__(self, *, budget_bytes: int, floor_bytes: int, node: str, hint: str = "") -> None:
        self.budget_bytes, self.floor_bytes, self.node = budget_bytes, floor_bytes, node
        super().__init__(
            f"cannot fit in {budget_bytes} bytes: the lowest reachable peak is {floor_bytes} bytes, "
            f"at '{node}'. {hint or 'Try that budget, or a smaller batch.'}"
        )
