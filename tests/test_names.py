"""One name, one thing: no two modules of the package share a file name, no two classes a name."""

import ast
from collections import defaultdict
from pathlib import Path

import lowtide

ROOT = Path(lowtide.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

PUBLIC = {"Lowtide"}
"""What each integration calls its callback: users import one of them."""


def twice(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in found.items() if len(places) > 1}


def test_no_module_name_is_there_twice() -> None:
    found = defaultdict(list)
    for path in MODULES:
        if path.stem not in {"__init__", "__main__"}:
            found[path.stem].append(str(path.relative_to(ROOT)))
    assert len(found) > 100 and not twice(found)


def test_no_class_name_is_there_twice() -> None:
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in PUBLIC:
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) > 100 and not twice(found)
