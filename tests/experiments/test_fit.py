"""`lowtide.fit`: the largest sizes are exact by prediction, and true when they are run."""

import pytest
import torch
from interpolated import find_fit, step_at
from torch import nn

import lowtide
from lowtide.experiments import fit_search
from lowtide.experiments.fit import Vary
from lowtide.profiling.devices import OpTiming
from lowtide.zoo.targets import Target

pytestmark = pytest.mark.slow

WIDTH = 32


def make(batch_size):
    layers = [
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 1),
    ]
    model = nn.Sequential(*layers)
    return model, torch.randn(batch_size, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1)


def profile(size):
    model, batch, optimizer = make(size)
    return lowtide.profile(model, batch, optimizer=optimizer)


def fits_with_a_plan(size, budget_bytes):
    try:
        return profile(size).plan(budget_bytes).peak_bytes <= budget_bytes
    except lowtide.BudgetTooSmall:
        return False


@pytest.fixture(scope="module")
def budget_bytes():
    return profile(37).peak_bytes + 100


@pytest.fixture(scope="module")
def found(budget_bytes):
    return lowtide.fit(make, budget=budget_bytes)


@pytest.mark.long
def test_the_largest_sizes_fit_and_the_next_do_not(found, budget_bytes):
    assert found.largest_plain == 37 and profile(38).peak_bytes > budget_bytes
    assert found.largest > 37
    assert fits_with_a_plan(found.largest, budget_bytes)
    assert not fits_with_a_plan(found.largest + 1, budget_bytes)


@pytest.mark.long
def test_what_was_found_is_true(found, budget_bytes):
    plain, planned = found.checks
    assert (plain.size, plain.planned) == (38, False) and plain.measured_peak_bytes > budget_bytes
    assert (planned.size, planned.planned) == (found.largest, True) and planned.exact
    assert planned.measured_peak_bytes <= budget_bytes


@pytest.mark.long
def test_rows_tell_the_throughput_of_sizes_in_between(found, budget_bytes):
    sizes = [row.size for row in found.rows]
    assert sizes == sorted(set(sizes)) and {37, found.largest} <= set(sizes)
    assert any(37 < size < found.largest for size in sizes)
    for row in found.rows:
        assert row.peak_bytes <= budget_bytes
        assert row.per_second == row.size / (row.step_seconds + row.recompute_seconds)
    assert found.fastest.per_second == max(row.per_second for row in found.rows)
    assert repr(found).startswith("Fit(budget=") and len(repr(found)) < 140


def test_an_interpolated_size_is_the_captured_one():
    steps = {size: profile(size).step for size in (32, 64, 116)}
    captured = steps.pop(116)
    interpolated = step_at(116, steps, degree=1)
    assert [s.nbytes for s in interpolated.storages] == [s.nbytes for s in captured.storages]
    assert step_at(116, {32: steps[32]}, degree=1) is None


@pytest.mark.long
def test_few_sizes_are_captured_and_the_others_interpolated(found, budget_bytes):
    captured = []

    def source(size):
        captured.append(size)
        return Target("small", *make(size))

    again = find_fit(source, budget=budget_bytes, vary=Vary(), check=False)
    assert (again.largest_plain, again.largest) == (found.largest_plain, found.largest)
    assert len(captured) == len(set(captured)) <= 5 and 38 not in captured
    assert {row.size: row.profiled for row in again.rows}[37] is (37 in captured)


@pytest.mark.long
def test_several_budgets_share_what_is_captured(found, budget_bytes):
    captured = []

    def factory(size):
        captured.append(size)
        return make(size)

    budgets = [budget_bytes, 1000, 2 * budget_bytes]
    one, none, two = lowtide.fit(factory, budget=budgets, check=False)
    assert [each.budget_bytes for each in (one, none, two)] == budgets
    assert (one.largest_plain, one.largest) == (found.largest_plain, found.largest)
    assert (
        none.largest == 0 and two.largest > one.largest and not fits_with_a_plan(two.largest + 1, budgets[2])
    )
    assert len(captured) == len(set(captured)) <= 6


