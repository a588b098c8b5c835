"""What formulas of gradients need is measured on real tensors, and nothing of that stays."""

import gc

import pytest
import torch
from torch import nn

import lowtide

WIDTH = 32


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        heads = self.inputs(values).unflatten(-1, (4, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).softmax(-1)


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.cells(values)[0]


def live_bytes() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.device.type == "cpu"}.values())


@pytest.mark.parametrize("kind", [Attends, Recurs])
def test_a_profile_leaves_no_tensor(kind: type[nn.Module]) -> None:
    model, batch = kind(), torch.randn(8, 64, WIDTH)
    lowtide.profile(model, batch[:, :4].clone(), cache=False)  # what torch makes once
    before = live_bytes()
    found = lowtide.profile(model, batch, cache=False)
    assert live_bytes() - before < batch.nbytes / 2 and found.floor_bytes
