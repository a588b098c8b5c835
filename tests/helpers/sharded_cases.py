"""Models whose blocks are sharded, and what to do with them on every process."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step

WORDS = 101
"""Odd, so that no two processes have parts of the same size."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).clone()


@dataclass(slots=True)
class Case:
    """A sharded model with an optimizer, and a batch of this process's own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    targets: torch.Tensor
    results: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def loss(self, output: torch.Tensor, *, start: int = 0) -> torch.Tensor:
        targets = self.targets[start : start + len(output)]
        return functional.cross_entropy(output.flatten(0, 1).float(), targets.flatten())

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        part = getattr(tensor, "_local_tensor", tensor)
        self.results[f"{len(self.results)} {name}"] = None if part is None else part.detach().clone()

    def keep_all(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.keep(name, parameter)
            self.keep(f"gradient of {name}", parameter.grad)
        self.keep("random state", torch.get_rng_state())


def build(
    *,
    rank: int,
    width: int = 32,
    blocks: int = 3,
    batch: tuple[int, int] = (4, 16),
    root: bool = True,
    change: Callable[[nn.Module], None] | None = None,
    after: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> Case:
    torch.manual_seed(0)
    model = Net(width, blocks)
    if change is not None:
        change(model)
    for block in model.blocks:
        fully_shard(block, **options)
    if root:
        fully_shard(model, **options)
    if after is not None:
        after(model)
    torch.manual_seed(100 + rank)
    tokens, targets = torch.randint(0, WORDS, (2, *batch))
    return Case(model, torch.optim.AdamW(model.parameters(), lr=0.01), tokens, targets)


def plain_loop(case: Case) -> None:
    for _ in range(2):
        value = case.loss(case.model(case.tokens))
        value.backward()
        case.keep("loss", value)
        case.keep_all()
        case.optimizer.step()
        case.optimizer.zero_grad()
    case.keep_all()


def clipping_loop(case: Case) -> None:
    for _ in range(2):
        case.loss(case.model(case.tokens)).backward()
        norm = nn.utils.clip_grad_norm_(case.model.parameters(), 0.5)
        case.keep("norm", norm.full_tensor())  # type: ignore[attr-defined]
        case.optimizer.step()
        case.keep_all()
        case.optimizer.zero_grad()


def accumulating_loop(case: Case) -> None:
    for last in (False, True, False, True):
        case.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        case.loss(case.model(case.tokens)).backward()
        if last:
            case.keep_all()
            case.optimizer.step()
            case.optimizer.zero_grad()
    case.keep_all()


def changing_loop(case: Case) -> None:
    """Other batch sizes, an evaluation in between, and one process with another batch than the others."""
    sizes = (4, 2, 4 if dist.get_rank() else 3)
    for size in sizes:
        value = case.loss(case.model(case.tokens[:size]))
        value.backward()
        case.keep("loss", value)
        case.optimizer.step()
        case.optimizer.zero_grad()
        case.model.eval()
        with torch.no_grad():
            case.keep("evaluation", case.model(case.tokens))
        case.model.train()
    case.keep_all()


def saving_loop(case: Case, *, folder: Path) -> None:
    """Save, train on, go back to what was saved, and train again."""
    plain_loop(case)
    model, optimizer = get_state_dict(case.model, case.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    plain_loop(case)
    model, optimizer = get_state_dict(case.model, case.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(case.model, case.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    case.keep_all()
    plain_loop(case)


def freeze_first(model: nn.Module) -> None:
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)


def prefetch(model: nn.Module) -> None:
    for one, other in zip(model.blocks[:-1], model.blocks[1:], strict=True):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept after forward": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": MIXED},
    "blocks only": {"root": False},
    "frozen": {"change": freeze_first},
    "prefetching": {"after": prefetch},
}

LOOPS: dict[str, Callable[..., None]] = {
    "plain": plain_loop,
    "clipping": clipping_loop,
    "accumulating": accumulating_loop,
    "changing": changing_loop,
    "saving": saving_loop,
}


def differences(
    rank: int, options: str, loop: str, folder: Path, *, blocks: int, planner: str = "auto"
) -> dict[str, Any]:
    """What a planned model leaves behind that is not what the plain one does. `auto` gets its floor, other
    planners a budget between that and the peak."""
    warnings.simplefilter("ignore")
    run = LOOPS[loop]
    if run is saving_loop:
        run = partial(run, folder=folder / "plain")
    expected = build(rank=rank, blocks=blocks, **OPTIONS[options])
    torch.manual_seed(rank)
    run(expected)
    case = build(rank=rank, blocks=blocks, **OPTIONS[options])
    profile = lowtide.profile(case.model, case.tokens, optimizer=case.optimizer, loss=case.loss)
    middle = (profile.floor_bytes + profile.peak_bytes) // 2
    plan = profile.plan(profile.floor_bytes if planner == "auto" else middle, planner=planner)
    plan.apply(case.model)
    if loop == "saving":
        run = partial(saving_loop, folder=folder / "planned")
    torch.manual_seed(rank)
    run(case)
    runner = runner_of(case.model)
    assert runner is not None
    return {
        "compared": len(expected.results),
        "different": [
            name
            for (name, one), (_, other) in zip(expected.results.items(), case.results.items(), strict=True)
            if (one is None) is not (other is None) or (one is not None and not torch.equal(one, other))
        ],
        "recompute_seconds": plan.recompute_seconds,
        "graphs": len({segment.fingerprint for segment, _, _ in runner.backend.graphs}),
        "backwards": runner.observer.view().num_backwards,
    }


def all_differences(
    rank: int, wanted: list[tuple[str, str]], folder: Path, blocks: int
) -> dict[tuple[str, str], Any]:
    found = {}
    for options, loop in wanted:
        own = folder / f"{options}-{loop}".replace(" ", "_")
        if rank == 0:
            own.mkdir()
        dist.barrier()
        found[options, loop] = differences(rank, options, loop, own, blocks=blocks)
    return found


def by_planners(rank: int, planners: tuple[str, ...], folder: Path) -> dict[str, Any]:
    return {
        name: differences(rank, "default", "changing", folder, blocks=3, planner=name) for name in planners
    }


def peaks(rank: int, options: dict[str, Any], shares: tuple[float, ...] = (0.5, 0)) -> list[dict[str, int]]:
    """Predicted and measured peaks of this process: without a plan, in between, and at the floor."""
    warnings.simplefilter("ignore")
    case = build(rank=rank, **options)
    profile = lowtide.profile(case.model, case.tokens, optimizer=case.optimizer, loss=case.loss)
    rows = [{"budget": 0, "predicted": profile.peak_bytes, "measured": _measured(case)}]
    low, high = profile.floor_bytes, profile.peak_bytes
    for budget in (low + int((high - low) * share) for share in shares):
        plan = profile.plan(budget)
        plan.apply(case.model)
        rows.append({"budget": budget, "predicted": plan.peak_bytes, "measured": _measured(case)})
        lowtide.remove(case.model)
    return rows


def _measured(case: Case) -> int:
    """The least of several: gloo frees its copies in threads of its own, now and then too late."""
    batch = (case.tokens,)

    def step() -> torch.Tensor:
        return train_step(case.model, batch, case.optimizer, case.loss)

    step()
    above = min(peak_above_start(step) for _ in range(8))
    return static_bytes(case.model, (batch, case.targets), case.optimizer) + above


def mistakes(rank: int) -> dict[str, str]:
    """The errors for plans of a sharded model that cannot work."""
    warnings.simplefilter("ignore")
    case = build(rank=rank)
    profile = lowtide.profile(case.model, case.tokens, optimizer=case.optimizer, loss=case.loss)
    planned = Net()
    found = lowtide.profile(planned, case.tokens, loss=case.loss)
    found.plan(found.floor_bytes).apply(planned)
    for block in planned.blocks:
        fully_shard(block)
    fully_shard(planned)
    said = {}
    attempts: dict[str, Callable[[], object]] = {
        "too small": lambda: profile.plan(1000),
        "sharded twice": lambda: lowtide.profile(case.model, case.tokens, ranks=4),
        "run": lambda: lowtide.profile(case.model, case.tokens, mode="run"),
        "sharded later": lambda: planned(case.tokens),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except lowtide.LowtideError as error:
            said[name] = str(error)
    return said
