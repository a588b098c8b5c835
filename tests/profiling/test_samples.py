"""Random inputs have the right layout, and values that no op chokes on."""

import pytest
import torch

from lowtide.ops.calls import Call
from lowtide.profiling.samples import make_sample
from lowtide.torch_compat.dispatch import storage_key

aten = torch.ops.aten
empty = torch.empty


def long(*shape):
    return torch.empty(shape, dtype=torch.long)


def mask(*shape):
    return torch.empty(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    "tensor",
    [
        empty(3, 4),
        empty(4, 3).t(),
        empty(3, 1).expand(3, 7),
        empty(6, 8)[1:3, ::2],
        empty(()),
        empty(0, 4),
        empty(2, 3, 4, 5, memory_format=torch.channels_last),
        empty(5, dtype=torch.bfloat16),
        empty(5, dtype=torch.complex64),
        mask(5, 2),
    ],
    ids=["plain", "t", "expanded", "strided", "scalar", "none", "channels", "bf16", "complex", "bool"],
)
def test_layout_is_kept(tensor):
    (made,), _ = make_sample(Call(aten.clone.default, (tensor,)))
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert storage_key(made) != storage_key(tensor)


def test_shared_storages_stay_shared():
    block = empty(4, 6)
    (left, right), _ = make_sample(Call(aten.add.Tensor, (block[:, :3], block[:, 3:])))
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert right.data_ptr() - left.data_ptr() == 3 * 4
    (left, right), _ = make_sample(Call(aten.add.Tensor, (block, empty(4, 6))))
    assert left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()


def test_floats_are_spread_and_never_denormal():
    (made,), _ = make_sample(Call(aten.clone.default, (empty(300, 1000),)))
    assert made.min() < -0.9
    assert made.max() > 0.9
    assert made.std() > 0.5


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    make_sample(Call(aten.clone.default, (empty(100),)))
    assert torch.equal(before, torch.get_rng_state())


ACCEPTED = {
    "embedding": (aten.embedding.default, (empty(11, 4), long(3, 5))),
    "embedding_backward": (
        aten.embedding_dense_backward.default,
        (empty(3, 5, 4), long(3, 5), 11, -1, False),
    ),
    "embedding_bag": (aten._embedding_bag.default, (empty(11, 4), long(6), long(3))),
    "nll_loss": (aten.nll_loss_forward.default, (empty(8, 3), long(8), None, 1, -100)),
    "nll_loss_backward": (
        aten.nll_loss_backward.default,
        (empty(()), empty(8, 3), long(8), None, 1, -100, empty(())),
    ),
    "nll_loss_one_class": (aten.nll_loss_forward.default, (empty(8, 1), long(8), None, 1, -100)),
    "nll_loss2d": (aten.nll_loss2d_forward.default, (empty(2, 3, 4, 4), long(2, 4, 4), None, 1, -100)),
    "cross_entropy": (aten.cross_entropy_loss.default, (empty(8, 3), long(8))),
    "gather": (aten.gather.default, (empty(5, 7), 1, long(5, 2))),
    "gather_scalar": (aten.gather.default, (empty(()), 0, long())),
    "scatter": (aten.scatter.src, (empty(5, 7), 0, long(2, 7), empty(2, 7))),
    "scatter_add_": (aten.scatter_add_.default, (empty(5, 7), 1, long(5, 2), empty(5, 2))),
    "index_select": (aten.index_select.default, (empty(5, 1), 1, long(3))),
    "index_add": (aten.index_add.default, (empty(5, 1), 1, long(3), empty(5, 3))),
    "index": (aten.index.Tensor, (empty(9, 1, 6), [None, long(4), long(4)])),
    "index_after_mask": (aten.index.Tensor, (empty(2, 3, 1), [mask(2, 3)])),
    "index_put": (aten.index_put.default, (empty(9, 6), [long(4)], empty(4, 6), True)),
    "take": (aten.take.default, (empty(3, 3), long(20))),
    "one_hot": (aten.one_hot.default, (long(6), 4)),
    "where": (aten.where.self, (mask(4, 4), empty(4, 4), empty(4, 4))),
    "dropout_backward": (aten.native_dropout_backward.default, (empty(4, 4), mask(4, 4), 2.0)),
    "bernoulli": (aten.bernoulli.default, (empty(50),)),
    "multinomial": (aten.multinomial.default, (empty(3, 5), 2)),
    "normal": (aten.normal.Tensor_Tensor, (empty(9), empty(9))),
    "bce": (aten.binary_cross_entropy.default, (empty(9), empty(9))),
    "integer_division": (aten.floor_divide.default, (long(9), long(9))),
    "remainder": (aten.remainder.Tensor, (long(9), long(9))),
    "max_pool_backward": (
        aten.max_pool2d_with_indices_backward.default,
        (empty(1, 2, 2, 2), empty(1, 2, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, long(1, 2, 2, 2)),
    ),
    "adaptive_max_pool_backward": (
        aten.adaptive_max_pool2d_backward.default,
        (empty(1, 2, 2, 2), empty(1, 2, 1, 4), long(1, 2, 2, 2)),
    ),
    "max_unpool": (aten.max_unpool2d.default, (empty(1, 2, 2, 2), long(1, 2, 2, 2), [4, 4])),
    "max_backward": (
        aten.value_selecting_reduction_backward.default,
        (empty(6), 1, long(6), [6, 1], False),
    ),
    "pack_padded": (aten._pack_padded_sequence.default, (empty(7, 3, 2), long(3), False)),
    "batch_norm": (
        aten._native_batch_norm_legit_functional.default,
        (empty(2, 3, 4), empty(3), empty(3), empty(3), empty(3), True, 0.1, 1e-5),
    ),
    "repeat_interleave": (aten.repeat_interleave.Tensor, (long(6),), {"output_size": 18}),
    "segment_reduce": (aten.segment_reduce.default, (empty(12, 3), "mean"), {"lengths": long(4)}),
    "segment_reduce_backward": (
        aten._segment_reduce_backward.default,
        (empty(4, 3), empty(4, 3), empty(12, 3), "max"),
        {"lengths": long(4)},
    ),
    "masked_scatter": (aten.masked_scatter.default, (empty(9, 8), mask(9, 8), empty(2, 8))),
    "masked_scatter_backward": (
        aten.masked_scatter_backward.default,
        (empty(9, 8), mask(9, 8), [2, 8]),
    ),
    "multilabel_backward": (
        aten.multilabel_margin_loss_backward.default,
        (empty(()), empty(4, 6), long(4, 6), 1, empty(4, 6)),
    ),
    "no_elements": (aten.embedding.default, (empty(11, 4), long(0))),
    "plain_function": (torch.nn.functional.linear, (empty(2, 3), empty(4, 3))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_ops_accept_their_samples(name):
    target, *given = ACCEPTED[name]
    for seed in range(3):
        args, kwargs = make_sample(Call(target, *given), seed=seed)
        target(*args, **kwargs)


def test_indices_reach_the_whole_range():
    (_, indices), _ = make_sample(Call(aten.embedding.default, (empty(50, 4), long(5000))))
    assert indices.min() == 0
    assert indices.max() == 49


def test_optimizer_lists_are_filled():
    lists = ([empty(4)], [empty(4)], [empty(4)], [empty(4)], [], [empty(())])
    args, _ = make_sample(Call(aten._fused_adam_.default, lists))
    assert args[3][0].min() > 0
    assert args[5][0] >= 1
