"""The stand-in accelerator itself: eager torch on it against the CPU, its allocator against counts."""

import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten
Layer = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def only_on_the_stand_in(standin: ModuleType) -> None:
    """All of these cases need it."""


def cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 64, 10))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Flatten(2), body, nn.Flatten(), nn.Linear(64 * 12, 10))


def trained(model: nn.Module, batch: Tensor, labels: Tensor) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch), labels)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results += [value.detach().cpu().clone() for value in (loss, *gradients)]
        optimizer.step()
    return [*results, *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.parametrize(("make", "shape"), [(cnn, (8, 3, 16, 16)), (encoder, (4, 12, 16, 4))])
def test_training_equals_training_on_the_cpu(
    make: Layer, shape: tuple[int, ...], device: torch.device
) -> None:
    model, batch, labels = make(), torch.randn(shape), torch.randint(0, 10, shape[:1])
    there = copy.deepcopy(model).to(device)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU has a kernel of its own for attention
        expected = trained(model, batch, labels)
        seen = trained(there, batch.to(device), labels.to(device))
    assert all(torch.equal(one, other) for one, other in zip(expected, seen, strict=True))


def test_dropout_draws_from_the_devices_generator_alone(standin: ModuleType, device: torch.device) -> None:
    torch.manual_seed(1)
    on_cpu = torch.get_rng_state()
    ones = torch.ones(1000, device=device, requires_grad=True)
    dropped = functional.dropout(ones, 0.3)
    assert torch.equal(on_cpu, torch.get_rng_state())
    assert "NativeDropout" in type(dropped.grad_fn).__name__
    assert not torch.equal(dropped, functional.dropout(ones, 0.3))
    torch.manual_seed(1)
    assert torch.equal(dropped, functional.dropout(ones, 0.3))
    state = standin.get_rng_state()
    assert state.nbytes == 16
    with torch.random.fork_rng(devices=[device.index], device_type=device.type):
        torch.rand(3, device=device)
    assert torch.equal(state, standin.get_rng_state())


def test_generators(device: torch.device) -> None:
    own = torch.Generator(device).manual_seed(3)
    drawn = torch.randn(5, device=device, generator=own)
    assert torch.equal(drawn, torch.randn(5, device=device, generator=own.manual_seed(3)))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=device, generator=torch.Generator())


def test_tensors_of_two_devices_are_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        functional.linear(torch.ones(2, 2, device=device), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=device) + torch.ones(2, device=f"{device.type}:1")


def test_the_other_device_has_its_own_memory(standin: ModuleType, device: torch.device) -> None:
    held = torch.accelerator.memory_allocated(1)
    kept = torch.ones(1000, device=f"{device.type}:1")
    assert torch.accelerator.memory_allocated(1) - held == 4096
    with standin.device(1):
        assert torch.ones(3, device=device.type).device == kept.device


def test_the_allocator_counts_as_by_hand(device: torch.device) -> None:
    """Two products without biases and a relu between them."""
    rows, width = 256, 1024
    weight, activation = 4 * width * width, 4 * rows * width
    start = torch.accelerator.memory_allocated()
    first, last = (nn.Linear(width, width, bias=False) for _ in range(2))
    model = nn.Sequential(first, nn.ReLU(), last).to(device)
    batch = torch.randn(rows, width, device=device)
    assert torch.accelerator.memory_allocated() - start == 2 * weight + activation
    start = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    output = model(batch)
    assert torch.accelerator.memory_allocated() - start == 2 * activation  # relu and output
    assert torch.accelerator.max_memory_allocated() - start == 2 * activation
    loss = output.sum()
    del output
    loss.backward()
    # where the first weight's gradient is made: both gradients, that of the first product, loss and its own
    assert torch.accelerator.max_memory_allocated() - start == 2 * weight + activation + 2 * 512
    del loss
    assert torch.accelerator.memory_allocated() - start == 2 * weight
    small = torch.empty(3, device=device)
    assert torch.accelerator.memory_allocated() - start == 2 * weight + 512
    assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.accelerator.memory_allocated()
    del small


