"""A small grammar of training loops: what users do around a planned model, drawn by number, printed as code.

A `LoopCase` has one choice for each part of a loop. `outcome_of` trains it with and without a plan, and says
what is wrong: results that differ, a budget that is exceeded without a word, an error that is not lowtide's.
`shortest` replaces choices by plain ones as long as the loop stays wrong.
"""

import copy
import logging
import random
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes

ROWS, WIDTH, CLASSES = 128, 48, 64
SCALARS_BYTES = 4096

MODELS = {
    "plain": "return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))",
    "reuse": "return self.head(torch.tanh(self.a(torch.tanh(self.a(x)))))",
    "tied": "w = self.head.weight; return F.linear(torch.tanh(self.a(x @ w.T @ w)), w)",
    "skip": "h = self.a(x); return self.head(self.block(h) + h.tanh())",
    "dropout": "return self.head(F.dropout(F.gelu(self.b(F.dropout(F.gelu(self.a(x)), 0.2))), 0.1))",
    "norm": "return self.head(self.norm(F.gelu(self.b(F.gelu(self.a(x))))))",
    "paths": "return self.head(torch.tanh((self.a if self.flag else self.b)(x)))",
    "products": "return self.head((1 + 0.01 * torch.tanh(self.a(x))).cumprod(1))",
    "complex": """
z = torch.complex(self.a(x), self.b(x))
return self.head((z * z.conj().T.contiguous().T).abs())
""",
    "norms": """
h = self.a(x)
return self.head(h / h.norm(dim=1, keepdim=True) + F.normalize(self.b(h), p=3.0))
""",
    "experts": """
top = self.a(x).argmax(1) % 3
h = torch.zeros_like(x)
for number, expert in enumerate((self.a, self.b, self.block)):
    rows = torch.where(top == number)[0]
    h = h.index_add(0, rows, expert(x[rows]))
return self.head(h)
""",
}
"""The forward pass, from `x` to logits. The layers are those of `Model`."""

LOSSES = {
    "inside": "model(x, y)",
    "given": "given(output)",
    "not given": "given(output)",
    "more than given": "given(output) + 0.01 * entropy(output)",
    "smooth, not given": "F.cross_entropy(output, ignored, weight=weight, label_smoothing=0.1)",
    "products, not given": "(1 + output * 0.01).view(-1, 32).prod(1).mean()",
    "logits by y, not given": "F.binary_cross_entropy_with_logits(output, F.one_hot(y, CLASSES).float())",
}

AROUND = {
    "nothing": {},
    "penalty": {"loss": "loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())"},
    "orthogonal": {"loss": "w = model.a.weight; loss = loss + 0.01 * (w @ w.T - torch.eye(WIDTH)).norm()"},
    "kept view": {"loss": "kept = output.detach() if output.dim() else loss.detach()"},
    "saliency": {
        "before": """
model.eval()
z = x.clone().requires_grad_()
seen.append(torch.autograd.grad(given(model.logits(z) if inside else model(z)), z)[0].norm())
del z
model.train()
"""
    },
    "input's gradient": {"before": "x = x.clone().requires_grad_()", "after": "seen.append(x.grad.norm())"},
    "output's hook": {
        "loss": "if output.dim(): output.register_hook(lambda grad: seen.append(grad.norm()))",
    },
    "gradient penalty": {
        "before": "x = x.clone().requires_grad_()",
        "loss": "loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()",
    },
    "clipping": {"after": "seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))"},
    "decay by hand": {"after": "with torch.no_grad(): [p.mul_(0.99) for p in model.parameters()]"},
    "a look at gradients": {
        "after": "seen += [p.grad.norm() for p in model.parameters() if p.grad is not None]"
    },
    "two calls": {"loss": "loss = loss + (model(x.flip(0), y) if inside else given(model(x.flip(0))))"},
    "two passes": {"after": "(model(x.flip(0), y) if inside else given(model(x.flip(0)))).backward()"},
    "a graph that is kept": {"before": "keep = True", "after": "loss.backward()"},
    "zero_grad before backward": {"loss": "optimizer.zero_grad()"},
    "zeros as gradients": {"end": "optimizer.zero_grad(set_to_none=False)"},
    "the user's checkpoint": {"call": "checkpoint(model, *batch, use_reentrant=False)"},
    "a forward hook": {
        "hooks": "model.a.register_forward_hook(lambda m, i, o: seen.append(o.detach().norm()))"
    },
    "a backward hook": {
        "hooks": "model.b.register_full_backward_hook(lambda m, i, o: seen.append(o[0].norm()))",
    },
    "a parameter's hook": {"hooks": "model.a.weight.register_hook(lambda grad: grad * 0.5)"},
    "a smaller batch": {
        "before": "x, y, ignored = (t[:100] if number % 3 == 2 else t for t in (x, y, ignored))"
    },
    "evaluation": {
        "end": """
model.eval()
with torch.no_grad():
    seen.append(model(*batch).norm())
model.train()
"""
    },
}
"""Lines of the user's own code, by their place in a step."""

LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "outputs let go": {"holds_outputs": False},
    "step in backward": {"step_in_backward": True},
    "accumulate": {"accumulate": True},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
}
BUDGETS = {"1 GiB": None, "middle": 0.5, "floor": 0.0}
DTYPES = ("float32", "float64", "autocast")
PLANNED = ("whole", "block")


@dataclass(frozen=True, slots=True)
class LoopCase:
    """One choice for each part; the defaults are the plain ones."""

    model: str = "plain"
    loss: str = "given"
    around: str = "nothing"
    also: str = "nothing"
    lever: str = "none"
    optimizer: str = "sgd"
    budget: str = "1 GiB"
    dtype: str = "float32"
    planned: str = "whole"


CHOICES: dict[str, tuple[str, ...]] = {
    "model": tuple(MODELS),
    "loss": tuple(LOSSES),
    "around": tuple(AROUND),
    "also": tuple(AROUND),
    "lever": tuple(LEVERS),
    "optimizer": tuple(OPTIMIZERS),
    "budget": tuple(BUDGETS),
    "dtype": DTYPES,
    "planned": PLANNED,
}


def drawn(seed: int) -> LoopCase:
    """The loop with this number. Levers, dtypes and a planned block are plain in most loops."""
    chooser = random.Random(seed)
    case = LoopCase(**{name: chooser.choice(choices) for name, choices in CHOICES.items()})
    plain = LoopCase()
    for name, share in (("also", 0.6), ("lever", 0.6), ("dtype", 0.7), ("planned", 0.8), ("optimizer", 0.4)):
        if chooser.random() < share:
            case = replace(case, **{name: getattr(plain, name)})
    return case


def code_of(case: LoopCase) -> str:
    """The loop as a reader would write it."""
    slots: dict[str, list[str]] = {}
    for choice in dict.fromkeys((case.around, case.also)):
        for place, line in AROUND[choice].items():
            slots.setdefault(place, []).append(line.strip())

    def lines(place: str) -> str:
        return "\n".join(slots.get(place, []))

    call = slots.get("call", ["model(*batch)"])[0]
    loss = "output" if case.loss == "inside" else LOSSES[case.loss]
    autocast = "torch.autocast('cpu', torch.bfloat16)" if case.dtype == "autocast" else "nullcontext()"
    forward = textwrap.indent(MODELS[case.model].strip(), " " * 8)
    step = "\n".join(
        part
        for part in (
            "keep = False",
            lines("before"),
            "batch = (x, y) if inside else (x,)",
            f"with {autocast}:",
            textwrap.indent(
                "\n".join(filter(None, (f"output = {call}", f"loss = {loss}", lines("loss")))), "    "
            ),
            "loss.backward(retain_graph=keep)",
            lines("after"),
            "optimizer.step()",
            lines("end") or "optimizer.zero_grad()",
            "return loss.detach()",
        )
        if part
    )
    inside = case.loss == "inside"
    return f"""
inside = {inside}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.BatchNorm1d(WIDTH)
        self.head, self.flag = nn.Linear(WIDTH, CLASSES, bias=False), False

    def logits(self, x):
{forward}

    def forward(self, x{", y" if inside else ""}):
        return {"F.cross_entropy(self.logits(x), y)" if inside else "self.logits(x)"}

def register(model, seen):
{textwrap.indent(lines("hooks") or "pass", "    ")}

def step(model, optimizer, x, y, ignored, number, seen):
    model.flag = number % 2 == 1
    given = lambda output: F.cross_entropy(output, y)
{textwrap.indent(step, "    ")}
"""


def entropy(output: Tensor) -> Tensor:
    logs = output.log_softmax(-1)
    return (logs.exp() * logs).sum(-1).mean()


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings of lowtide's log."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Keep(logging.WARNING), logging.getLogger("lowtide")
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


