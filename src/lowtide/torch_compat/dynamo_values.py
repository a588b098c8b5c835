"""Python values that decide a graph, under Dynamo: values read from the batch, and numbers that change.

`batch_values`: `if mask.all():` or `lengths.max().item()` would end a graph. But the input is known while
torch traces, and so is the value. Tracing continues with the value, and a guard recomputes it in every call;
another value has another graph. Values that depend on parameters, or that change with every batch, still end
the graph.

`changing_numbers`: a Python number becomes an input of the graph when its value changes for the first time;
most numbers never change, and a constant gives the simpler graph. The graph reads the number from its input
and passes it to its ops as Python would. Python computes on numbers alone, op by op: all results have eager's
bits. A number that decides more than values, such as a shape or the choice of ops, is fixed: tracing starts
over, and every value of the number has its own graph.

Shortcoming: a number is fixed if an op takes it as a `float` of C (`huber_loss`, `bernoulli_`);
`ops.traced_ops` has rules for a few such ops.
"""

import contextlib
import dis
import functools
import math
import operator
import unittest.mock
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config, symbolic_convert
from torch._dynamo.exc import SkipFrame, TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.source import is_constant_source, is_from_defaults
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch._aot_autograd import graph_compile
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.torch_compat import dynamo_paths
from lowtide.torch_compat.dispatch import FakeTensor, is_number, iter_tensors, real_tensors, storage_key

MAX_VALUES = 16
"""Per source location; a value with more counts as one that changes with every batch."""
MAX_LIST = 1024

JUMPS = {name for name in dis.opmap if "JUMP" in name and name.endswith(("_TRUE", "_FALSE", "_OR_POP"))}
TRANSLATORS = (symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator)
IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i")} | {operator.setitem}

