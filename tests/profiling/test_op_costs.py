"""Single ops: each signature once, workspace to the byte, never past the memory limit."""

import logging
import operator
from types import SimpleNamespace

import pytest
import torch
from fake_calls import conv, conv_backward, fake

from lowtide.ops.calls import Call, OpCost, signature, storages_bytes
from lowtide.profiling import op_costs, op_trials
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import OpTiming, device_for
from lowtide.profiling.op_costs import ShortTimeLimit, measure_calls, short_time_limit
from lowtide.profiling.samples import make_sample
from lowtide.profiling.work import work_of
from lowtide.verification.measure_step import peak_above_start, tensors_in

aten = torch.ops.aten
empty = torch.empty
CPU = device_for(torch.device("cpu"))
MIB = 1 << 20


def profile_calls(calls, **options):
    return measure_calls(calls, **options).costs


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(op_costs, "ROUNDS", 1)


@pytest.fixture
def made_up_clock(monkeypatch):
    """Every run takes a microsecond per byte of its inputs; gives the (target, seconds) of all runs.

    `special` may have another clock for a target, by how often that ran before.
    """
    runs, special = [], {}

    def timed(call, device):
        seconds = sum(tensor.nbytes for tensor in call.tensors) * 1e-6
        number = sum(target is call.target for target, _ in runs)
        timing = special.get(call.target, lambda number: OpTiming(seconds))(number)
        runs.append((call.target, timing.seconds))
        return timing

    monkeypatch.setattr(op_trials, "timed", timed)
    return SimpleNamespace(runs=runs, special=special)


def test_costs_come_in_order_and_each_signature_is_run_once(monkeypatch, made_up_clock):
    prepared = []
    prepare = op_trials._start
    monkeypatch.setattr(op_trials, "_start", lambda call, **o: prepared.append(call) or prepare(call, **o))
    large, small = Call(aten.mm.default, (fake(300, 300),) * 2), Call(aten.mm.default, (fake(2, 2),) * 2)
    item = Call(operator.getitem, ([fake(2)], 0))
    costs = profile_calls([large, small, large, item, small])
    assert len(prepared) == 2
    assert costs[0] == costs[2]
    assert costs[1] == costs[4]
    assert costs[0].seconds == pytest.approx(2 * 300 * 300 * 4e-6)
    assert costs[1].seconds == pytest.approx(2 * 2 * 2 * 4e-6)
    assert costs[3] == OpCost(0.0, 0, False)
    assert not any(cost.estimated for cost in costs)


