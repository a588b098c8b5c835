"""Where in the user's model and source a graph node comes from."""

import re

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
