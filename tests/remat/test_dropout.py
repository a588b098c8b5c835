"""Dropout as eager PyTorch computes it, for every probability and type, forward, backward and again."""

import pytest
import torch
from torch.nn import functional as F

from lowtide.ops.random_ops import MASK_CHUNK, apply_mask, eager_dropout, random_state, replay, replay_dropout

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(MASK_CHUNK * 2 + 77,), (40, 50)])
def test_dropout_equals_eager_to_the_last_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for percent in (*range(1, 100, 7), 15, 42, 100):
        probability = percent / 100
        value = torch.randn(shape).to(dtype).requires_grad_()
        grad = torch.randn(shape).to(dtype)
        torch.manual_seed(percent)
        expected = F.dropout(value, probability, training=True)
        after = torch.get_rng_state()
        expected.backward(grad)
        torch.manual_seed(percent)
        before = random_state("cpu")
        result, mask = eager_dropout(value.detach(), probability, True)
        assert torch.equal(result, expected.detach()), percent
        assert torch.equal(torch.get_rng_state(), after), percent
        assert torch.equal(apply_mask(grad, mask, probability), value.grad), percent
        again = replay_dropout(before, "cpu", value.detach(), probability, True)
        assert torch.equal(again[0], result) and torch.equal(again[1], mask)
        assert torch.equal(torch.get_rng_state(), after), percent


def test_random_numbers_that_are_told_their_device_are_drawn_again() -> None:
    before = random_state("cpu")
    drawn = torch.rand((3, 4), device="cpu")
    after = random_state("cpu")
    again = replay(before, "cpu", torch.ops.aten.rand.default, (3, 4), device=torch.device("cpu"))
    assert torch.equal(again, drawn) and torch.equal(random_state("cpu"), after)


def test_a_strided_input_keeps_its_layout() -> None:
    value = torch.randn(300, 500).t()
    torch.manual_seed(0)
    expected = F.dropout(value.clone(memory_format=torch.preserve_format).requires_grad_(), 0.15)
    torch.manual_seed(0)
    assert torch.equal(eager_dropout(value, 0.15, True)[0], expected)