def test_segments_are_reserved_and_given_back(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    start = torch.accelerator.memory_reserved()
    sizes = {3 << 20: 20 << 20, 17 << 20: 18 << 20}
    for wanted, reserved in sizes.items():
        value = torch.empty(wanted, dtype=torch.uint8, device=device)
        assert torch.accelerator.memory_reserved() - start == reserved
        del value
        torch.accelerator.empty_cache()
        assert torch.accelerator.memory_reserved() == start


def test_a_full_device_raises(standin: ModuleType, device: torch.device) -> None:
    standin.set_capacity(torch.accelerator.memory_reserved() + (8 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(100 << 20, device=device)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_copy_on_a_side_stream_has_run_where_its_event_has(
    is_lazy: bool, standin: ModuleType, device: torch.device
) -> None:
    standin.set_lazy(is_lazy)
    side = torch.Stream(device=device)
    host = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert host.is_pinned()
    assert not torch.empty(1).is_pinned()
    value = torch.randint(1, 100, host.shape, dtype=torch.uint8, device=device)
    expected = value.cpu()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(value, non_blocking=True)
    event = side.record_event()
    assert torch.equal(host, expected) is not is_lazy
    event.synchronize()
    assert torch.equal(host, expected)


def test_unordered_streams_are_a_race(standin: ModuleType, device: torch.device) -> None:
    value = torch.ones(10, device=device)
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        value.add_(1)
    assert standin.take_races() == []
    value.add_(1)
    assert "no event orders them" in standin.take_races()[0]
    torch.accelerator.synchronize()


def test_the_host_sees_pinned_memory_when_it_has_waited(standin: ModuleType, device: torch.device) -> None:
    standin.set_lazy(True)
    value = torch.ones(10, device=device)
    seen = value.to("cpu", non_blocking=True)
    value.add_(1)
    assert seen.is_pinned()
    assert not torch.equal(seen, torch.ones(10))
    torch.accelerator.synchronize()
    assert torch.equal(seen, torch.ones(10))


def test_a_copy_reads_pinned_memory_late(standin: ModuleType, device: torch.device) -> None:
    standin.set_lazy(True)
    host = torch.ones(10).pin_memory()
    first = host.to(device, non_blocking=True)
    torch.accelerator.synchronize()
    last = host.to(device, non_blocking=True)
    torch.ones(5, device=device).sum()  # another op of the stream, which does not need the copy
    host.fill_(3)
    assert torch.equal(first.cpu(), torch.ones(10))
    assert torch.equal(last.cpu(), torch.full((10,), 3.0))


def test_events_tell_the_time_of_the_stream(standin: ModuleType, device: torch.device) -> None:
    """On an idle stream the host's time counts; behind other work that of the ops alone."""

    def milliseconds() -> float:
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        first.record()
        time.sleep(0.05)
        ones.add_(1)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    ones = torch.ones(10, device=device)
    assert milliseconds() >= 50
    standin.sleep(1)
    assert 0 < milliseconds() < 50


def test_autocast_has_the_lists_of_cuda(device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16):
        product = torch.mm(torch.ones(4, 4, device=device), torch.ones(4, 4, device=device))
        norm = functional.layer_norm(product, (4,))
        shares = torch.softmax(product, -1)
    assert (product.dtype, norm.dtype, shares.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_losses_do_not_warn(device: torch.device) -> None:
    value = torch.randn(3, 4, device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (
            functional.mse_loss,
            functional.smooth_l1_loss,
            functional.huber_loss,
            functional.l1_loss,
        ):
            loss(value, torch.zeros_like(value)).backward()


@pytest.mark.parametrize("kind", ["efficient", "flash", "overrideable"])
@pytest.mark.parametrize("width", [16, 13])
def test_attention_in_one_op(kind: str, width: int, standin: ModuleType, device: torch.device) -> None:
    query = torch.randn(2, 4, 12, width).bfloat16()

    def attention(place: str) -> tuple[Tensor, Tensor]:
        leaf = query.detach().to(place).requires_grad_()
        made = functional.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
        made.square().sum().backward()
        assert leaf.grad is not None
        return made, leaf.grad.cpu()

    getattr(standin, f"set_{kind}_attention")(True)
    expected, seen = attention("cpu"), attention(device.type)
    assert any(kind in name.lower() for name in _grad_fns(seen[0]))
    assert _far(expected, seen) < 0.03
    leaf = query.to(device).requires_grad_()
    dropped = partial(functional.scaled_dot_product_attention, leaf, leaf, leaf, dropout_p=0.3)
    torch.manual_seed(0)
    first, second = dropped(), dropped()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, dropped())


LAYERS: dict[str, Layer] = {
    "lstm": partial(nn.LSTM, 8, 6, num_layers=2, bidirectional=True),
    "lstm with projections": partial(nn.LSTM, 8, 6, proj_size=4),
    "gru": partial(nn.GRU, 8, 6, num_layers=2, batch_first=True),
    "gru without biases": partial(nn.GRU, 8, 6, bias=False),
    "tanh": partial(nn.RNN, 8, 6),
    "relu": partial(nn.RNN, 8, 6, nonlinearity="relu"),
}


def _recurrent(
    layer: nn.Module, value: Tensor, device: torch.device, lengths: list[int] | None
) -> list[Tensor]:
    layer, leaf = copy.deepcopy(layer).to(device), value.detach().to(device).requires_grad_()
    given = leaf if lengths is None else nn.utils.rnn.pack_padded_sequence(leaf, lengths, layer.batch_first)
    made, last = layer(given)
    last = last if isinstance(last, tuple) else (last,)
    made = made if lengths is None else made.data
    torch.stack([each.sin().sum() for each in (made, *last)]).sum().backward()
    return [each.detach().cpu() for each in (made, *last, leaf.grad, *(p.grad for p in layer.parameters()))]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("lengths", [None, [5, 3, 2]], ids=["whole", "packed"])
def test_recurrent_layers(
    name: str, lengths: list[int] | None, standin: ModuleType, device: torch.device
) -> None:
    layer = LAYERS[name]()
    value = torch.randn((3, 5, 8) if layer.batch_first else (5, 3, 8))
    expected = _recurrent(layer, value, torch.device("cpu"), lengths)
    fused = _recurrent(layer, value, device, lengths)
    standin.set_vendor_recurrent(True)
    vendor = _recurrent(layer, value, device, lengths)
    assert _far(expected, fused) < 1e-5
    assert _far(expected, vendor) < 1e-5
    assert not any(torch.equal(one, other) for one, other in zip(fused, vendor, strict=True))
    again = _recurrent(layer, value, device, lengths)
    assert all(torch.equal(one, other) for one, other in zip(vendor, again, strict=True))
    with torch.backends.cudnn.flags(enabled=False):
        other = _recurrent(layer, value, device, lengths)
    assert all(torch.equal(one, other) for one, other in zip(fused, other, strict=True))


def test_weights_of_a_vendors_layer_share_a_storage(standin: ModuleType, device: torch.device) -> None:
    standin.set_vendor_recurrent(True)
    layer = nn.LSTM(8, 6, 2, dropout=0.5).to(device)
    assert len({p.untyped_storage().data_ptr() for p in layer.parameters()}) == 1
    value = torch.randn(5, 3, 8, device=device)
    torch.manual_seed(1)
    before = standin.get_rng_state()
    first, _ = layer(value)
    assert torch.equal(before, standin.get_rng_state())  # masks come from a state of their own
    assert not torch.equal(first, layer(value)[0])
    torch.manual_seed(1)
    assert torch.equal(first, layer(value)[0])
    first.sum().backward()


def _normed(norm: nn.Module, value: Tensor, device: torch.device) -> list[Tensor]:
    norm, leaf = copy.deepcopy(norm).to(device), value.detach().to(device).requires_grad_()
    made = norm(leaf)
    made.sin().sum().backward()
    gradients = [leaf.grad, norm.weight.grad, norm.bias.grad]
    return [each.detach().cpu() for each in (made, *gradients, norm.running_mean, norm.running_var)]


def test_the_vendors_batch_norm(standin: ModuleType, device: torch.device) -> None:
    norm, value = nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    expected = _normed(norm, value, torch.device("cpu"))
    own = _normed(norm, value, device)
    standin.set_vendor_batch_norm(True)
    vendor = _normed(norm, value, device)
    assert all(torch.equal(one, other) for one, other in zip(expected, own, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(own, vendor, strict=True))
    assert _far(own, vendor) < 1e-5
    there, leaf = copy.deepcopy(norm).to(device), value.detach().to(device).requires_grad_()
    statistics = there.running_mean, there.running_var
    made, *kept = aten._batch_norm_with_update(leaf, there.weight, there.bias, *statistics, 0.1, 1e-5)
    made.sin().sum().backward()
    seen = [made, leaf.grad, there.weight.grad, there.bias.grad, *statistics]
    assert all(torch.equal(one, other.detach().cpu()) for one, other in zip(vendor, seen, strict=True))
    plain, *_ = aten.native_batch_norm(leaf, there.weight, there.bias, None, None, True, 0.1, 1e-5)
    assert torch.equal(plain.detach().cpu(), own[0])
    assert kept[-1].nbytes > 0


def _dressed(value: object) -> list[tuple[object, ...]]:
    values = value if isinstance(value, tuple | list) else (value,)
    tensors = [each for each in values if isinstance(each, Tensor)]
    return [(each.dtype, each.shape, each.stride(), each.device) for each in tensors]


FAKED = {
    "layer norm": lambda x: aten.native_layer_norm(x, [5], None, None, 1e-5),
    "group norm": lambda x: aten.native_group_norm(x, None, None, 4, 6, 25, 3, 1e-5),
    "batch norm": lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    "batch norm in evaluation": lambda x: aten.native_batch_norm(
        x, None, None, x.new_zeros(6).float(), x.new_ones(6).float(), False, 0.1, 1e-5
    ),
    "flash attention": lambda x: aten._scaled_dot_product_flash_attention(x, x, x),
    "overrideable attention": lambda x: aten._scaled_dot_product_fused_attention_overrideable(x, x, x),
}


@pytest.mark.parametrize("name", FAKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_kernels_tell_the_results_of_real_ones(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    value = torch.randn(4, 6, 5, 5, device=device, dtype=dtype)
    with FakeTensorMode() as mode:
        faked = FAKED[name](mode.from_tensor(value))
    assert _dressed(FAKED[name](value)) == _dressed(faked)


@pytest.mark.parametrize("last", ["input", "weight", "neither"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_keep_channels_last_as_on_cuda(
    last: str, is_transposed: bool, kernel: int, device: torch.device
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def convolved(value: Tensor, weight: Tensor) -> list[Tensor]:
        options = ([1, 1], [0, 0], [1, 1], is_transposed, [0, 0], 1)
        made = aten.convolution(value, weight, None, *options)
        return [
            made,
            *aten.convolution_backward(made, value, weight, None, *options, [True, True, False])[:2],
        ]

    value = torch.randn(4, 6, 5, 5)
    weight = torch.randn((6, 2, kernel, kernel) if is_transposed else (2, 6, kernel, kernel))
    expected = convolved(value, weight)
    value, weight = value.to(device), weight.to(device)
    value = value.to(memory_format=torch.channels_last) if last == "input" else value
    weight = weight.to(memory_format=torch.channels_last) if last == "weight" else weight
    seen = convolved(value, weight)
    with FakeTensorMode() as mode:
        faked = convolved(mode.from_tensor(value), mode.from_tensor(weight))
    assert _dressed(seen) == _dressed(faked)
    # strides do not tell the format of a weight of one number for each channel
    formatted = [each for each in seen if each.shape[2:] != (1, 1)]
    assert formatted
    if kernel > 1 or last == "input":
        is_last = [each.is_contiguous(memory_format=torch.channels_last) for each in formatted]
        assert is_last == [last != "neither"] * len(is_last)
    assert _far(expected, seen) < 1e-5


def _far(expected: list[Tensor] | tuple[Tensor, ...], seen: list[Tensor] | tuple[Tensor, ...]) -> float:
    """The largest difference, as a share of each tensor's largest element."""
    pairs = [
        (one.detach().float(), other.detach().float().cpu())
        for one, other in zip(expected, seen, strict=True)
    ]
    return max(((one - other).abs().max() / one.abs().max()).item() for one, other in pairs)


def _grad_fns(value: Tensor) -> set[str]:
    names, waiting = set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(type(node).__name__)
            waiting += [each for each, _ in node.next_functions]
    return names
