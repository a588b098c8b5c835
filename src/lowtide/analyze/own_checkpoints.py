"""The user's own calls of torch.utils.checkpoint in the facts of a step: which nodes belong to which call."""

from dataclasses import replace

import torch

from lowtide.analyze.analysis import Analysis, GraphAnalysis
from lowtide.facts import Kind
from lowtide.ops.device_memory import CPU
from lowtide.torch_compat.aot_autograd import own_checkpoint_of


def mark_own_checkpoints(analysis: Analysis, states: list[GraphAnalysis]) -> None:
    """Number the calls from 1; mark the forward nodes that a call runs again in the backward pass, and the
    backward nodes of forward nodes inside of the call."""
    numbers: dict[tuple[int, int], int] = {}
    for state in states:
        by_sequence: dict[int, int] = {}
        for node in state.segment.forward_ops:
            found = own_checkpoint_of(node)
            if found is None:
                continue
            number = numbers.setdefault((state.index, found.call), len(numbers) + 1)
            by_sequence[node.meta.get("seq_nr", -1)] = number
            if found.runs_again:
                _mark(analysis, state.rank[node], number)
        for node in state.segment.backward_ops if by_sequence else ():
            number = by_sequence.get(node.meta.get("seq_nr", -1), 0)
            if number and node in state.rank:
                _mark(analysis, state.rank[node], number)
    if numbers and analysis.device == CPU:
        nbytes = len(numbers) * torch.get_rng_state().nbytes
        name = "random states of checkpoints"
        analysis.add_storage(nbytes=0, kind=Kind.OTHER, name=name, static=True, extra_eager_bytes=nbytes)


def _mark(analysis: Analysis, rank: int, number: int) -> None:
    analysis.nodes[rank] = replace(analysis.nodes[rank], own_checkpoint=number)
