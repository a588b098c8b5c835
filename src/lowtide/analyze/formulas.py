"""Eager's formulas of gradients as one: which ops of a graph stand for one, and the bytes that eager needs.

A formula of autograd is a function in C++. On fake tensors it often takes another path than on real ones:
where ATen asks whether a tensor is of a subclass (`docs/formulas.md` lists ops), a fake tensor
is one, and the formula makes a new tensor where it would write over an old one:

    captured   sigmoid -> sub -> mul -> div       four results, and each is live to the end of the formula
    eager      sigmoid -> sub_ -> mul_ -> div_    one result

So the captured ops say what a formula computes, and not what it takes. `find_formulas` finds the formulas
of a step with the forward op of each; the profiler runs that op's backward once, on real tensors, and
`with_formula_bytes` puts the measured bytes in place of the ops' own: in the loss always, in the model's own
graphs where they run without a plan.

Shortcoming: a formula whose op cannot run on random values keeps the bytes of its ops.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.analyze.analysis import Analysis
from lowtide.facts import Step
from lowtide.ops.calls import Call, call_of, signature
from lowtide.torch_compat.dispatch import OpOverload, iter_tensors, map_leaves, packet_name
from lowtide.trace.segments import Segment

aten = torch.ops.aten

NO_OP = -1
_NOT_TRAINED = re.compile(r"new_.*|.*_like|detach|sign|floor|ceil|round|trunc")
"""Ops whose results do not depend on their inputs, or have no gradient that does."""


@dataclass(frozen=True, eq=False)
class Formula:
    """The formula of an op's gradients: the backward nodes `ranks`, in eager's order, that stand for it.

    `call` is the forward op. Its tensors that are `wanted` get a gradient, and its results get `incoming`
    gradients, with None for a result that gets none; both in the order of tensors in arguments and results.
    `results` are the storages that outlive the formula, `temporaries` all others that it makes. `inputs` are
    the ranks behind the tensors of the call, `NO_OP` for an input of the graph.
    """

    call: Call
    wanted: tuple[bool, ...]
    incoming: tuple[Tensor | None, ...]
    ranks: tuple[int, ...]
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    temporaries: tuple[int, ...]
    in_model: bool

    @property
    def signature(self) -> str:
        """Text that is equal for two formulas exactly when they need the same bytes."""
        given = signature(Call(aten.alias.default, self.incoming))
        return f"gradients of {signature(self.call)} by {self.wanted}, {given}"

    @property
    def makes(self) -> tuple[int, ...]:
        """The storages that the captured ops make."""
        return (*self.results, *self.temporaries)

    @property
    def kind(self) -> str:
        """Text that is equal for formulas that make bytes in proportion: the same op at other sizes."""
        options = map_leaves(_without_sizes, (self.call.args, self.call.kwargs))
        expanded = [like is not None and 0 in like.stride() for like in self.incoming]
        return f"{self.call.target} {options} {self.wanted} {expanded}"


@dataclass(frozen=True, slots=True)
class FormulaBytes:
    """Measured: the most bytes that a formula makes at once, its results included, and the positions of the
    tensors of its op that autograd saves for it. The formula of `gather` saves a tensor for its shape."""

    peak_bytes: int
    saved: tuple[int, ...] = ()


Shares = Mapping[str, tuple[float, tuple[int, ...]]]
"""By the kind of a formula: its peak as a share of the bytes that its captured ops make; what is saved."""


def shares_of(step: Step, formulas: Sequence[Formula], measured: Mapping[str, FormulaBytes]) -> Shares:
    """What is known about formulas at other sizes. `step` has the bytes of the captured ops."""
    known: dict[str, tuple[float, tuple[int, ...]]] = {}
    for formula in formulas:
        found, made = measured.get(formula.signature), step.bytes_of(formula.makes)
        if found is not None and made:
            known[formula.kind] = (found.peak_bytes / made, found.saved)
    return known


def by_shares(step: Step, formulas: Sequence[Formula], known: Shares) -> dict[str, FormulaBytes]:
    """The bytes of formulas, in proportion to those of the same formulas at other sizes."""
    return {
        formula.signature: FormulaBytes(round(known[formula.kind][0] * step.bytes_of(formula.makes)), saved)
        for formula in formulas
        if formula.kind in known
        for saved in [known[formula.kind][1]]
    }


def find_formulas(analysis: Analysis, *, num_in_model: int) -> tuple[Formula, ...]:
    """The formulas of a step that several ops of its graphs stand for."""
    ranks: dict[int, dict[fx.Node, int]] = {}
    for rank, place in analysis.graph_nodes.items():
        ranks.setdefault(place.execution, {})[place.node] = rank
    readers: dict[int, set[int]] = {}
    for node in analysis.nodes:
        for read in node.reads:
            for storage in analysis.nodes[read].holds:
                readers.setdefault(storage, set()).add(node.rank)
    return tuple(
        formula
        for index, segment in enumerate(analysis.segments)
        if segment.differentiable
        for formula in _of_graph(
            analysis, segment, ranks.get(index, {}), readers, in_model=index < num_in_model
        )
    )


def _of_graph(
    analysis: Analysis,
    segment: Segment,
    rank: Mapping[fx.Node, int],
    readers: Mapping[int, set[int]],
    *,
    in_model: bool,
) -> Iterator[Formula]:
    forward: dict[int, list[fx.Node]] = {}
    for node in segment.forward_ops:
        if isinstance(node.target, OpOverload) and node.target is not aten.detach.default:
            forward.setdefault(node.meta.get("seq_nr", -1), []).append(node)
    trained = _trained(segment)
    backward = set(segment.backward_ops)
    for number, group in itertools.groupby(segment.backward_ops, key=lambda node: node.meta.get("seq_nr")):
        ops = [node for node in group if not node.meta.get("is_gradient_acc")]
        sources = forward.get(-1 if number is None else number, [])
        if len(sources) != 1 or not all(node in rank and _is_torchs(node) for node in ops):
            continue
        mine = [rank[node] for node in ops]
        made = [storage for each in mine for storage in analysis.nodes[each].makes]
        if len(made) < 2:
            continue
        results = [
            storage
            for storage in made
            if readers.get(storage, set()).difference(mine) or analysis.storages[storage].pinned
        ]
        given = {read for node in ops for read in node.all_input_nodes if read not in ops}
        gradients = [read for read in segment.joint.graph.nodes if read in given]
        gradients = [read for read in gradients if read in backward or read in segment.tangents]
        incoming = _matched(sources[0], gradients)
        if incoming is not None:
            yield Formula(
                call=call_of(sources[0]),
                wanted=tuple(read in trained for read in _tensor_arguments(sources[0])),
                incoming=incoming,
                ranks=tuple(mine),
                inputs=tuple(rank.get(read, NO_OP) for read in _tensor_arguments(sources[0])),
                results=tuple(results),
                temporaries=tuple(storage for storage in made if storage not in results),
                in_model=in_model,
            )


def _is_torchs(node: fx.Node) -> bool:
    """Whether a node is an op of torch, or a part of its results: ops of our own are no copies of eager's."""
    return not isinstance(node.target, OpOverload) or node.target.namespace in ("aten", "prims")


