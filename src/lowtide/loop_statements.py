"""The user's statements about the loop around a model: what a step is captured with."""

import logging
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lowtide import display
from lowtide.analyze.captured_step import Captured, capture
from lowtide.errors import LowtideError
from lowtide.facts import Step
from lowtide.facts.gpus import Gpu
from lowtide.facts.pipeline import StageInPipeline
from lowtide.facts.plan import OffloadTarget, parse_offload
from lowtide.facts.sizes import parse_size
from lowtide.offload.offload_store import open_store
from lowtide.ops.repeatable_ops import stated
from lowtide.ops.rounded_head import NO_HEAD
from lowtide.optim.joined_optimizers import join_optimizers
from lowtide.parallel.microbatches import stage_in_pipeline
from lowtide.parallel.ranks import Ranks
from lowtide.parallel.simulated_sharding import SimulatedSharding
from lowtide.planning.pipeline_bytes import kept_bytes
from lowtide.planning.rounded_step import NOT_USED
from lowtide.profiling.costing import KnownCosts, estimate_costs
from lowtide.profiling.transfer_speed import measure_transfer_speed
from lowtide.runtime.loop_watch import leave
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat import ddp
from lowtide.torch_compat.dispatch import map_leaves
from lowtide.torch_compat.dtensor import is_divided
from lowtide.torch_compat.fsdp2 import units_of
from lowtide.trace.identity import user_tensors
from lowtide.trace.model_call import Loop, Loss, Optimizers, tensors_in
from lowtide.trace.step_device import device_of

logger = logging.getLogger("lowtide")

