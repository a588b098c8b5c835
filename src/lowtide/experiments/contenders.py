"""Methods to run a step in less memory, lowtide's and others, with a switch for use in one process."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import LowtideError
from lowtide.experiments.remat_regions import Forward, region
from lowtide.facts.serial import solution_from_dict, solution_to_dict
from lowtide.ops.direct import direct_function
from lowtide.plans import Plan
from lowtide.runtime.executor import executor_named
from lowtide.runtime.runner import Runner, attach, install, remove, runner_of
from lowtide.torch_compat import aot_autograd as aot
from lowtide.torch_compat import dynamo
from lowtide.torch_compat.modules import call_model, set_route
from lowtide.trace.compile_settings import compiled
from lowtide.verification.comparison import baseline_schedules, planned
from lowtide.zoo.targets import Target


class NotApplicable(LowtideError):
    """A method has nothing to work on in this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`blocks`: torch.utils.checkpoint around every repeated block. `regions`: the same by the package
    torch_remat, where every block is one region that is recomputed. `partitioner`: torch's own, where
    `memory_budget` is a share of the saved bytes. `inductor`: the same, compiled by Inductor. `plan`:
    lowtide's, with its `solution`."""

    name: str
    kind: Literal["eager", "blocks", "regions", "partitioner", "inductor", "plan"]
    memory_budget: float | None = None
    solution: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Switch:
    """`on` makes the model run by a method, `off` as before; any number of times."""

    on: Callable[[], None]
    off: Callable[[], None]


def plan_method(name: str, plan: Plan) -> Contender:
    return Contender(name=name, kind="plan", solution=solution_to_dict(plan.solution))


def switch_for(method: Contender, target: Target) -> Switch:
    """The switch of `method`; the model does not change until `on`."""
    model = target.model
    match method.kind:
        case "eager":
            return Switch(lambda: None, lambda: None)
        case "blocks":
            return _around_blocks(repeated_blocks(model), _checkpointed)
        case "regions":
            return _around_blocks(repeated_blocks(model), region)
        case "partitioner":
            return _route(model, _compiled(model, partitioned_by_torch, method.memory_budget))
        case "inductor":
            eager_random = method.memory_budget is None  # so that results can be eager's
            return _route(model, _compiled(model, _by_inductor(eager_random), method.memory_budget))
        case "plan":
            assert method.solution is not None
            return _planned(planned(target, solution=method.solution).model)


def reference_for(method: Contender, target: Target) -> Switch | None:
    """The graph of a method, run without recompute; None for a method without a graph.

    Where results differ from eager's and equal those of this graph, recompute is not the cause.
    """
    model = target.model
    if method.kind == "partitioner":
        return _route(model, _compiled(model, partitioned_by_torch, None))
    if method.kind == "inductor" and method.memory_budget is not None:
        return _route(model, _compiled(model, _by_inductor(eager_random=False), None))
    if method.kind == "plan":
        assert method.solution is not None
        executor = executor_named(solution_from_dict(method.solution).executor)
        install(Runner(model, baseline_schedules(method.solution), executor=executor))
        return _planned(model)
    return None


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a user would checkpoint: in lists of modules, all of the class that occurs most often
    in one list. Modules without children are no blocks.
    """
    containers = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    longest: Counter[type[nn.Module]] = Counter()
    for container in containers:
        counts = Counter(type(child) for child in container if any(True for _ in child.children()))
        for kind, count in counts.items():
            longest[kind] = max(longest[kind], count)
    if not longest or max(longest.values()) < 2:
        raise NotApplicable("there are no repeated blocks: no list of modules has one class twice")
    chosen = longest.most_common(1)[0][0]
    found = {id(child): child for container in containers for child in container if type(child) is chosen}
    return list(found.values())


def _checkpointed(forward: Forward) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=True)


def _around_blocks(blocks: list[nn.Module], around: Callable[[Forward], Forward]) -> Switch:
    wrapped = [around(block.forward) for block in blocks]

    def on() -> None:
        for block, forward in zip(blocks, wrapped, strict=True):
            block.forward = forward

    def off() -> None:
        for block in blocks:
            block.__dict__.pop("forward", None)

    return Switch(on, off)


def partitioned_by_torch(
    graph: fx.GraphModule, inputs: Sequence[Any], *, memory_budget: float | None
) -> Callable[..., Any]:
    """A torch.compile backend that leaves recomputing to torch's own partitioner, for comparison.

    `memory_budget` is `torch._functorch.config.activation_memory_budget`; None recomputes nothing. Ops run
    eagerly, and values are freed after their last use as in lowtide's own graphs.
    """

    def compiler(module: fx.GraphModule, _args: Any) -> Callable[..., Any]:
        return aot.takes_list(direct_function(module))

    partition = (
        aot.default_partition
        if memory_budget is None
        else partial(aot.min_cut_rematerialization_partition, compiler="inductor")
    )
    compile_with = aot.aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=aot.inductor_decompositions(),
        partition_fn=partition,
    )
    budget = 1.0 if memory_budget is None else memory_budget
    with aot.functorch_config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        compiled_graph: Callable[..., Any] = compile_with(graph, inputs)
    return compiled_graph


def _by_inductor(eager_random: bool) -> Callable[..., Any]:
    from lowtide.torch_compat.inductor import compiled_by_torch

    return partial(compiled_by_torch, eager_random=eager_random)


def _compiled(
    model: nn.Module, compiler: Callable[..., Any], memory_budget: float | None
) -> Callable[..., Any]:
    backend = partial(compiler, memory_budget=memory_budget)
    call = compiled(dynamo.own_code(call_model), backend)

    def route(*args: Any, backend: object = backend, **kwargs: Any) -> Any:
        """`backend` is an argument because it must outlive its compiled code."""
        with dynamo.quiet():
            return call(model, args, kwargs)

    return route


def _planned(model: nn.Module) -> Switch:
    """The switch of a model with an applied plan; removes the plan, from the optimizer's steps as well."""
    runner = runner_of(model)
    assert runner is not None
    remove(model)

    def off() -> None:
        remove(model)

    return Switch(lambda: attach(model, runner), off)


def _route(model: nn.Module, route: Callable[..., Any]) -> Switch:
    return Switch(lambda: set_route(model, route), lambda: set_route(model, None))
