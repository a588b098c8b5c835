"""What the ranks of a group run in the tests of DistributedDataParallel."""

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from budgets import between
from torch import nn
from torch.distributed import GradBucket
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes, train_step

ROWS, WIDTH = 48, 16


class Net(nn.Module):
    """Batch norm, dropout, layer norm, a tied weight, a convolution; a rank can leave a branch out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(3 * WIDTH)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(3 * WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 11)
        self.last.weight = self.words.weight

    def forward(self, words: torch.Tensor, *, use_branch: bool = True) -> torch.Tensor:
        x = self.words(words)
        x = x + self.conv(x.view(-1, 4, WIDTH)).view(-1, WIDTH)
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = torch.tanh(self.second(x))
        if use_branch:
            x = x + torch.sigmoid(self.branch(x))
        return self.last(self.layer_norm(x))


def averaged_twice(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of a user's own: halves, sums."""
    work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "own hook, small buckets": {"bucket_cap_mb": 0.002},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters, bucket views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "fp16 hook, bucket views": {"gradient_as_bucket_view": True},
    "accumulation": {},
    "accumulation, own hook, small buckets": {"bucket_cap_mb": 0.002},
    "accumulation, bucket views": {"gradient_as_bucket_view": True},
}
HOOKS: dict[str, Callable[..., Any]] = {
    "fp16 hook, bucket views": fp16_compress_hook,
    "own hook, small buckets": averaged_twice,
    "accumulation, own hook, small buckets": averaged_twice,
}


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.logsumexp(-1).mean()


def train(model: DDP, rank: int, name: str, *, steps: int = 3) -> list[torch.Tensor | None]:
    """Everything that each step leaves behind; the seed is the rank's own."""
    torch.manual_seed(100 + rank)
    if name in HOOKS:
        model.register_comm_hook(None, HOOKS[name])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rounds = 3 if "accumulation" in name else 1
    left: list[torch.Tensor | None] = []
    for step in range(steps):
        for turn in range(rounds):
            words = torch.randint(11, (ROWS,))
            use_branch = "unused" not in name or (step + rank) % 2 == 0
            with model.no_sync() if turn < rounds - 1 else nullcontext():
                loss = loss_of(model(words, use_branch=use_branch))
                loss.backward()
            left.append(loss.detach().clone())
        left += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        left += [value.clone() for value in model.state_dict().values()]
        left.append(torch.get_rng_state())
    return left


