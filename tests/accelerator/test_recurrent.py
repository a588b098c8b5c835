"""Recurrent layers on an accelerator: eager's own op whole, by the vendor's library or by fused cells."""

import gc
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerator_cases import as_target, check, on
from torch import nn
from training import twin

import lowtide

LENGTHS = [12, 9, 7, 12, 11, 8, 10, 12] * 8


class Sentences(nn.Module):
    """Recurrent modules over embedded words, from a given or an empty initial state, padded or packed."""

    def __init__(self, kind: type[nn.RNNBase], *, packed: bool = False, starts: bool = False, **options: Any):
        super().__init__()
        directions = 2 if options.get("bidirectional") else 1
        width = options.get("proj_size", 32) * directions
        self.words = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(kind(width if index else 32, 32, **options) for index in range(3))
        self.packed, self.batch_first = packed, self.layers[0].batch_first
        rows = self.layers[0].num_layers * directions
        self.start = nn.Parameter(torch.randn(rows, 1, width // directions)) if starts else None
        self.head = nn.Linear(width, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        value: Any = self.words(words)
        if self.packed:
            value = nn.utils.rnn.pack_padded_sequence(
                value, LENGTHS, batch_first=self.batch_first, enforce_sorted=False
            )
        states = None if self.start is None else self.start.expand(-1, len(LENGTHS), -1).contiguous()
        for layer in self.layers:
            value, ends = layer(value, states)
        if self.packed:
            value = nn.utils.rnn.pad_packed_sequence(value, batch_first=self.batch_first)[0]
        end = ends[0] if isinstance(ends, tuple) else ends
        return self.head(value) + end.mean()


CASES = {
    "lstm": partial(Sentences, nn.LSTM, num_layers=2, batch_first=True),
    "lstm both ways": partial(Sentences, nn.LSTM, num_layers=2, bidirectional=True),
    "lstm with projections": partial(Sentences, nn.LSTM, proj_size=16),
    "gru from a state": partial(Sentences, nn.GRU, num_layers=2, starts=True),
    "gru of packed sentences": partial(Sentences, nn.GRU, packed=True, bidirectional=True),
    "lstm of packed sentences": partial(Sentences, nn.LSTM, packed=True, num_layers=2, batch_first=True),
    "rnn": partial(Sentences, nn.RNN, nonlinearity="relu", bias=False),
}


def sentences(model: Sentences, **options: Any) -> Any:
    shape = (len(LENGTHS), 12) if model.batch_first else (12, len(LENGTHS))
    return as_target(model, torch.randint(0, 50, shape), **options)


BREAKS = {"gru of packed sentences", "lstm of packed sentences"}
"""Packing ends a graph, and nothing is recomputed across graphs."""


SAMPLE = {
    "torch": ["lstm", "gru of packed sentences", "rnn"],
    "vendor": ["lstm both ways", "lstm with projections", "gru from a state", "lstm of packed sentences"],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("vendor", "name"),
    [
        pytest.param(
            kind == "vendor", name, id=f"{kind}-{name}", marks=[pytest.mark.long] * (name not in names)
        )
        for kind, names in SAMPLE.items()
        for name in CASES
    ],
)
def test_all_layers_run_by_eagers_own_op(
    vendor: bool, name: str, standin: ModuleType, device: torch.device
) -> None:
    standin.set_vendor_recurrent(vendor)
    share = 1.0 if name in BREAKS else 0.85
    plan = check(sentences(CASES[name]()), device, share=share, steps=2, cache=False)
    assert (plan.recompute_seconds > 0) == (share < 1)


@pytest.mark.parametrize("vendor", [False, True], ids=["torch", "vendor"])
def test_under_autocast(vendor: bool, standin: ModuleType, device: torch.device) -> None:
    standin.set_vendor_recurrent(vendor)
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    target = sentences(CASES["lstm"](), within=autocast)
    check(target, device, share=1.0 if vendor else 0.9, steps=2, cache=False)


@pytest.mark.parametrize("vendor", [False, True], ids=["torch", "vendor"])
def test_dropout_between_layers_is_drawn_once(
    vendor: bool, standin: ModuleType, device: torch.device
) -> None:
    standin.set_vendor_recurrent(vendor)
    model = nn.Sequential(Sentences(nn.GRU, num_layers=3, dropout=0.3), *head(), *head(), *head())
    plan = check(
        as_target(model, torch.randint(0, 50, (12, len(LENGTHS)))), device, share=0.9, steps=2, cache=False
    )
    fixed = {node.fixed for node in plan.step.nodes if "recurrent_stack" in node.op}
    assert "the dropout between its layers is drawn once" in fixed


def head() -> list[nn.Module]:
    """Layers whose dropout could be drawn again, if cuDNN's did not start over by that."""
    return [nn.Linear(50, 200), nn.GELU(), nn.Dropout(0.2), nn.Linear(200, 50)]


class Cells(nn.Module):
    """Words one by one through a cell."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(16, 16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        state: Any = None
        for word in words.unbind():
            state = self.cell(word, state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_single_cells(kind: type[nn.RNNCellBase], device: torch.device) -> None:
    check(as_target(Cells(kind), torch.randn(6, 32, 16)), device, share=1.0, steps=2)


def test_a_second_backward_pass_runs_the_recorded_graph_again(device: torch.device) -> None:
    target = on(sentences(CASES["lstm"]()), device)
    eager, planned = target.model, twin(target).model
    lowtide.profile(planned, target.batch, loss=target.loss).plan("100%").apply(planned)
    for model in (eager, planned):
        loss = target.loss(model(*target.batch))
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(eager.parameters(), planned.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_forward_pass_without_backward_leaves_nothing_behind(device: torch.device) -> None:
    target = on(sentences(CASES["lstm"]()), device)
    lowtide.profile(target.model, target.batch, loss=target.loss).plan("100%").apply(target.model)
    target.model(*target.batch)
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    for _ in range(3):
        target.model(*target.batch)
    gc.collect()
    assert torch.accelerator.memory_allocated(device) == before