SHARDED_ROUNDS = "rounds is not planned for models that are sharded over processes: leave rounds out"
SHARDED_OFFLOAD = "offload is not planned for models that are sharded over processes: leave offload out"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStatements:
    """The user's statements about the loop around the model."""

    optimizer: Optimizers | None
    loss: Loss | None
    accumulate: bool
    reserve: str | int
    step_in_backward: bool
    holds_outputs: bool
    offload: str
    offload_what: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    calls: int = 1
    stage: StageInPipeline | None = None

    @property
    def reserve_bytes(self) -> int:
        return parse_size(self.reserve) if self.reserve else 0

    def of_pipeline(self, schedule: Any, model: Any) -> Self:
        """These statements for a stage of a pipeline with that schedule; as they are without a schedule."""
        if schedule is None:
            return self
        if self.calls != 1:
            raise LowtideError("calls is found from the schedule of the pipeline: leave calls out")
        is_stage = isinstance(schedule, StageInPipeline)
        stage = schedule if is_stage else stage_in_pipeline(schedule, model)
        accumulate = self.accumulate or stage.accumulates
        return replace(self, stage=stage, calls=stage.in_flight, accumulate=accumulate)

    def is_alone(self, process_group: ProcessGroup | None) -> bool:
        """Whether this process alone trains the model: other processes have other stages."""
        return self.stage is not None and process_group is None

    def received(self, batch: Any) -> Any:
        """A micro-batch as the stage gets it: the values of an earlier stage need gradients."""
        if self.stage is None or self.stage.is_first:
            return batch
        if any(tensor.requires_grad for tensor in tensors_in(batch)):
            return batch
        return map_leaves(
            lambda leaf: (
                leaf.detach().requires_grad_()
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
                else leaf
            ),
            batch,
        )

    def loop(self, model: nn.Module, batch: Any, step: Step | None = None) -> Loop:
        """What the loop is known to have; `step` is the captured one, with what a pipeline keeps live."""
        return Loop.of(
            self.optimizer,
            self.loss,
            holds_outputs=self.holds_outputs,
            reserve_bytes=self.reserve_bytes + (kept_bytes(step) if self.stage and step else 0),
            origins=user_tensors(model, batch),
        )

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The settings that must be the same on all ranks."""
        named = (
            "accumulate",
            "reserve_bytes",
            "step_in_backward",
            "holds_outputs",
            "offload",
            "offload_what",
            "rounds",
            "calls",
        )
        own = [(name, str(getattr(self, name))) for name in named]
        return [*own, ("repeatable ops", ",".join(stated()))]

    @property
    def offload_to(self) -> OffloadTarget | None:
        return parse_offload(self.offload) if self.offload else None

    def check(self, model: nn.Module, batch: Any, ranks: Ranks | None) -> None:
        if not isinstance(model, nn.Module):
            raise LowtideError(f"profile() needs an nn.Module, not a {type(model).__name__}")
        if runner_of(model) is not None:
            raise LowtideError(
                "this model already runs by a plan: call lowtide.remove(model) before profiling it"
            )
        if self.step_in_backward and self.accumulate:
            raise LowtideError(
                "step_in_backward=True updates parameters in every backward pass, and accumulate=True says "
                "that gradients of several are added up: choose one of them"
            )
        if self.step_in_backward and (ranks is not None or is_divided(model)):
            raise LowtideError(
                "step_in_backward=True would update parameters before the gradients of all processes are "
                "there: leave it out"
            )
        if self.offload_to is not None and units_of(model):
            raise LowtideError(SHARDED_OFFLOAD)
        if self.rounds and units_of(model):
            raise LowtideError(SHARDED_ROUNDS)
        self._check_calls(model)
        if "state" in self.offload_what and self.optimizer is None:
            raise LowtideError(
                "offload_what names the optimizer's state, and no optimizer is given: optimizer=..., or "
                "leave 'state' out"
            )
        if self.offload_to is not None:
            open_store(self.offload_to, str(device_of(model, batch)))
        ddp.check(model)

    def _check_calls(self, model: nn.Module) -> None:
        """Refuse a number of calls that is none, and what is not planned for several calls.

        Stages of one pipeline are alike, also one with a single micro-batch in flight.
        """
        if type(self.calls) is not int or self.calls < 1:
            raise LowtideError(
                f"calls={self.calls!r} is no number of calls: give how often a step calls the model before "
                "its first backward pass, 1 or more"
            )
        if self.calls == 1 and self.stage is None:
            return
        given = f"calls={self.calls}" if self.stage is None else "a stage of a pipeline"
        option = "calls" if self.stage is None else "pipeline"
        others = {
            "step_in_backward": self.step_in_backward,
            "offload": self.offload_to is not None,
            "rounds": bool(self.rounds),
        }
        for name in (name for name, is_given in others.items() if is_given):
            raise LowtideError(
                f"{name} is planned for a backward pass after each call of the model, not for {given}: leave "
                f"{name} or {option} out"
            )
        if units_of(model):
            raise LowtideError(
                "several calls before a backward pass are not planned for models that are sharded by "
                "fully_shard: leave calls and pipeline out"
            )

    def capture(
        self,
        model: nn.Module,
        batch: Any,
        *,
        simulated: SimulatedSharding | None = None,
        gpu: Gpu | None = None,
    ) -> Captured:
        leave()
        with display.shown() as line:
            line.stage("capturing the step")
            return capture(
                ddp.unwrapped(model),
                batch,
                optimizer=join_optimizers(self.optimizer),
                loss=self.loss,
                accumulate=self.accumulate,
                calls=self.calls,
                stage=self.stage,
                reserve_bytes=self.reserve_bytes,
                step_in_backward=self.step_in_backward,
                holds_outputs=self.holds_outputs,
                simulated=simulated,
                offload_what=self.offload_what,
                gpu=gpu,
            )

    def with_rounding(self, step: Step, captured: Captured, known: KnownCosts) -> tuple[Step, Step | None]:
        """The step, and its form that rounds; where that is the same step, a note says why."""
        if not self.rounds or captured.again is None:
            return step, None
        other = captured.again(replace(captured.again.settings, rounds=self.rounds))
        assert other is not None, "the model and the batch are alive here"
        if any(graph.rounds for graph in other.step.graphs):
            rounded = replace(estimate_costs(other, known), transfer_speed=step.transfer_speed)
            return step, replace(rounded, copy_bytes_per_second=step.copy_bytes_per_second)
        reason = "; ".join(other.not_rounding) or NO_HEAD
        note = NOT_USED.format(what=",".join(self.rounds), reason=reason)
        logger.warning(note)
        return replace(step, notes=(*step.notes, note)), None

    def with_link(self, step: Step, *, cache: bool = True) -> Step:
        """The step with the transfer speed of its store, if it has one."""
        target = self.offload_to
        return (
            step
            if target is None
            else replace(step, transfer_speed=measure_transfer_speed(target, step, cache))
        )
