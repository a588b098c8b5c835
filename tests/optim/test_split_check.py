"""What chunks of an optimizer's step hold inside, told from a trace of the whole step."""

from functools import partial

import pytest
import torch
from torch import nn

from lowtide.optim import split_check
from lowtide.optim.optimizer_trace import trace_optimizer
from lowtide.optim.shadow_optimizer import estimate
from lowtide.optim.split_check import check_split, chunked_step_bytes
from lowtide.torch_compat.modules import stepping_as_real
from lowtide.verification.measure_step import peak_above_start

SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 20)
KINDS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "foreach": partial(torch.optim.Adam, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "maximize": partial(torch.optim.Adam, maximize=True, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


def make_parameters() -> list[nn.Parameter]:
    shapes = [(64, 32), (32,), (64, 32), (7, 5, 3), (300, 40), (40,), (2, 900)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_step_tells_what_pieces_hold(kind):
    parameters = make_parameters()
    optimizer = KINDS[kind]([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.01}])
    traced = trace_optimizer(optimizer, {id(parameter) for parameter in parameters[:-1]})
    for within_parameters in (False, True):
        told = chunked_step_bytes(optimizer, traced, within_parameters=within_parameters, sizes=SIZES)
        every = split_check._chunked_step_bytes(
            traced.shadow, None, within_parameters=within_parameters, sizes=SIZES
        )
        assert told == every
    assert told[SIZES[-1]] == traced.peak_bytes


def test_a_later_step_that_holds_more_is_the_one_that_counts():
    parameter = nn.Parameter(torch.randn(64, 32))
    optimizer = torch.optim.RAdam([parameter])
    traced = trace_optimizer(optimizer, {id(parameter)})
    for _ in range(8):  # from the sixth on, it divides by what the gradients were
        parameter.grad = torch.randn_like(parameter)
        held = peak_above_start(optimizer.step)
    assert traced.peak_bytes >= held - 64


def test_equal_layers_are_not_traced_again(monkeypatch):
    recorded = []

    def count(*args):
        recorded.append(args)
        return 0

    parameters = [*make_parameters(), *make_parameters()]
    optimizer = torch.optim.Adam(parameters)
    traced = trace_optimizer(optimizer, {id(parameter) for parameter in parameters})
    monkeypatch.setattr(split_check, "recorded_bytes", count)
    assert (
        max(chunked_step_bytes(optimizer, traced, within_parameters=False, sizes=SIZES).values())
        == traced.peak_bytes
    )
    assert not recorded


def test_two_slices_hold_as_much_as_all_of_them():
    parameter = nn.Parameter(torch.randn(256, 32))
    optimizer = torch.optim.Adam([parameter])
    traced = trace_optimizer(optimizer, {id(parameter)})
    size = parameter.nbytes // 8
    told = chunked_step_bytes(optimizer, traced, within_parameters=True, sizes=[size])[size]
    with torch.no_grad():
        fake = traced.shadow.fakes[id(parameter)]
        whole = partial(split_check.step_in_rows, traced.shadow.optimizer, fake, len(fake) // 8)
        assert told == split_check.recorded_bytes(whole, traced.shadow)


@pytest.mark.long
def test_looking_at_an_optimizer_leaves_every_generator_alone(monkeypatch):
    """`torch.manual_seed` seeds accelerators, whose generators `fork_rng(devices=[])` does not restore."""

    def seed_all(*_):
        pytest.fail("seeds the generators of an accelerator")

    before = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", seed_all)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seed_all)
    parameters = make_parameters()
    before = torch.get_rng_state()
    check_split(torch.optim.SGD(parameters, lr=0.123))
    estimate(torch.optim.LBFGS(parameters), {id(parameter) for parameter in parameters})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_single_elements_are_tried_in_the_dtype_of_the_parameters(dtype):
    """SGD with weight decay rounds the last elements of a bfloat16 tensor otherwise than those in vectors."""
    whole, single = (nn.Parameter(torch.linspace(-1, 1, 67).to(dtype)[:, None].clone()) for _ in range(2))
    build = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1)
    optimizers = build([whole]), build([single])
    for _ in range(3):
        whole.grad = single.grad = torch.linspace(-3, 5, 67).to(dtype)[:, None]
        optimizers[0].step()
        split_check.step_in_rows(optimizers[1], single, 1)
    assert check_split(build([whole])).within_parameters == torch.equal(whole, single)


def test_a_split_is_found_once(monkeypatch):
    found, small = [], split_check.small_optimizer
    monkeypatch.setattr(split_check, "small_optimizer", lambda *args: (found.append(args), small(*args))[1])
    for lr, times in ((0.0123, 3), (0.0123, 3), (0.0124, 6)):
        check_split(torch.optim.Adam(make_parameters(), lr=lr))
        assert len(found) == times
    with stepping_as_real(on_gpu=True):
        check_split(torch.optim.Adam(make_parameters(), lr=0.0124))
    assert len(found) == 9, "on a GPU, another code is the default"
    for number in range(2 * split_check.MOST_KNOWN):
        check_split(torch.optim.SGD(make_parameters()[:1], lr=number))
    assert len(split_check._known) == split_check.MOST_KNOWN
