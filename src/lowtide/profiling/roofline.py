"""Costs of a step on an absent GPU, from its published rates.

    seconds = max(flops / peak rate, bytes / bandwidth, launch of a kernel)

Sizes are those of the captured CPU step, with the differences of a GPU: the allocator's rounding, dropout
masks, workspaces, and the attention that capture has chosen. All costs are estimated.

Shortcomings: recurrent layers save the same bytes as on a CPU, since cuDNN does not publish its reserve; a
convolution copies operands whose strides tensor cores cannot read, and has no other workspace; the cost of a
fused optimizer is the bytes that it reads and writes.
"""

from dataclasses import replace

import torch

from lowtide.analyze.captured_step import Captured, with_costs
from lowtide.facts import Kind, Node, Region, Step, Storage
from lowtide.facts.gpus import Gpu
from lowtide.ops.absent_gpu import HALF_TYPES, backward_bytes
from lowtide.ops.calls import Call, signature, target_name
from lowtide.ops.loss_chunks import LOSS_GRADIENTS, log_probabilities, rows_per_chunk
from lowtide.ops.random_ops import eager_dropout
from lowtide.ops.schema import argument_names, writes_inputs
from lowtide.planning.allocator import cut_by_allocator
from lowtide.planning.decisions import WORKSPACE_OF
from lowtide.planning.log_lines import baseline_line, cost_line
from lowtide.profiling.repeat_trials import with_untried_ops
from lowtide.profiling.work import fake_result, visible_work_of
from lowtide.remat import rule_named
from lowtide.stage_log import stage
from lowtide.units import format_size

SHARE_OF_PEAK = 0.75
"""Share of the published rates that good kernels reach."""
KERNEL_SECONDS = 5e-6
"""The shortest time of an op."""

RECURRENT = (
    "recurrent layers are counted with what they keep on a CPU, since cuDNN does not publish what it keeps: "
    "the peak on the GPU can be another"
)

_CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
_SORTED_INDICES = "aten.embedding_dense_backward.default"
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm")
_IN_CHUNKS = (*LOSS_GRADIENTS, log_probabilities)
_A_GPU = torch.device("cuda")
_TEMPORARY_INDICES = 4
"""Sorted indices, their old positions, and the copies of both in the sort."""


@stage(
    "profile",
    given=lambda captured, gpu: f"{len(captured.calls)} calls on the {gpu.name}, which is not here",
    made=baseline_line,
    details=lambda step: map(cost_line, step.nodes),
)
def estimated_costs(captured: Captured, gpu: Gpu) -> Step:
    """The step with the seconds and the bytes that it should have on `gpu`."""
    known: dict[str, tuple[float, int, bool]] = {}
    costs = {}
    for run, call in captured.calls.items():
        name = signature(call)
        if name not in known:
            known[name] = (_seconds(call, gpu), _workspace_bytes(call, gpu), True)
        costs[run] = known[name]
    multiplies = any(target_name(call.target).startswith(_PRODUCTS) for call in captured.calls.values())
    step = _in_larger_chunks(with_untried_ops(with_costs(captured.step, costs), captured), captured)
    return _as_on(gpu, _copying_in_eager(step, captured), multiplies=multiplies)


def _seconds(call: Call, gpu: Gpu) -> float:
    work = visible_work_of(call)
    if not work.outputs and not writes_inputs(call.target):
        return 0.0  # a view
    flops = work.flops / (gpu.flops_per_second[_rate(call, gpu)] * SHARE_OF_PEAK)
    return max(flops, work.nbytes / (gpu.bytes_per_second * SHARE_OF_PEAK), KERNEL_SECONDS)


def _rate(call: Call, gpu: Gpu) -> str:
    """The type whose rate an op computes at."""
    types = [tensor.dtype for tensor in call.tensors if tensor.is_floating_point()]
    name = str(types[0]).removeprefix("torch.") if types else "float32"
    if name == "float32" and "tf32" in gpu.flops_per_second and _may_round(call):
        return "tf32"
    return name if name in gpu.flops_per_second else "float32"


def _may_round(call: Call) -> bool:
    """Whether torch lets tensor cores compute an op of float32, by the settings of this process."""
    if target_name(call.target) in _CONVOLUTIONS:
        return bool(torch.backends.cudnn.allow_tf32)
    return torch.get_float32_matmul_precision() != "highest"


def _workspace_bytes(call: Call, gpu: Gpu) -> int:
    """The workspace of an op: the one table of differences between devices."""
    name = target_name(call.target)
    if name in _CONVOLUTIONS:
        return _copied_operands_bytes(call, gpu)
    if name.startswith(_PRODUCTS):
        return _copied_matrices_bytes(call)
    if call.target in _IN_CHUNKS:
        result = fake_result(call)
        return _chunk_bytes(result, call.kwargs.get("chunk_bytes"), device=_A_GPU)
    if name == _SORTED_INDICES:
        return _TEMPORARY_INDICES * call.tensors[1].nbytes
    if len(call.tensors) > 2 and call.tensors[1].dim() == 4:
        return backward_bytes(call.target, call.tensors[1], call.tensors[2])
    return 0


