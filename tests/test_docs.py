"""The documentation is true: its code runs, its links lead somewhere, and every message is explained.

A block of Python runs in its page's order, with the names of the blocks before it. One that cannot run here
has the comment `<!-- not run: why -->` before it, and is compiled only.
"""

import ast
import importlib
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from torch import nn

import lowtide
from lowtide.cli import terminal
from lowtide.cli.app import app
from lowtide.errors import CannotMoveToFreshProcess
from lowtide.experiments import contenders, machine
from lowtide.verification import verify_plan

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lowtide"
DOCS = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
PAGES = [README, *DOCS]
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")),
]
BLOCK = re.compile(r"(?P<comment><!-- not run: [^>]+ -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    runs: bool


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text.count("\n", 0, found.start("code")), found["code"], not found["comment"])
        for found in BLOCK.finditer(text)
    ]


def run(page: Path, block: Block, names: dict[str, typing.Any]) -> None:
    code = compile("\n" * block.line + block.code, str(page), "exec")  # a failure names the page and its line
    if block.runs:
        exec(code, names)


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` starts no processes, and times no more than it must: other tests look at those."""

    def run_fresh(*_: object, **__: object) -> None:
        raise CannotMoveToFreshProcess("not now", kind="")

    monkeypatch.setattr(verify_plan, "run_fresh", run_fresh)
    monkeypatch.setattr(verify_plan, "MOST_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("page", [page for page in DOCS if blocks(page)], ids=lambda page: page.stem)
def test_the_code_of_a_page(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}".replace("-", "_"))  # torch looks up what a page defines
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        run(page, block, vars(module))


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_the_code_of_the_readme() -> None:
    """Every block by itself, with what its reader has."""
    for block in blocks(README):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        given = {
            "model": model,
            "batch": torch.randn(32, 16),
            "optimizer": torch.optim.Adam(model.parameters()),
        }
        run(README, block, {"__name__": "page", "lowtide": lowtide} | given)


def test_blocks_are_found() -> None:
    for page in PAGES:
        assert len(blocks(page)) == page.read_text().count("\n```python"), page


def anchors(page: Path) -> set[str]:
    """As GitHub and Sphinx name the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)):
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{path} in {page.name}"
        assert not anchor or anchor in anchors(linked), f"#{anchor} of {path} in {page.name}"


FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]*(?:\.(?:py|c|h)|/))`")
"""A file or folder of the repository in backticks: `planning/auto.py`, `remat/`, `bench/results.py`."""


USERS = ("file.py", "train.py", "plots/")


def named_files(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return [name for name in FILE.findall(text) if name not in USERS]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [
        name for name in named_files(page) if not any((place / name).exists() for place in (ROOT, SOURCE))
    ]
    assert not missing, f"{page.name} names {missing}"


def test_files_are_found_in_pages() -> None:
    assert {"facts/", "parallel/exchange.py"} <= set(named_files(ROOT / "docs" / "architecture.md"))


FOLDERS = sorted(path.parent for path in SOURCE.rglob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_a_folder_lists_its_files(folder: Path) -> None:
    """`__init__.py` names each file, and begins no line with a name that is not there."""
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    lines = re.findall(r"^- (.+?)(?=\n- |\n\n|\Z)", doc, re.M | re.S)
    named = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} <= named
    heads = {name for line in lines for name in re.findall(r"`([\w.]+)`", line.partition(":")[0])}
    present = {name for path in folder.iterdir() for name in (path.stem, path.name)}
    assert heads <= present


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {line for tree in re.findall(r"```{toctree}\n(.*?)```", index, re.S) for line in tree.split()}
    assert {page.stem for page in DOCS} - {"index"} <= listed


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    errors = {name for name in lowtide.__all__ if name in vars(lowtide.errors)}
    for name in set(lowtide.__all__) - errors - {"__version__"}:
        assert re.search(rf":: lowtide\.{name}\b", page), name


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_all_options_of_a_callback_are_listed(library: str) -> None:
    text = (ROOT / "docs" / "trainers.md").read_text()
    listed = text.split(f"lowtide.integrations.{library}.Lowtide(\n")[1].split("\n)\n")[0]
    callback = importlib.import_module(f"lowtide.integrations.{library}").Lowtide
    options = [name for name in inspect.signature(callback).parameters if name != "swap"]
    assert re.findall(r"^    (\w+)=", listed, re.M) == options


COMMAND = re.compile(r"`(lowtide [^`\n]+)`|^(lowtide [^\n]+?)(?:   +#.*)?$", re.M)
NEEDS_BATCH = ("run", "profile", "plan", "compare")


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command that a page shows whole: with the name of a target, or a file."""
    for found in COMMAND.finditer(text.replace("\\\n", " ")):
        words = shlex.split(found[1] or found[2])
        if len(words) > 2 and re.search(r"^\w.*(-[a-z0-9]|:make|\.json)", words[2]):
            yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_to_paste_are_understood(page: Path) -> None:
    group: typing.Any = typer.main.get_command(app)
    for name, *words in commands_of(page.read_text()):
        if name in NEEDS_BATCH and not words[0].endswith(".json"):
            assert {"-b", "--batch-size"} & {*words}, (name, words)
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        if name != "launch":
            assert {word for word in words if word.startswith("-")} <= known | {"--help"}, (name, words)


