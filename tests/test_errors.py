import errno
import importlib
import pkgutil
import re
import subprocess
import sys

import pytest

import lowtide
from lowtide import errors
from lowtide.errors import BudgetTooSmall, FreshProcessError, LowtideError, is_out_of_memory


def every_kind(kind: type = LowtideError) -> set[type]:
    """`kind` and all below it that lowtide itself defines, wherever they live."""
    ours = {below for below in kind.__subclasses__() if below.__module__.startswith("lowtide.")}
    return {kind}.union(*map(every_kind, ours))


def test_the_drawn_tree_is_the_real_one():
    for module in pkgutil.walk_packages(lowtide.__path__, "lowtide."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    drawn, above = {}, []
    for branch, name in re.findall(r"^((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)(?:  |$)", errors.__doc__, re.M):
        above = [*above[: len(branch) // 4], name]
        drawn[name] = above[-2] if len(above) > 1 else "Exception"
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in every_kind()}


@pytest.mark.parametrize("first", ["lowtide.errors", "lowtide.facts.sizes", "lowtide.units"])
def test_errors_and_sizes_can_be_imported_in_any_order(first):
    code = f"import {first}; from lowtide.facts.sizes import BadSize; from lowtide.errors import BadSize as B"
    subprocess.run([sys.executable, "-c", f"{code}; assert B is BadSize"], check=True)


def test_budget_too_small_says_the_floor_and_where():
    error = BudgetTooSmall(budget_bytes=100, floor_bytes=2040109465, node="conv2d_7")
    assert (error.budget_bytes, error.floor_bytes, error.node) == (100, 2040109465, "conv2d_7")
    assert str(error).startswith(
        "cannot fit in 100 bytes: the lowest reachable peak is 1.9 GiB (2040109465 bytes), at 'conv2d_7'. "
    )
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("unable to mmap 4096 bytes from file </x>: Cannot allocate memory (12)"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (FreshProcessError("its message", kind="OutOfMemoryError"), True),
        (FreshProcessError("DefaultCPUAllocator: not enough memory", kind="RuntimeError"), True),
        (OSError(errno.ENOENT, "no such file"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("another"), False),
    ],
)
def test_running_out_of_memory_is_recognized_in_every_form(error, expected):
    assert is_out_of_memory(error) is expected
    outer = LowtideError("around it")
    outer.__cause__ = error
    assert is_out_of_memory(outer) is expected
