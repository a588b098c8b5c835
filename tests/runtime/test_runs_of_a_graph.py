"""A graph that runs several times in a call, by a schedule for each run."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from sharded_cases import Case, build

import lowtide
from lowtide.runtime.runner import runner_of

pytestmark = pytest.mark.slow

BLOCKS = 3


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """A model whose blocks are one graph; with a single process, which has all of each parameter."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build(rank=0, width=16, blocks=BLOCKS)
    dist.destroy_process_group()


def _has_two_schedules(plan: lowtide.Plan) -> bool:
    repeated = [graph for graph in plan.solution.graphs if graph.in_model][1:-1]
    assert len(repeated) == BLOCKS and len({graph.fingerprint for graph in repeated}) == 1
    return len({graph.schedule for graph in repeated}) == 2


def _train(case: Case) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    for rows in (4, 2):
        case.loss(case.model(case.tokens[:rows])).backward()
        case.keep_all()
        case.optimizer.step()
        case.optimizer.zero_grad()
    case.keep_all()
    return list(case.results.values())


def test_a_budget_between_two_plans_of_a_block_is_used(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first blocks recompute more than the last ones; training is that of eager."""
    expected = _train(build(rank=0, width=16, blocks=BLOCKS))
    found = lowtide.profile(case.model, case.tokens, optimizer=case.optimizer, loss=case.loss)
    plan = next(filter(_has_two_schedules, found.tradeoff(points=12)))
    plan.apply(case.model)
    runner = runner_of(case.model)
    saved: list[int] = []

    def ran(plain, nbytes, **others) -> None:  # type: ignore[no-untyped-def]
        saved.append(nbytes)
        plain(nbytes, **others)

    monkeypatch.setattr(runner.observer, "graph_ran", partial(ran, runner.observer.graph_ran))
    seen = _train(case)
    assert all(a is b or torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
    of_blocks = saved[1 : BLOCKS + 1]
    assert len(set(of_blocks)) == 2 and of_blocks == sorted(of_blocks), "the last ones save more"
