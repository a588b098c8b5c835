import mmap
import os
import subprocess
import sys
import time
import types
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import fresh_cases
import pytest
import torch
from fresh_cases import take_first
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowtide.errors import CannotMoveToFreshProcess, FreshProcessError, LowtideError
from lowtide.measure import measure_here, measure_step, static_bytes, train_step
from lowtide.report.style import QUIET
from lowtide.trace.model_call import call, loss_of
from lowtide.verification import measure_step as measuring
from lowtide.verification.fresh_process import run_fresh
from lowtide.verification.measure_step import (
    LEAST_PAIRS,
    MOST_SECONDS,
    USUAL_PAIRS,
    Timing,
    can_measure_resident,
    peak_above_start,
    tensors_in,
    time_steps,
)
from lowtide.verification.verdict import fault_note
from lowtide.zoo.targets import Target, TargetSpec, load_target

pytestmark = pytest.mark.slow

HELPERS = Path(fresh_cases.__file__).parent
MIB = 2**20
FLOATS_PER_MIB = MIB // 4


def small_target(width=64, batch_size=256):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(width), nn.Linear(width, 8)
    )
    return Target("small", model, torch.randn(batch_size, width), torch.optim.Adam(model.parameters()))


def is_running(pid):
    """A process that has ended may still be listed, as a zombie that nobody asked for its status."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not state.startswith(" Z")


def wait_for(condition, seconds=120):
    """What `condition` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)
    return found


# peak


def test_the_peak_is_the_largest_sum_held_at_once():
    def step():
        first = torch.empty(10 * FLOATS_PER_MIB)
        del first
        second = torch.empty(3 * FLOATS_PER_MIB)
        third = torch.empty(4 * FLOATS_PER_MIB)
        del second, third
        return torch.empty(FLOATS_PER_MIB)

    assert peak_above_start(step) == 10 * MIB


def test_what_was_there_does_not_count():
    held = [torch.empty(5 * FLOATS_PER_MIB)]
    assert peak_above_start(lambda: held.append(torch.empty(7 * FLOATS_PER_MIB))) == 7 * MIB


def test_the_peak_is_seen_inside_ops():
    value = torch.randn(FLOATS_PER_MIB)
    assert peak_above_start(lambda: torch.nn.functional.gelu(value).sum()) >= MIB


# step


def test_static_bytes_counts_shared_memory_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    batch = torch.zeros(4, 8)
    assert static_bytes(model, {"x": batch, "again": (batch[:2],)}) == 4 * (64 + 32)


def test_static_bytes_counts_buffers_and_optimizer_state():
    model = nn.BatchNorm1d(16)
    batch = torch.randn(8, 16)
    optimizer = torch.optim.Adam(model.parameters())
    plain = static_bytes(model, batch, optimizer)
    assert plain == 4 * 4 * 16 + 8 + batch.nbytes
    train_step(model, batch, optimizer)
    assert static_bytes(model, batch, optimizer) == plain + 2 * (2 * 4 * 16 + 4)


def test_train_step_is_the_loop_that_users_write():
    ours, theirs = small_target(), small_target()
    torch.manual_seed(1)
    loss = train_step(ours.model, ours.batch, ours.optimizer, torch.sum)
    torch.manual_seed(1)
    expected = theirs.model(theirs.batch).sum()
    expected.backward()
    theirs.optimizer.step()
    assert torch.equal(loss, expected.detach())
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value)


def test_the_batch_may_be_a_tensor_a_tuple_or_a_dict():
    class Add(nn.Module):
        def forward(self, a, b=1):
            return a + b

    one = torch.ones(1)
    assert [call(Add(), batch).item() for batch in (one, (one, 2), [one, 3], {"a": one, "b": 4})] == [
        2,
        3,
        4,
        5,
    ]


def test_which_loss_is_taken():
    one, two = torch.ones(()), torch.full((3,), 2.0)
    assert loss_of(two, torch.sum) == 6
    assert loss_of({"loss": one, "logits": two}) == 1
    assert loss_of(types.SimpleNamespace(loss=one, logits=two)) == 1
    assert loss_of(one) == 1
    assert loss_of((two, torch.arange(3), [two])) == 12
    with pytest.raises(LowtideError, match="pass `loss=`"):
        loss_of(torch.arange(3))


def test_tensors_are_found_in_order():
    a, b, c = (torch.full((1,), float(i)) for i in range(3))
    assert [t.item() for t in tensors_in({"x": [a, (b,)], "y": None, "z": {"w": c}})] == [0, 1, 2]


