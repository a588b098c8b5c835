"""Apply a plan to a model, in place; and the plan that a model trains by."""

import weakref

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.facts.plan import parse_offload
from lowtide.offload.offload_store import OffloadStore, open_store
from lowtide.ops.repeatable_ops import add_statements
from lowtide.optim.joined_optimizers import inner_optimizers
from lowtide.optim.resting_state import RestingState
from lowtide.optim.resting_step import RestingStep
from lowtide.optim.split_check import check_split
from lowtide.optim.split_step import SplitStep
from lowtide.optim.step_in_backward import StepInBackward
from lowtide.planning.resting_forms import resting_name
from lowtide.plans import Plan, check_identity
from lowtide.runtime.executor import Executor, executor_named
from lowtide.runtime.replan import Replanner
from lowtide.runtime.resting_model import RestingWeights, weight_names
from lowtide.runtime.runner import Runner, install, runner_of
from lowtide.trace.identity import identify_model


def apply_plan(
    plan: Plan,
    model: nn.Module,
    *,
    executor: Executor | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Route `model`'s calls through `plan`, in place; `executor` runs the graphs, by default the plan's own.

    A plan that steps in backward or in chunks needs the `optimizer`, unless the optimizer of its profile is
    still live.
    """
    check_identity(plan, identify_model(model))
    add_statements(plan.solution.repeatable)
    updates = split_step = None
    store = _store_of(plan)
    resting_step = _resting_step(plan, model, store)
    if plan.solution.step_in_backward or plan.solution.optimizer_in_chunks:
        known = _optimizer_of(plan, optimizer)
        every, within = inner_optimizers(known), check_split(known).within_parameters
        if plan.solution.step_in_backward:
            updates = StepInBackward(every, model, within_parameters=within, resting=resting_step)
        else:
            chunk_bytes = plan.solution.optimizer_chunk_bytes
            split_step = SplitStep(
                every, within_parameters=within, chunk_bytes=chunk_bytes, resting=resting_step
            )
    resting = None
    if store is not None and weight_names(plan.solution.resting):
        resting = RestingWeights(model, plan.solution.resting, store)
    batch = dict(plan.solution.identity).get("batch")
    runs_by = executor or plan.executor or executor_named(plan.solution.executor)
    runner = Runner(
        model,
        Replanner(plan, model, updates=updates, executor=runs_by),
        executor=runs_by,
        eager_batch=batch if plan.solution.eager else None,
        planned_batch=batch,
        updates=updates,
        split_step=split_step,
        holds_outputs=plan.solution.holds_outputs,
        traced=None if plan.solution.eager else plan.traced,
        store=store,
        resting=resting,
    )
    install(runner)
    return model


def _store_of(plan: Plan) -> OffloadStore | None:
    """The store of a plan that offloads, with all its bytes reserved; `StoreError` where the bytes are
    missing."""
    offload = plan.solution.offload
    if offload is None:
        return None
    store = open_store(parse_offload(offload.transfer_speed.store), plan.solution.device)
    store.reserve(offload.store_bytes)
    return store


def _resting_step(plan: Plan, model: nn.Module, store: OffloadStore | None) -> RestingStep | None:
    """What takes the optimizer's steps where its state rests; None where the plan lets none of it rest."""
    reference = weakref.ref(model)

    def find() -> dict[int, str]:
        alive = reference()
        if alive is None:
            return {}
        return {id(p): name for name, p in alive.named_parameters() if resting_name(name) in chosen}

    chosen = frozenset(plan.solution.resting)
    names = find()
    if store is None or not names:
        return None
    return RestingStep(RestingState(store, names, find=find))


def _optimizer_of(plan: Plan, given: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    optimizer = given if given is not None or plan.loop is None else plan.loop.optimizer
    if optimizer is None:
        raise LowtideError(
            "this plan takes the optimizer's step in the backward pass or in chunks, and no optimizer is "
            "known here: plan.apply(model, optimizer=...)"
        )
    return optimizer


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that `model` trains by; None for a plain model. A wrapper has the plan of the model inside."""
    runner = runner_of(model)
    return runner.schedules.plan if runner is not None and isinstance(runner.schedules, Replanner) else None
