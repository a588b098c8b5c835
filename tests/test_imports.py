"""The arrows between modules, and who may reach into torch's private parts."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lowtide"
MAY_USE_PRIVATE_TORCH = ("capture", "profiling")
"""The profiler runs ops on fake tensors, which torch only offers as a private module."""
TORCH_FREE = (
    "facts", "errors", "files", "serial", "sizes", "simulate", "activations", "planners", "report",
    "targets", "cli",
)  # fmt: skip


def top_module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def private_torch(tree: ast.AST) -> Iterator[str]:
    """Every `torch._something` that the code imports or reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
                found = [f"torch.{attribute}"]
            case _:
                found = []
        for name in found:
            root, _, rest = name.partition(".")
            if root == "torch" and rest.startswith("_") and not rest.startswith("__"):
                yield f"{name} (line {getattr(node, 'lineno', '?')})"


def test_import_contracts_are_kept():
    # in a process of its own, since the linter turns off all loggers that exist
    lint = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_stays_in_its_place(path):
    if top_module(path) not in MAY_USE_PRIVATE_TORCH:
        assert list(private_torch(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._subclasses import FakeTensorMode",
        "from torch import _C",
        "def f():\n    return torch._functorch.config",
    ],
)
def test_private_torch_is_found(code):
    assert len(list(private_torch(ast.parse(code)))) == 1


def test_public_torch_is_let_through():
    assert list(private_torch(ast.parse("import torch.nn\nfrom torch import fx\ntorch.__version__"))) == []


@pytest.mark.parametrize("name", [m for m in TORCH_FREE if list(PACKAGE.glob(f"{m}*"))])
def test_imports_without_torch(name):
    code = f"import sys, lowtide.{name}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