def test_times_are_measured_at_one_size_and_scaled_to_others(budget_bytes, monkeypatch):
    timed = []
    monkeypatch.setattr(
        "lowtide.profiling.op_trials.Trial.time",
        lambda self, **_: timed.append(self.call) or self.timings.append(OpTiming(1e-3)),
    )

    def profile_anew(target):
        return lowtide.profile(target.model, target.batch, optimizer=target.optimizer, cache=False)

    def source(size):
        return Target("small", *make(size))

    found = find_fit(source, budget=budget_bytes, vary=Vary(), check=False, profile=profile_anew)
    assert found.largest > found.largest_plain
    sizes = {size for call in timed for tensor in call.tensors for size in tensor.shape[:1]}
    assert sizes == {1, 8, WIDTH, 4 * WIDTH}  # the first size, and what is as large at all of them


def test_sizes_that_the_model_refuses_are_not_profiled(caplog):
    class Positions(nn.Module):
        """Takes sequences from 100 to 300."""

        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(300, WIDTH))
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            if x.shape[0] < 100:
                raise ValueError("too short")
            return self.layer(x + self.positions[: x.shape[0]]).relu().sum()

    def source(size):
        return Target("positions", Positions(), torch.randn(size, WIDTH))

    found = find_fit(source, budget="1MiB", vary=Vary(multiple_of=10, name="length"), check=False)
    assert (found.largest_plain, found.largest, found.most) == (300, 300, 300)
    assert "no length from 310 on is profiled, since the model refuses that one" in caplog.text
    with pytest.raises(lowtide.CaptureError, match="too short"):
        find_fit(source, budget="1MiB", vary=Vary(name="length"), check=False)


def only(takes):
    """`make` for sizes that are taken."""

    def factory(size):
        if not takes(size):
            raise ValueError("not for me")
        return make(size)

    return factory


def test_an_answer_that_the_factory_refuses_is_an_error_that_says_what_to_do(budget_bytes):
    with pytest.raises(lowtide.TargetError, match=r"batch size \d+ is refused.*not for me.*multiple_of"):
        lowtide.fit(only(lambda size: size % 2 == 0), budget=budget_bytes)


@pytest.mark.long
def test_where_the_next_size_is_refused_the_answer_is_not_lost(budget_bytes):
    found = lowtide.fit(only(lambda size: size != 38), budget=budget_bytes)
    plain, planned = found.checks
    assert found.largest_plain == 37 and planned.exact
    assert plain.measured_peak_bytes is None and "not for me" in plain.reason


