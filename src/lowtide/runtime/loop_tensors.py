"""Tensors that the user's loop makes anew for every step, beside the model and what it is called with.

    inputs, labels = next(batches)      `labels` are live all along
    output = model(inputs)              the last step's `loss` is live until here, and its gradients, too
    loss = loss_fn(output, labels)
    optimizer.zero_grad()
    loss.backward()

What is there when the first call begins, and gone when the second one does, belongs to a step. What stays
longer does not: a data set, an averaged copy of the model. Storages are referred to weakly, so that what dies
before the backward pass is known.

A loop may plan its model at the first batch. Then the labels of this batch are older than the plan, as a data
set is. Such tensors are expected to belong to a step where they have a row for each row of the batch.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.ops.device_memory import block_bytes
from lowtide.torch_compat.dispatch import StorageWeakRef, has_storage, storage_key, torch_function_off
from lowtide.torch_compat.python_tensors import collections, gradient_of, python_tensors
from lowtide.trace.model_call import tensors_in

LOOKS = 4
"""Calls that are looked at, where no backward pass follows."""


class LoopBytes(NamedTuple):
    """Bytes of a loop's own tensors in a step with `batch_bytes`: live all along, and only until the backward
    pass begins. `is_seen`: in a step that is over, not expected in the one that begins."""

    step_bytes: int
    forward_bytes: int
    batch_bytes: int
    is_seen: bool


class _LoopStorage(NamedTuple):
    """A storage of tensors in Python; `rows` of a tensor that fills it, 0 where none was found."""

    reference: Any
    nbytes: int
    rows: int

    @property
    def is_live(self) -> bool:
        return not self.reference.expired()


class LoopTensors:
    """The loop's own tensors on `device`; `own_tensors` are the model's."""

    def __init__(self, own_tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._own_tensors, self._device = own_tensors, device
        self.looks_left = LOOKS
        """calls that are looked at from now on"""
        self._collections = collections()
        self._before = self._look(young=False)
        self._seen: dict[int, _LoopStorage] = {}
        self._older: dict[int, _LoopStorage] = {}
        """of what was there when the model was planned, what still is at the first call"""
        self._in_backward: set[int] | None = None
        self._expected_bytes = self._given_later = 0
        """bytes that are new at a call, and those that the last step gave to later calls"""

    def call_begins(self, batch: Any, outputs: Iterable[int], *, loss_bytes: int) -> LoopBytes | None:
        """A step begins, with a call on `batch`. `outputs` are the storages of what the model returned
        before; `loss_bytes` of the last loss are live. None where nothing is learned."""
        given = list(tensors_in(batch))
        batch_bytes = sum(tensor.nbytes for tensor in given)
        if self._in_backward is None:
            self.looks_left -= 1
            young = self._collections == collections()
            known = {storage_key(tensor) for tensor in given if has_storage(tensor)}.union(outputs)
            found = self._look(young=young)
            # a storage may lie where one lay that has died
            self._before = {key: one for key, one in self._before.items() if one.is_live}
            self._seen = {key: found[key] for key in found.keys() - self._before.keys() - known}
            self._older = {key: one for key, one in self._before.items() if key not in known}
            if young and self._seen:  # those of other models, whose parameters are old
                self._forget(_gradients(python_tensors(self._device)))
            labels = self._labels(given)
            # of all tensors in the process, those of this step are not known yet
            nbytes = (
                sum(one.nbytes for one in self._seen.values()) + labels if young else self._expected_bytes
            )
            self._expected_bytes = max(0, nbytes - self._given_later)
            is_news, self._given_later = young or self._given_later > 0, 0
            return LoopBytes(self._expected_bytes, 0, batch_bytes, is_seen=False) if is_news else None
        gone = {key: one.nbytes for key, one in self._seen.items() if not one.is_live}
        step_bytes = sum(nbytes for key, nbytes in gone.items() if key in self._in_backward)
        forward_bytes = sum(gone.values()) - step_bytes + loss_bytes
        step_bytes += self._replaced_bytes(given, outputs, sum(gone.values()))
        self.looks_left, self._seen, self._before, self._older = 0, {}, {}, {}
        return LoopBytes(step_bytes, forward_bytes, batch_bytes, is_seen=True)

    def _labels(self, given: Iterable[Tensor]) -> int:
        """The bytes of labels that are older than the plan; none where the batch is younger."""
        older = [t for t in given if has_storage(t) and storage_key(t) in self._before and t.dim()]
        rows = {tensor.shape[0] for tensor in older}
        return sum(one.nbytes for one in self._older.values() if one.rows in rows)

    def _replaced_bytes(self, given: Iterable[Tensor], outputs: Iterable[int], gone_bytes: int) -> int:
        """Of what is older than the plan, the bytes that died in the first step and were made anew since,
        beside `gone_bytes` of younger tensors: the labels of a batch. What only died was for planning."""
        in_backward = self._in_backward or set()
        older = sum(o.nbytes for key, o in self._older.items() if key in in_backward and not o.is_live)
        if not older:
            return 0
        known = {storage_key(tensor) for tensor in given if has_storage(tensor)}.union(outputs)
        known.update(key for key, one in (*self._older.items(), *self._seen.items()) if one.is_live)
        found = self._look(young=self._collections == collections())
        new = sum(one.nbytes for key, one in found.items() if key not in known)
        return max(0, min(older, new - gone_bytes))

    def another_call(self, batch: Any) -> None:
        """A step calls the model once more, on a `batch` that counts with that call."""
        if not self._seen:
            return
        given = {storage_key(tensor) for tensor in tensors_in(batch) if has_storage(tensor)}
        self._given_later += sum(self._seen[key].nbytes for key in given & self._seen.keys())
        self._forget(given)

    def _forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._seen.pop(key, None)

    def backward_begins(self) -> None:
        """The first backward pass of a call begins."""
        if self.looks_left and self._in_backward is None:
            both = (*self._seen.items(), *self._older.items())
            self._in_backward = {key for key, one in both if one.is_live}

    def _look(self, *, young: bool) -> dict[int, _LoopStorage]:
        """By storage, the tensors of Python without the model's own and without gradients of any model."""
        found: dict[int, _LoopStorage] = {}
        own = {storage_key(tensor) for tensor in self._own_tensors() if has_storage(tensor)}
        tensors = python_tensors(self._device, young=young)
        own.update(_gradients(tensors))
        with torch_function_off():  # of the users' own classes of tensors
            for tensor in tensors:
                key, storage = storage_key(tensor), tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                rows = tensor.shape[0] if tensor.dim() and tensor.nbytes == storage.nbytes() else 0
                rows = max(rows, found[key].rows) if key in found else rows
                found[key] = _LoopStorage(reference, block_bytes(self._device, tensor), rows)
        return {key: one for key, one in found.items() if key not in own}


def _gradients(tensors: Iterable[Tensor]) -> list[int]:
    """The storages of these tensors' gradients."""
    gradients = (gradient_of(tensor) for tensor in tensors)
    with torch_function_off():
        return [storage_key(each) for each in gradients if each is not None and has_storage(each)]