_seen: weakref.WeakKeyDictionary[CodeType, dict[int, set[str]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def batch_values() -> Iterator[None]:
    """While torch traces, let code read values that depend only on inputs."""
    with contextlib.ExitStack() as patches:
        for translator in TRANSLATORS:
            table = list(translator.dispatch_table)
            for name in JUMPS:
                code = dis.opmap[name]
                plain = table[code]
                if plain is not None:
                    table[code] = _jump_by_value(plain, keeps=name.endswith("_OR_POP"))
            patches.enter_context(unittest.mock.patch.object(translator, "dispatch_table", table))
        for name, read in READS.items():
            reads = _read_by(read, getattr(TensorVariable, name))
            patches.enter_context(unittest.mock.patch.object(TensorVariable, name, reads))
        calls = _called_by(TensorVariable.call_method)
        patches.enter_context(unittest.mock.patch.object(TensorVariable, "call_method", calls))
        yield


def _jump_by_value(plain: Callable[..., None], *, keeps: bool) -> Callable[..., None]:
    """A jump by a tensor's known truth value. A jump that `keeps` its operand keeps the tensor itself."""

    def jump(tx: Any, instruction: Any) -> None:
        condition = tx.stack[-1]
        value = _known_value(tx, condition, bool)
        if value is None:
            return plain(tx, instruction)
        tx.stack[-1] = VariableTracker.build(tx, value)
        depth = len(tx.stack)
        plain(tx, instruction)
        if keeps and len(tx.stack) == depth:
            tx.stack[-1] = condition
        return None

    return jump


def _read_by(read: Callable[[torch.Tensor], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        value = None if args or kwargs else _known_value(tx, variable, read)
        return plain(variable, tx, *args, **kwargs) if value is None else VariableTracker.build(tx, value)

    return method


def _called_by(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        read = None if args or kwargs else METHODS.get(name)
        if name in LISTS and _has_numbers_of_the_model(
            variable.proxy.node, tx.output.graph, tx.output.root_tx.f_code
        ):
            dynamo_paths.numbers_follow(tx, in_array=name == "numpy")
            read = None
        value = None if read is None else _known_value(tx, variable, read)
        return plain(variable, tx, name, args, kwargs) if value is None else VariableTracker.build(tx, value)

    return call_method


def _has_numbers_of_the_model(node: fx.Node, graph: fx.Graph, code: CodeType) -> bool:
    """Whether a tensor has several whole numbers that do not follow from the batch alone."""
    fake = node.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or not fake.dim() or fake.dtype not in WHOLE_NUMBERS:
        return False
    found = _origin(node, graph)
    return found is None or any(_is_made_by_model(each, code) for each in found[0])


def _is_made_by_model(node: fx.Node, code: CodeType) -> bool:
    """Whether an input of a graph was computed by code before the graph, not from the batch alone."""
    argument = node.meta["grapharg"]
    return argument.example in _made_by_model or dynamo_paths.is_row_result(code, argument.source.name)


_made_by_model = WeakIdKeyDictionary()
"""Tensors of whole numbers that a graph computed not from the batch alone: inputs of a later graph."""
WHOLE_NUMBERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


def _noting_numbers(
    graph: fx.GraphModule, code: CodeType, compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """The compiled graph, which notes its results for `_made_by_model`."""
    (results,) = graph.graph.output_node().args
    made = [
        place
        for place, node in enumerate(results if isinstance(results, (list, tuple)) else ())
        if isinstance(node, fx.Node) and _has_numbers_of_the_model(node, graph.graph, code)
    ]
    if not made:
        return compiled

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = compiled(*args, **kwargs)
        _made_by_model.update((found[place], True) for place in made)
        return found

    return call


METHODS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": torch.Tensor.item,
    "tolist": torch.Tensor.tolist,
}
LISTS = ("tolist", "numpy")
TRUTH = "nb_bool_impl" if hasattr(TensorVariable, "nb_bool_impl") else "bool_impl"  # the latter: torch 2.13
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    TRUTH: bool,
    "nb_int_impl": int,
    "nb_float_impl": float,
    "nb_index_impl": operator.index,
}


def _known_value(tx: Any, variable: Any, read: Callable[[torch.Tensor], Any]) -> Any:
    """The result of `read` for a traced tensor, guarded from now on; None where it is unknown."""
    if not isinstance(variable, TensorVariable):
        return None
    fake = variable.proxy.node.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or fake.numel() > MAX_LIST or fake.requires_grad:
        return None
    certain = _certain_comparison(variable.proxy.node)
    if certain is not None and read is bool:
        return certain
    found = _origin(variable.proxy.node, tx.output.graph)
    if found is None:
        return None
    inputs, compute = found
    examples = [node.meta["grapharg"].example for node in inputs]
    if any(isinstance(example, FakeTensor) for example in examples):
        return None
    try:
        value = _compute(compute, read, examples)
    except Exception:
        return None  # the model's own code raises the error
    if not _is_one_of_few(tx, value):
        return None
    if inputs:
        sources = [node.meta["grapharg"].source for node in inputs]
        install_guard(sources[0].make_guard(_guard(compute, read, value, sources)))
    return value


def _certain_comparison(node: fx.Node) -> bool | None:
    """The result of comparing a draw from [0, 1) with 0 or 1, as for layers dropped with probability 0."""
    drawn, bound = (*node.args, None, None)[:2]
    if node.target is not operator.lt or not isinstance(drawn, fx.Node) or drawn.target is not torch.rand:
        return None
    if not isinstance(bound, (int, float)) or 0 < bound < 1:
        return None
    return bound >= 1


def _is_one_of_few(tx: Any, value: Any) -> bool:
    seen = _seen.setdefault(tx.f_code, {}).setdefault(tx.instruction_pointer, set())
    if len(seen) < MAX_VALUES:
        seen.add(str(value))
    return str(value) in seen


def _origin(node: fx.Node, graph: fx.Graph) -> tuple[list[fx.Node], fx.GraphModule] | None:
    """The inputs that decide a value, and the graph from them to the value; None for other values."""
    if node.graph is not graph:
        return None
    needed, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                waiting.append(source)
    ordered = [each for each in graph.nodes if each in needed]
    inputs = [each for each in ordered if each.op == "placeholder"]
    if not all(map(_is_plain_input, inputs)) or not all(map(_is_plain_op, ordered)):
        return None
    if writes_to(needed):
        return None
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for each in (*inputs, *(other for other in ordered if other.op != "placeholder")):
        copies[each] = part.node_copy(each, copies.__getitem__)
    part.output(copies[node])
    return inputs, fx.GraphModule({}, part)


def _is_plain_input(node: fx.Node) -> bool:
    argument = node.meta.get("grapharg")
    example = getattr(argument, "example", None)
    return (
        isinstance(example, torch.Tensor)
        and not example.requires_grad
        and getattr(argument, "source", None) is not None
    )


def _is_plain_op(node: fx.Node) -> bool:
    """Whether a node is an input, or a deterministic op that changes no input."""
    if node.op == "placeholder":
        return True
    if node.op not in ("call_function", "call_method") or _writes(node):
        return False
    name = node_name(node)
    return not name.startswith(("rand", "bernoulli", "multinomial", "dropout", "normal", "empty", "poisson"))


def writes_to(nodes: Collection[fx.Node]) -> bool:
    """Whether any op of their graph writes to the results of `nodes`."""
    own = _storages(nodes)
    return any(
        _writes(each) and own & _storages(each.all_input_nodes)
        for graph in {node.graph: None for node in nodes}
        for each in graph.nodes
    )


def _writes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = node_name(node)
    return (
        (name.endswith("_") and not name.endswith("__"))
        or node.target in IN_PLACE
        or "out" in node.kwargs
        or bool(node.kwargs.get("inplace"))
    )


def _storages(nodes: Iterable[fx.Node]) -> set[Any]:
    values = [node.meta.get("example_value") for node in nodes]
    return {storage_key(value) for value in values if isinstance(value, torch.Tensor)}


def node_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _compute(
    compute: Callable[..., torch.Tensor], read: Callable[[torch.Tensor], Any], inputs: list[torch.Tensor]
) -> Any:
    with real_tensors():
        return read(compute(*inputs))


def _guard(
    compute: Callable[..., torch.Tensor], read: Callable[[torch.Tensor], Any], value: Any, sources: list[Any]
) -> Callable[..., None]:
    def is_same(*inputs: torch.Tensor) -> bool:
        try:
            return bool(_compute(compute, read, list(inputs)) == value)
        except Exception:
            return False

    def add_guard(builder: Any, _guard: Any) -> None:
        arguments = ", ".join(source.name for source in sources)
        words = f"___same_value({arguments})"
        names = {**_get_closure_vars(), "___same_value": is_same}  # torch's names of inputs may use these
        builder.add_python_lambda_leaf_guard_to_root([words], [words], closure_vars=names)

    return add_guard


_first: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], int | float]] = weakref.WeakKeyDictionary()
"""The first value of every number that a function was traced with, by the function's module, else by its
code; then by its code and the number's source. Two models of one class may have two probabilities of dropout,
say, and each of them a constant one."""
_fixed: weakref.WeakKeyDictionary[CodeType, set[str]] = weakref.WeakKeyDictionary()
"""Numbers that never become inputs."""
_inputs: weakref.WeakKeyDictionary[CodeType, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Numbers that became inputs in the present tracing, each with torch's symbol."""


@contextlib.contextmanager
def changing_numbers() -> Iterator[None]:
    """While torch traces, turn numbers into inputs if they have changed since the code was last traced."""
    wrap = _wrapped_by(VariableBuilder.wrap_literal)
    with (
        unittest.mock.patch.object(VariableBuilder, "wrap_literal", wrap),
        # with its assertions torch recomputes numbers by simplified formulas, which round differently
        config.patch(do_not_emit_runtime_asserts=True),
    ):
        yield


def _wrapped_by(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wrap_literal(builder: Any, value: Any) -> Any:
        if dynamo_paths.runs_eagerly(_code_of(builder)):
            raise SkipFrame("numbers that the model computes decide shapes")
        if not _has_changed(builder, value):
            return plain(builder, value)
        if type(value) is int:
            made = builder.wrap_symint(value, dynamism=DimDynamic.DYNAMIC)
        else:
            with config.patch(assume_static_by_default=False):
                made = plain(builder, value)
        symbol = getattr(made, "sym_num", None)
        if is_number(symbol):
            _note(_code_of(builder), builder.source.name, symbol)
        return made

    return wrap_literal


def _note(code: CodeType, name: str, symbol: Any) -> None:
    noted = _inputs.setdefault(code, {})
    if any(other.node.shape_env is not symbol.node.shape_env for other in noted.values()):
        noted.clear()  # from an abandoned tracing
    noted[name] = symbol


def _code_of(builder: Any) -> CodeType:
    code: CodeType = builder.tx.output.root_tx.f_code
    return code


def _module_of(builder: Any) -> nn.Module | None:
    """The module whose function is traced."""
    values = builder.tx.output.root_tx.f_locals.values()
    return next((value for value in values if isinstance(value, nn.Module)), None)


def _has_changed(builder: Any, value: Any) -> bool:
    source = builder.source
    if type(value) not in (int, float) or is_constant_source(source) or is_from_defaults(source):
        return False
    code, name = _code_of(builder), source.name
    if not math.isfinite(value) or not name.startswith("L[") or name in _fixed.get(code, ()):
        return False
    if type(value) is int and dynamo_paths.is_models_number(code, name):
        return True
    owner = _module_of(builder) or code
    first = _first.setdefault(owner, {}).setdefault((id(code), name), value)
    return type(first) is type(value) and first != value


def compiled_with_numbers(
    graph: fx.GraphModule,
    code: CodeType,
    compile_graph: Callable[[], Callable[..., Any]],
    *,
    allowed: bool,
) -> Callable[..., Any]:
    """The function that `compile_graph` makes of a graph of `code`, with numbers among its inputs. Tracing
    starts over without a number that is not `allowed`, decides more than values, or makes torch fail."""
    numbers = _inputs.pop(code, {})
    if not numbers:
        return _noting_numbers(graph, code, compile_graph())
    if not allowed:
        _fix(code, numbers)

    def look(joint: fx.GraphModule) -> None:
        _fix(code, _deciding(numbers, joint, "val"))

    _fix(code, _deciding(numbers, graph, "example_value"))
    try:
        # torch would turn numbers into tensors here, which round differently, and fix the rest
        with unittest.mock.patch.object(graph_compile, "_apply_tensorify_python_scalars", look):
            return _noting_numbers(graph, code, compile_graph())
    except TorchDynamoException:
        raise
    except RuntimeError:
        _fix(code, numbers)
        raise


def _fix(code: CodeType, names: Collection[str]) -> None:
    """Start over without these numbers among the inputs; does nothing for an empty list. Numbers that the
    model computes would be others in every step: their code runs without graphs."""
    if names:
        if any(dynamo_paths.is_models_number(code, name) for name in names):
            dynamo_paths.run_eagerly(code)
        _fixed.setdefault(code, set()).update(names)
        # tracing takes another path with a constant, and torch compares the paths of two attempts
        symbolic_convert.InstructionTranslator.current_tx().speculation_log.clear()
        raise TensorifyScalarRestartAnalysis(
            restart_reason="a number decides more than it may as an input"
        ) from None


def _deciding(numbers: Mapping[str, Any], graph: fx.GraphModule, field: str) -> list[str]:
    """The numbers of a graph that decide more than values: torch replaced them by constants, or they decide
    the layout of a tensor or the type of a number."""
    symbols: set[Any] = set()
    for node in graph.graph.nodes:
        value = node.meta.get(field)
        for tensor in iter_tensors(value):
            layout = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
            symbols.update(*(number.node.expr.free_symbols for number in layout if is_number(number)))
        # the maximum of 1 and 0.5, say: torch gives 1.0, Python 1
        mixes = (
            node.target in (torch.sym_min, torch.sym_max) and len({_kind(a, field) for a in node.args}) > 1
        )
        if mixes and _tells_types_apart(node, field):
            symbols |= value.node.expr.free_symbols if is_number(value) else set()
    return [
        name
        for name, symbol in numbers.items()
        if not symbol.node.expr.free_symbols or symbol.node.expr.free_symbols & symbols
    ]


def _kind(arg: Any, field: str) -> type:
    value = arg.meta.get(field) if isinstance(arg, fx.Node) else arg
    return int if isinstance(value, int | torch.SymInt) else float


def _tells_types_apart(number: fx.Node, field: str) -> bool:
    """Whether it matters that a number is 1 or 1.0: not to ops on tensors of floats."""
    for reader in number.users:
        if is_number(reader.meta.get(field)):
            if _tells_types_apart(reader, field):
                return True
        else:
            read = [source.meta.get(field) for source in reader.all_input_nodes]
            floats = [tensor.is_floating_point() for tensor in read if isinstance(tensor, torch.Tensor)]
            if reader.op == "output" or not any(floats):
                return True
    return False