class Attends(nn.Module):
    """Holds squares of its length."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer((x @ x.T).softmax(-1) @ x)
        return x.sum()


@pytest.mark.long
def test_where_bytes_are_squares_no_size_is_captured_that_is_far_too_large():
    captured = []

    def source(size):
        captured.append(size)
        return Target("attends", Attends(), torch.randn(size, WIDTH))

    budget_bytes = 4_000_000
    vary = Vary(multiple_of=4, degree=2, name="length")
    found = find_fit(source, budget=budget_bytes, vary=vary, check=False)
    assert max(captured) <= 2 * found.no_plan_above
    assert found.largest_plain < found.largest <= found.no_plan_above
    plain = found.largest_plain
    peaks = [lowtide.profile(Attends(), source(size).batch).peak_bytes for size in (plain, plain + 4)]
    assert peaks[0] <= budget_bytes < peaks[1]
    bound = lowtide.profile(Attends(), source(found.no_plan_above + 4).batch).floor_bound_bytes
    assert bound > budget_bytes


def test_a_factory_whose_argument_is_a_length_shows_how_bytes_grow():
    """Where bytes are squares, a line through two large sizes told a size with 20 times the budget."""
    budget_bytes = 4_000_000
    found = lowtide.fit(
        lambda length: (Attends(), torch.randn(length, WIDTH)), budget=budget_bytes, check=False
    )
    peaks = [
        lowtide.profile(Attends(), torch.randn(length, WIDTH)).peak_bytes
        for length in (found.largest_plain, found.largest_plain + 1)
    ]
    assert peaks[0] <= budget_bytes < peaks[1]


def test_nothing_fits():
    found = lowtide.fit(make, budget=1000, check=False)
    assert (found.largest_plain, found.largest, found.rows) == (0, 0, ()) and found.fastest is None
    assert found.lowest_bytes > 1000


@pytest.mark.long
def test_multiples_and_a_limit(budget_bytes):
    found = lowtide.fit(make, budget=budget_bytes, multiple_of=8, check=False)
    assert found.largest_plain == 32 and found.largest % 8 == 0 and found.checks == ()
    assert all(row.size % 8 == 0 for row in found.rows)
    found = lowtide.fit(make, budget=budget_bytes, most=20, check=False)
    assert (found.largest_plain, found.largest, found.most) == (20, 20, 20)


def test_what_the_machine_cannot_hold_is_said_and_not_run(budget_bytes, monkeypatch):
    monkeypatch.setattr("lowtide.experiments.machine.available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(fit_search, "run_plain", lambda *_, **__: pytest.fail("must not run"))
    found = lowtide.fit(make, budget=budget_bytes)
    assert all(check.measured_peak_bytes is None and "are free" in check.reason for check in found.checks)


@pytest.mark.long
def test_what_no_fresh_process_can_be_given_is_said_and_the_answer_not_lost(budget_bytes):
    """As a loss that is a lambda."""
    found = lowtide.fit(lambda size: (*make(size), lambda output: output.sum()), budget=budget_bytes, most=64)
    plain = found.checks[0]
    assert found.largest > found.largest_plain and plain.measured_peak_bytes is None
    assert "cannot send the model to a fresh process" in plain.reason


@pytest.mark.long
def test_a_step_whose_ops_change_with_the_size_is_found_by_halving(budget_bytes):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            for _ in range(x.shape[0] % 5):
                x = self.layer(x)
            return self.layer(x).sum()

    def source(size):
        return Target("odd", Odd(), torch.randn(size, WIDTH))

    found = find_fit(source, budget=40_000, vary=Vary(), check=False)
    peaks = [
        lowtide.profile(Odd(), torch.randn(size, WIDTH)).peak_bytes
        for size in (found.largest_plain, found.largest_plain + 1)
    ]
    assert peaks[0] <= 40_000 < peaks[1]


@pytest.mark.long
def test_sizes_are_not_interpolated_from_sizes_with_other_ops():
    class Deeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

        def forward(self, x):
            for layer in self.layers[: 3 if x.shape[0] < 100 else 4]:
                x = nn.functional.gelu(layer(x))
            return x.sum()

    def source(size):
        return Target("deeper", Deeper(), torch.randn(size, WIDTH))

    found = find_fit(source, budget=120_000, vary=Vary(), check=False)
    plain = found.largest_plain
    peaks = [lowtide.profile(Deeper(), source(size).batch).peak_bytes for size in (plain, plain + 1)]
    assert peaks[0] <= 120_000 < peaks[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "60%"}, "8GiB"),
        ({"budget": "much"}, "cannot read the size"),
        ({"budget": "1GiB", "multiple_of": 0}, "say 1 or more"),
        ({"budget": "1GiB", "multiple_of": 8, "most": 7}, "allow larger sizes"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(lowtide.LowtideError, match=words):
        lowtide.fit(make, **options)


def test_a_bad_factory_is_told():
    with pytest.raises(lowtide.TargetError, match="must return"):
        lowtide.fit(lambda size: None, budget="1MiB")
