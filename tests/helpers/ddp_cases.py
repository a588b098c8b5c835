"""What the ranks of a group run in the tests of DistributedDataParallel."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from budgets import between
from lowtide.checking.peak import peak_above_start
from lowtide.checking.train_step import static_bytes, train_step

ROWS, WIDTH = 48, 16


class Net(nn.Module):
    """Batch norm, dropout, layer norm, a tied weight, a convolution, and a branch that a rank can leave out."""

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
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.002},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "fp16 hook": {},
    "own hook, small buckets": {"bucket_cap_mb": 0.002},
    "accumulation": {},
    "accumulation, bucket views": {"gradient_as_bucket_view": True},
}
HOOKS: dict[str, Callable[..., Any]] = {"fp16 hook": fp16_compress_hook, "own hook, small buckets": averaged_twice}


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.logsumexp(-1).mean()


def train(model: DDP, rank: int, name: str, *, steps: int = 4) -> list[torch.Tensor | None]:
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
            use_branch = name != "unused parameters" or (step + rank) % 2 == 0
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


def shared_plan(rank: int, folder: str, net: nn.Module, batch: Any, budget: str = "85%") -> lowtide.Plan:
    """Made on rank 0, loaded by all."""
    path = Path(folder, "plan.json")
    if rank == 0:
        lowtide.profile(net, batch, loss=loss_of).plan(budget).save(path)
    torch.distributed.barrier()
    return lowtide.load_plan(path)


def both_orders(rank: int, folder: str, names: list[str] | None = None) -> dict[str, tuple[bool, bool]]:
    """By option: whether training is equal to plain DDP with the plan inside, and with it put on the wrapper."""
    torch.manual_seed(0)
    net, batch = Net(), {"words": torch.randint(11, (ROWS,))}
    plan = shared_plan(rank, folder, net, batch)
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
    """How many ops of the backward pass had run when each bucket was sent, and of how many; the third step."""
    torch.manual_seed(0)
    net, x, counter = Blocks(), torch.randn(256, 128), Counter()
    seen: list[int] = []

    def hook(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(counter.ops)
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(
            lambda done: done.value()[0]
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


def peaks(rank: int) -> dict[str, tuple[int, int, int]]:
    """By option: the budget, what was predicted and what was measured, buckets included."""
    torch.manual_seed(0)
    net, x = Blocks(), torch.randn(256, 128)
    found = {}
    for name, wrapped_first, options in (
        ("wrapped", True, {}),
        ("wrapped, bucket views", True, {"gradient_as_bucket_view": True}),
        ("wrapped later", False, {}),
        ("wrapped later, bucket views", False, {"gradient_as_bucket_view": True}),
    ):
        inner = copy.deepcopy(net)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model = DDP(inner, **options) if wrapped_first else inner
        profile = lowtide.profile(model, x, optimizer=optimizer)
        budget = between(profile, 0.3)
        lowtide.checkpoint(model, x, budget=budget, optimizer=optimizer)
        model = model if wrapped_first else DDP(model, **options)
        for _ in range(2):
            train_step(model, x, optimizer)
        above = peak_above_start(lambda: train_step(model, x, optimizer))
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        bucket_bytes = sum(int(size) for size in sizes.split(", "))
        measured = static_bytes(model, x, optimizer) + bucket_bytes + above
        found[name] = (budget, profile.plan(budget).peak_bytes, measured)
    return found
