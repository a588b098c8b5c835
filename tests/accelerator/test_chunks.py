"""Ops in chunks on the accelerator: the same bits as whole, in few launches."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from lowtide.ops.chunk_sizes import MOST_CHUNKS
from lowtide.ops.loss_chunks import loss_gradient
from lowtide.ops.packing import layout_of, pack_bits, unpack_bits
from lowtide.ops.random_ops import apply_mask


@pytest.mark.parametrize("count", [1000, 4 << 20, (4 << 20) + 13])
def test_packed_bits(count: int, device: torch.device) -> None:
    mask = torch.rand(count, device=device) > 0.5
    layout = layout_of(mask)
    assert layout is not None
    assert torch.equal(unpack_bits(pack_bits(mask, layout), layout), mask)


def test_a_mask(device: torch.device) -> None:
    value = torch.randn(3 << 20, device=device)
    mask = torch.rand_like(value) > 0.1
    expected = torch.mul(value, mask).mul_(torch.ones((), device=device).div_(0.9))
    assert torch.equal(apply_mask(value, mask, 0.1), expected)


def launches() -> dict[str, Callable[[torch.device], Callable[[], object]]]:
    """Ops in chunks over 16 or 32 MiB, each with all it needs."""

    def pack(device: torch.device) -> Callable[[], object]:
        mask = torch.ones(16 << 20, dtype=torch.bool, device=device)
        return lambda: pack_bits(mask, ((16 << 20,), (1,)))

    def unpack(device: torch.device) -> Callable[[], object]:
        packed = torch.ones(2 << 20, dtype=torch.uint8, device=device)
        return lambda: unpack_bits(packed, ((16 << 20,), (1,)))

    def loss(device: torch.device) -> Callable[[], object]:
        scores = torch.randn(4096, 2048, device=device).log_softmax(1)
        target = torch.zeros(4096, dtype=torch.int64, device=device)
        one = torch.ones((), device=device)
        return lambda: loss_gradient(one, scores, target, None, 1, -100, one, 1, torch.float32)

    return {"pack": pack, "unpack": unpack, "loss": loss}


@pytest.mark.parametrize("name", launches())
def test_few_launches(name: str, standin: ModuleType, device: torch.device) -> None:
    run = launches()[name](device)
    before = standin.num_ops()
    run()
    assert standin.num_ops() - before <= 9 * (MOST_CHUNKS + 2)  # some ops for each chunk