def test_commands_are_found() -> None:
    assert list(
        commands_of(
            "`lowtide plan tiny-vit --bugdet 1` and `lowtide fit`\n```sh\nlowtide verify a.json   # b\n```"
        )
    ) == [
        ["plan", "tiny-vit", "--bugdet", "1"],
        ["verify", "a.json"],
    ]


def test_names_in_the_glossary_exist() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    code = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    names = set(re.findall(r"`([^`]+)`", page))
    assert {"lowtide.Plan", "auto", "torch.equal"} <= names
    for name in names:
        assert not name.startswith("lowtide.") or name.split(".")[1] in lowtide.__all__, name
        assert re.search(rf"\b{re.escape(name.split('.')[-1])}\b", code), name


ERRORS = {
    error.__name__
    for module in (lowtide.errors, terminal, contenders, machine)
    for error in vars(module).values()
    if isinstance(error, type) and issubclass(error, lowtide.LowtideError)
} | {"BadParameter"}


def messages() -> Iterator[tuple[str, str]]:
    """What the source raises and warns of, with where; gaps are filled in when it is said."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            ast.unparse(target): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
        }
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func).rpartition(".")[2]
            if (isinstance(node, ast.Raise) and name in ERRORS) or name in ("warning", "say"):
                for argument in call.args:
                    text = argument.left if isinstance(argument, ast.BinOp) else argument
                    found = constants.get(ast.unparse(text), argument) if name == "say" else argument
                    yield f"{path.relative_to(SOURCE)}:{call.lineno}", words(found)


def words(node: ast.expr) -> str:
    """The text of an expression, with `…` for its gaps; empty for what is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sd]|%\.\df%%", "…", text)
        case ast.JoinedStr(values=values):
            return "".join(words(value) or "…" for value in values)
        case ast.BinOp(left=left, right=right):
            return words(left) + (words(right) or "…")
    return ""


def key(message: str) -> str:
    """What to look for: the longest piece without a gap of its first part that has one."""
    parts = re.split(r"(?<=[\w)'…])[:.;] ", message)
    pieces = [max(text.split("…"), key=len).strip(" '\"(,:") for text in (*parts, message)]
    return next((piece for piece in pieces if len(piece) >= 8), pieces[-1])


def test_every_message_is_explained() -> None:
    page = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    missing = [f"{where}: {text}" for where, text in messages() if text and key(text) not in page]
    assert not missing, "not in docs/troubleshooting.md:\n" + "\n".join(missing)


def test_what_is_explained_is_said() -> None:
    """No row is left over from a text that was changed."""
    trees = (ast.parse(path.read_text()) for path in SOURCE.rglob("*.py"))
    said = [words(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr)]
    source = "\n".join(re.sub(r"{\w+}", "…", text) for text in said if text)
    rows = re.findall(r"^\| (.+?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    texts = [text for row in rows for text in re.findall(r"`([^`]+ [^`]+)`", row)]
    assert len(texts) > 100
    pieces = [piece.strip() for text in texts for piece in text.split("…")]
    unsaid = [piece for piece in pieces if piece not in source]
    assert not unsaid, "said nowhere in the source:\n" + "\n".join(unsaid)


def test_messages_are_found() -> None:
    found = [text for _, text in messages() if text]
    assert len(found) > 100
    assert "the model is in eval mode: call model.train() before capturing a training step" in found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is deprecated. Check CHANGES for Sphinx API")
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    build = pytest.importorskip("sphinx.cmd.build")
    assert build.main(["-W", "-q", "-b", "html", str(ROOT / "docs"), str(tmp_path)]) == 0
    commands = (tmp_path / "commands.html").read_text()
    assert 'id="lowtide-tradeoff"' in commands
    assert "--mode run" in commands, "two hyphens, as they are typed"
