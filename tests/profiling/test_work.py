"""Smaller calls of the same op: which sizes are reduced, and that the smaller call runs."""

import pytest
import torch
from fake_calls import conv, fake
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.ops.calls import Call
from lowtide.profiling import work as work_module
from lowtide.profiling.samples import make_sample
from lowtide.profiling.work import shrink, work_of

aten = torch.ops.aten
MIB = 1 << 20


def test_shrink_takes_the_batch():
    call = conv(64)
    part = shrink(call, work_of(call), limit_bytes=MIB)
    assert part is not None
    assert part.reduced == ("size 64",)
    assert [tuple(tensor.shape) for tensor in part.call.tensors] == [(4, 16, 32, 32), (16, 16, 3, 3)]
    assert work_of(call).ratio_to(part.work) == 16


def test_shrink_keeps_order_and_gaps_of_strides():
    with FakeTensorMode():
        heads = torch.empty(32, 100, 3, 64)[:, :, 1].transpose(0, 1)
    call = Call(aten.clone.default, (heads,))
    part = shrink(call, work_of(call), limit_bytes=work_of(call).nbytes // 4)
    assert part is not None
    (small,) = part.call.tensors
    assert small.shape == (25, 32, 64)
    assert small.stride() == (192, 25 * 192, 1)


def test_a_batch_as_large_as_an_image_is_high_is_reduced_alone():
    stride, padding, ones = [2, 2], [1, 1], [1, 1]
    tensors = (fake(28, 8, 14, 14), fake(28, 4, 28, 28), fake(8, 4, 3, 3))
    options = ([0], stride, padding, ones, False, [0, 0], 1, [True, True, False])
    call = Call(aten.convolution_backward.default, (*tensors, *options))
    work = work_of(call)
    part = shrink(call, work, limit_bytes=work.nbytes // 3)
    assert [tuple(t.shape) for t in part.call.tensors[:2]] == [(7, 8, 14, 14), (7, 4, 28, 28)]
    args, kwargs = make_sample(part.call)
    call.target(*args, **kwargs)  # as it runs alone
    part = shrink(call, work, limit_bytes=work.nbytes // 12)
    args, kwargs = make_sample(part.call)
    call.target(*args, **kwargs)


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_an_image_is_not_reduced_without_its_gradient(share):
    tensors = (fake(26, 32, 32, 32), fake(26, 64, 16, 16), fake(64, 32, 2, 2))
    options = ([32], [2, 2], [0, 0], [1, 1], True, [0, 0], 1, [True, True, True])
    call = Call(aten.convolution_backward.default, (*tensors, *options))
    work = work_of(call)
    part = shrink(call, work, limit_bytes=int(work.nbytes * share))
    assert part.reduced[0] == "size 26"
    args, kwargs = make_sample(part.call)
    call.target(*args, **kwargs)  # as it runs alone


def test_a_square_product_is_reduced_wherever_its_size_stands():
    call = Call(aten.mm.default, (fake(64, 64), fake(64, 64)))
    part = shrink(call, work_of(call), limit_bytes=work_of(call).nbytes // 3)
    assert [tuple(t.shape) for t in part.call.tensors] == [(32, 32), (32, 32)]


def test_shrink_never_leaves_a_size_of_one():
    call = Call(aten.add.Tensor, (fake(4, 1000), fake(4, 1000)))
    part = shrink(call, work_of(call), limit_bytes=work_of(call).nbytes // 4)
    assert part is not None
    assert part.call.tensors[0].shape == (4, 250)


def test_what_is_known_of_calls_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(work_module, "_KNOWN", {})
    monkeypatch.setattr(work_module, "_MOST_KNOWN", 3)
    for rows in range(1, 6):
        work_of(Call(aten.relu.default, (fake(rows),)))
    assert len(work_module._KNOWN) == 3
