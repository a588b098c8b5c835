"""What the ranks of a group run in the tests of DistributedDataParallel."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import lowtide

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


def both_orders(rank: int, names: list[str] | None = None) -> dict[str, tuple[bool, bool]]:
    """By option: whether training is equal to plain DDP with the plan inside, and with it put on the wrapper."""
    torch.manual_seed(0)
    net, batch = Net(), {"words": torch.randint(11, (ROWS,))}
    plan = lowtide.profile(net, batch, loss=loss_of).plan("85%")
    outcome = {}
    for name in names or OPTIONS:
        expected = train(DDP(copy.deepcopy(net), **OPTIONS[name]), rank, name)
        inside = train(DDP(plan.apply(copy.deepcopy(net)), **OPTIONS[name]), rank, name)
        wrapper = DDP(copy.deepcopy(net), **OPTIONS[name])
        plan.apply(wrapper.module)
        outcome[name] = (equal(expected, inside), equal(expected, train(wrapper, rank, name)))
    return outcome
