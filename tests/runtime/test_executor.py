"""Another executor than eager ops can run the rewritten graphs, without a change anywhere else."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from training import differences, train, twin

import lowtide
from lowtide.runtime import executor
from lowtide.runtime.apply import apply_plan
from lowtide.runtime.executor import Function, RecentlyUsed
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow


class Interpreted:
    """Runs graphs node by node with torch's interpreter."""

    name = "interpreted"
    in_place = True
    takes_numbers = True

    def __init__(self) -> None:
        self.compiled: list[bool] = []
        self.ran: list[bool] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Function:
        assert len(inputs) == len(module.graph.find_nodes(op="placeholder"))
        self.compiled.append(is_backward)

        def run(args: list[Any]) -> Any:
            self.ran.append(is_backward)
            given = list(args)
            args.clear()
            return fx.Interpreter(module).run(*given)

        return run


@pytest.fixture
def targets() -> tuple[Target, Target]:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)
    ]
    model = nn.Sequential(*blocks)
    plain = Target("model", model, torch.randn(64, 32), torch.optim.Adam(model.parameters()))
    return plain, twin(plain)


def test_a_foreign_executor_runs_both_passes_exactly(targets: tuple[Target, Target]) -> None:
    plain, planned = targets
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    executor = Interpreted()
    apply_plan(found.plan(found.floor_bytes), planned.model, executor=executor)
    assert differences(train(plain), train(planned)) == []
    assert executor.compiled == [False, True]
    assert executor.ran == [False, True] * 2


def test_what_was_used_last_is_kept() -> None:
    kept: RecentlyUsed[str, int] = RecentlyUsed(2)
    kept["a"], kept["b"] = 1, 2
    assert kept.get("a") == 1
    kept["c"] = 3
    assert dict(kept) == {"a": 1, "c": 3} and kept.get("b") is None


def test_compiled_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.torch_compat.inductor.CompiledGraph", lambda *_, **__: object())
    monkeypatch.setattr(executor, "COMPILED_GRAPHS", 2)
    compiler = executor.InductorOps()
    module = fx.symbolic_trace(nn.ReLU())
    for rows in range(5):
        compiler.compiled(module, [torch.ones(rows)], is_backward=False)
    assert len(compiler._compiled) == 2
