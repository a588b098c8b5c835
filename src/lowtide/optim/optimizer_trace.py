"""The optimizer's region of a step: what `optimizer.step()` allocates, op by op, traced on fake tensors.

The optimizer's own Python code runs on fake copies of the parameters. So temporaries are live exactly as long
as this code refers to them: in the loop, foreach and fused variants alike.
"""

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowtide.errors import CaptureError
from lowtide.ops.device_memory import CPU, block_bytes
from lowtide.ops.schema import READS_VALUES
from lowtide.optim.joined_optimizers import inner_optimizers
from lowtide.optim.shadow_optimizer import (
    FakeFactories,
    OptimizerEstimate,
    ShadowOptimizer,
    estimate,
    set_step_count,
    shadow_optimizer,
    state_tensors,
    tensors_of,
)
from lowtide.torch_compat.dispatch import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    StorageWeakRef,
    TorchDispatchMode,
    storage_key,
)

Optimizer = torch.optim.Optimizer

TRACED_STEP = 1000
"""The number of the traced step: some optimizers do more in later steps, or in every tenth."""


@dataclass(slots=True)
class OptimizerOp:
    """One op of `optimizer.step()`: the storages (by key) that it reads and makes, and those freed after it.

    An `estimated` op represents a whole step, and its `target` is a name.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...] = ()
    estimated: bool = False


@dataclass(slots=True)
class OptimizerTrace:
    """The ops of a step, and bytes by storage key in `sizes`; temporaries have negative keys.

    `parameters` and `gradients` map keys to the identity of the user's parameter. `note` says what is
    estimated, and `shadow` took the step.
    """

    ops: list[OptimizerOp]
    sizes: dict[int, int]
    state: tuple[int, ...]
    parameters: dict[int, int]
    gradients: dict[int, int]
    note: str = ""
    shadow: ShadowOptimizer | None = None

    @property
    def state_bytes(self) -> int:
        return sum(self.sizes[key] for key in self.state)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the step's own storages that are live at once."""
        return peak_bytes(self.ops, self.sizes)


