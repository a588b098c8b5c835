"""The arrows between modules, and who may reach into torch's private parts."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lowtide"
HOOKS = PACKAGE / "torchside" / "hooks.py"
AS_GOOD_AS_PUBLIC = "torch.utils._pytree"
"""The way into nested outputs that torch itself tells users to take; it has no public name."""
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
    """Every private name of torch's modules that the code imports or reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(attr=attribute) if attribute.startswith("_"):
                found = [dotted(node)]
            case _:
                found = []
        for name in found:
            root, *rest = name.removeprefix(AS_GOOD_AS_PUBLIC).split(".")
            if root == "torch" and any(part.startswith("_") and part[:2] != "__" for part in rest):
                yield f"{name} (line {getattr(node, 'lineno', '?')})"


def test_import_contracts_are_kept():
    # in a process of its own, since the linter turns off all loggers that exist
    lint = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_stays_in_its_place(path):
    if path != HOOKS:
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
    ],
)
def test_private_torch_is_found(code):
    assert len(list(private_torch(ast.parse(code)))) == 1


def test_public_torch_is_let_through():
    assert (
        list(
            private_torch(ast.parse("import torch.nn\nfrom torch import fx\ntorch.__version__\nself._torch"))
        )
        == []
    )


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_without_torch(name):
    code = f"import sys, lowtide.{name}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
