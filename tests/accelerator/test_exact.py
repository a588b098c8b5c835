"""Planned training on the accelerator: equal to eager there to the last bit, and within the budget."""

import pytest
import torch
from accelerator_cases import CASES, check


@pytest.mark.parametrize("name", CASES)
def test_recompute_is_exact_and_within_the_budget(name: str, device: torch.device) -> None:
    check(CASES[name](), device, share=0.6)