class _Recorder(TorchDispatchMode):
    """Record every op that reads or makes fake tensors, or tensors of an accelerator, the step's `device`;
    ops on real tensors of the CPU, which are step counters, just run."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.device = device
        self.ops: list[OptimizerOp] = []
        self.sizes: dict[int, int] = {}
        self._live: dict[int, tuple[int, StorageWeakRef]] = {}
        self._layout: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = self._counted((args, kwargs))
        if func.namespace == "prim" or func in READS_VALUES:
            return func(*args, **kwargs)
        self.collect()
        read = {storage_key(tensor) for tensor in inputs}
        reads = tuple(dict.fromkeys(self._name(storage_key(tensor)) for tensor in inputs))
        result = func(*args, **kwargs)
        if not inputs and not self._counted(result):
            return result
        makes = []
        for tensor in self._counted(result):
            key = storage_key(tensor)
            if key not in read and key not in self._live:
                # torch reuses addresses of freed storages, so each temporary gets a number
                name = -1 - len(self.sizes)
                self._live[key] = (name, StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                self.sizes[name] = block_bytes(self.device, tensor)
                makes.append(name)
        args, kwargs = self._layouts((args, kwargs))
        self.ops.append(OptimizerOp(func, args, kwargs, reads, tuple(makes)))
        return result

    def _counted(self, tree: Any) -> list[torch.Tensor]:
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return [leaf for leaf in leaves if isinstance(leaf, FakeTensor) or leaf.device != CPU]

    def _layouts(self, tree: Any) -> Any:
        """Arguments with other tensors of the same layouts, so that recording keeps no temporary live."""

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if key not in self._layout:
                with self.mode:
                    self._layout[key] = torch.empty_strided(*key[:2], dtype=leaf.dtype, device=leaf.device)
            return self._layout[key]

        return pytree.tree_map(plain, tree)

    def _name(self, key: int) -> int:
        return self._live[key][0] if key in self._live else key

    def collect(self) -> None:
        """Record which storages were freed since the last op."""
        freed = [key for key, (_, reference) in self._live.items() if reference.expired()]  # type: ignore[no-untyped-call]
        names = tuple(self._live.pop(key)[0] for key in freed)
        if names:
            self.ops[-1].frees = (*self.ops[-1].frees, *names)


class ValueAnswers(TorchDispatchMode):
    """Answer code that reads a value of a fake tensor: a number is 1, a condition is `condition`."""

    def __init__(self, *, condition: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.condition = condition
        self.numbers = self.conditions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            tensors = _fakes((args, kwargs or {}))
            if tensors[0].dtype is torch.bool or func is torch.ops.aten.equal.default:
                self.conditions += 1
                return self.condition
            self.numbers += 1
            return 1.0 if tensors[0].dtype.is_floating_point else 1


@dataclass(slots=True)
class _Attempt:
    """A traced step. It is less certain where the code `reads` values, or branches on them (`chooses`)."""

    trace: OptimizerTrace
    reads: bool
    chooses: bool
    condition: bool
    closure: bool


def trace_optimizer(optimizer: Optimizer, gradients: Container[int]) -> OptimizerTrace:
    """Trace a later step of `optimizer`, which has its state already.

    `gradients` are the identities of the parameters with a gradient. Fake tensors have no values: where the
    optimizer's code reads values, the trace is an estimate and has a `note`.
    """
    inner = inner_optimizers(optimizer)
    optimizer = inner[0] if len(inner) == 1 else optimizer
    name = type(optimizer).__name__
    errors: list[Exception] = []
    found = list(_attempts(optimizer, gradients, errors))
    if found and not found[0].reads:
        return found[0].trace
    trace = found[0].trace if found else None
    if trace is None or found[0].chooses:
        try:
            trace = _compared(found, estimate(optimizer, gradients), name)
        except Exception as error:  # whatever the optimizer's own code raises
            errors.append(error)
    if trace is None:
        raise CaptureError(
            f"cannot trace {name}.step(): {_one_line(errors[0])}. "
            "Leave the optimizer out (`optimizer=None`) to plan for forward and backward alone"
        ) from errors[0]
    note = (
        f"{name} reads values in its step, or needs a closure: its state and temporaries are estimated, and "
        "the optimizer's part of the peak with them. Leave room in the budget"
    )
    return replace(trace, note=note)


def _attempts(optimizer: Optimizer, gradients: Container[int], errors: list[Exception]) -> Iterator[_Attempt]:
    """Traces without and with a closure; where code branches on values, one more for the other branch."""
    for condition in (False, True):
        for closure in (False, True):
            try:
                attempt = _attempt(optimizer, gradients, condition=condition, closure=closure)
            except Exception as error:  # whatever the optimizer's own code raises
                errors.append(error)
                continue
            yield attempt
            if not attempt.chooses:
                return
            break


def _compared(found: list[_Attempt], real: OptimizerEstimate, name: str) -> OptimizerTrace:
    """The attempt whose branch gives a small optimizer its real state bytes, else the estimate."""
    same = [attempt for attempt in _attempts(real.small, real.trained, []) if attempt.chooses]
    for attempt in same:
        traced_bytes = attempt.trace.state_bytes
        for own in found:
            matches = (own.condition, own.closure) == (attempt.condition, attempt.closure)
            if matches and abs(traced_bytes - real.small_state_bytes) <= 0.01 * real.small_state_bytes:
                return own.trace
    return _as_trace(real, name)


def _one_line(error: Exception | None) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


def _attempt(optimizer: Optimizer, gradients: Container[int], *, condition: bool, closure: bool) -> _Attempt:
    shadow = shadow_optimizer(optimizer)
    fakes = shadow.fakes

    def evaluate() -> torch.Tensor:
        _give_gradients(fakes, gradients)
        return torch.ones(())

    take_step = partial(shadow.optimizer.step, evaluate) if closure else shadow.optimizer.step
    answers = ValueAnswers(condition=condition)
    with warnings.catch_warnings(), torch.no_grad(), answers, FakeFactories(shadow.mode):
        warnings.simplefilter("ignore")
        _give_gradients(fakes, gradients)
        take_step()
        _give_gradients(fakes, gradients)
        set_step_count(shadow.optimizer, TRACED_STEP - 1)
        own = {id(fake) for fake in fakes.values()}
        states = {id(tensor) for tensor in state_tensors(shadow.optimizer)}
        # a tensor without dimensions outside of the state, such as a learning rate, is the user's own
        kept = [t for t in tensors_of(shadow.optimizer) if id(t) not in own and (t.dim() or id(t) in states)]
        recorder = _Recorder(shadow.mode, shadow.device)
        with recorder:
            take_step()
            recorder.collect()
    if not recorder.ops and any(fake.grad is not None for fake in fakes.values()):
        raise CaptureError("it does nothing with the parameters that it is given")
    sizes = dict(recorder.sizes)
    for tensor in kept:
        sizes[storage_key(tensor)] = block_bytes(shadow.device, tensor)
    trace = OptimizerTrace(
        ops=recorder.ops,
        sizes=sizes,
        state=tuple(dict.fromkeys(storage_key(tensor) for tensor in kept)),
        parameters={storage_key(fake): key for key, fake in fakes.items()},
        gradients={storage_key(fake.grad): key for key, fake in fakes.items() if fake.grad is not None},
        shadow=shadow,
    )
    return _Attempt(
        trace,
        reads=closure or bool(answers.numbers or answers.conditions),
        chooses=bool(answers.conditions),
        condition=condition,
        closure=closure,
    )


def recorded_bytes(step: Callable[[], None], shadow: ShadowOptimizer) -> int:
    """The most bytes that a step over fake tensors makes and has live at once."""
    recorder = _Recorder(shadow.mode, shadow.device)
    with FakeFactories(shadow.mode), recorder:
        step()
        recorder.collect()
    return peak_bytes(recorder.ops, recorder.sizes)


def peak_bytes(ops: Iterable[OptimizerOp], sizes: Mapping[int, int]) -> int:
    """The most bytes that these ops of a step make and have live at once."""
    live: set[int] = set()
    live_bytes = most = 0
    for op in ops:
        live |= {*op.makes}
        live_bytes += sum(sizes[key] for key in op.makes)
        most = max(most, live_bytes)
        # an op may free storages that none of `ops` made
        freed = live.intersection(op.frees)
        live -= freed
        live_bytes -= sum(sizes[key] for key in freed)
    return most


def _as_trace(found: OptimizerEstimate, name: str) -> OptimizerTrace:
    """A trace of one op that makes all temporaries at once, with all state as one storage."""
    state, temporary = 1, -1
    op = OptimizerOp(f"{name}.step", (), {}, reads=(), makes=(temporary,), frees=(temporary,), estimated=True)
    sizes = {state: found.state_bytes, temporary: found.peak_bytes}
    return OptimizerTrace(ops=[op], sizes=sizes, state=(state,), parameters={}, gradients={})


def _give_gradients(fakes: dict[int, torch.Tensor], gradients: Container[int]) -> None:
    for key, fake in fakes.items():
        if key in gradients and fake.grad is None:
            fake.grad = torch.empty_like(fake, requires_grad=False)


def _fakes(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, FakeTensor)]
