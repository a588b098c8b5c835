"""Training inside a memory budget with the Trainer of Lightning.

    from lowtide.integrations.lightning import Lowtide

    Trainer(callbacks=[Lowtide(budget="8GiB")]).fit(module)

What is planned is what `training_step` calls: `self(...)`, or the one network inside of the LightningModule
that is trained. That happens at the first batch, with the Trainer's own optimizers, precision and
accumulation of gradients, and one line says what to expect. Losses and parameters are those of training
without it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lowtide.api import checkpoint
from lowtide.errors import BudgetTooSmall, LowtideError, RankError
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
from lowtide.parallel.ranks import ranks_of, together
from lowtide.plans import Plan
from lowtide.runtime.apply import plan_of
from lowtide.runtime.loop_messages import TRAINER
from lowtide.runtime.observer import SMALL_BYTES
from lowtide.runtime.runner import remove, runner_of
from lowtide.trace.model_call import Arguments

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

__all__ = ["Lowtide"]


class Lowtide(Callback):
    """Let a LightningModule train with a peak of at most `budget` bytes.

    A budget that cannot be met raises `BudgetTooSmall` before the first step. `plan` is the plan that was
    made, None before that. The model has no plan any more when the training ends. Gradients of the last step
    are dropped before the forward pass, where Lightning drops them after it.

    Args:
        budget: Bytes, a size (`"8GiB"`), a share of the baseline's peak (`"60%"`), or `"auto"`, what the
            device has free.
        planner: The name of a planner.
        holds_outputs: Whether the network's outputs (logits, say) stay live through the backward pass. By
            default this is seen in the first step: where `training_step` frees them, on all processes, the
            second batch is planned anew, with fewer live bytes.
        reserve: Bytes that are live besides the step, such as those of an averaged copy; what the
            LightningModule has besides the network counts anyway. Without it, what the process holds besides
            is said, and counts on an accelerator.
        offload: `"disk:FOLDER"` or `"host"`: activations may also wait there.
        offload_what: What may wait there, one or several of `"activations"`, `"state"`, `"frozen"` and
            `"parameters"`, as for `lowtide.profile`.
        rounds: `"head"`: what may run with other bits than eager's, as for `lowtide.profile`.
        swap: The earlier name of `offload`.
        executor: `"inductor"`: what is planned is compiled by Inductor.
        log_peak: The measured peak is logged beside the loss, to the Trainer's own loggers. `False` leaves
            torch's counter of it alone.
    """

    def __init__(
        self,
        budget: str | int = "auto",
        *,
        planner: str = "auto",
        holds_outputs: bool | None = None,
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
        self._peaks: dict[str, deque[float]] = {}
        self._planned: nn.Module | None = None
        self._lets_go = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.plan, self._planned, self._lets_go = None, None, False
        networks = [module for module in _networks(pl_module) if _is_trained(module)]
        if trainer.strategy.model is pl_module:
            # where it is wrapped, Lightning sends all of training_step through the module's call
            networks.insert(0, pl_module)
        for module in networks:
            await_first_call(module, lambda module, call: self._meet(trainer, pl_module, module, call))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
        if self._lets_go and self._planned is not None:
            module, self._planned = self._planned, None
            await_first_call(module, lambda module, call: self._meet(trainer, pl_module, module, call))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The first time, see what is left of the network's outputs now that `training_step` has returned."""
        if self._planned is None or self._lets_go:
            return
        runner = runner_of(self._planned)
        is_gone = runner is not None and runner.observer.view().live_output_bytes <= SMALL_BYTES
        wins = self.plan is not None and _may_win(self.plan)
        self._lets_go = _on_all(self._planned, is_gone=is_gone, wins=wins)
        if not self._lets_go:
            self._planned = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the largest peak of the last `log_every_n_steps` batches: Lightning keeps the last value."""
        if not self.log_peak or self.plan is None:
            return
        for name, peak in logged_peak(pl_module).items():
            peaks = self._peaks.setdefault(
                name, deque(maxlen=max(1, getattr(trainer, "log_every_n_steps", 1)))
            )
            peaks.append(peak)
            pl_module.log(name, max(peaks))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _release(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _release(pl_module)

    def _meet(self, trainer: Trainer, pl_module: LightningModule, module: nn.Module, call: Arguments) -> None:
        """Plan the module that is called first: all that is trained is in there, or no budget can be kept."""
        _release(pl_module)
        own = {id(parameter) for parameter in module.parameters()}
        # what toggle_optimizer freezes while another network trains, as in a GAN, is trained later
        toggled = vars(pl_module).get("_param_requires_grad_state", {})  # Lightning's own; 2.6
        for name, parameter in pl_module.named_parameters():
            if (parameter.requires_grad or toggled.get(parameter)) and id(parameter) not in own:
                raise LowtideError(
                    f"training_step calls a {type(module).__name__}, and '{name}' outside of it is trained "
                    "as well: put all that is trained into one module, and call that in training_step"
                )
        besides = held_besides(pl_module, call, trainer.optimizers)
        own_bytes = _state_bytes(pl_module) - _state_bytes(module)
        options: dict[str, Any] = {
            "budget": self.budget,
            "planner": self.planner,
            "optimizer": trainer.optimizers,
            "accumulate": trainer.accumulate_grad_batches > 1,
            "reserve": own_bytes + besides.counted_bytes(self.reserve, self.budget),
            "offload": self.offload,
            "offload_what": self.offload_what,
            "rounds": self.rounds,
            "executor": self.executor,
        }
        first = self.holds_outputs is None and not self._lets_go
        try:
            checkpoint(module, call, holds_outputs=first or bool(self.holds_outputs), **options)
        except (BudgetTooSmall, RankError) as error:
            # where several processes train, the others hear of it
            if not first or (isinstance(error, RankError) and error.kind != BudgetTooSmall.__name__):
                raise
            checkpoint(module, call, holds_outputs=False, **options)  # warns if that is not so
        self.plan = plan_of(module)
        loop_is_of(TRAINER, module)
        if self.plan is not None and first and trainer.is_global_zero:
            tell_of(self.plan, besides, self.reserve)
        if self.log_peak:
            logged_peak(module)  # what planning took is not logged
            self._peaks = {}
        self._planned = module if first else None


def _on_all(module: nn.Module, *, is_gone: bool, wins: bool) -> bool:
    """Whether the outputs are gone on all ranks and one of them wins by that: all of them then plan anew."""
    ranks = ranks_of(module, None)
    told = [(is_gone, wins)]
    if ranks is not None:
        _, told = together(ranks, lambda: (is_gone, wins), tell=list)
    return all(gone for gone, _ in told) and any(one_wins for _, one_wins in told)


def _may_win(plan: Plan) -> bool:
    """Whether a step would be faster with fewer bytes live."""
    return plan.solution.holds_outputs and plan.recompute_seconds > 0


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside of one that can be called: its children, and those of lists and dicts of modules."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _networks(child)
        else:
            yield child


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _state_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _release(pl_module: LightningModule) -> None:
    for module in (pl_module, *_networks(pl_module)):
        no_longer_await(remove(module))
