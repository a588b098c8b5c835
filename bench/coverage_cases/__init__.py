"""The cases of `bench/coverage.py`.

- `case`: what a case is, and the steps of a loop
- `architectures`, `shrink`: the models of transformers, made tiny
- `constructions`: plain torch.nn models
- `net`, `loops`, `batches`, `weights`, `forwards`: a small model, ways to train it, and what its code does
  besides computing
- `examine`: with and without lowtide, compared and measured
- `outcome`, `table`: rows, and how they are shown
"""

from functools import cache

from .case import Case

__all__ = ["Case", "every_case", "find_case"]


@cache
def every_case() -> list[Case]:
    """All of them; importing transformers takes seconds, so only when asked."""
    from .architectures import architectures
    from .constructions import CONSTRUCTIONS
    from .forwards import FORWARDS
    from .loops import LOOPS

    return [*LOOPS, *FORWARDS, *CONSTRUCTIONS, *architectures()]


def find_case(name: str) -> Case:
    return next(case for case in every_case() if case.name == name)
