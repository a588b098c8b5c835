"""Name the rank that failed where the others only see that it does not answer.

While all goes well nothing is sent. Each rank holds a socket that listens, and says where in the store of its
group: whoever cannot connect to it knows that its process is gone. One that fails in a step says why in the
same store, before it raises. Both are read only after an exchange of the ranks has failed.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn

from lowtide.errors import RankError
from lowtide.parallel.ranks import group_for
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat import autograd_engine, ddp

FAILURE = "lowtide/failure"
PATIENCE_SECONDS = 5.0
"""How long a rank may take to go, after its connections went."""


class Guard:
    """One process of a group, which tells the others of its failures and reads theirs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.store = ddp.store_of(group)
        self.socket = socket.create_server(("", 0), backlog=self.size)
        self._has_told = False
        self.store.set(_place(self.rank), json.dumps([socket.gethostname(), self.socket.getsockname()[1]]))

    @contextmanager
    def watching(self, when: str) -> Iterator[None]:
        """Tell the other ranks of what is raised in here; raise a RankError where it is theirs."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if ddp.is_alive(self.group):
                self._explain(error, when)
            raise
        if self._has_told:  # the loop went on after all
            self.store.delete_key(FAILURE)
            self._has_told = False

    def _explain(self, error: BaseException, when: str) -> None:
        if not ddp.is_of_communication(error):
            self._tell(
                self.rank, f"rank {self.rank} raised in its {when} pass: {type(error).__name__}: {error}"
            )
            return
        try:
            found = self._find()
        except RuntimeError as no_answer:  # of several kinds, by the kind of store
            raise RankError(
                0, "rank 0 is gone, and with it the store of the process group: look at its own output"
            ) from no_answer
        if found is not None:
            rank, words = found
            self._tell(rank, words)
            raise RankError(rank, words) from error

    def _tell(self, rank: int, words: str) -> None:
        self._has_told = True
        try:
            self.store.set(FAILURE, json.dumps([rank, words]))
        except RuntimeError:
            return  # the store is gone: there is nobody to tell, and the error itself is on its way

    def _find(self) -> tuple[int, str] | None:
        """The rank that failed first, and how; None where all of them are there."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            gone = next((rank for rank in range(self.size) if not self._is_there(rank)), None)
            if self.store.check([FAILURE]):  # asked last: who fails tells first, and goes then
                rank, words = json.loads(self.store.get(FAILURE))
                return rank, words
            if gone is not None:
                return gone, (
                    f"rank {gone} is gone: its process ended in the middle of a step, killed or by an error "
                    "outside of the model. Look at its own output and at the memory of its machine"
                )
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)

    def _is_there(self, rank: int) -> bool:
        if rank == self.rank or not self.store.check([_place(rank)]):
            return True
        host, port = json.loads(self.store.get(_place(rank)))
        try:
            address = "localhost" if host == socket.gethostname() else host
            socket.create_connection((address, port), timeout=PATIENCE_SECONDS).close()
        except OSError:
            return False
        return True


def _place(rank: int) -> str:
    return f"lowtide/at/{rank}"


_guards: dict[dist.ProcessGroup, Guard] = {}
"""Those of this process, as long as it lives: the others connect to it whatever becomes of a model."""


def guard_ranks(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let the planned `model` of one of several processes name the rank that fails."""
    if not dist.is_available() or not dist.is_initialized():
        return
    group = group or group_for(model)
    runner = runner_of(model)
    if runner is None or dist.get_world_size(group) == 1:
        return
    if not _guards:
        autograd_engine.around_backward(_watching_backward)
        os.register_at_fork(after_in_child=_let_go)
    if group not in _guards:
        _guards[group] = Guard(group)
    runner.guard = _guards[group].watching


@contextmanager
def _watching_backward() -> Iterator[None]:
    with ExitStack() as stack:
        for guard in _guards.values():
            stack.enter_context(guard.watching("backward"))
        yield


def _let_go() -> None:
    """A worker that outlives its rank must not answer for it."""
    for guard in _guards.values():
        guard.socket.close()
    _guards.clear()
