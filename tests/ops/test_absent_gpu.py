"""Which kernel of attention torch takes on a GPU, by shapes, types and settings."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.ops import absent_gpu

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
FLASH, EFFICIENT, MATH = "flash_attention", "efficient_attention", "attention_math"


def heads(count: int, width: int, dtype: torch.dtype, length: int = 6) -> Tensor:
    return torch.empty(2, count, length, width, dtype=dtype)


def kernel(query: Tensor, key: Tensor, value: Tensor, *, has_flash: bool = True, **options: object) -> str:
    """The op that was called, of those that torch has."""
    called = []
    names = {f"_scaled_dot_product_{name}" for name in (FLASH, EFFICIENT, MATH)}

    class Watched:
        def __getattr__(self, name: str) -> object:
            if name in names:
                called.append(name.removeprefix("_scaled_dot_product_"))
            return getattr(torch.ops.aten, name)

    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(absent_gpu, "aten", Watched()):
        result = absent_gpu._attention(query, key, value, has_flash=has_flash, **options)
    assert result.shape == (*query.shape[:-1], value.shape[-1])
    return called[0]


@pytest.mark.parametrize(
    ("dtype", "width", "has_flash", "expected"),
    [
        (HALF, 64, True, FLASH),
        (HALF, 20, True, FLASH),  # in padded copies
        (HALF, 320, True, EFFICIENT),
        (HALF, 64, False, MATH),  # older ones have no kernel of bfloat16
        (torch.float16, 64, False, EFFICIENT),
        (torch.float16, 20, False, MATH),
        (SINGLE, 20, True, EFFICIENT),
        (SINGLE, 18, True, MATH),
        (SINGLE, 18, False, EFFICIENT),
        (DOUBLE, 64, True, MATH),
    ],
)
def test_types_and_widths_decide(dtype: torch.dtype, width: int, has_flash: bool, expected: str) -> None:
    query, key, value = (heads(4, width, dtype) for _ in range(3))
    assert kernel(query, key, value, has_flash=has_flash) == expected


def test_masks_shared_keys_and_other_widths_of_values_decide() -> None:
    query, key, value = (heads(4, 64, HALF) for _ in range(3))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    shared = {"enable_gqa": True}
    few = heads(2, 64, HALF)
    assert kernel(query, key, value, attn_mask=mask) == EFFICIENT
    assert kernel(query, few, few, **shared) == FLASH
    assert kernel(query, few, few, attn_mask=mask, **shared) == MATH
    assert kernel(query, key, heads(4, 32, HALF)) == EFFICIENT
    longer = heads(4, 64, HALF, length=9)
    assert kernel(query, longer, longer) == FLASH
    assert kernel(query, longer, longer, is_causal=True) == EFFICIENT
    assert kernel(query[0], key[0], value[0]) == MATH


def test_settings_of_torch_decide() -> None:
    query, key, value = (heads(4, 64, HALF) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert kernel(query, key, value) == EFFICIENT
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernel(query, key, value) == MATH


def test_rows_of_a_bias_begin_where_the_kernel_can_load_them() -> None:
    query, key = heads(4, 64, HALF), heads(4, 64, HALF, length=9)
    whole = absent_gpu._bias(torch.zeros(1, 4, 6, 9), query, key)
    assert whole.shape == (2, 4, 6, 9)
    assert whole.untyped_storage().nbytes() == 4 * 6 * 16 * HALF.itemsize
    fits = torch.zeros(6, 16, dtype=HALF)
    read = absent_gpu._bias(fits, query, heads(4, 64, HALF, length=16))
    assert read.data_ptr() == fits.data_ptr()


def test_backward_of_shared_keys_has_gradients_for_every_head() -> None:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    query, few = heads(4, 64, HALF), heads(2, 64, HALF)
    own = absent_gpu.backward_bytes(backward, query, query)
    assert absent_gpu.backward_bytes(backward, query, few) == own + 2 * query.nbytes