def _chunk_bytes(value: torch.Tensor, most_bytes: int | None, *, device: torch.device | None = None) -> int:
    return int(rows_per_chunk(value, most_bytes, device=device) * value[0].nbytes)


def _copied_operands_bytes(call: Call, gpu: Gpu) -> int:
    """Tensor cores read channels last: cuDNN copies operands with other strides, and its result back."""
    names = dict(zip(argument_names(call.target), call.args, strict=False))
    first = call.tensors[0]
    on_tensor_cores = first.dtype in HALF_TYPES or _rate(call, gpu) == "tf32"
    if first.dim() == 3:  # torch gives cuDNN an image of one row
        first = first.unsqueeze(2)
    channels_last = torch.channels_last if first.dim() == 4 else torch.channels_last_3d
    is_channels_last = first.is_contiguous(memory_format=channels_last)
    if not on_tensor_cores or is_channels_last or names.get("groups", 1) != 1:
        return 0
    work = visible_work_of(call)
    if "output_mask" not in names:
        return work.input_bytes + work.output_bytes
    # one kernel at a time: each has two of the operands and makes the third
    return work.input_bytes


def _copied_matrices_bytes(call: Call) -> int:
    """cuBLAS reads matrices row by row or column by column; torch copies matrices with other strides, such as
    an expanded gradient with strides of 0."""
    # the added term is the first argument
    matrices = (tensor for tensor in call.tensors[-2:] if tensor.dim() > 1)
    return sum(matrix.numel() * matrix.itemsize for matrix in matrices if not _is_readable(matrix))


def _is_readable(matrix: torch.Tensor) -> bool:
    if matrix.is_contiguous() or matrix.mT.is_contiguous():
        return True
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _in_larger_chunks(step: Step, captured: Captured) -> Step:
    """Chunks of a loss are larger on a GPU than on the CPU that the step was captured on; what eager has
    beyond a chunk is less by that."""
    nodes = list(step.nodes)
    for run, call in captured.calls.items():
        if run.is_first and call.target in _IN_CHUNKS:
            value, most = fake_result(call), call.kwargs.get("chunk_bytes")
            more = _chunk_bytes(value, most, device=_A_GPU) - _chunk_bytes(value, most)
            node = nodes[run.rank]
            nodes[run.rank] = replace(node, extra_eager_bytes=node.extra_eager_bytes - more)
    return replace(step, nodes=tuple(nodes))


def _copying_in_eager(step: Step, captured: Captured) -> Step:
    """A graph that gets an expanded gradient has a copy of it from the start; eager copies it in each matrix
    product."""
    copied: dict[int, int] = {}
    for node in step.nodes:
        if (
            node.op == "placeholder"
            and node.region is Region.BACKWARD
            and node.makes
            and len(node.reads) == 1
        ):
            giver = captured.graph_nodes.get(node.reads[0])
            value = None if giver is None else giver.node.meta.get("val")
            if isinstance(value, torch.Tensor) and 0 in value.stride():
                copied[node.makes[0]] = step.storages[node.makes[0]].nbytes
    if not copied:
        return step
    nodes = list(step.nodes)
    for node in step.nodes:
        if node.op.startswith(_PRODUCTS):
            read = {storage for rank in node.reads for storage in step.nodes[rank].holds}
            copied_bytes = sum(nbytes for storage, nbytes in copied.items() if storage in read)
            nodes[node.rank] = replace(node, extra_eager_bytes=node.extra_eager_bytes + copied_bytes)
    return replace(step, nodes=tuple(nodes))


def _as_on(gpu: Gpu, step: Step, *, multiplies: bool) -> Step:
    # a dropout mask has one byte per element on any GPU
    masks = {made for node in step.nodes if node.op == target_name(eager_dropout) for made in node.makes}
    storages = [replace(s, extra_eager_bytes=0) if s.id in masks else s for s in step.storages]
    if multiplies:
        for pass_name in ("forward", "backward"):
            storages.append(
                Storage(
                    id=len(storages),
                    nbytes=gpu.matmul_workspace_bytes,
                    kind=Kind.OTHER,
                    name=f"{WORKSPACE_OF}cuBLAS, {pass_name}",
                    static=True,
                )
            )
    nodes = tuple(_estimated(node) for node in step.nodes)
    recurrent = [RECURRENT] if any(node.op.startswith("lowtide.recurrent_") for node in nodes) else []
    note = (
        f"estimated for an {gpu.words}, which is not there: times from its published rates, sizes from the "
        f"step on {step.device}. It has {format_size(gpu.memory_bytes)}, of which its driver takes some"
    )
    return replace(
        cut_by_allocator(replace(step, storages=tuple(storages))),
        nodes=nodes,
        device=gpu.label,
        copy_bytes_per_second=gpu.copy_bytes_per_second,
        notes=(*step.notes, note, *recurrent),
    )


def _estimated(node: Node) -> Node:
    remats = tuple(r for r in node.remats if not rule_named(r.rule).as_eager_only)
    estimated = node.estimated or bool(node.seconds or node.workspace_bytes)
    return replace(node, estimated=estimated, remats=remats)
