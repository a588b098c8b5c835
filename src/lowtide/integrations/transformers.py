"""Training inside a memory budget with the Trainer of transformers, or one of TRL.

    from lowtide.integrations.transformers import Lowtide

    Trainer(model, args, train_dataset=data, callbacks=[Lowtide(budget="8GiB")]).train()

The step is planned at the first batch, with the Trainer's own optimizer, precision and accumulation of
gradients, and one line says what to expect. Losses and parameters are those of training without it.
"""

import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lowtide.api import checkpoint
from lowtide.errors import LowtideError
from lowtide.facts.plan import parse_rounds
from lowtide.integrations.first_call import (
    await_first_call,
    checked_budget,
    checked_executor,
    checked_offload,
    checked_offload_what,
    checked_reserve,
    no_longer_await,
)
from lowtide.integrations.held_besides import held_besides, loop_is_of, tell_of
from lowtide.integrations.logged_peak import logged_peak
from lowtide.optim.joined_optimizers import inner_optimizers
from lowtide.plans import Plan
from lowtide.runtime.apply import plan_of
from lowtide.runtime.loop_messages import TRAINER
from lowtide.runtime.runner import remove
from lowtide.trace.model_call import Arguments

__all__ = ["Lowtide"]


class Lowtide(TrainerCallback):
    """Let a Trainer's model train with a peak of at most `budget` bytes.

    A budget that cannot be met raises `BudgetTooSmall` before the first step. `plan` is the plan that was
    made, None before that. The model has no plan any more when the training ends.

    Args:
        budget: Bytes, a size (`"8GiB"`), a share of the baseline's peak (`"60%"`), or `"auto"`, what the
            device has free.
        planner: The name of a planner.
        holds_outputs: `True` for a Trainer whose own `compute_loss` or `training_step` keeps the model's
            outputs (logits, say) live through the backward pass. Trainer itself does not; one that does is
            warned.
        reserve: Bytes that are live besides the step, such as those of an averaged copy or a reference model.
            Without it, what the process holds besides is said, and counts on an accelerator.
        offload: `"disk:FOLDER"` or `"host"`: activations may also wait there.
        offload_what: What may wait there, one or several of `"activations"`, `"state"`, `"frozen"` and
            `"parameters"`, as for `lowtide.profile`.
        rounds: `"head"`: what may run with other bits than eager's, as for `lowtide.profile`.
        swap: The earlier name of `offload`.
        executor: `"inductor"`: what is planned is compiled by Inductor.
        log_peak: The peak that was measured since the last logging stands beside the loss, and reaches
            whatever the Trainer reports to. `False` leaves torch's counter of it alone.
    """

    def __init__(
        self,
        budget: str | int = "auto",
        *,
        planner: str = "auto",
        holds_outputs: bool = False,
        reserve: str | int = 0,
        offload: str = "",
        offload_what: str | Iterable[str] = ("activations",),
        rounds: str | Iterable[str] = (),
        swap: str = "",
        executor: str = "eager",
        log_peak: bool = True,
    ) -> None:
        self.budget = checked_budget(budget)
        self.planner = planner
        self.holds_outputs = holds_outputs
        self.reserve = checked_reserve(reserve)
        self.offload = checked_offload(offload, swap)
        self.offload_what = checked_offload_what(offload_what, offload=self.offload)
        self.rounds = parse_rounds(rounds)
        self.executor = checked_executor(executor)
        self.log_peak = log_peak
        self.plan: Plan | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.torch_compile:
            raise LowtideError(
                "torch_compile=True would go past the plan: leave it out, lowtide compiles by itself"
            )
        if args.deepspeed:
            raise LowtideError(
                "DeepSpeed has a training step of its own, which lowtide cannot plan: leave out one of them"
            )
        optimizer = kwargs["optimizer"]
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer  # the wrapper takes no step while gradients are accumulated

        def meet(module: nn.Module, call: Arguments) -> None:
            besides = held_besides(module, call, inner_optimizers(optimizer))
            checkpoint(
                module,
                call,
                budget=self.budget,
                reserve=besides.counted_bytes(self.reserve, self.budget),
                planner=self.planner,
                optimizer=optimizer,
                accumulate=args.gradient_accumulation_steps > 1,
                holds_outputs=self.holds_outputs,
                offload=self.offload,
                offload_what=self.offload_what,
                rounds=self.rounds,
                executor=self.executor,
            )
            self.plan = plan_of(module)
            loop_is_of(TRAINER, module)
            if self.plan is not None and state.is_world_process_zero:
                tell_of(self.plan, besides, self.reserve)
            if self.log_peak:
                logged_peak(module)  # what planning took is not logged

        if self.log_peak:
            _log_first(self, inspect.currentframe())
        self.plan = None
        await_first_call(kwargs["model"], meet)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the measured peak beside the loss: into the dict that reporters get, and into the history."""
        logs: dict[str, float] = kwargs.get("logs") or {}
        if self.log_peak and self.plan is not None and "loss" in logs:
            found = logged_peak(kwargs["model"])
            logs.update(found)
            state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        no_longer_await(remove(kwargs["model"]))


def _log_first(callback: Lowtide, frame: FrameType | None) -> None:
    """Let `callback` have its turn before the reporters (TensorBoard, W&B), which a Trainer puts first.

    No event tells a callback of the handler that calls it: `frame` is that of the event, and the handler is
    the caller's `self`. Where it is not, the peak is in the history and in what is printed alone.
    """
    caller = None if frame is None or frame.f_back is None else frame.f_back.f_locals.get("self")
    callbacks = getattr(caller, "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
