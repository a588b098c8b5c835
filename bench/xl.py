"""GPT-2 XL (1.5 billion parameters, float32, Adam) within 4 GiB of torch's memory, on a disk.

Its weights, gradients and Adam state are 24 GB. Weights and state rest on the disk between their uses, the
optimizer steps in backward, and activations wait on the disk or are recomputed.

    python bench/xl.py FOLDER [--budget 4GiB] [--length 64] [--steps 2] [--only small|xl]

First a small model of the same shape (fewer layers, less width, a smaller vocabulary) trains eagerly and by a
plan for a third of eager's peak, from the same start: losses, weights and Adam's state are compared by
torch.equal after each step. Then XL trains alone. FOLDER needs 20 GB of a local disk, the machine 10 GB of
memory while the model is built and laid to rest. Prints what it does as it goes.
"""

import argparse
import copy
import gc
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

import lowtide
from lowtide.offload import disk_store
from lowtide.offload.offload_store import resting_of
from lowtide.units import format_size
from lowtide.verification.measure_step import peak_above_start, static_bytes

WHAT = ("activations", "state", "frozen", "parameters")
START = time.perf_counter()


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT-2."""

    layers: int
    width: int
    heads: int
    vocabulary: int


SMALL, XL = Size(4, 320, 5, 4000), Size(48, 1600, 25, 50257)


@dataclass
class Transfers:
    """Of one step: bytes, seconds that they took, and seconds that the step waited for them."""

    nbytes: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    seconds: float = 0.0
    waited_seconds: float = 0.0


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:7.1f} s] {text}", flush=True)


def built(size: Size, length: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        vocab_size=size.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    tokens = torch.randint(0, size.vocabulary, (1, length))
    return model.train(), {"input_ids": tokens, "labels": tokens.clone()}


def step(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    value: torch.Tensor = loss.detach().clone()
    del loss
    optimizer.step()
    optimizer.zero_grad()
    return value


def planned(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, budget: str | int, folder: str
) -> None:
    lowtide.checkpoint(
        model,
        batch,
        budget=budget,
        optimizer=optimizer,
        step_in_backward=True,
        holds_outputs=False,
        offload=f"disk:{folder}",
        offload_what=WHAT,
    )


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for key, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, torch.Tensor):
                yield f"{key} of {name}", value


def check_small(folder: str, length: int, steps: int, share: float) -> bool:
    """Whether the small model trains as eager does, to the last bit."""
    model, batch = built(SMALL, length)
    other = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-4) for each in (model, other)]
    found = lowtide.profile(model, batch, optimizer=optimizers[0], holds_outputs=False)
    budget_bytes = int(share * found.peak_bytes)
    say(f"small: {format_size(budget_bytes)} of eager's {format_size(found.peak_bytes)}")
    del found
    planned(model, batch, optimizers[0], budget_bytes, folder)
    same = True
    for number in range(1, steps + 1):
        losses = []
        for each, optimizer in zip((model, other), optimizers, strict=True):
            torch.manual_seed(number)
            losses.append(step(each, batch, optimizer))
        pairs = zip(tensors(model, optimizers[0]), tensors(other, optimizers[1]), strict=True)
        different = [name for (name, one), (_, two) in pairs if not torch.equal(one, two)]
        if not torch.equal(*losses):
            different.insert(0, "loss")
        say(
            f"small, step {number}: "
            + (f"differs in {', '.join(different[:5])}" if different else "equal to eager")
        )
        same = same and not different
    lowtide.remove(model)
    return same


@contextmanager
def transfers_seen() -> Iterator[Transfers]:
    """What the threads of the store do, and how long the step waits for them."""
    seen = Transfers()
    wait = disk_store.FileTransfer.wait

    def timed(what: str, run: Any) -> Any:
        def call(file: Any, box: list[memoryview], start: int) -> None:
            nbytes, begin = len(box[0]), time.perf_counter()
            run(file, box, start)
            seen.nbytes[what] += nbytes
            seen.seconds += time.perf_counter() - begin

        return call

    def waited(transfer: disk_store.FileTransfer) -> None:
        begin = time.perf_counter()
        wait(transfer)
        seen.waited_seconds += time.perf_counter() - begin

    file = disk_store._File
    with (
        mock.patch.object(file, "read", timed("read", file.read)),
        mock.patch.object(file, "write", timed("write", file.write)),
        mock.patch.object(disk_store.FileTransfer, "wait", waited),
    ):
        yield seen


def train_xl(size: Size, folder: str, *, budget: str, length: int, steps: int) -> None:
    say("building the model in memory")
    model, batch = built(size, length)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"{count:,} parameters, {format_size(16 * count)} of weights, gradients and Adam state in float32")
    planned(model, batch, optimizer, budget, folder)
    plan = lowtide.plan_of(model)
    assert plan is not None
    say("planned, weights are laid to rest")
    print(plan.summary(), flush=True)
    offload = plan.solution.offload
    if offload is not None and offload.transfer_seconds:
        hidden = 1 - offload.stall_seconds / offload.transfer_seconds
        say(f"predicted: {offload.transfer_seconds:.1f} s of transfers a step, {hidden:.0%} hidden")
    gc.collect()
    lowtide.peak_bytes(model)
    for number in range(1, steps + 1):
        loss = torch.zeros(())

        def run(seed: int = number) -> None:
            nonlocal loss
            torch.manual_seed(seed)
            loss = step(model, batch, optimizer)

        begin = time.perf_counter()
        with transfers_seen() as seen:
            peak_bytes = static_bytes(model, batch, optimizer) + peak_above_start(run)
        seconds = time.perf_counter() - begin
        hidden = 1 - min(1.0, seen.waited_seconds / seen.seconds) if seen.seconds else 0.0
        say(
            f"step {number}: {seconds:.1f} s, loss {loss.item():.6f}, peak {format_size(peak_bytes)} of "
            f"torch's memory ({format_size(plan.peak_bytes)} predicted), "
            f"{format_size(lowtide.peak_bytes(model))} resident; "
            f"{format_size(seen.nbytes['read'])} read and {format_size(seen.nbytes['write'])} written in "
            f"{seen.seconds:.1f} s, of which {hidden:.0%} hidden"
        )
    resting = sum(p.nbytes for p in model.parameters() if resting_of(p) is not None)
    free_bytes = shutil.disk_usage(folder).free
    say(f"{format_size(resting)} of weights rest; the folder has {format_size(free_bytes)} left")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="on a local disk")
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--length", type=int, default=64, help="tokens of the one sequence")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", choices=("small", "xl"))
    parser.add_argument("--layers", type=int, default=XL.layers, help="of the large model, to try it out")
    parser.add_argument(
        "--share", type=float, default=0.35, help="budget of the small model, of eager's peak"
    )
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("lowtide").setLevel(logging.INFO)
    if given.only != "xl" and not check_small(given.folder, given.length, given.steps, given.share):
        raise SystemExit(4)
    if given.only != "small":
        size = Size(given.layers, XL.width, XL.heads, XL.vocabulary)
        train_xl(size, given.folder, budget=given.budget, length=given.length, steps=given.steps)


if __name__ == "__main__":
    main()