def test_progress_ends_at_the_total():
    seen = []
    call = Call(aten.mm.default, (fake(2, 2),) * 2)
    profile_calls([call], progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (2, 2)


def test_random_state_and_grad_mode_are_left_alone():
    before = torch.get_rng_state()
    profile_calls([Call(aten.native_dropout.default, (fake(100), 0.5, True))])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()


NO_WORKSPACE = {
    "mm": Call(aten.mm.default, (fake(64, 64), fake(64, 64))),
    "softmax": Call(aten._softmax.default, (fake(64, 64), -1, False)),
    "embedding_backward": Call(
        aten.embedding_dense_backward.default, (fake(8, 16), fake(8, dtype=torch.long), 100, -1, False)
    ),
    "foreach_sqrt": Call(aten._foreach_sqrt.default, ([fake(64), fake(32)],)),
    "fused_adam": Call(
        aten._fused_adam_.default,
        ([fake(64)], [fake(64)], [fake(64)], [fake(64)], [], [fake()]),
        {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        | {"amsgrad": False, "maximize": False},
    ),
    "view": Call(aten.t.default, (fake(64, 64),)),
}


@pytest.mark.parametrize("name", NO_WORKSPACE)
def test_ops_that_hold_nothing_inside(name):
    (cost,) = profile_calls([NO_WORKSPACE[name]])
    assert cost.workspace_bytes == 0
    assert cost.hidden_bytes == ()


def holds_inside(left):
    """Holds three temporaries of its input's size, two of them at once."""
    block = left + 1
    block = block * 2
    return block.sum() + 0 * left.new_empty(left.shape).numel()


def test_workspace_of_a_function_is_what_it_holds_beyond_its_result():
    (cost,) = profile_calls([Call(holds_inside, (fake(1000),))])
    # The sum and one temporary are alive with the new empty block, then the block goes.
    assert cost.workspace_bytes == pytest.approx(2 * 4000, abs=64)


def test_workspace_of_the_layer_norm_backward_is_one_row_per_thread():
    row, shape = 64, (8, 16, 64)
    given = (fake(*shape), fake(*shape), [row], fake(8, 16, 1), fake(8, 16, 1), fake(row), fake(row))
    (cost,) = profile_calls([Call(aten.native_layer_norm_backward.default, (*given, [True, True, True]))])
    assert cost.workspace_bytes == 2 * row * 4 * torch.get_num_threads()


@pytest.mark.parametrize("call", [conv(2), conv_backward(2)], ids=["forward", "backward"])
def test_the_workspace_of_a_convolution_is_what_a_real_run_holds_beyond_its_results(call):
    (cost,) = profile_calls([call])
    args, kwargs = make_sample(call)
    call.target(*args, **kwargs)
    results = []
    peak = peak_above_start(lambda: results.append(call.target(*args, **kwargs)))
    assert cost.workspace_bytes == peak - storages_bytes(tensors_in(results)) >= 0


def profiled_under_watch(call, limit, monkeypatch):
    """The cost of a call and the most bytes that profiling it held.

    Profiler sessions do not nest: what the inner ones measured in a first pass is played back.
    """
    measure, seen = type(CPU).measured, []

    def record(self, run):
        result, peak = measure(self, run)
        seen.append(peak)
        return result, peak

    monkeypatch.setattr(type(CPU), "measured", record)
    profile_calls([call], memory_limit_bytes=limit)
    monkeypatch.setattr(type(CPU), "measured", lambda self, run: (run(), seen.pop(0)))
    monkeypatch.setattr(op_costs, "outside_profiler", lambda run: run())
    (cost,), peak = measure(CPU, lambda: profile_calls([call], memory_limit_bytes=limit))
    return cost, peak


@pytest.mark.parametrize(
    "call",
    [
        conv(64),
        conv_backward(64),
        Call(aten.mm.default, (fake(8192, 128), fake(128, 256))),
        Call(aten.add.Tensor, (fake(64, 128, 256), fake(64, 128, 256))),
        Call(aten._foreach_add.Scalar, ([fake(1000, 100) for _ in range(20)], 1)),
        Call(aten.embedding.default, (fake(30000, 64), fake(16, 512, dtype=torch.long))),
        Call(aten.native_layer_norm.default, (fake(64, 128, 256), [256], fake(256), fake(256), 1e-5)),
        Call(aten.full.default, ([64, 128, 256], 0)),
    ],
    ids=lambda call: str(call.target),
)
def test_memory_limit_is_kept_and_times_are_marked(call, monkeypatch):
    limit = 4 * MIB
    assert work_of(call).nbytes > limit
    cost, peak = profiled_under_watch(call, limit, monkeypatch)
    assert cost.estimated
    assert cost.seconds > 0
    assert limit / 16 < peak <= limit


def test_workspace_of_a_slice_is_scaled_to_that_of_the_whole():
    (whole,) = profile_calls([conv_backward(64)])
    (scaled,) = profile_calls([conv_backward(64)], memory_limit_bytes=6 * MIB)
    assert not whole.estimated
    assert scaled.estimated
    assert scaled.workspace_bytes == pytest.approx(whole.workspace_bytes, rel=0.02)


def mse_loss(rows):
    return Call(aten.mse_loss.default, (fake(rows, 1024), fake(rows, 1024)))


@pytest.mark.parametrize("limit", [1 << 30, 4 * MIB])
def test_what_a_scalar_result_keeps_is_seen_whole_and_from_a_slice(limit):
    (cost,) = profile_calls([mse_loss(1024)], memory_limit_bytes=limit)
    assert cost.estimated is (limit < 1 << 30)
    assert cost.hidden_bytes == (pytest.approx(4 * MIB - 4, abs=8),)


def test_a_view_of_any_size_costs_its_dispatch(made_up_clock):
    (cost,) = profile_calls([Call(aten.t.default, (fake(1 << 20, 1 << 20),))])
    assert cost.estimated
    assert [target for target, _ in made_up_clock.runs] == [aten.detach.default]
    assert cost.seconds == pytest.approx(4e-6)  # of the one number that stands for it


def test_what_a_first_run_leaves_behind_is_not_inside_the_op(monkeypatch):
    kept = []

    def op(tensor):
        if not kept:
            kept.append(torch.empty(1 << 20))
        return tensor + 1

    monkeypatch.setattr(type(CPU), "keeps_after_first_run", True)
    (cost,) = profile_calls([Call(op, (fake(100, 100),))])
    assert kept and cost.workspace_bytes < 1 << 20


def test_inside_torch_profiler_ops_are_measured_and_leave_no_trace():
    calls = [Call(holds_inside, (fake(1000),)), Call(aten.mm.default, (fake(64, 64),) * 2)]
    plain = profile_calls(calls)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3).cos()
        inside = profile_calls(calls)
    assert [cost.workspace_bytes for cost in inside] == [cost.workspace_bytes for cost in plain]
    assert not any(cost.estimated for cost in inside)
    names = {event.key for event in profiler.key_averages()}
    assert "aten::cos" in names and "aten::mm" not in names


def refuses(tensor):
    raise RuntimeError("not on random data")


def test_what_cannot_run_is_costed_by_bytes_and_said_so(caplog, tmp_path):
    call = Call(refuses, (fake(1000, 1000),))
    cache = CostCache(CPU, directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        (cost,) = profile_calls([call], cache=cache)
    assert "not on random data" in caplog.text
    assert cost.estimated
    assert cost.seconds == pytest.approx(4e6 / 2 / CPU.copy_bytes_per_second())
    assert cache.get(signature(call), memory_limit_bytes=1) is None


def fails_in_slices(tensor):
    if type(tensor) is torch.Tensor and tensor.shape[0] < 1 << 12:
        raise RuntimeError("not this size")
    return tensor * 2 + tensor * 3


def test_an_op_whose_slices_fail_is_run_whole(caplog):
    (cost,) = profile_calls([Call(fails_in_slices, (fake(1 << 12, 1 << 10),))], memory_limit_bytes=1 << 27)
    assert not cost.estimated and cost.workspace_bytes >= 1 << 24 and "costed" not in caplog.text


def fails_when_large(tensor):
    """Holds twice its input inside, and fails for more than half of it."""
    if type(tensor) is torch.Tensor and tensor.shape[0] > 600:
        raise RuntimeError("could not create a primitive")
    return (tensor * 2 + tensor * 3).sum(0)


def test_an_op_that_fails_alone_is_told_from_a_slice_that_does_not(caplog):
    small, large = (Call(fails_when_large, (fake(size, 100),)) for size in (500, 1000))
    with caplog.at_level(logging.WARNING):
        costs = profile_calls([large, small])
    assert "costed by a chunk, since the op fails alone" in caplog.text
    assert costs[0].estimated and not costs[1].estimated
    assert costs[1].workspace_bytes > 0
    assert costs[0].workspace_bytes == pytest.approx(2 * costs[1].workspace_bytes, rel=0.01)


def refuses_all_but_small(tensor):
    if type(tensor) is torch.Tensor and tensor.shape[0] > 10:
        raise RuntimeError("could not create a primitive")
    return (tensor * 2 + tensor * 3).sum(0)


def test_an_op_that_never_runs_holds_inside_what_its_like_does(caplog):
    small, large = (Call(refuses_all_but_small, (fake(size, 100),)) for size in (10, 1000))
    with caplog.at_level(logging.WARNING):
        costs = profile_calls([large, small])
    assert "with the workspace of the same op at other sizes" in caplog.text
    assert costs[0].workspace_bytes == pytest.approx(100 * costs[1].workspace_bytes, rel=0.1)


def test_cached_costs_are_not_measured_again(tmp_path, monkeypatch, made_up_clock):
    call = Call(aten.mm.default, (fake(20, 20),) * 2)
    first = profile_calls([call], cache=CostCache(CPU, directory=tmp_path))
    monkeypatch.setattr(op_trials, "_start", lambda *args, **options: pytest.fail("measured again"))
    assert profile_calls([call], cache=CostCache(CPU, directory=tmp_path)) == first


def test_a_short_time_limit_measures_nothing_twice_and_remembers_little(tmp_path, monkeypatch, made_up_clock):
    call, cache, measured = Call(aten.mm.default, (fake(20, 20),) * 2), CostCache(CPU, directory=tmp_path), {}
    monkeypatch.setattr(op_costs, "_SHORT_TIME_LIMIT_SECONDS", 0.0)
    with short_time_limit(ShortTimeLimit(measured=measured)):
        first = profile_calls([call], cache=cache)
        assert measured == {signature(call): first[0]}
        monkeypatch.setattr(op_trials, "_start", lambda *args, **options: pytest.fail("measured again"))
        assert profile_calls([call], cache=cache) == first
    assert cache.get(signature(call), memory_limit_bytes=1) is None, "one run is too few"


MM, RELU = Call(aten.mm.default, (fake(20, 20),) * 2), Call(aten.relu.default, (fake(20, 20),))


@pytest.mark.busy
@pytest.mark.parametrize(
    ("clock", "num_noisy"),
    [
        pytest.param(lambda number: OpTiming(1e-3), 0, id="steady"),
        pytest.param(lambda number: OpTiming(1e-3 * (1 + number % 2)), 0, id="a little unsteady"),
        pytest.param(lambda number: OpTiming(1e-3 * (1 + 9 * (number % 2))), 1, id="rounds far apart"),
        pytest.param(
            lambda number: OpTiming(1e-3 * (1 + 9 * (number % 2)), 0, 0.0, 2e-2), 0, id="mostly page faults"
        ),
        pytest.param(lambda number: OpTiming(1e-3, 2), 1, id="always interrupted"),
        pytest.param(lambda number: OpTiming(1e-3, number % 2), 0, id="at times interrupted"),
        pytest.param(lambda number: OpTiming(0.5, 9), 0, id="too slow for one piece"),
        pytest.param(lambda number: OpTiming(0.5, 9, 0.4), 1, id="slow because of others"),
        pytest.param(lambda number: OpTiming(1e-6 * (1 + 9 * (number % 2))), 0, id="shorter than jitter"),
    ],
)
def test_times_of_a_busy_machine_are_told_and_not_remembered(
    clock, num_noisy, made_up_clock, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(op_costs, "ROUNDS", 8)
    monkeypatch.setattr(op_trials, "rest_after", lambda timing: None)
    made_up_clock.special[aten.mm.default] = clock
    cache = CostCache(CPU, directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        found = measure_calls([MM, RELU, MM], cache=cache)
    assert (found.num_noisy, found.num_measured) == (num_noisy, 2)
    again = CostCache(CPU, directory=tmp_path)
    assert (again.get(signature(MM), memory_limit_bytes=1) is None) is bool(num_noisy)
    assert again.get(signature(RELU), memory_limit_bytes=1) == found.costs[1]
    assert [record.message for record in caplog.records] == list(found.notes)
    assert [note.split(":")[0].split("time ")[1] for note in found.notes] == ["1 of 2 ops"] * num_noisy


@pytest.mark.parametrize(("rows", "is_whole"), [(4096, True), (1 << 16, False)])
def test_what_never_fits_is_measured_on_small_slices_and_each_once(rows, is_whole, monkeypatch):
    sizes, memory = [], op_trials.memory_of
    monkeypatch.setattr(op_trials, "_CHUNK_BYTES", MIB)
    monkeypatch.setattr(
        op_trials,
        "memory_of",
        lambda call, work, device: sizes.append(work.nbytes) or memory(call, work, device),
    )
    call = Call(aten.relu.default, (fake(rows, 128),))
    profile_calls([call], memory_limit_bytes=8 * MIB)
    assert (sizes[-1] == work_of(call).nbytes) is is_whole
    assert is_whole or max(sizes) <= MIB
    assert len(set(sizes)) == len(sizes)