def test_the_profiler_prints_nothing():
    # In a process of its own: the profiler's library reads its settings once.
    code = (
        "import torch; from lowtide.verification.measure_step import peak_above_start; "
        "peak_above_start(lambda: torch.ones(3))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""


# clock


def test_timing_summary():
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median_seconds == 3.0
    assert timing.spread_seconds == 2.0
    assert Timing((1.0,)).spread_seconds == 0.0


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.floats(1e-4, 10)), min_size=1, max_size=9))
def test_added_time_agrees_with_the_medians_beside_it(pairs):
    planned, plain = (Timing(runs) for runs in zip(*pairs, strict=True))
    added = planned.added_to(plain)
    assert plain.median_seconds * (1 + added) == pytest.approx(planned.median_seconds)


def test_noise_is_of_runs_that_followed_each_other():
    slow_moment = Timing((1.1, 11.0, 1.1)), Timing((1.0, 10.0, 1.0))
    assert slow_moment[0].added_to(slow_moment[1]) == pytest.approx(0.1)
    assert slow_moment[0].noise_beside(slow_moment[1]) == pytest.approx(0)
    # pairs say +0.6 %, medians +9.5 %: nobody can tell
    torn = Timing((0.127, 0.1167, 0.1308)), Timing((0.130, 0.116, 0.116))
    assert torn[0].noise_beside(torn[1]) > torn[0].added_to(torn[1])
    assert Timing((1.0,)).noise_beside(Timing((1.0,))) is None


def test_steps_are_timed_in_turn():
    ran = []
    steps = {name: lambda name=name: ran.append(name) for name in "ab"}
    timings = time_steps(steps, device=torch.device("cpu"), warm_up=1, runs=2)
    assert "".join(ran) == "ababab"
    assert [len(timing.runs) for timing in timings.values()] == [2, 2]


class FakeClock:
    """Each step takes the seconds that it returns, and nothing else takes any."""

    def __init__(self):
        self.now = 0.0

    def timed(self, step):
        seconds = step()
        self.now += seconds
        return None, SimpleNamespace(seconds=seconds)

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = FakeClock()
    monkeypatch.setattr(measuring, "device_for", lambda device: found)
    monkeypatch.setattr(measuring, "time", found)
    return found


def timed_in_turn(planned, **settings):
    """Pairs that were timed, and their noise, of an eager step of one second beside a planned one."""
    steps = {"eager": lambda: 1.0, "planned": planned}
    eager, timing = time_steps(steps, device=torch.device("cpu"), warm_up=0, **settings).values()
    return len(timing.runs), timing.noise_beside(eager)


@pytest.mark.parametrize("seconds", [1.05, 0.9])
def test_a_quiet_machine_needs_few_runs(clock, seconds):
    assert timed_in_turn(lambda: seconds, runs=None) == (USUAL_PAIRS, pytest.approx(0))


def test_noise_asks_for_more_runs_until_it_is_small(clock):
    seconds = cycle([1.0, 1.2, 1.1, 1.05, 1.15, 1.1])
    pairs, noise = timed_in_turn(lambda: next(seconds), runs=None, most_seconds=1000.0)
    assert USUAL_PAIRS < pairs < 100 and noise <= QUIET


def test_noise_that_stays_ends_with_the_time_for_it(clock):
    seconds = cycle([1.0, 3.0])
    pairs, noise = timed_in_turn(lambda: next(seconds), runs=None)
    assert noise > QUIET and clock.now == pytest.approx(MOST_SECONDS, abs=4.0) and pairs == 10
    assert timed_in_turn(lambda: 60.0, runs=None)[0] == LEAST_PAIRS, "and three pairs at least"


def test_a_number_of_runs_is_that_number(clock):
    seconds = cycle([1.0, 3.0])
    assert timed_in_turn(lambda: next(seconds), runs=2)[0] == 2
    assert timed_in_turn(lambda: 1.0, runs=40)[0] == 40


# fresh processes


@pytest.mark.long
@pytest.mark.skipif(not can_measure_resident(), reason="the resident high-water mark is Linux only")
def test_both_methods_agree_in_a_fresh_process():
    spec = TargetSpec(text="tiny-transformer", batch_size=32, sequence_length=128)
    measured = measure_step(spec, with_optimizer=False)
    assert measured.fresh_process and not measured.with_optimizer
    above = measured.peak_bytes - measured.static_bytes
    assert above > 30 * MIB
    assert measured.resident_peak_bytes - measured.static_bytes == pytest.approx(above, rel=0.02)


@pytest.mark.long
def test_torchs_own_count_alone():
    target = small_target()
    measured = measure_step(target, resident=False)
    assert measured.fresh_process and measured.resident_peak_bytes is None
    assert measured.peak_bytes == measure_here(target).peak_bytes