def _trained(segment: Segment) -> set[fx.Node]:
    """Forward values with a gradient: those that depend on an input with one."""
    pairs = zip(segment.primals, segment.has_gradients, strict=False)
    found = {primal for primal, has_gradient in pairs if has_gradient}
    for node in segment.forward_ops:
        values = list(iter_tensors(node.meta.get("val")))
        is_real = any(value.is_floating_point() or value.is_complex() for value in values)
        ends = _NOT_TRAINED.fullmatch(packet_name(node.target))
        if is_real and not ends and found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def _tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes behind the tensors of a call, in the order of `Call.tensors`."""
    leaves: list[Any] = []
    fx.node.map_arg((node.args, node.kwargs), leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf.meta.get("val"), Tensor)]


def _matched(source: fx.Node, gradients: Sequence[fx.Node]) -> tuple[Tensor | None, ...] | None:
    """The gradients by the results of an op; None where they are not of its shapes."""
    waiting = [value for node in gradients if isinstance(value := node.meta.get("val"), Tensor)]
    found: list[Tensor | None] = []
    for result in iter_tensors(source.meta.get("val")):
        fits = next((value for value in waiting if value.shape == result.shape), None)
        found.append(fits)
        waiting = [value for value in waiting if value is not fits]
    return None if waiting or not any(value is not None for value in found) else tuple(found)


def _without_sizes(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype
    return None if type(leaf) is int else leaf


def with_formula_bytes(step: Step, formulas: Sequence[Formula], measured: Mapping[str, FormulaBytes]) -> Step:
    """The step where formulas take as many bytes as eager's own, by their signatures in `measured`."""
    nodes, storages = list(step.nodes), list(step.storages)
    for formula in formulas:
        found = measured.get(formula.signature)
        if found is None:
            continue
        results = [storages[made] for made in formula.results]
        result_bytes = sum(
            each.nbytes + (each.extra_eager_bytes if formula.in_model else 0) for each in results
        )
        inside_bytes = max(0, found.peak_bytes - result_bytes)
        last = nodes[formula.ranks[-1]]
        saved = [formula.inputs[place] for place in found.saved if formula.inputs[place] != NO_OP]
        if formula.in_model:
            nodes[last.rank] = replace(last, eager_reads=tuple(dict.fromkeys((*last.eager_reads, *saved))))
        else:
            nodes[last.rank] = replace(last, reads=tuple(dict.fromkeys((*last.reads, *saved))))
        for rank in formula.ranks:
            wanted = inside_bytes if rank == formula.ranks[-1] else 0
            if formula.in_model:
                extra = wanted - nodes[rank].workspace_bytes
                nodes[rank] = replace(nodes[rank], extra_eager_bytes=extra)
            else:
                nodes[rank] = replace(nodes[rank], workspace_bytes=wanted)
        for made in formula.temporaries:
            if formula.in_model:
                storages[made] = replace(storages[made], extra_eager_bytes=-storages[made].nbytes)
            else:
                storages[made] = replace(storages[made], nbytes=0)
    return replace(step, nodes=tuple(nodes), storages=tuple(storages))
