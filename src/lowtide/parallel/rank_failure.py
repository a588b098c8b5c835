"""Name the rank that failed, where other ranks only see that it does not answer.

Ranks talk through the store of their process group. While all goes well, a thread of each rank asks this
store once a second whether a roll call is open; nothing else is sent. A rank that raises in a step first
writes its error to the store. A rank whose exchange with other ranks fails opens a roll call:

    rank 0: all-reduce fails ── roll call 1 ─────────────── after PATIENCE_SECONDS: rank 1 is gone
    rank 1: killed
    rank 2: all-reduce waits    └─ its thread answers

Shortcoming: a rank whose Python code does not run for PATIENCE_SECONDS counts as gone.
"""

import atexit
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import nn

from lowtide.errors import RankError
from lowtide.parallel.ranks import group_for
from lowtide.runtime.runner import runner_of
from lowtide.torch_compat import autograd_engine, ddp, pipelining

FAILURE = "lowtide/failure"
ROLL_CALLS = "lowtide/roll_calls"
"""The key of the number of roll calls so far."""
TOLD = "lowtide_told"
"""An attribute of an error: the guards of this process that have told others of it."""
PATIENCE_SECONDS = 5.0
"""How long a rank may take to answer a roll call."""
POLL_SECONDS = 1.0

logger = logging.getLogger("lowtide")


class RankGuard:
    """One process of a group: reports its failures to other ranks and reads theirs, until `close`.

    A thread answers roll calls over its own connection to the store, since the main thread may wait on the
    other connection. A forked process has no such thread: a worker that outlives its rank does not answer
    for the rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.store = ddp.store_of(group)
        self.num_models = 0
        self._has_told = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._answer_roll_calls, args=(self.store.clone(),), name="lowtide-rank", daemon=True
        )
        self._num_answered = _num_roll_calls(self.store)
        self.store.set(_guarded(self.rank), b"yes")
        self._thread.start()
        # a daemon thread that is inside of torch when Python ends would abort the process
        atexit.register(self._stop)

    def close(self) -> None:
        """Excuse this process from roll calls: it has no planned model any more."""
        atexit.unregister(self._stop)
        self._stop()
        if ddp.is_alive(self.group):
            self._write(_guarded(self.rank), b"")

    def _stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():  # it may itself collect the last planned model
            self._thread.join(PATIENCE_SECONDS)

    def _answer_roll_calls(self, store: Any) -> None:
        while not self._stopped.wait(POLL_SECONDS) and ddp.is_alive(self.group):
            try:
                roll_call = _num_roll_calls(store)
                for number in range(self._num_answered + 1, roll_call + 1):
                    store.set(_answer(self.rank, number), b"")
                self._num_answered = roll_call
            except RuntimeError:  # the store is gone: no rank asks any more
                return

    @contextmanager
    def watching(self, when: str) -> Iterator[None]:
        """Report errors inside, in a part `when` of a step, to other ranks; raise a `RankError` where another
        rank failed."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            # an error in a pass of a stage ends the step of the pipeline, which raises its own
            told = {*getattr(error, TOLD, ()), *getattr(error.__cause__, TOLD, ())}
            if ddp.is_alive(self.group) and id(self) not in told:
                setattr(error, TOLD, {*told, id(self)})
                self._explain(error, when)
            raise
        if self._has_told:  # the user's loop continued after an error
            self.store.delete_key(FAILURE)
            self._has_told = False

    def _explain(self, error: BaseException, when: str) -> None:
        if not ddp.is_of_communication(error):
            self._tell(self.rank, f"rank {self.rank} raised in its {when}: {type(error).__name__}: {error}")
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
        self._write(FAILURE, json.dumps([rank, words]))

    def _write(self, key: str, value: Any) -> None:
        try:
            self.store.set(key, value)
        except RuntimeError as error:  # the store ended with its process: no rank can read it
            logger.debug("cannot write '%s' to the store of the process group: %s", key, error)

    def _find(self) -> tuple[int, str] | None:
        """The rank that failed first, and its failure in words; None where all ranks answer."""
        roll_call = self.store.add(ROLL_CALLS, 1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        missing = set(range(self.size)) - {self.rank}
        while not self.store.check([FAILURE]):
            missing -= {rank for rank in missing if self._is_excused(rank, roll_call)}
            if time.monotonic() > deadline:
                if not missing:
                    return None
                gone = min(missing)
                return gone, (
                    f"rank {gone} is gone: its process ended in the middle of a step, killed or by an error "
                    "outside of the model. Look at its own output and at the memory of its machine"
                )
            time.sleep(0.1)
        rank, words = json.loads(self.store.get(FAILURE))
        return rank, words

    def _is_excused(self, rank: int, roll_call: int) -> bool:
        """Whether a rank answered, or has no planned model that could."""
        if self.store.check([_answer(rank, roll_call)]):
            return True
        return not self.store.check([_guarded(rank)]) or not self.store.get(_guarded(rank))


def _num_roll_calls(store: Any) -> int:
    return int(store.get(ROLL_CALLS)) if store.check([ROLL_CALLS]) else 0


def _guarded(rank: int) -> str:
    return f"lowtide/guarded/{rank}"


def _answer(rank: int, roll_call: int) -> str:
    return f"lowtide/roll_call/{roll_call}/{rank}"


_guards: dict[dist.ProcessGroup, RankGuard] = {}
"""By group; a guard stays as long as this process has planned models of the group."""


@contextmanager
def _watching(when: str) -> Iterator[None]:
    with ExitStack() as stack:
        for guard in list(_guards.values()):
            stack.enter_context(guard.watching(when))
        yield


_BACKWARD = autograd_engine.around_backward(partial(_watching, "backward pass"))


@cache
def _pipeline_steps() -> list[autograd_engine.ProcessPatch]:
    return pipelining.around_steps(partial(_watching, "step of the pipeline"))


class ModelGuard:
    """Names the rank that fails while one planned model is in use: from `open` to `close`, or until the model
    is freed."""

    def __init__(self, group: dist.ProcessGroup, *, in_pipeline: bool = False) -> None:
        self.group = group
        self._patches = [_BACKWARD, *(_pipeline_steps() if in_pipeline else ())]
        self._release: Callable[[], object] = lambda: None

    def open(self) -> None:
        self._release()
        if not ddp.is_alive(self.group):
            return
        if self.group not in _guards:
            _guards[self.group] = RankGuard(self.group)
        _guards[self.group].num_models += 1
        held = [patch.hold(self) for patch in self._patches]
        self._release = release = weakref.finalize(self, _release, self.group, held)
        release.atexit = False  # a rank that ends while others train is gone

    def close(self) -> None:
        self._release()

    def watching(self, when: str) -> AbstractContextManager[None]:
        guard = _guards.get(self.group)
        return nullcontext() if guard is None else guard.watching(when)


def guard_ranks(model: nn.Module, group: dist.ProcessGroup | None, *, in_pipeline: bool = False) -> None:
    """Let the planned `model` of one of several processes, or a stage of a pipeline, name the rank that
    fails."""
    if not dist.is_available() or not dist.is_initialized():
        return
    group = group or group_for(model)
    runner = runner_of(model)
    if runner is not None and dist.get_world_size(group) > 1:
        runner.guard = ModelGuard(group, in_pipeline=in_pipeline)
        runner.guard.open()


def _release(group: dist.ProcessGroup, held: Sequence[Callable[[], object]]) -> None:
    for release in held:
        release()
    guard = _guards[group]
    guard.num_models -= 1
    if not guard.num_models:
        _guards.pop(group).close()
