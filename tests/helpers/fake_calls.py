"""Calls of ops on fake tensors."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.ops.calls import Call

aten = torch.ops.aten


def fake(*shape, dtype=torch.float32):
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def conv(batch, *, channels=16, size=32):
    image, weight = fake(batch, channels, size, size), fake(channels, channels, 3, 3)
    return Call(aten.convolution.default, (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))


def conv_backward(batch, *, channels=16, size=32):
    image, weight = fake(batch, channels, size, size), fake(channels, channels, 3, 3)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    return Call(aten.convolution_backward.default, (fake(batch, channels, size, size), image, weight, *rest))
