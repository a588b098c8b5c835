"""Results written over what an op reads have the bits that they have in memory of their own."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lowtide.ops import loss_chunks
from lowtide.ops.in_place import WITH_OUT, keeps_bits, overwriting, times
from lowtide.ops.loss_chunks import (
    LOSS_GRADIENTS,
    log_probabilities,
    loss_gradient,
    rows_per_chunk,
    soft_loss_gradient,
)
from lowtide.ops.random_ops import apply_mask
from lowtide.torch_compat.dispatch import FakeTensorMode

aten = torch.ops.aten
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = [(3,), (1021,), (37, 129), (7, 100, 130)]


def arguments(target: object, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[object, ...]:
    grad, value = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    mask = torch.rand(shape) < 0.5
    places, rows = torch.randint(shape[0], shape), torch.randint(shape[0], shape[:1])
    special: dict[object, tuple[object, ...]] = {
        aten.neg.default: (grad,),
        aten.mul.Scalar: (grad, 0.044715),
        aten.add.Scalar: (grad, 0.1),
        aten.sub.Scalar: (grad, 0.1),
        aten.div.Scalar: (grad, 0.3),
        aten.masked_fill.Scalar: (grad, mask, 0.0),
        aten.where.self: (mask, grad, value),
        aten.threshold_backward.default: (grad, value, 0),
        aten.leaky_relu_backward.default: (grad, value, 0.1, False),
        aten.hardtanh_backward.default: (grad, value, -0.5, 0.5),
        aten.elu_backward.default: (grad, 1.0, 1.0, 1.0, False, value),
        aten._softmax_backward_data.default: (grad, value.softmax(-1), len(shape) - 1, dtype),
        aten._log_softmax_backward_data.default: (grad, value.log_softmax(0), 0, dtype),
        aten.scatter.src: (grad, 0, places, value),
        aten.scatter.value: (grad, 0, places, 0.3),
        aten.scatter_add.default: (grad, 0, places, value),
        aten.index_add.default: (grad, 0, rows, value),
        aten.index_put.default: (grad, [rows], value, True),
        aten.index_fill.int_Scalar: (grad, 0, rows, 0.3),
        aten.index_fill.int_Tensor: (grad, 0, rows, torch.tensor(0.3, dtype=dtype)),
        aten.masked_scatter.default: (grad, mask, value),
        apply_mask: (grad, mask, 0.3),
    }
    return special.get(target, (grad, value))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "target",
    [target for target in WITH_OUT if target not in LOSS_GRADIENTS],
    ids=lambda op: getattr(op, "__name__", str(op)),
)
def test_every_op_gives_the_same_bits_over_its_argument(target, dtype: torch.dtype, request) -> None:
    if target is aten.index_put.default:
        # eager's threads add in any order, so that it differs from itself
        request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
        torch.set_num_threads(1)
    for shape in SHAPES:
        args = arguments(target, shape, dtype)
        expected = target(*args)
        for place in WITH_OUT[target][1]:
            copies = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
            call = overwriting(target, place, copies, {})
            result = call.target(*call.args, **call.kwargs)
            assert result.data_ptr() == copies[place].data_ptr()
            assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "target",
    [target for target in WITH_OUT if target not in LOSS_GRADIENTS],
    ids=lambda op: getattr(op, "__name__", str(op)),
)
def test_every_op_gives_the_same_bits_over_an_argument_that_lies_in_another_order(target) -> None:
    """A gradient comes as it comes, whatever strides were traced."""
    args = arguments(target, (7, 100, 130), torch.float32)
    for place in WITH_OUT[target][1]:
        turned = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        turned[place] = args[place].transpose(0, 1).contiguous().transpose(0, 1)
        expected = target(*turned)
        call = overwriting(target, place, tuple(turned), {})
        assert torch.equal(call.target(*call.args, **call.kwargs), expected)


ORDERS = (None, (0, 1), (1, 2), (0, 2))
"""Dimensions that are exchanged in memory."""


def in_order(value: torch.Tensor, order: tuple[int, int] | None) -> torch.Tensor:
    return value.clone() if order is None else value.transpose(*order).contiguous().transpose(*order)


@pytest.mark.parametrize("dtype", (*TYPES, torch.complex64, torch.complex128), ids=str)
def test_every_dtype_gives_the_same_bits_whatever_the_order_of_each_argument_in_memory(dtype) -> None:
    """An op that traces allow: one that keeps bits, over arguments whose strides need not agree."""
    tried = 0
    for target in set(WITH_OUT) - set(LOSS_GRADIENTS):
        if not keeps_bits(target, dtype, {}):
            continue
        real = torch.float32 if dtype.is_complex else dtype
        args = list(arguments(target, (9, 8, 5), real))
        if dtype.is_complex:
            args = [
                torch.complex(a, a.flip(0) if a.dim() else a) if torch.is_tensor(a) and a.dtype == real else a
                for a in args
            ]
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.dim() == 3]
        for orders in itertools.product(ORDERS, repeat=len(tensors)):
            for i, order in zip(tensors, orders, strict=True):
                args[i] = in_order(args[i], order)
            expected = target(*args)
            for place in WITH_OUT[target][1]:
                copies = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
                call = overwriting(target, place, copies, {})
                assert torch.equal(call.target(*call.args, **call.kwargs), expected), (target, orders, place)
                tried += 1
    assert tried > 100


OTHERS = {
    "columns of a wider value": lambda: torch.randn(6, 96)[:, 40:88],
    "rows, one for all": lambda: torch.randn(1, 48).expand(6, 48),
    "a column for all": lambda: torch.randn(6, 1).expand(6, 48),
    "turned": lambda: torch.randn(48, 6).t(),
    "columns of a turned value": lambda: torch.randn(48, 12).t()[::2],
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("target", [aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor])
def test_a_result_is_written_over_an_argument_of_its_strides_whatever_lies_beside_it(target, other) -> None:
    """The trace counts on it: the fake result has the strides of the argument."""
    args = (OTHERS[other](), torch.randn(6, 48))
    expected, copy = target(*args), args[1].clone()
    call = overwriting(target, 1, (args[0], copy), {})
    for _ in range(2):
        written = call.target(*call.args, **call.kwargs)
        assert (written.data_ptr() == copy.data_ptr()) == (expected.stride() == copy.stride())
        assert written.stride() == expected.stride()
        assert torch.equal(written, expected)
        copy.copy_(args[1])


def test_a_value_that_does_not_lie_densely_is_left_alone() -> None:
    row, other = torch.randn(1, 8).expand(4, 8), torch.randn(4, 8)
    before = row.clone()
    call = overwriting(aten.add.Tensor, 0, (row, other), {})
    assert torch.equal(call.target(*call.args), before + other)
    assert torch.equal(row, before)


@pytest.mark.parametrize("dtype", TYPES[:3])
@pytest.mark.parametrize(
    "shape", [(1, 5), (33, 1003), (500, 257), (129, 30), (3, 7, 9, 11), (2, 20, 64, 64), (9, 33, 65)]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_of_a_loss_in_slices_has_eagers_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...], reduction: str
) -> None:
    threads = torch.get_num_threads()
    for num_threads, chunk_bytes in [(1, 1 << 20), (1, 3000), (2, 3000), (3, 50_000)]:
        monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", chunk_bytes)
        torch.set_num_threads(num_threads)
        try:
            compare(shape, dtype, reduction)
        finally:
            torch.set_num_threads(threads)


def compare(shape: tuple[int, ...], dtype: torch.dtype, reduction: str) -> None:
    classes = shape[1]
    scores = (4 * torch.randn(shape)).to(dtype).log_softmax(1)
    target = torch.randint(0, classes, (shape[0], *shape[2:]))
    target[0] = -100
    weight = torch.rand(classes).to(dtype)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    images = scores.unsqueeze(2) if len(shape) == 3 else scores
    target = target.unsqueeze(1) if len(shape) == 3 else target
    loss, total = (aten.nll_loss_forward if len(shape) == 2 else aten.nll_loss2d_forward)(
        images, target, weight, number, -100
    )
    grad = torch.randn_like(loss)
    backward = aten.nll_loss_backward if len(shape) == 2 else aten.nll_loss2d_backward
    between = backward(grad, images, target, weight, number, -100, total).view(shape)
    args = (target, weight, number, -100, total, 1, dtype)
    term = torch.randn_like(scores[:, :1]).expand_as(scores)
    smoothed = aten._log_softmax_backward_data(term + between, scores, 1, dtype)
    assert torch.equal(loss_gradient(grad, scores, *args, term), smoothed)
    expected = aten._log_softmax_backward_data(between, scores, 1, dtype)
    assert torch.equal(loss_gradient(grad, scores, *args), expected)
    assert torch.equal(loss_gradient(grad, scores, *args, out=scores), expected)


@pytest.mark.parametrize("dtype", TYPES[:3])
@pytest.mark.parametrize("shape", [(1, 5), (33, 1003), (500, 257), (9, 33, 65)])
def test_the_gradient_of_a_loss_of_probabilities_in_slices_has_eagers_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    scores = (4 * torch.randn(shape)).to(dtype).log_softmax(1)
    targets, grad = torch.rand(shape).to(dtype), torch.tensor(-0.37, dtype=dtype).expand(shape)
    weight = torch.rand(shape[1]).to(dtype).view(1, -1, *[1] * (len(shape) - 2))
    threads = torch.get_num_threads()
    for num_threads, chunk_bytes in [(1, 3000), (2, 50_000)]:
        monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", chunk_bytes)
        torch.set_num_threads(num_threads)
        try:
            expected = aten._log_softmax_backward_data(grad * weight * targets, scores, 1, dtype)
            assert torch.equal(soft_loss_gradient(grad, [weight, targets], scores, 1, dtype), expected)
            out = scores.clone()
            assert soft_loss_gradient(grad, [weight, targets], out, 1, dtype, out=out) is out
            assert torch.equal(out, expected)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TYPES[:3])
@pytest.mark.parametrize("rows", [1, 7, 129, 500])
@pytest.mark.parametrize("classes", [3, 257, 1003])
def test_log_probabilities_over_their_logits_have_eagers_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, classes: int
) -> None:
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, 16), (16, classes), (classes,)))
    arguments = [bias, x, 3 * weight]
    threads = torch.get_num_threads()
    for num_threads, chunk_bytes in [(1, 1 << 20), (1, 3000), (2, 3000), (3, 50_000)]:
        monkeypatch.setattr(loss_chunks, "CHUNK_BYTES", chunk_bytes)
        torch.set_num_threads(num_threads)
        try:
            expected = aten.addmm(*arguments).log_softmax(1)
            found = log_probabilities(aten.addmm.default, arguments, [rows, classes])
            assert torch.equal(found, expected)
        finally:
            torch.set_num_threads(threads)


def test_a_slice_is_small() -> None:
    scores = torch.empty(4096, 30_000, device="meta")
    assert rows_per_chunk(scores) * 30_000 * 4 <= loss_chunks.CHUNK_BYTES
    assert rows_per_chunk(torch.empty(2, 1 << 20, device="meta")) == 1


def test_a_backward_pass_that_comes_again_finds_the_log_probabilities() -> None:
    logits = torch.randn(64, 50, requires_grad=True)
    seen = []

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            scores = logits.log_softmax(1)
            loss, total = aten.nll_loss_forward(scores, target, None, 1, -100)
            ctx.save_for_backward(scores, target, total)
            return loss

        @staticmethod
        def backward(ctx, grad):
            scores, target, total = ctx.saved_tensors
            seen.append(loss_gradient(grad, scores, target, None, 1, -100, total, 1, grad.dtype, out=scores))
            return seen[-1].clone(), None

    target = torch.randint(0, 50, (64,))
    loss = Loss.apply(logits, target)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = torch.autograd.grad(F.cross_entropy(logits, target), logits)[0]
    assert all(torch.equal(one, expected) for one in seen) and len(seen) == 2


def test_a_product_with_zero_keeps_its_sign() -> None:
    for number in (0.0, -0.0, 0.0, 2.0, -2.0):
        value = torch.linspace(-1, 1, 5)
        want = torch.mul(value, number)
        found = times(value, number, out=value)
        assert torch.equal(torch.signbit(found), torch.signbit(want)) and torch.equal(found, want)


def test_a_product_on_fake_tensors_leaves_no_fake_number_behind() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
        times(fake, 0.123, out=fake)
    value = torch.ones(3)
    assert torch.equal(times(value, 0.123, out=value), torch.ones(3) * 0.123)
