"""Where in the user's model and source a graph node comes from."""

import re
import types
from typing import Any

from torch import fx


def module_path(node: fx.Node) -> str:
    """The path of the module a node belongs to, as in `model.named_modules()`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]", lambda m: f".{m[1] or m[2]}", path)
    parts = path.split(".")
    return ".".join(part for part in parts[2:] if part)


def source_line(node: fx.Node) -> str:
    """`file:line` of the user's code that made a node: the deepest frame outside of torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [frame for frame in frames if "/torch/" not in frame[0]]
    return "{}:{}".format(*outside[-1]) if outside else ""


def target_name(target: Any) -> str:
    """An op's name, the same in every process: Python's own name of a function has its address in it."""
    if isinstance(target, types.FunctionType | types.BuiltinFunctionType):
        return f"{str(target.__module__).split('.')[0].lstrip('_')}.{target.__qualname__}"
    return str(target)


def device_name(node: fx.Node) -> str:
    """`cpu` or `cuda:0`: where a node's (first) result lives."""
    value = node.meta["val"]
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    return str(tensor.device)
