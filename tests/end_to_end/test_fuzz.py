"""Whatever somebody feeds it: a correct result or an error of one line, and nothing half-written.

`-m long` runs all 2,000 inputs; the normal run takes every twenty-fifth of each kind.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import fuzz
import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli import app
from lowtide.errors import LowtideError
from lowtide.facts.sizes import parse_budget, parse_size
from lowtide.ops.calls import OpCost
from lowtide.planning.simulate import simulate
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import device_for
from lowtide.zoo.targets import load_target

pytestmark = pytest.mark.slow

INPUTS = {
    **{"sizes": 300, "profiles": 500, "plans": 300, "graphs": 200, "costs": 100},
    **{"targets": 200, "commands": 400},
}
SAMPLE = 25
WIDTH = 8
GRAPH = (
    '{"name": "small", "nodes": [{"id": 0, "bytes": 4, "cost": 1}, {"id": 1, "bytes": 2, "cost": 2}, '
    '{"id": 2, "bytes": 8, "cost": 1}, {"id": 3, "bytes": 1, "cost": 3}], '
    '"edges": [[0, 1], [1, 2], [0, 3], [2, 3]]}'
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))


def batch() -> torch.Tensor:
    return torch.ones(64, WIDTH)


class Bench:
    """A folder with a whole profile, plan and graph, and what each kind of input is put to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = lowtide.profile(model(), batch())
        found.save(folder / "profile.json")
        found.plan((found.peak_bytes + found.floor_bytes) // 2).save(folder / "plan.json")
        (folder / "graph.json").write_text(GRAPH)
        self.files = [folder / name for name in ("profile.json", "plan.json", "graph.json")]
        cache = CostCache(device_for(torch.device("cpu")), directory=folder)
        cache.put("mm", OpCost(0.25, 64, False, (0, 96)), memory_limit_bytes=1 << 30)
        cache.put_orders("mm", [[1, 0], None])
        cache.save()
        self.costs_path, self.costs_file = cache.path, cache.path.read_bytes()
        self.texts = {file.stem: file.read_text() for file in self.files}

    def sizes(self, random: Random) -> None:
        text = fuzz.size(random)
        for read in (parse_size, lambda t: parse_budget(t, whole=1000)):
            try:
                assert read(text) > 0
            except LowtideError as error:
                check_line(str(error))

    def profiles(self, random: Random) -> None:
        path = self._damaged(random, "profile")
        try:
            found = lowtide.load_profile(path)
            plan = found.plan(random.choice(["70%", "100%", 10**6]))
        except LowtideError as error:
            return check_line(str(error))
        peak_bytes = simulate(found.step, plan.solution.schedule.runs).peak_bytes
        assert plan.solution.eager or peak_bytes == plan.peak_bytes <= plan.budget_bytes
        return None

    def plans(self, random: Random) -> None:
        path = self._damaged(random, "plan")
        trained = model()
        try:
            plan = lowtide.load_plan(path)
            repr(plan), plan.overhead, plan.to_csv(self.folder / "csv")
            plan.apply(trained)
            torch.manual_seed(1)
            trained(batch()).sum().backward()
        except LowtideError as error:
            return check_line(str(error))
        finally:
            lowtide.remove(trained)
        eager = model()
        torch.manual_seed(1)
        eager(batch()).sum().backward()
        for one, other in zip(eager.parameters(), trained.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        return None

    def graphs(self, random: Random) -> None:
        output = self.folder / "order.json"
        output.unlink(missing_ok=True)
        path = self._damaged(random, "graph")
        code = run(["solve", str(path), "--budget", random.choice(["80%", "100", "8"]), "-o", str(output)])
        assert output.exists() is (code == 0)

    def costs(self, random: Random) -> None:
        """A damaged cache is none, or one with sensible costs; and is whole again after the next save."""
        self.costs_path.write_bytes(fuzz.damaged_bytes(random, self.costs_file))
        cpu = device_for(torch.device("cpu"))
        cache = CostCache(cpu, directory=self.folder)
        for signature in ("mm", "add"):
            cost = cache.get(signature, memory_limit_bytes=1)
            assert cost is None or 0 <= cost.seconds < 1e300
        cache.put("add", OpCost(0.5, 0, False), memory_limit_bytes=1)
        cache.save()
        assert CostCache(cpu, directory=self.folder).get("add", memory_limit_bytes=1) is not None

    def targets(self, random: Random) -> None:
        try:
            load_target(fuzz.target(random, self.folder), batch_size=2)
        except LowtideError as error:
            check_line(str(error))

    def commands(self, random: Random) -> None:
        run(fuzz.command_line(random, self.folder, self.files))

    def _damaged(self, random: Random, name: str) -> Path:
        path = self.folder / f"damaged-{name}.json"
        path.write_bytes(fuzz.damaged(random, self.texts[name]))
        return path


def run(words: list[str]) -> int:
    """The command line in this process: its exit code, after its output was looked at."""
    sys.argv = ["lowtide", *words]
    with pytest.raises(SystemExit) as caught:
        app.main()
    code = caught.value.code or 0
    assert code in {0, 1, 2, 3, 4}, code
    return code


def check_line(text: str) -> None:
    assert text and "\n" not in text


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("fuzz"))


def check(kind: str, numbers: range, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path.cwd().iterdir())
    try_input: Callable[[Random], None] = getattr(bench, kind)
    failed = {}
    for number in numbers:
        sys.argv = []
        try:
            with fuzz.no_hang():
                try_input(Random(f"{kind}-{number}"))
            printed = capsys.readouterr().err
            assert "Traceback" not in printed or "-v" in sys.argv or "--verbose" in sys.argv, printed
            assert "should not happen" not in printed, printed
        except BaseException as error:
            failed[f"{kind}-{number}"] = f"{type(error).__name__}: {error}"[-300:]
    assert not failed
    assert sorted(Path.cwd().iterdir()) == before, "nothing is written where nobody asked for it"
    assert {file.stem: file.read_text() for file in bench.files} == bench.texts


@pytest.mark.parametrize("kind", INPUTS)
def test_a_sample(
    kind: str,
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    check(kind, range(0, INPUTS[kind], SAMPLE), bench, capsys)


@pytest.mark.long
@pytest.mark.parametrize("kind", INPUTS)
def test_all(
    kind: str,
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    check(kind, range(INPUTS[kind]), bench, capsys)
