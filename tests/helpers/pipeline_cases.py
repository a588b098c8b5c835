"""Stages of a pipeline over two processes, trained with and without plans."""

import copy
import logging
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

import lowtide
from lowtide.verification.measure_step import peak_above_start, static_bytes

WIDTH, ROWS, MICROBATCHES, BLOCKS, PROCESSES = 64, 64, 8, 8, 2

SCHEDULES = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zero bubble, V": ScheduleZBVZeroBubble,
}
SINGLE = ("1F1B", "GPipe")


class PipelineBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass(slots=True)
class Pipeline:
    """The stages of one process, each with its optimizer, and the schedule of all stages."""

    models: list[nn.Module]
    stages: list[PipelineStage]
    schedule: Any
    optimizers: list[torch.optim.Optimizer]
    losses: list[Tensor] = field(default_factory=list)
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    targets: Tensor = field(default_factory=lambda: torch.empty(0))

    def step(self) -> None:
        args = [self.inputs] if self.stages[0].is_first else []
        is_last = any(stage.is_last for stage in self.stages)
        self.schedule.step(*args, **({"target": self.targets, "losses": self.losses} if is_last else {}))
        for optimizer in self.optimizers:
            optimizer.step()

    def evaluate(self) -> Tensor | None:
        """The output of an evaluation, on the process that has the last stage."""
        args = [self.inputs] if self.stages[0].is_first else []
        is_last = any(stage.is_last for stage in self.stages)
        output = self.schedule.eval(
            *args, **({"target": self.targets, "losses": self.losses} if is_last else {})
        )
        return None if output is None else output.detach().clone()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        found = {f"loss {i}": loss.detach().clone() for i, loss in enumerate(self.losses)}
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                found[f"{number}.{name}"] = parameter.detach().clone()
                if parameter.grad is not None:
                    found[f"{number}.{name}.grad"] = parameter.grad.clone()
        return found

    def measured(self) -> int:
        """The peak of a step. The profiler does not see that a step frees outputs of the last one: they are
        freed before."""
        self.zero_grad()
        self.losses.clear()
        for stage in self.stages:
            stage.clear_runtime_states()
        return peak_above_start(self._whole_step) + self._kept_bytes()

    def _whole_step(self) -> None:
        self.step()
        self.zero_grad()

    def _kept_bytes(self) -> int:
        """Of the models, the batch and the pipeline's buffers, live all along."""
        buffers = {
            info.buffer.untyped_storage().data_ptr(): info.buffer.nbytes
            for stage in self.stages
            for received in (stage.args_recv_info, stage.grad_recv_info)
            for infos in received.values()
            for info in infos
            if getattr(info, "buffer", None) is not None
        }
        own = sum(static_bytes(m, (), o) for m, o in zip(self.models, self.optimizers, strict=True))
        batch = self.inputs.nbytes * any(stage.is_first for stage in self.stages)
        return own + batch + self.targets.nbytes * any(s.is_last for s in self.stages) + sum(buffers.values())


def pipeline(rank: int, name: str) -> Pipeline:
    """The same on every call; each call has a new model."""
    torch.manual_seed(0)
    number = PROCESSES if name in SINGLE else 2 * PROCESSES
    whole = [nn.Sequential(*(PipelineBlock() for _ in range(BLOCKS // number))) for _ in range(number)]
    second = number - 1 - rank if name.endswith("V") else rank + PROCESSES
    own = [rank] if name in SINGLE else [rank, second]
    models = [copy.deepcopy(whole[index]) for index in own]
    stages = [
        PipelineStage(model, index, number, torch.device("cpu"))
        for model, index in zip(models, own, strict=True)
    ]
    schedule: Any = SCHEDULES[name]
    made = Pipeline(
        models,
        stages,
        schedule(stages[0] if name in SINGLE else stages, MICROBATCHES, loss_fn=squared),
        [torch.optim.AdamW(model.parameters()) for model in models],
    )
    made.inputs, made.targets = (torch.randn(ROWS * MICROBATCHES, WIDTH) for _ in range(2))
    return made


def plan_stages(made: Pipeline, share: float) -> list[dict[str, int]]:
    """Plan every stage for a budget between its floor (0) and its baseline (1); the figures of each."""
    found = []
    for model, stage, optimizer in zip(made.models, made.stages, made.optimizers, strict=True):
        target = torch.randn(ROWS, WIDTH)
        profile = lowtide.profile(
            model,
            torch.randn(ROWS, WIDTH),
            optimizer=optimizer,
            loss=(lambda output, target=target: squared(output, target)) if stage.is_last else None,
            pipeline=made.schedule,
        )
        floor = profile.floor_bytes
        plan = profile.plan(floor + int(share * (profile.peak_bytes - floor)))
        plan.apply(model)
        found.append(
            {
                "stage": stage.stage_index,
                "in flight": plan.solution.calls,
                "plain": profile.peak_bytes,
                "floor": floor,
                "budget": plan.budget_bytes,
                "planned": plan.peak_bytes,
            }
        )
    return found


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def compared(rank: int, *, name: str, share: float = 0.3) -> dict[str, Any]:
    """Train two steps with and without plans: what differs, the figures of each stage, and both peaks."""
    said = _Said()
    logging.getLogger("lowtide").addHandler(said)
    plain, planned = pipeline(rank, name), pipeline(rank, name)
    stages = plan_stages(planned, share)
    different: list[str] = []
    number = 0
    for step in range(2):
        for made in (plain, planned):
            made.losses.clear()
            made.zero_grad()
            made.step()
        one, other = plain.state(), planned.state()
        number += len(one)
        different += [key for key in one if not torch.equal(one[key], other[key])]
        if name in SINGLE and not step:  # torch makes buffers for gradients anew after an evaluation
            outputs = [made.evaluate() for made in (plain, planned)]
            different += [] if outputs[0] is None or torch.equal(*outputs) else ["evaluation"]
    found = {"plain": plain.measured(), "planned": planned.measured()}
    return {"stages": stages, "different": different, "compared": number, "said": said.words, **found}


def ends_in_a_step(rank: int, *, name: str, how: str) -> None:
    """Rank 1 is killed, or raises, in the middle of the second step."""
    made = pipeline(rank, name)
    plan_stages(made, 0.5)
    for step in range(3):
        if rank == 1 and step:
            made.models[0].register_forward_pre_hook(lambda *_: end(how))
        made.step()


def end(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a stage of mine")
