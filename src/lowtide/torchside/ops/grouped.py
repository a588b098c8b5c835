"""Products of groups of rows, each with a matrix of its own: how experts are called in one op."""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch import _meta_registrations as registrations

TORCHS = registrations._meta_grouped_mm_common


@contextlib.contextmanager
def grouped_products_of_any_type() -> Iterator[None]:
    """Let torch trace grouped products of all types that eager computes, and not of bfloat16 alone."""
    with unittest.mock.patch.object(registrations, "_meta_grouped_mm_common", _result):
        yield


def _result(mat_a: torch.Tensor, mat_b: torch.Tensor, **options: Any) -> Any:
    if options["scale_a"] is not None or mat_a.dtype is torch.bfloat16:
        return TORCHS(mat_a, mat_b, **options)
    make: Any = registrations._create_grouped_mm_output_tensor
    return make(mat_a, mat_b, options["offs"], options["out_dtype"])
