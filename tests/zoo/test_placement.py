"""Targets on another device: on "meta", which every machine has, where no accelerator is."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide.errors import TargetError
from lowtide.zoo.placement import device_named, devices_here, move_model, moved, seeded
from lowtide.zoo.targets import TargetSpec

META = torch.device("meta")
Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Sample:
    values: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        (torch.ones(2), [torch.ones(3), {"deep": torch.ones(1)}]),
        UserDict(input=torch.ones(2)),
        Pair(torch.ones(2), torch.ones(3)),
        Sample(torch.ones(2), "first"),
        SimpleNamespace(x=torch.ones(2), inner=Sample(torch.ones(1), "second")),
        nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 4), torch.tensor([3, 2]), batch_first=True),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_tensor_of_a_batch_moves_and_the_batch_stays_as_it_was(batch):
    there = moved(batch, META)
    assert type(there) is type(batch)
    assert {tensor.device for tensor in tensors(there)} == {META}
    assert all(tensor.device.type == "cpu" for tensor in tensors(batch))


def tensors(value):
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return [value.data]  # torch keeps the lengths on the CPU
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, UserDict | dict):
        return [t for part in value.values() for t in tensors(part)]
    parts = (
        value
        if isinstance(value, tuple | list)
        else vars(value).values()
        if hasattr(value, "__dict__")
        else ()
    )
    return [t for part in parts for t in tensors(part)]


def test_numbers_texts_functions_and_classes_are_left_alone():
    values = (3, "text", None, len, torch.float32, Sample, nn.Linear)
    assert moved(values, META) == values


@pytest.mark.parametrize("fused", [False, True])
def test_state_moves_and_a_counter_stays_where_torch_keeps_it(fused):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    move_model(model, optimizer, META)
    assert {parameter.device for parameter in model.parameters()} == {META}
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    state = optimizer.state[model.weight]
    assert state["exp_avg"].device == META
    assert state["step"].device == (META if fused else torch.device("cpu"))


def test_a_device_that_is_not_here_is_refused_with_those_that_are():
    assert device_named(" CPU ") == torch.device("cpu") and devices_here()[0] == torch.device("cpu")
    with pytest.raises(TargetError, match=r"no device 'xpu:3' here: this machine has cpu"):
        device_named("xpu:3")
    with pytest.raises(TargetError, match=r"say --device a100-40g$"):
        device_named("a100-40g")
    with pytest.raises(TargetError, match="no device 'meta' here"):
        TargetSpec(text="tiny-gpt2", batch_size=1, device="meta").load()


def test_a_seed_lasts_for_its_block():
    before = torch.get_rng_state()
    with seeded(3):
        first = torch.rand(2)
    with seeded(3):
        assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.get_rng_state(), before)


FACTORY = """
import torch

def told(batch_size, device="nowhere"):
    told.device = device
    return torch.nn.Linear(4, 2), torch.ones(batch_size, 4)
"""


def test_a_factory_with_a_parameter_device_is_told_the_device(tmp_path):
    path = tmp_path / "telling.py"
    path.write_text(FACTORY)
    text = f"{path}:told"
    import sys

    TargetSpec(text=text, batch_size=1, device="cpu").load()
    assert sys.modules["telling"].told.device == torch.device("cpu")
    TargetSpec(text=text, batch_size=1).load()
    assert sys.modules["telling"].told.device == "nowhere"
