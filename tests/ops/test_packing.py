"""Packed tensors come back as they were: every size, layout and type."""

import pytest
import torch

from lowtide.ops.packing import CHUNK_WORDS, WORD, layout_of, pack_bits, pack_sign, unpack_bits, unpack_sign

aten = torch.ops.aten
SIZES = [1, 7, 8, 9, 63, 1000, WORD * CHUNK_WORDS - 1, WORD * CHUNK_WORDS, WORD * CHUNK_WORDS * 2 + 13]


@pytest.mark.parametrize("size", SIZES)
def test_bits_of_any_size(size: int) -> None:
    mask = torch.rand(size) < 0.3
    layout = layout_of(mask)
    assert layout is not None
    packed = pack_bits(mask, layout)
    assert packed.nbytes == -(-size // 8)
    assert torch.equal(unpack_bits(packed, layout), mask)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_bits_of_any_layout(order: tuple[int, ...]) -> None:
    mask = (torch.rand(3, 5, 7, 2) < 0.5).permute(order)
    layout = layout_of(mask)
    assert layout is not None
    back = unpack_bits(pack_bits(mask, layout), layout)
    assert torch.equal(back, mask) and back.stride() == mask.stride()


def test_a_mask_with_other_strides_than_captured_comes_back_in_the_captured_layout() -> None:
    mask = torch.rand(6, 10) < 0.5
    layout = layout_of(mask)
    assert layout is not None
    assert torch.equal(unpack_bits(pack_bits(mask.t().contiguous().t(), layout), layout), mask)


def test_only_what_fills_its_storage_has_a_layout() -> None:
    whole = torch.zeros(8, 8, dtype=torch.bool)
    assert layout_of(whole[:4]) is None and layout_of(whole[:, ::2]) is None
    assert layout_of(torch.zeros(1, dtype=torch.bool).expand(8)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_signs_give_the_same_backward_bits(dtype: torch.dtype) -> None:
    special = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40]
    value = torch.cat([torch.tensor(special), torch.randn(1013)]).to(dtype)
    grad = torch.randn(len(value)).to(dtype)
    layout = layout_of(value)
    assert layout is not None
    ways = [
        (True, lambda x: aten.threshold_backward(grad, x, 0)),
        (False, lambda x: aten.leaky_relu_backward(grad, x, 0.1, False)),
    ]
    for nan_is_above, backward in ways:
        packed = pack_sign(value, layout, nan_is_above=nan_is_above)
        sign = unpack_sign(packed, layout, dtype)
        assert torch.equal(backward(sign), backward(value))
        assert sign.dtype is dtype and packed.nbytes == 128
