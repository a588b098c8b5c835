"""The optimizer's step in chunks whose state is read from a store and written back.

An exception, Ctrl-C too, leaves what eager leaves: the state of a chunk is written as the optimizer's code
left it, and where writing it is what was interrupted, right after. Where that is impossible, as on a full
disk, the tensor is torn: the next step is refused until the tensor has other values, as of a checkpoint.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.errors import StoreError
from lowtide.offload.offload_store import RestingTransfer
from lowtide.optim.chunk_buffers import limit_bytes, turns
from lowtide.optim.resting_state import (
    WEIGHT,
    RestingState,
    StateBlock,
    may_rest,
    read_rows,
    read_whole,
    rows_over,
)
from lowtide.optim.split_step import CHUNK_SIZES, RowSteps, chunks_of, step_for
from lowtide.torch_compat.dispatch import storage_key

logger = logging.getLogger("lowtide")

Optimizer = torch.optim.Optimizer

RESTING_CHUNK_SIZES = (1 << 20, *CHUNK_SIZES)
"""The chunk sizes of a step whose state rests: blocks of state are in each chunk, besides temporaries."""
RESTING_CHUNK_BYTES = CHUNK_SIZES[0]
"""The chunk size of a step in backward whose state rests."""


class ChunkPart(NamedTuple):
    """Some parameters whose step is taken at once, or some rows of one."""

    parameters: list[Tensor]
    rows: slice | None = None

    @property
    def num_rows(self) -> int:
        """0 for whole parameters."""
        return 0 if self.rows is None else len(range(len(self.parameters[0]))[self.rows])

    @property
    def nbytes(self) -> int:
        return sum(self.share_of(parameter.nbytes) for parameter in self.parameters)

    def share_of(self, nbytes: int) -> int:
        """The bytes of this part, of `nbytes` for its parameter."""
        return nbytes if self.rows is None else nbytes // len(self.parameters[0]) * self.num_rows


def parts_of(
    parameters: Iterable[Tensor], *, within_parameters: bool, chunk_bytes: int
) -> Iterator[ChunkPart]:
    """The parts of a step, in order."""
    for chunk in chunks_of(parameters, within_parameters=within_parameters, chunk_bytes=chunk_bytes):
        if not chunk.rows:
            yield ChunkPart(chunk.parameters)
            continue
        for first in range(0, len(chunk.parameters[0]), chunk.rows):
            yield ChunkPart(chunk.parameters, slice(first, first + chunk.rows))


Blocks = list[tuple[Tensor, Any, StateBlock]]
"""Blocks for the state of a part, each with its parameter and the key of the state."""
Writes = list[tuple[RestingTransfer, StateBlock]]


class RestingStep:
    """Takes the steps of optimizers whose state rests."""

    def __init__(self, state: RestingState) -> None:
        self.state = state

    def open(self, optimizers: Iterable[Optimizer]) -> list[Any]:
        """Lay all state to rest, now and after every `load_state_dict`; returns the hooks."""
        every = list(optimizers)
        self.state.lay_down(every)
        return [each.register_load_state_dict_post_hook(self._loaded) for each in every]

    def close(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring all state back into memory."""
        self.state.bring_back(optimizers)

    def wake(self, optimizer: Optimizer) -> None:
        """Let the optimizer's own code step at once. On a CPU it can read state on a disk as it is."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(parameter.device.type != "cpu" for parameter in parameters):
            self.state.bring_back([optimizer])

    def _loaded(self, optimizer: Optimizer) -> None:
        self.state.lay_down([optimizer])

    def take(
        self,
        optimizer: Optimizer,
        parameters: Iterable[Tensor],
        *,
        within_parameters: bool,
        chunk_bytes: int,
    ) -> None:
        """The step for all `parameters` that have a gradient, part by part."""
        parts = list(parts_of(parameters, within_parameters=within_parameters, chunk_bytes=chunk_bytes))
        running = _Running(self.state, optimizer)
        try:
            running.take(parts, size=chunk_bytes)
        except BaseException:
            running.end_early()
            for part in parts:
                self.state.note_torn(optimizer, part.parameters)
            if running.done:
                logger.warning(
                    "optimizer.step() ended early, when %d of its %d chunks were done: load your last "
                    "checkpoint before you go on",
                    running.done,
                    len(parts),
                )
            raise


class _Running:
    """One step: the blocks that are read ahead and those that are being written."""

    def __init__(self, state: RestingState, optimizer: Optimizer) -> None:
        self.state, self.optimizer = state, optimizer
        self.done = 0
        self._ahead: Blocks = []
        self._writes: Writes = []
        self._at_work: list[StateBlock] = []
        """blocks that the optimizer's code may have changed, until their write begins"""
        self._rows: RowSteps | None = None

    def take(self, parts: list[ChunkPart], *, size: int) -> None:
        nbytes = [self._block_bytes(part) for part in parts]
        limit = limit_bytes(nbytes, [part.nbytes for part in parts], size=size)
        has_next = False
        for place, (part, turn) in enumerate(zip(parts, turns(nbytes, limit=limit), strict=True)):
            if turn.waits_for_write:
                self._finish_writes(len(self._writes))
            blocks, self._ahead = self._ahead if has_next else self._read(part), []
            has_next = turn.reads_next
            if has_next:
                self._ahead = self._read(parts[place + 1])
            for _, _, block in blocks:
                block.reading.wait()
            number = len(self._writes)
            self._compute(part, blocks)
            self.done += 1
            del blocks
            self._finish_writes(number)
        self._finish_writes(len(self._writes))

    def end_early(self) -> None:
        """Drop what is read, write what the optimizer's code has changed, and let all writes end; one that
        fails marks its tensor as torn."""
        for _, _, block in self._ahead:
            block.reading.drop()
        self._ahead = []
        for block in list(self._at_work):
            try:
                self._begin_write(block)
            except StoreError:  # the error that ended the step is raised
                continue
        for transfer, _ in self._writes:
            try:
                transfer.wait()
            except StoreError:  # the error that ended the step is raised
                continue
        self._writes = []

    def _block_bytes(self, part: ChunkPart) -> int:
        resting = (
            each
            for parameter in part.parameters
            for each in self.state.of(self.optimizer, parameter).values()
        )
        return sum(part.share_of(each.nbytes) for each in resting)

    def _read(self, part: ChunkPart) -> Blocks:
        found: Blocks = []
        try:
            for parameter in part.parameters:
                for key, resting in self.state.of(self.optimizer, parameter).items():
                    block = (
                        read_whole(resting, parameter)
                        if part.rows is None
                        else read_rows(resting, parameter, part.rows)
                    )
                    found.append((parameter, key, block))
        except BaseException:
            for _, _, block in found:
                block.reading.drop()
            raise
        return found

    def _compute(self, part: ChunkPart, blocks: Blocks) -> None:
        if part.rows is None:
            self._step_whole(part, blocks)
        else:
            self._step_rows(part.parameters[0], part.rows, blocks)

    def _step_whole(self, part: ChunkPart, blocks: Blocks) -> None:
        own: list[Tensor] = []
        for parameter, key, block in blocks:
            at_work = block.resting.layout.over(block.block)
            if key is WEIGHT:
                own.append(parameter.data)
                parameter.data = at_work
            else:
                own.append(self.optimizer.state[parameter][key])
                self.optimizer.state[parameter][key] = at_work
        self._begin_work(blocks)
        try:
            step_for(self.optimizer, part.parameters)
        finally:
            for (parameter, key, block), at_rest in zip(blocks, own, strict=True):
                at_work = block.resting.layout.over(block.block)
                if key is WEIGHT:
                    value: Any = parameter.data
                    parameter.data = at_rest
                else:
                    value = self.optimizer.state[parameter].get(key)
                if isinstance(value, Tensor) and (value.shape, value.dtype) == (at_rest.shape, at_rest.dtype):
                    if key is not WEIGHT:
                        self.optimizer.state[parameter][key] = at_rest
                    self._write(block, at_work, value)
                else:  # the optimizer's code has put something else there
                    self._end_work(block)
        for parameter in part.parameters:
            self.state.of(self.optimizer, parameter)  # what a first step has made

    def _step_rows(self, parameter: Tensor, part: slice, blocks: Blocks) -> None:
        if part.start == 0 or self._rows is None:
            self._rows = RowSteps(self.optimizer, parameter)
        steps, some = self._rows, parameter.detach()[part]
        rows = {key: rows_over(block, some) for _, key, block in blocks}
        weight = rows.pop(WEIGHT, None)
        self._begin_work(blocks)
        found: dict[Any, Tensor] = {}
        try:
            found = steps.take(part, rows, weight=weight)
        finally:
            for _, key, block in blocks:
                own = rows_over(block, some)
                self._write(block, own, own if key is WEIGHT else found.get(key, own))
        for key, value in found.items():
            if key in rows:
                steps.after[key] = steps.before[key]
            elif self.state.has(parameter) and key not in steps.before and is_worth(value, parameter):
                if key not in steps.after:
                    steps.after[key] = self.state.make(self.optimizer, parameter, key, value.dtype)
                self.state.write_rows(self.optimizer, parameter, key, value, part)
            else:
                steps.keep(key, value, part)
        if part.stop >= len(parameter):
            steps.finish()
            self._rows = None

    def _write(self, block: StateBlock, own: Tensor, value: Tensor) -> None:
        if storage_key(value) != storage_key(own):
            own.copy_(value)
        self._begin_write(block)

    def _begin_work(self, blocks: Blocks) -> None:
        self._at_work = [block for _, _, block in blocks]
        for block in self._at_work:
            block.resting.is_torn = True  # until the write has begun

    def _begin_write(self, block: StateBlock) -> None:
        try:
            block.resting.is_torn = False
            self._writes.append((block.resting.start_write(block.block, block.start), block))
        except BaseException:
            block.resting.is_torn = True
            raise
        self._end_work(block)

    def _end_work(self, block: StateBlock) -> None:
        block.resting.is_torn = False
        self._at_work = [other for other in self._at_work if other is not block]

    def _finish_writes(self, number: int) -> None:
        """Wait for the first writes, and free their blocks one by one."""
        for _ in range(number):
            self._writes[0][0].wait()
            self._writes.pop(0)


def is_worth(rows: Tensor, parameter: Tensor) -> bool:
    """Whether state of which these are rows is worth a place on a store."""
    whole = torch.empty_like(parameter, dtype=rows.dtype, device="meta", requires_grad=False)
    return may_rest(whole, parameter)
