"""First calls of mathematical functions, made where they can do no harm.

With Intel's MKL the first call of such a function in a process picks its kernel. Where that call runs
on several threads, one of them may use a kernel of low precision for its share of the values, that one
time (pytorch/pytorch issue 188792; seen here with torch 2.13.0 as an Adam step that differed in the
last bits from the same step run again). One value is worked on by one thread.
"""

from functools import cache

import torch

# fmt: off
FUNCTIONS = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log",
    "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)
# fmt: on


@cache
def make_first_calls() -> None:
    """Let every function pick its kernel. Once per process; further calls do nothing."""
    for dtype in (torch.float32, torch.float64):
        one_value = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one_value)
