"""Planned training on the accelerator: equal to eager there to the last bit, and within the budget."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerator_cases import CASES, check


@pytest.mark.parametrize("name", CASES)
def test_recompute_is_exact_and_within_the_budget(name: str, device: torch.device) -> None:
    check(CASES[name](), device, share=0.6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype, device: torch.device) -> None:
    check(replace(CASES["encoder"](), within=partial(torch.autocast, device.type, dtype)), device, share=0.7)