@pytest.mark.long
def test_live_objects_a_hook_and_the_clock():
    target = small_target()
    before = [parameter.detach().clone() for parameter in target.model.parameters()]
    whole = measure_here(target)
    measured = measure_step(target, prepare="fresh_cases:take_first", payload={"count": 128}, timed_runs=3)
    assert measured.static_bytes == whole.static_bytes - target.batch.nbytes // 2
    assert measured.peak_bytes < whole.peak_bytes
    assert len(measured.timing.runs) == 3 and min(measured.timing.runs) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))


def test_measuring_here_leaves_the_target_alone():
    target = small_target()
    state, random = {k: v.clone() for k, v in target.model.state_dict().items()}, torch.get_rng_state()
    measured = measure_here(target)
    assert not measured.fresh_process and measured.resident_peak_bytes is None
    assert all(torch.equal(state[name], value) for name, value in target.model.state_dict().items())
    assert target.optimizer.state == {}
    assert torch.equal(random, torch.get_rng_state())
    without = measure_here(target, with_optimizer=False)
    assert without.static_bytes < measured.static_bytes
    half = measure_here(target, prepare=lambda double: take_first(double, count=128))
    assert half.static_bytes == measured.static_bytes - target.batch.nbytes // 2


@pytest.mark.long
def test_measuring_here_counts_like_a_fresh_process():
    target = load_target("tiny-transformer", batch_size=4)
    spec = TargetSpec(text="tiny-transformer", batch_size=4)
    assert measure_here(target).peak_bytes == measure_step(spec).peak_bytes


def test_an_exception_in_the_child_comes_back():
    with pytest.raises(FreshProcessError) as caught:
        run_fresh("fresh_cases:raise_here", text="went wrong")
    assert str(caught.value) == "went wrong"
    assert caught.value.kind == "ValueError"
    assert "in raise_here" in caught.value.details


def test_target_errors_keep_their_message():
    with pytest.raises(FreshProcessError, match=r"no such file: missing\.py"):
        measure_step(TargetSpec(text="missing.py:make", batch_size=1))


def test_a_class_that_cannot_be_pickled():
    class Local(nn.Linear):
        pass

    with pytest.raises(CannotMoveToFreshProcess, match="cannot send the model"):
        measure_step(Target("local", Local(2, 2), torch.ones(1, 2)))


def test_a_class_that_is_not_importable_there(monkeypatch):
    module = types.ModuleType("only_here")
    module.Here = type("Here", (nn.Linear,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(
        CannotMoveToFreshProcess, match=r"cannot load the model in a fresh process.*only_here"
    ):
        measure_step(Target("here", module.Here(2, 2), torch.ones(1, 2)))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [("os:abort", {}, "signal SIGABRT"), ("os:_exit", {"status": 3}, "status 3 and without an answer")],
)
def test_a_child_that_dies(function, arguments, message):
    with pytest.raises(FreshProcessError, match=message):
        run_fresh(function, **arguments)


def test_an_interrupt_ends_the_child(monkeypatch):
    children = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            children.append(self)
            self.first = True

        def wait(self, timeout=None):
            if self.first:
                self.first = False
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_fresh("time:sleep", secs=60)
    assert children[0].returncode == -9


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the process in /proc")
def test_the_child_ends_with_a_parent_that_is_killed(tmp_path):
    call = f"run_fresh('fresh_cases:sleep_in', folder={str(tmp_path)!r})"
    script = f"from lowtide.verification.fresh_process import run_fresh; {call}"
    environ = os.environ | {"PYTHONPATH": str(HELPERS), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environ)
    pid = wait_for(lambda: (tmp_path / "pid").exists() and int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(pid))
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


def test_page_faults_are_counted_beside_the_time():
    def fresh():
        with mmap.mmap(-1, 1 << 20) as area:
            area.write(bytes(1 << 20))

    timings = time_steps({"fresh": fresh}, device=torch.device("cpu"), warm_up=0, runs=2)
    assert len(timings["fresh"].page_faults) == 2
    assert timings["fresh"].median_page_faults > 0
    assert Timing((1.0,)).median_page_faults == Timing((1.0,)).fault_share == 0


def test_page_faults_are_told_where_they_take_time():
    plain, planned = Timing((2.0, 2.0), (400_000,) * 2, 1e-6), Timing((2.0, 2.0), (1000, 3000), 1e-6)
    assert "400,000 page faults in a step without the plan and 2,000 with it" in fault_note(plain, planned)
    assert "about 20% and 0% of the time" in fault_note(plain, planned)
    assert fault_note(planned, planned) == fault_note(None, None) == fault_note(Timing((1.0,)), planned) == ""