@dataclass(slots=True)
class Loop:
    """A model in training, and the values that its loop has seen."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: Callable[..., Tensor]
    data: tuple[Tensor, ...]
    seen: list[Tensor]

    def train(self, number: int) -> list[Tensor]:
        """All that a step leaves."""
        torch.manual_seed(number)
        loss = self.step(self.model, self.optimizer, *self.data, number, self.seen)
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.seen]
        found = [loss, *(tensor.detach().clone() for tensor in tensors), torch.get_rng_state()]
        self.seen.clear()
        return found


def loops_of(case: LoopCase) -> tuple[Loop, Loop]:
    """The same loop twice."""
    torch.manual_seed(0)
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    x, y = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randint(CLASSES, (ROWS,))
    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "nullcontext": nullcontext,
        "WIDTH": WIDTH, "CLASSES": CLASSES, "entropy": entropy, "weight": torch.rand(CLASSES, dtype=dtype),
    }  # fmt: skip
    exec(compile(code_of(case), "<loop>", "exec"), names)
    model = names["Model"]().to(dtype)
    data = (x, y, torch.where(y % 3 == 0, -100, y))
    loops = []
    for one in (model, copy.deepcopy(model)):
        seen: list[Tensor] = []
        names["register"](one, seen)
        loops.append(Loop(one, OPTIMIZERS[case.optimizer](one.parameters()), names["step"], data, seen))
    return loops[0], loops[1]


def plan_of(case: LoopCase, loop: Loop) -> Any:
    """Plan the loop's model, or a block of it, and apply the plan."""
    x, y, _ = loop.data
    options: dict[str, Any] = dict(LEVERS[case.lever])
    inside = case.loss == "inside"
    model, batch = loop.model, (x, y) if inside else (x,)
    if case.planned == "block":
        model, batch = model.block, (x.clone().requires_grad_(),)
    else:
        options["optimizer"] = loop.optimizer
        if not inside and "not given" not in case.loss:
            options["loss"] = lambda output: F.cross_entropy(output, y)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "autocast"):
        found = lowtide.profile(model, batch, **options)
    share = BUDGETS[case.budget]
    budget = (
        1 << 30 if share is None else found.floor_bytes + int(share * (found.peak_bytes - found.floor_bytes))
    )
    plan = found.plan(budget)
    plan.apply(model)
    return plan


STEPS = 4
WRONG = "wrong"
DEPARTURES = (
    "the peak is higher",
    "the peak can be higher than the budget",
    "is not proven",
    "the budget is not kept",
    "estimated",
    "may take more",
)
"""Words of warnings that a budget is exceeded, or can be."""


class Outcome(NamedTuple):
    """How a loop went: `exact` and within its budget; `told` of a departure; `refused` in one line;
    `senseless`, since eager PyTorch itself cannot run it; or `wrong`, and why."""

    kind: str
    why: str = ""


def outcome_of(case: LoopCase) -> Outcome:
    plain, loop = loops_of(case)
    try:
        expected = [plain.train(number) for number in range(STEPS)]
    except Exception as error:
        return Outcome("senseless", str(error))
    with said() as words:
        try:
            plan = plan_of(case, loop)
            if loop.seen:
                return Outcome(WRONG, f"planning called the user's hook: {loop.seen}")
            for number in range(STEPS):
                found = loop.train(number)
                same = len(found) == len(expected[number]) and all(map(torch.equal, found, expected[number]))
                if not same and not any("last bits" in line for line in words):
                    return Outcome(WRONG, f"step {number} differs from eager without a word")
            over_bytes = _measured_bytes(loop) - plan.budget_bytes if case.planned == "whole" else 0
        except lowtide.LowtideError as error:
            text = str(error).strip()
            return Outcome("refused" if "\n" not in text else WRONG, text)
        except Exception as error:
            return Outcome(WRONG, f"{type(error).__name__}: {error}")
    if over_bytes > SCALARS_BYTES and not any(part in line for line in words for part in DEPARTURES):
        return Outcome(WRONG, f"{over_bytes} bytes above {plan.budget_bytes}, without a word")
    return Outcome("told", words[0]) if words else Outcome("exact")


def _measured_bytes(loop: Loop) -> int:
    """The true peak of one more step."""
    above = peak_above_start(lambda: loop.step(loop.model, loop.optimizer, *loop.data, STEPS, loop.seen))
    return static_bytes(loop.model, loop.data, loop.optimizer) + above


def shortest(case: LoopCase) -> LoopCase:
    """A bad loop with plain choices wherever it stays bad."""
    plain = LoopCase()
    for field in fields(LoopCase):
        simpler = replace(case, **{field.name: getattr(plain, field.name)})
        if simpler != case and outcome_of(simpler).kind == WRONG:
            case = simpler
    return case
