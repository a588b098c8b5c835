"""The bytes that eager's formulas of gradients need, measured: one run of each, on real tensors."""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.analyze.formulas import Formula, FormulaBytes
from lowtide.ops.calls import Call, OpCost, storages_bytes
from lowtide.profiling.cache import CostCache
from lowtide.profiling.devices import outside_profiler
from lowtide.profiling.op_costs import as_a_step_runs
from lowtide.profiling.op_trials import device_of, in_one_line
from lowtide.profiling.samples import make_sample
from lowtide.profiling.work import fresh_storages, shrink, work_of
from lowtide.torch_compat.dispatch import iter_tensors, map_leaves, storage_key

_log = logging.getLogger(__name__)

_MOST_TIMES = 12
"""An op and its formula need at most this many times the bytes of the op's tensors."""


def measure_formulas(
    formulas: Iterable[Formula],
    result_bytes: Mapping[str, int],
    *,
    memory_limit_bytes: int,
    cache: CostCache | None,
) -> dict[str, FormulaBytes]:
    """The bytes of formulas, by the formula's signature.

    `result_bytes` are those of its results alone, as captured. A formula that does not run on random values,
    or whose results have other bytes, is left out: its captured ops tell how much it needs.
    """
    found: dict[str, FormulaBytes] = {}
    missing: dict[str, Formula] = {}
    for formula in formulas:
        name = formula.signature
        known = None if cache is None else cache.get(name, memory_limit_bytes=memory_limit_bytes)
        if known is None:
            missing[name] = formula
        elif known.workspace_bytes:
            found[name] = FormulaBytes(known.workspace_bytes, known.hidden_bytes)
    if not missing:
        return found
    limit_bytes = min(device_of(each.call).within_free(memory_limit_bytes) for each in missing.values())
    with as_a_step_runs(formula.call for formula in missing.values()):
        for name, formula in missing.items():
            run = partial(_measured, formula, result_bytes[name], limit_bytes=limit_bytes)
            try:
                measured = outside_profiler(run)
            except Exception as error:
                _log.debug("the ops of a formula tell its bytes: %s: %s", name, in_one_line(error))
                measured = FormulaBytes(0)
            if measured.peak_bytes:
                found[name] = measured
            if cache is not None:  # a file of costs of ops: the saved tensors are in the place of results
                cost = OpCost(0.0, measured.peak_bytes, estimated=False, hidden_bytes=measured.saved)
                cache.put(name, cost, memory_limit_bytes=memory_limit_bytes)
    if cache is not None:
        cache.save()
    return found


def _measured(formula: Formula, result_bytes: int, *, limit_bytes: int) -> FormulaBytes:
    """The bytes of a formula, scaled from a smaller one where it is too large; ValueError where it makes
    other results than the captured ops."""
    call, share = formula.call, 1.0
    if storages_bytes(call.tensors) * _MOST_TIMES > limit_bytes:
        work = work_of(call)
        part = shrink(call, work, limit_bytes=limit_bytes // _MOST_TIMES)
        if part is None:
            raise ValueError("no size of its op can be reduced")
        call, share = part.call, work.nbytes / part.work.nbytes
    found, fresh_bytes = _run(call, formula)
    if abs(fresh_bytes * share - result_bytes) > 0.01 * result_bytes:
        raise ValueError(f"results of {fresh_bytes * share:.0f} bytes, and {result_bytes} as captured")
    return FormulaBytes(round(found.peak_bytes * share), found.saved)


def _run(call: Call, formula: Formula) -> tuple[FormulaBytes, int]:
    """The bytes of a formula, and those of its results."""
    wanted = iter(formula.wanted)
    saved: set[int] = set()

    def save(tensor: Tensor) -> Tensor:
        saved.add(storage_key(tensor))
        return tensor.detach()  # a result that its own node holds would never be freed

    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and next(wanted):
            leaves.append(value.detach().requires_grad_())
            # an op may write over its input, which a leaf does not allow
            return leaves[-1].view_as(leaves[-1])
        return value

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        args, kwargs = map_leaves(leaf, make_sample(call))
        results = list(iter_tensors(call.target(*args, **kwargs)))
    keys = [storage_key(tensor) for tensor in iter_tensors((args, kwargs))]
    places = tuple(place for place, key in enumerate(keys) if key in saved)
    pairs = [
        (result, _gradient(result, like))
        for result, like in zip(results, formula.incoming, strict=True)
        if like is not None
    ]
    outputs, gradients = [result for result, _ in pairs], [gradient for _, gradient in pairs]
    del args, kwargs, results, pairs
    found, peak_bytes = device_of(call).measured(
        # the graph is retained: what the op saved was made before the measurement, and is freed after it
        partial(torch.autograd.grad, outputs, leaves, gradients, retain_graph=True, allow_unused=True)
    )
    made = [gradient for gradient in found if gradient is not None]
    return FormulaBytes(peak_bytes, places), sum(fresh_storages(made, gradients))


def _gradient(result: Tensor, like: Tensor) -> Tensor:
    """A gradient of a result, whose dimensions lie in memory as those of `like` do."""
    strides = like.stride()
    sizes = [1 if step == 0 else size for size, step in zip(result.shape, strides, strict=True)]
    order = sorted(range(result.dim()), key=lambda dim: (-strides[dim], dim))
    dense = torch.ones([sizes[dim] for dim in order], dtype=result.dtype, device=result.device)
    return dense.permute([order.index(dim) for dim in range(result.dim())]).expand(result.shape)
