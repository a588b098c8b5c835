"""Sizes of chunks: for caches on the CPU, few and large on an accelerator."""

import pytest
import torch

from lowtide.ops.chunk_sizes import LARGEST_BYTES, MOST_CHUNKS, chunk_bytes
from lowtide.ops.loss_chunks import rows_per_chunk

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


@pytest.mark.parametrize("whole", [0, 1, MIB, 40 * MIB, 1000 * MIB, 9000 * MIB])
def test_chunks_of_an_accelerator_are_few_or_long(whole: int) -> None:
    size = chunk_bytes(whole, MIB, GPU)
    assert size >= MIB == chunk_bytes(whole, MIB, CPU)
    assert size == LARGEST_BYTES or -(-whole // size) <= MOST_CHUNKS


def test_rows_of_a_loss() -> None:
    scores = torch.empty(8192, 30_000, device="meta")
    assert rows_per_chunk(scores) * 30_000 * 4 <= MIB
    assert rows_per_chunk(scores, device=GPU) == 512
    assert rows_per_chunk(scores, 0, device=GPU) == 8192