def equal(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def shared_plan(
    rank: int, path: str, model: nn.Module, batch: Any, *, share: float = 0.5, **loop: Any
) -> lowtide.Plan:
    """Made on rank 0, loaded by all."""
    if rank == 0:
        profile = lowtide.profile(model, batch, **loop)
        profile.plan(between(profile, share)).save(path)
    torch.distributed.barrier()
    return lowtide.load_plan(path)


def both_orders(rank: int, folder: str, names: list[str] | None = None) -> dict[str, tuple[bool, bool]]:
    """By option: whether training is equal to plain DDP, planned inside and planned as wrapped."""
    torch.manual_seed(0)
    net, batch = Net(), {"words": torch.randint(11, (ROWS,))}
    plan = shared_plan(rank, f"{folder}/plan.json", net, batch, loss=loss_of)
    outcome = {}
    for name in names or OPTIONS:
        expected = train(DDP(copy.deepcopy(net), **OPTIONS[name]), rank, name)
        inside = train(DDP(plan.apply(copy.deepcopy(net)), **OPTIONS[name]), rank, name)
        wrapper = DDP(copy.deepcopy(net), **OPTIONS[name])
        assert plan.apply(wrapper) is wrapper
        outcome[name] = (equal(expected, inside), equal(expected, train(wrapper, rank, name)))
    return outcome


class Blocks(nn.Module):
    """Layers whose gradients fill several buckets one after the other."""

    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Counter(TorchDispatchMode):
    """How many ops have run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def launches(rank: int) -> dict[str, tuple[list[int], int]]:
    """How many ops of the third backward pass had run when each bucket was sent, and of how many."""
    torch.manual_seed(0)
    net, x, counter = Blocks(depth=5), torch.randn(256, 128), Counter()
    seen: list[int] = []

    def hook(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(counter.ops)
        return (
            torch.distributed.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    found = {}
    for name in ("plain", "planned"):
        model = DDP(copy.deepcopy(net), bucket_cap_mb=0.06)
        if name == "planned":
            lowtide.checkpoint(model, x, budget="80%")
        model.register_comm_hook(None, hook)
        for _ in range(3):
            loss = model(x)
            seen.clear()
            counter.ops = 0
            with counter:
                loss.backward()
            model.zero_grad()
        found[name] = (list(seen), counter.ops)
    return found


PEAKS: dict[str, tuple[bool, dict[str, Any]]] = {
    "wrapped": (True, {}),
    "wrapped, bucket views": (True, {"gradient_as_bucket_view": True}),
    "wrapped later": (False, {}),
}


def peaks(rank: int, folder: str) -> dict[str, tuple[int, int, int]]:
    """By option: the budget, what was predicted and what was measured, buckets included."""
    torch.manual_seed(0)
    net, x = Blocks(depth=4), torch.randn(192, 128)
    found = {}
    for name, (wrapped_first, options) in PEAKS.items():
        inner = copy.deepcopy(net)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model = DDP(inner, **options) if wrapped_first else inner
        plan = shared_plan(rank, f"{folder}/{name}.json", model, x, optimizer=optimizer, share=0.3)
        plan.apply(model)
        model = model if wrapped_first else DDP(model, **options)
        for _ in range(2):
            train_step(model, x, optimizer)
        above = peak_above_start(partial(train_step, model, x, optimizer))
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        bucket_bytes = sum(int(size) for size in sizes.split(", "))
        measured = static_bytes(model, x, optimizer) + bucket_bytes + above
        found[name] = (plan.budget_bytes, plan.peak_bytes, measured)
    return found


def batches_of_all_sizes(rank: int) -> tuple[bool, list[str]]:
    """Whether training is exact where every rank has batches of its own sizes, from the plan on."""
    lines = Lines()
    torch.manual_seed(0)
    net = Net()
    first = {"words": torch.randint(11, (ROWS - 8 * rank,))}

    def losses(model: nn.Module) -> list[torch.Tensor | None]:
        torch.manual_seed(rank)
        left: list[torch.Tensor | None] = []
        for rows in (ROWS - 8 * rank, ROWS - 8 * rank, 16 + 8 * rank, ROWS - 8 * rank):
            loss = loss_of(model(torch.randint(11, (rows,))))
            loss.backward()
            left += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return left

    expected = losses(DDP(copy.deepcopy(net)))
    planned = DDP(lowtide.checkpoint(net, first, budget="85%", loss=loss_of))
    return equal(expected, losses(planned)), lines.said


class Lines(logging.Handler):
    """What lowtide says in this process."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []
        logging.getLogger("lowtide").addHandler(self)
        logging.getLogger("lowtide").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class AcrossRanks(nn.Module):
    """Normalizes by the statistics of all ranks' batches, as SyncBatchNorm does where there is a GPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world = torch.distributed.group.WORLD
        mean = all_reduce(x.mean(0), "sum", world) / 2
        variance = all_reduce((x - mean).square().mean(0), "sum", world) / 2
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight


def collectives(rank: int) -> tuple[bool, list[int]]:
    """Whether training is exact, and how many ops of backward talk to other ranks, plain and planned."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), AcrossRanks(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)]
    net, x = nn.Sequential(*layers), torch.randn(64, 16) + rank
    plain, planned = DDP(copy.deepcopy(net)), DDP(copy.deepcopy(net))
    lowtide.checkpoint(planned, x, budget="80%")
    counts, left = [], []
    for model in (plain, planned):
        left.append([])
        for _ in range(2):
            loss = model(x).square().mean()
            with Talk() as talk:
                loss.backward()
            left[-1] += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        counts.append(talk.count)
    return equal(*left), counts


class Talk(TorchDispatchMode):
    """Counts ops that talk to other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in func.namespace and "all" in func.__name__
        return func(*args, **(kwargs or {}))


def sync_batch_norm(rank: int) -> list[str]:
    """What torch says of SyncBatchNorm on CPU, and what lowtide says."""
    said = []
    for plan in (False, True):
        net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        try:
            if plan:
                lowtide.checkpoint(net, torch.randn(4, 8), budget="90%")
            else:
                net(torch.randn(4, 8))
        except Exception as error:
            said.append(str(error))
    return said


def auto_budgets(rank: int) -> tuple[int, list[str]]:
    """The budget that both ranks have, each with other memory, and the lines that a rank says of it."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.facts.auto_budget.host_bytes", lambda: (40 - 10 * rank) << 30)
        patch.setattr("lowtide.facts.auto_budget.resident_bytes", lambda: 0)
        patch.setattr("lowtide.api.say", said.append)
        net = lowtide.checkpoint(nn.Linear(8, 8), torch.randn(4, 8), budget="auto")
    plan = lowtide.plan_of(net)
    assert plan is not None
    return plan.budget_bytes, said
