"""Models on device meshes (tensor parallelism, alone and with FSDP2; other ways to shard), and what a plan of
them leaves behind that plain training does not."""

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat.dispatch import iter_tensors, local
from lowtide.verification.measure_step import peak_above_start, static_bytes
from lowtide.verification.trained_steps import Start

WORDS, HEADS = 96, 4
ROWS, LENGTH = 4, 32
MOST_ATTEMPTS = 40


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head_width = width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        heads = [each(x).unflatten(-1, (-1, self.head_width)) for each in (self.wq, self.wk, self.wv)]
        q, k, v = (value.transpose(1, 2) for value in heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed = Attention(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Llama(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Columns and rows alone: activations between the blocks are whole on every process."""
    for block in model.blocks:
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed.gate", "feed.up")
        plan: dict[str, Any] = dict.fromkeys(columns, ColwiseParallel())
        plan |= dict.fromkeys(("attention.wo", "feed.down"), RowwiseParallel())
        parallelize_module(block, mesh, plan)


def sequence_parallel(model: nn.Module, mesh: DeviceMesh, *, with_loss: bool = True) -> None:
    """As torchtitan does: norms on parts of the sequence, and logits divided by words."""
    head = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if with_loss else Replicate(),
        use_local_output=not with_loss,
    )
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, {"embedding": embedding, "norm": SequenceParallel(), "head": head})
    whole = partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        plan: dict[str, Any] = {"attention": whole(), "feed": whole()}
        plan |= dict.fromkeys(("attention_norm", "feed_norm"), SequenceParallel())
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed.gate", "feed.up")
        plan |= dict.fromkeys(columns, ColwiseParallel())
        plan |= dict.fromkeys(("attention.wo", "feed.down"), RowwiseParallel(output_layouts=Shard(1)))
        parallelize_module(block, mesh, plan)


def shard(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def flat(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def square(names: tuple[str, str], first: int) -> DeviceMesh:
    return init_device_mesh("cpu", (first, dist.get_world_size() // first), mesh_dim_names=names)


@dataclass(slots=True)
class Case:
    """A model on a mesh with an optimizer, and a batch, which is the same on the processes of one part."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: Tensor
    targets: Tensor
    loss_is_parallel: bool = False
    results: dict[str, Tensor | str | None] = field(default_factory=dict)

    def loss(self, output: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1).float(), self.targets.flatten())

    def step(self) -> Tensor:
        with loss_parallel() if self.loss_is_parallel else nullcontext():
            value = self.loss(self.model(self.tokens))
            value.backward()
        return value

    def keep(self, name: str, value: Tensor | None) -> None:
        self.results[f"{name}, layout"] = str(getattr(value, "placements", ""))
        part = value.to_local() if hasattr(value, "to_local") else value
        self.results[name] = None if part is None else part.detach().clone()

    def train(self, steps: int = 2) -> None:
        for step in range(steps):
            self.keep(f"loss {step}", self.step())
            for name, parameter in self.model.named_parameters():
                self.keep(f"gradient of {name} {step}", parameter.grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters():
            self.keep(name, parameter)


def _tp(model: nn.Module) -> None:
    tensor_parallel(model, flat(dist.get_world_size()))


def _sp(model: nn.Module) -> None:
    sequence_parallel(model, flat(dist.get_world_size()), with_loss=False)


def _lp(model: nn.Module) -> None:
    sequence_parallel(model, flat(dist.get_world_size()))


def _returns_dtensor(model: nn.Module) -> None:
    mesh = flat(dist.get_world_size())
    tensor_parallel(model, mesh)
    words = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"head": words})


def _tp_fsdp(model: nn.Module, first: int = 1, **options: Any) -> None:
    mesh = square(("dp", "tp"), first)
    sequence_parallel(model, mesh["tp"], with_loss=False)
    shard(model, mesh["dp"], **options)


def _tied(model: nn.Module) -> None:
    """The head and the embedding, of the outermost unit, share a weight."""
    model.head.weight = model.embedding.weight
    shard(model)


def _several_modules(model: nn.Module) -> None:
    """A unit of two modules, as torchtitan has it, and one of two tied ones."""
    fully_shard([model.norm, model.head], reshard_after_forward=False)
    model.blocks[0].feed.up.weight = model.blocks[1].feed.up.weight
    fully_shard([model.blocks[0].feed.up, model.blocks[1].feed.up])
    shard(model)


def _hsdp(model: nn.Module, first: int = 2) -> None:
    shard(model, square(("replicas", "shards"), first))


def _two_meshes(model: nn.Module) -> None:
    """The blocks are divided among all processes, the rest among two."""
    everyone = flat(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=square(("replicas", "shards"), dist.get_world_size() // 2))


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOWER_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)

AXES: dict[str, Callable[[nn.Module], None]] = {
    "tensor": _tp,
    "sequence": _sp,
    "loss": _lp,
    "returns a DTensor": _returns_dtensor,
    "tensor in bf16": lambda model: _tp(model.bfloat16()),
    "loss in bf16": lambda model: _lp(model.bfloat16()),
    "fsdp and tensor": _tp_fsdp,
    "fsdp over two and tensor": partial(_tp_fsdp, first=2),
    "fsdp and tensor, mixed": partial(_tp_fsdp, mp_policy=MIXED),
    "hsdp": _hsdp,
    "hsdp of one replica": partial(_hsdp, first=1),
    "lower sums": partial(shard, mp_policy=LOWER_SUMS),
    "few between": partial(shard, reshard_after_forward=2),
    "one between": partial(shard, reshard_after_forward=1),
    "two meshes": _two_meshes,
    "tied": _tied,
    "units of several modules": _several_modules,
    "on the host": lambda model: shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


DATA_PARALLEL = (
    *("hsdp", "hsdp of one replica", "lower sums", "few between", "one between", "two meshes"),
    *("tied", "units of several modules", "on the host"),
)
"""Every process has a batch of its own."""


def build(rank: int, axis: str, *, width: int = 32, blocks: int = 2, rows: int = ROWS) -> Case:
    torch.manual_seed(0)
    model = Llama(width, blocks)
    AXES[axis](model)
    torch.manual_seed(100 + (rank if axis in DATA_PARALLEL else 0))
    tokens, targets = torch.randint(0, WORDS, (2, rows, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Case(model, optimizer, tokens, targets, loss_is_parallel=axis.startswith("loss"))


def compared(rank: int, axis: str, **options: Any) -> dict[str, Any]:
    """Training by the plan of the lowest budget beside plain training, and both peaks."""
    warnings.simplefilter("ignore")
    expected, case = build(rank, axis, **options), build(rank, axis, **options)
    expected.train()
    with loss_parallel() if case.loss_is_parallel else nullcontext():
        profile = lowtide.profile(
            case.model, case.tokens, optimizer=case.optimizer, loss=case.loss, holds_outputs=False
        )
    plan = profile.plan(profile.floor_bytes)
    plain = {"predicted": profile.peak_bytes, "measured": _measured(expected, profile.peak_bytes)}
    plan.apply(case.model)
    case.train()
    return {
        "compared": len(expected.results),
        "different": [name for name in expected.results if not _same(expected, case, name)],
        "recompute_seconds": plan.recompute_seconds,
        "plain": plain,
        "planned": {"predicted": plan.peak_bytes, "measured": _measured(case, plan.peak_bytes)},
    }


def _same(one: Case, other: Case, name: str) -> bool:
    a, b = one.results[name], other.results[name]
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def all_compared(rank: int, axes: list[str], **options: Any) -> dict[str, dict[str, Any]]:
    return {axis: compared(rank, axis, **options) for axis in axes}


def _measured(case: Case, limit_bytes: int) -> int:
    """The least of several, up to one on each process within the limit: gloo frees its copies in threads of
    its own, now and then too late."""

    def step() -> Tensor:
        value = case.step()
        case.optimizer.step()
        case.optimizer.zero_grad()
        return value

    step()
    state_bytes = static_bytes(case.model, (case.tokens, case.targets), case.optimizer)
    least = 1 << 60
    for _ in range(MOST_ATTEMPTS):
        least = min(least, state_bytes + peak_above_start(step))
        are_over = torch.tensor(float(least > limit_bytes))
        dist.all_reduce(are_over)
        if not are_over.item():
            break
    return least


class Reused(nn.Module):
    """Uses one weight four times, in one graph or in two."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layer, self.breaks = nn.Linear(64, 64, bias=False), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(torch.tanh(self.layer(x))) * 1.3)
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.layer(torch.tanh(self.layer(x) * 0.7)) * 0.9)


def reused(rank: int) -> dict[str, bool]:
    """Whether the gradients of a divided weight are those of plain training: the model uses it several times,
    and the loss once more."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    kinds = {
        f"{breaks=} {penalty=}": (breaks, penalty) for breaks in (False, True) for penalty in (False, True)
    }
    return {
        name: all(map(torch.equal, *(_reused_gradients(x, *kind, planned=p) for p in (False, True))))
        for name, kind in kinds.items()
    }


def _reused_gradients(x: Tensor, breaks: bool, penalty: bool, *, planned: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Reused(breaks=breaks)
    columns = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, flat(dist.get_world_size()), {"layer": columns})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    if planned:
        profile = lowtide.profile(model, x, optimizer=optimizer, loss=loss)
        profile.plan(profile.floor_bytes).apply(model)
    found = []
    for _ in range(2):
        value = loss(model(x))
        if penalty:
            weight = model.layer.weight.to_local()
            value = value + weight.pow(3).sum() * 0.1 + weight.square().sum() * 0.07
        value.backward()
        found.append(model.layer.weight.grad.to_local().clone())
        optimizer.step()
        optimizer.zero_grad()
    return found


def saved(rank: int, axes: list[str], folder: str) -> None:
    """Train plainly, and by a plan, and save each."""
    warnings.simplefilter("ignore")
    for axis in axes:
        for name in ("plain", "planned"):
            case = build(rank, axis)
            _train(case, planned=name == "planned")
            model, optimizer = get_state_dict(case.model, case.optimizer)
            place = f"{folder}/{axis}/{name}".replace(" ", "_")
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=place)


def resumed(rank: int, axes: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Load what other numbers of processes saved, go on, and compare."""
    warnings.simplefilter("ignore")
    found = {}
    for axis in axes:
        cases = []
        for name in ("plain", "planned"):
            case = build(rank, axis)
            model, optimizer = get_state_dict(case.model, case.optimizer)
            place = f"{folder}/{axis}/{name}".replace(" ", "_")
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=place)
            set_state_dict(case.model, case.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            _train(case, planned=name == "planned")
            cases.append(case)
        one, other = cases
        found[axis] = {
            "compared": len(one.results),
            "different": [name for name in one.results if not _same(one, other, name)],
        }
    return found


def _train(case: Case, *, planned: bool) -> None:
    if planned:
        options: dict[str, Any] = {"optimizer": case.optimizer, "loss": case.loss}
        lowtide.checkpoint(case.model, case.tokens, budget="70%", **options)
    case.train(2)


def ends_in_a_step(rank: int, axis: str) -> None:
    """Rank 1 is killed in the middle of the second step."""
    warnings.simplefilter("ignore")
    case = build(rank, axis, blocks=1)
    lowtide.checkpoint(case.model, case.tokens, budget="98%", optimizer=case.optimizer, loss=case.loss)
    for step in range(3):
        output = case.model(case.tokens)
        if rank == 1 and step:
            output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        case.loss(output).backward()
        case.optimizer.step()
        case.optimizer.zero_grad()


def refusals(rank: int) -> dict[str, str]:
    """The errors for what cannot work with a tensor-parallel model."""
    warnings.simplefilter("ignore")
    case = build(rank, "sequence", blocks=1)
    known: dict[str, Any] = {"optimizer": case.optimizer, "loss": case.loss}
    attempts: dict[str, Callable[[], object]] = {
        "run": lambda: lowtide.profile(case.model, case.tokens, mode="run", **known),
        "measure": lambda: lowtide.measure_step(case.model, case.tokens, **known),
        "simulated": lambda: lowtide.profile(case.model, case.tokens, ranks=4),
        "in backward": lambda: lowtide.profile(case.model, case.tokens, step_in_backward=True, **known),
        "other gradient": lambda: _with_other_gradient(rank),
        "divided later": _divided_later,
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            said[name] = str(attempt())
        except lowtide.LowtideError as error:
            said[name] = str(error)
    return said


def verified(rank: int) -> dict[str, Any]:
    """Verifications of a plan by all processes, also where rank 1 trains with other weights by the plan; and
    what they leave behind."""
    warnings.simplefilter("ignore")
    case = build(rank, "fsdp and tensor", blocks=1)
    known: dict[str, Any] = {"optimizer": case.optimizer, "loss": case.loss}
    case.step()
    case.optimizer.step()
    profile = lowtide.profile(case.model, case.tokens, **known)
    plan = profile.plan(profile.floor_bytes)
    state = [case.model.state_dict(), case.optimizer.state_dict(), [p.grad for p in case.model.parameters()]]
    before = [part.clone() for part in map(local, iter_tensors(state))]
    results = [lowtide.verify(case.model, case.tokens, plan, timed_runs=0, **known)]
    if rank == 1:
        plain = Start.restore

        def restore(start: Start) -> None:
            plain(start)
            if runner_of(case.model) is not None:
                local(next(case.model.parameters())).data.add_(0.01)

        Start.restore = restore  # type: ignore[method-assign]
    results.append(lowtide.verify(case.model, case.tokens, plan, timed_runs=0, **known))
    state = [case.model.state_dict(), case.optimizer.state_dict(), [p.grad for p in case.model.parameters()]]
    return {
        "results": [(found.exact, found.fits, found.differences[:1]) for found in results],
        "as before": all(map(torch.equal, before, map(local, iter_tensors(state)))),
    }


def _divided_later() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    lowtide.checkpoint(model, x, budget="100%", process_group=alone)
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel()})
    model(x)


def _with_other_gradient(rank: int) -> None:
    """A gradient with other placements than the DTensor that the model returns."""
    case = build(rank, "returns a DTensor", blocks=1)
    lowtide.checkpoint(case.model, case.tokens, budget="100%", optimizer=case.optimizer)
    output = case.model(case.tokens)
    output.backward(output.detach().redistribute(placements=[Replicate()]))
