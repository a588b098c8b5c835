"""Private names and patches of torch, one file per subsystem; no other folder reads a private name of torch.

In the order in which a model passes them:

- `modules`: what a call of a module runs, hooks around modules and optimizers, stand-ins for hooks
- `dynamo`: Dynamo, which traces Python code: compiled functions, settings, errors, log lines
- `dynamo_paths`: model code takes the path of eager under Dynamo, with few graph breaks
- `dynamo_values`: Python values that decide a graph: read from the batch, or changing from call to call
- `dynamo_counts`: `bincount` of indices in a known range stays in its graph
- `dynamo_random`: Python's random numbers are drawn between two graphs
- `aot_autograd`: AOTAutograd, which makes a joint graph of forward and backward; graphs as functions
- `equal_blocks`, `aot_blocks`, `joint_blocks`, `joint_copies`: of a chain of equal blocks, five are traced,
  and the joint graph of all is made from theirs
- `dispatch`: tensors, fake tensors and storages; modes, kernels and schemas of ops
- `inductor`: graphs that Inductor compiles, and calls in them that it does not compile
- `autograd_engine`: the backward pass that runs now, autocast, hooks of parameters; no second derivatives
- `allocation_record`: the blocks that the CPU's allocator hands out, by torch's older profiler
- `python_tensors`: the tensors that Python's objects keep live
- `gradient_edges`: the uses of a tensor in autograd's graph, and gradients handed to planned graphs
- `ddp`, `fsdp2`, `dtensor`, `pipelining`: models on several processes

Importing anything here asks `check_version`. Where the checked versions differ, a comment names the version.
"""

import logging
import re

import torch

from lowtide.errors import UnsupportedTorch

CHECKED_TORCH = ("2.13.0", "2.14.1", "2.15.0")
"""Every test of exactness has passed with these: `make test-torch VERSION=...` runs them."""

REQUIREMENT = "torch>=2.13,<2.16"
"""As pip reads it; the same as in pyproject.toml."""

OLDEST, NEWEST = (2, 13), (2, 15)

logger = logging.getLogger("lowtide")


def check_version(found: str) -> None:
    """Raise for a torch that is too old, and warn of one that is newer than any that was checked."""
    version = _version(found)
    if version is not None and version < OLDEST:
        raise UnsupportedTorch(
            f"lowtide needs torch {_text(OLDEST)} or newer, and this is torch {found}: "
            f"pip install '{REQUIREMENT}'"
        )
    if is_newer(found):
        logger.warning(
            "lowtide was checked with torch %s to %s, and this is torch %s: lowtide.verify says whether it "
            "is exact, or pip install '%s'",
            _text(OLDEST),
            _text(NEWEST),
            found,
            REQUIREMENT,
        )


def is_newer(found: str) -> bool:
    """Whether a torch is newer than any that was checked, or has a version that cannot be read."""
    version = _version(found)
    return version is None or version > NEWEST


def _version(found: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def _text(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)


check_version(torch.__version__)
