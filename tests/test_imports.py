"""The arrows between modules, and who may reach into torch's private parts."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lowtide"
PRIVATE = PACKAGE / "torch_compat"
AS_GOOD_AS_PUBLIC = "torch.utils._pytree"
"""The way into nested outputs that torch itself tells users to take; it has no public name."""
OURS = re.compile(r"(self|cls)\._\w+")
NOT_TORCHS = {"os._exit"}
OPS = ("aten._", "torch.ops.aten._")
"""Ops whose names begin so are ops like others."""
TORCH_FREE = ("facts", "errors", "planning.planner", "planning.abstract", "report.html", "zoo.targets", "cli")


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{dotted(value)}.{attribute}"
        case _:
            return ""


def private_torch(tree: ast.AST) -> Iterator[str]:
    """Every private name that the code imports from torch, or reads of whatever is not its own."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(attr=attribute) if is_private(attribute):
                found = [dotted(node) or f"?.{attribute}"]
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]
            ):
                found = [f"?.{name}"]
            case _:
                found = []
        for name in found:
            parts = name.removeprefix(AS_GOOD_AS_PUBLIC).split(".")
            if parts[0] == "torch" or isinstance(node, ast.Attribute | ast.Call):
                ours = OURS.fullmatch(name) or name in NOT_TORCHS or name.startswith(OPS)
                if any(map(is_private, parts)) and not ours:
                    yield f"{name} (line {getattr(node, 'lineno', '?')})"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_import_contracts_are_kept():
    # in a process of its own, since the linter turns off all loggers that exist
    lint = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_stays_in_its_place(path):
    if not path.is_relative_to(PRIVATE):
        assert list(private_torch(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._subclasses import FakeTensorMode",
        "from torch import _C",
        "from torch.fx.graph import _BoxedCodeGen",
        "def f():\n    return torch._functorch.config",
        "torch.utils._python_dispatch",
        "model._compiled_call_impl",
        "model._compiled_call_impl = runner",
        "node.target._schema.is_mutable",
        "tensor.untyped_storage()._cdata",
        "self.model._call_impl",
        "getattr(target, '_opname', target)",
    ],
)
def test_private_torch_is_found(code):
    assert len(list(private_torch(ast.parse(code)))) == 1


def test_public_torch_is_let_through():
    assert (
        list(
            private_torch(
                ast.parse("import torch.nn\nfrom torch import fx\ntorch.__version__\nself._torch\naten._x")
            )
        )
        == []
    )


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_without_torch(name):
    code = f"import sys, lowtide.{name}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
