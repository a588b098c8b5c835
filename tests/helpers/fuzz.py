"""Generated inputs: sizes, files, targets and command lines, each from a number.

The same number always gives the same input, so that a failure is found again by its name, `plans-17`.
"""

import copy
import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

SECONDS = 60
"""The time limit of one case."""

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.5, 1e308, -1e308),
    *(math.inf, -math.inf, math.nan, "", "x", "0", "../..", "/dev/null", "é\u0000\ud7ff", "a" * 5000),
    *([], [[]], {}, [None], [0, 0], {"": 0}, {"columns": [], "rows": []}, ["x", "y"], [[0, "again"]]),
)
TEXTS = (
    *("", " ", "0", "-1", "1", "8GiB", "60%", "0%", "100%", "101%", "-5%", "1e9", "1e999", "nan", "inf"),
    *("9" * 5000, "9" * 400 + ".5", "9" * 400 + "%", "٣GiB", "8 GiB ", "8gib", "8 Gi B", "0x10", "1_000"),
    *("½", "8GiB\n", "\x00", "..", "/", "~", "*", "[red]", "%s", "{0}", "$(touch here)", "; ls", "--", "-"),
    *("a" * 3000, "é" * 300, "\ud7ff", "None", "True", "1,2,3", ",", ":", "::", "=", "none", "auto", "adam"),
)


@contextmanager
def no_hang(seconds: int = SECONDS) -> Iterator[None]:
    """Fail what takes longer."""

    def late(*_: Any) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def size(random: Random) -> Any:
    """A size or budget as text, or an invalid value."""
    if random.random() < 0.2:
        return random.choice(JUNK)
    if random.random() < 0.3:
        return random.choice(TEXTS)
    number = random.choice(["8", "0", "1.5", ".5", "5.", "1.2.3", "-3", "+4", "1e3", "00012", "9" * 30, ""])
    unit = random.choice(["", "B", "GiB", "gb", "MB", "%", "XB", "Gi", "bytes", "%%", "B%", " TiB"])
    return random.choice(["", " ", "\t"]) + number + random.choice(["", " ", "\n"]) + unit


def damaged(random: Random, content: str) -> bytes:
    """A file of JSON after an accident: a value replaced, bytes lost, changed or added."""
    if random.random() < 0.7:
        data = json.loads(content)
        for _ in range(random.choice([1, 1, 1, 2, 5])):
            _replace_something(random, data)
        return json.dumps(data).encode()
    return damaged_bytes(random, content.encode())


def damaged_bytes(random: Random, content: bytes) -> bytes:
    """Any file after an accident."""
    raw = bytearray(content)
    accident = random.choice(["cut", "flip", "insert", "double", "nest", "empty", "head"])
    at = random.randrange(len(raw))
    if accident == "cut":
        del raw[at:]
    elif accident == "flip":
        for _ in range(random.choice([1, 3, 50])):
            raw[random.randrange(len(raw))] = random.randrange(256)
    elif accident == "insert":
        raw[at:at] = random.randbytes(random.choice([1, 100]))
    elif accident == "double":
        raw *= 2
    elif accident == "nest":
        raw = bytearray(b'{"format":' + b"[" * 100_000)
    elif accident == "empty":
        raw.clear()
    else:
        del raw[:at]
    return bytes(raw)


def _replace_something(random: Random, data: Any) -> None:
    places = list(_places(data))
    holder, key = random.choice(places)
    accident = random.random()
    if accident < 0.6:
        holder[key] = copy.deepcopy(random.choice(JUNK))
    elif accident < 0.75:
        del holder[key]
    elif accident < 0.9:
        other, name = random.choice(places)
        if key in holder or isinstance(holder, list):
            holder[key] = copy.deepcopy(other[name])
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}x"] = holder.pop(key)


def _places(data: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Where a value stands; whole tables come up as often as what is in them."""
    keys = list(data) if isinstance(data, dict) else range(len(data))
    for key in keys:
        if depth < 6:
            yield from [(data, key)] * (8 if depth < 2 else 1)
        if isinstance(data[key], dict | list):
            yield from _places(data[key], depth + 1)


FACTORIES = (
    "def make(batch_size): raise SystemExit(3)",
    "def make(batch_size): raise KeyError",
    "def make(batch_size): raise ValueError('two\\nlines [red]')",
    "def make(batch_size): return None",
    "def make(batch_size): return 1, 2",
    "def make(batch_size): return ()",
    "def make(): pass",
    "make = 5",
    "make = None",
    "def make(batch_size, /, other): pass",
    "import torch\ndef make(n): return torch.nn.Linear(2, 2), 'text'",
    "import torch\ndef make(n): return torch.nn.Linear(2, 2), torch.ones(n, 2), 'adam'",
    "import torch\ndef make(n): return torch.nn.Linear(2, 2), torch.ones(n, 2), None, 3",
    "import torch\ndef make(n): return torch.nn.Linear, torch.ones(n, 2)",
    "class make:\n    def __init__(self, n): raise RuntimeError('no')",
    "def make(n):\n  return (",
    "import nothing_like_this",
    "raise SystemExit('bye')",
    "1/0",
    "\x00",
    "",
    "# coding: nothing",
    "def make(n): return make(n)",
    "async def make(n): return 1",
    "def make(n): yield 1",
)


def target(random: Random, folder: Path) -> str:
    """A TARGET that names nothing that can be trained."""
    if random.random() < 0.5:
        path = folder / f"target_{random.randrange(10**9)}.py"
        path.write_bytes(random.choice(FACTORIES).encode())
        return f"{path}:{random.choice(['make', 'make', 'make', 'other', '', 'make.__call__', '__doc__'])}"
    where = random.choice(
        ["", "json", "os.path", "lowtide", "no.such", "..", str(folder), "a/b.py", "x.py", "."]
    )
    text = random.choice(["", "load", "f", "gpt", "tiny-gpt3", "TINY-GPT2", *TEXTS])
    return random.choice([f"{where}:{text}", text, where, f"{where}:{text}:{text}", f"{folder}/{text}.py:f"])


COMMANDS = (
    *("run", "profile", "plan", "verify", "fit", "tradeoff", "sweep", "compare", "solve", "models", "doctor"),
    *("explain", "", "RUN", "--version", "-h", "nothing"),
)
OPTIONS = (
    *("--batch-size", "-b", "--budget", "--planner", "--image-size", "--sequence-length", "--optimizer"),
    *(
        "--seed",
        "--memory-limit",
        "--no-cache",
        "--step-in-backward",
        "--timed-runs",
        "-o",
        "--force",
        "--json",
    ),
    *("-q", "-v", "--batch-sizes", "--points", "--mode", "--ranks", "--shard", "--nothing", "-x", "--help"),
)


def command_line(random: Random, folder: Path, files: list[Path]) -> list[str]:
    """Words that `lowtide` may get; none of them is a target that can be trained."""
    words = [random.choice(COMMANDS)]
    if random.random() < 0.8:
        words.append(random.choice([str(random.choice(files)), target(random, folder), random.choice(TEXTS)]))
    for _ in range(random.randrange(6)):
        words.append(random.choice(OPTIONS))
        if random.random() < 0.8:
            words.append(random.choice([*TEXTS, "4", "2", "60%", "8MB", str(folder / "out")]))
    return [word.replace("\x00", "") for word in words]
