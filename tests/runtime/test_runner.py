"""The user's own loop runs unchanged around a planned model."""

import copy
import re

import pytest
import torch
from budgets import between
from torch import nn
from torch.nn import functional as F
from training import differences, snapshot, train, twin
from trouble import BATCH, WIDTH, LongSkips, SharedModule, TupleOutput

import lowtide
from lowtide.api import profile
from lowtide.runtime.runner import runner_of
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

SMALL = 37


class Repeated(nn.Module):
    """One layer, used over and over, and its weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(self.layer(x))
        return x @ self.layer.weight


def _target(model: nn.Module) -> Target:
    return Target(
        "model", model, torch.randn(BATCH, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )


def _pair(model: nn.Module) -> tuple[Target, Target]:
    """The same model plain and planned, as tight as it goes."""
    torch.manual_seed(0)
    plain = _target(model)
    planned = twin(plain)
    found = profile(planned.model, planned.batch, optimizer=planned.optimizer)
    plan = found.plan(found.floor_bytes)
    assert plan.recompute_seconds > 0
    assert plan.apply(planned.model) is planned.model
    return plain, planned


def _run(target: Target, loop, seed: int = 3) -> list:
    target.model.zero_grad()
    torch.manual_seed(seed)
    loop(target)
    grads = [(f"gradient of {name}", p.grad) for name, p in target.model.named_parameters()]
    return [*grads, *snapshot(target.model, 0), ("random state", torch.get_rng_state())]


def _same(plain: Target, planned: Target, loop) -> None:
    assert differences(_run(plain, loop), _run(planned, loop)) == []


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Target]:
    return _pair(SharedModule())


@pytest.fixture(scope="module")
def other_pair() -> tuple[Target, Target]:
    return _pair(LongSkips())


@pytest.fixture(scope="module")
def plan() -> lowtide.Plan:
    return profile(SharedModule(), torch.randn(BATCH, WIDTH)).plan("1GiB")


def test_gradient_accumulation_clipping_and_a_schedule(pair: tuple[Target, Target]) -> None:
    def loop(target: Target) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(target.optimizer, step_size=1, gamma=0.5)
        for _ in range(2):
            for micro in range(3):
                (target.model(target.batch * (micro + 1)).sum() / 3).backward()
            torch.nn.utils.clip_grad_norm_(target.model.parameters(), 0.1)
            target.optimizer.step()
            schedule.step()
            target.optimizer.zero_grad(set_to_none=False)

    _same(*pair, loop)


def test_two_calls_before_one_backward(other_pair: tuple[Target, Target]) -> None:
    def loop(target: Target) -> None:
        (target.model(target.batch) * target.model(target.batch.flip(0))).sum().backward()

    _same(*other_pair, loop)


def test_two_calls_that_each_use_a_weight_several_times(caplog: pytest.LogCaptureFixture) -> None:
    def loop(target: Target) -> None:
        for _ in range(2):
            target.model(target.batch).sum().backward()
            (target.model(target.batch).sum() + target.model(target.batch.flip(0)).sum()).backward()

    pair = _pair(Repeated())
    _same(*pair, loop)
    assert "called twice" not in caplog.text


def test_retain_graph(pair: tuple[Target, Target]) -> None:
    def loop(target: Target) -> None:
        loss = target.model(target.batch).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    _same(*pair, loop)


def test_a_smaller_last_batch_gets_a_plan_of_its_own(pair: tuple[Target, Target]) -> None:
    def loop(target: Target) -> None:
        target.model(target.batch[:SMALL]).sum().backward()

    _same(*pair, loop)
    graphs = runner_of(pair[1].model).backend.graphs
    assert len({segment.fingerprint for segment, _, _ in graphs}) == 2


def test_without_gradients_the_plain_model_runs(pair: tuple[Target, Target]) -> None:
    plain, planned = pair
    graphs = len(runner_of(planned.model).backend.graphs)
    shape = torch.randn(5, WIDTH)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = plain.model(shape)
        torch.manual_seed(1)
        assert torch.equal(planned.model(shape), expected)
        plain.model.eval(), planned.model.eval()
        try:
            assert torch.equal(planned.model(shape), plain.model(shape))
        finally:
            plain.model.train(), planned.model.train()
    assert len(runner_of(planned.model).backend.graphs) == graphs


def test_autocast() -> None:
    def block() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.2)]

    def loop(target: Target) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = target.model(target.batch).float().sum()
        loss.backward()

    _same(*_pair(nn.Sequential(*block(), *block(), *block())), loop)


def test_the_model_stays_what_it_was(pair: tuple[Target, Target]) -> None:
    plain, planned = pair
    assert type(planned.model) is SharedModule
    assert list(planned.model.state_dict()) == list(plain.model.state_dict())
    double = copy.deepcopy(planned.model)
    assert runner_of(double) is None
    assert torch.equal(double.block[0].weight, planned.model.block[0].weight)


def test_the_state_can_be_saved_and_loaded(pair: tuple[Target, Target], tmp_path) -> None:
    saved, loaded = pair[1].model, SharedModule()
    torch.save(saved.state_dict(), tmp_path / "state")
    loaded.load_state_dict(torch.load(tmp_path / "state"))
    assert differences(snapshot(saved, 0), snapshot(loaded, 0)) == []
    back = pair[0].model.state_dict()
    saved.load_state_dict(back)
    assert all(torch.equal(value, back[name]) for name, value in saved.state_dict().items())
    _same(*pair, lambda target: target.model(target.batch).sum().backward())


def test_double_backward_is_refused(pair: tuple[Target, Target]) -> None:
    model, batch = pair[1].model, pair[1].batch.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(batch).square().sum(), batch, create_graph=True)
    with pytest.raises(lowtide.Unsupported, match="differentiates a gradient of the planned model"):
        grad.sum().backward()


def test_remove_gives_the_plain_model_back() -> None:
    plain, planned = _pair(LongSkips())
    backend = runner_of(planned.model).backend
    assert lowtide.remove(planned.model) is planned.model
    assert runner_of(planned.model) is None
    _same(plain, planned, lambda target: target.model(target.batch).sum().backward())
    assert backend.observer.view().num_forwards == 0


def test_two_models_at_a_time(pair: tuple[Target, Target], other_pair: tuple[Target, Target]) -> None:
    plain, planned = zip(pair, other_pair, strict=True)

    def loop(targets) -> list:
        torch.manual_seed(5)
        for target in targets:
            target.model.zero_grad()
        loss = sum(target.model(target.batch).square().mean() for target in targets)
        loss.backward()
        return [(name, p.grad) for t in targets for name, p in t.model.named_parameters()]

    assert differences(loop(plain), loop(planned)) == []


def test_a_loss_outside_that_uses_one_of_several_outputs() -> None:
    plain, planned = _pair(TupleOutput())

    def loop(target: Target) -> None:
        F.cross_entropy(target.model(target.batch)[0], torch.zeros(BATCH, dtype=torch.long)).backward()

    _same(plain, planned, loop)
    assert planned.model.right.weight.grad is None


def test_a_larger_batch_that_cannot_fit_is_refused(pair: tuple[Target, Target]) -> None:
    with pytest.raises(lowtide.BudgetTooSmall):
        pair[1].model(torch.randn(BATCH * 50, WIDTH))


def test_a_compiled_model_is_not_planned_over(plan: lowtide.Plan) -> None:
    model = SharedModule()
    model.compile(backend="eager")
    with pytest.raises(lowtide.LowtideError, match="already compiled"):
        plan.apply(model)


def test_a_plan_for_another_model_is_refused(plan: lowtide.Plan) -> None:
    with pytest.raises(lowtide.PlanMismatch, match="model"):
        plan.apply(LongSkips())


def test_a_saved_plan_trains_the_same(tmp_path) -> None:
    torch.manual_seed(0)
    plain = _target(SharedModule())
    planned = twin(plain)
    found = profile(planned.model, planned.batch, optimizer=planned.optimizer)
    made = found.plan(between(found, 0.5))
    assert made.recompute_seconds > 0
    made.save(tmp_path / "plan.json")
    again = lowtide.load_plan(tmp_path / "plan.json")
    assert again == made
    again.apply(planned.model)
    assert differences(train(plain), train(planned)) == []


def _floor_of_the_backend(model: nn.Module, batch: torch.Tensor) -> int:
    """The lowest budget it takes, which it tells when asked for less."""
    with pytest.raises(Exception, match="lowest reachable peak is") as caught:
        torch.compile(model, backend="lowtide", options={"budget": "1B"})(batch)
    return int(re.search(r"lowest reachable peak is \D*[\d.]+ \w+ \((\d+) bytes\)", str(caught.value))[1])


def test_the_torch_compile_backend() -> None:
    torch.manual_seed(0)
    plain = _target(SharedModule())
    other = twin(plain)
    floor = _floor_of_the_backend(SharedModule(), plain.batch)
    compiled = torch.compile(other.model, backend="lowtide", options={"budget": floor})
    planned = Target("compiled", compiled, other.batch, other.optimizer)
    names = [(name, value) for name, value in train(plain) if not name.startswith("random")]
    seen = [(n.replace("_orig_mod.", ""), v) for n, v in train(planned) if not n.startswith("random")]
    assert differences(names, seen) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [({"budgt": "1GiB"}, "budgt.*budget"), ({}, "needs a budget"), ({"budget": "1 byte"}, "byte")],
)
def test_bad_options_of_the_backend(options: dict[str, str], words: str) -> None:
    model = torch.compile(SharedModule(), backend="lowtide", options=options)
    with pytest.raises(Exception, match=words):
        model(torch.randn(BATCH, WIDTH))
