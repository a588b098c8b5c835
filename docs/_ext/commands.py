"""The directive `lowtide-commands`: a section for every command, from what `--help` is made of."""

from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lowtide.cli.app import app


def page() -> str:
    """All commands in Markdown, as typer knows them."""
    group: Any = typer.main.get_command(app)
    return "\n".join(line for name, command in group.commands.items() for line in section(name, command))


def section(name: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=f"lowtide {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"## `lowtide {name}`", "", "```sh", f"lowtide {name} {usage}", "```", "")
    yield from (command.help.strip(), "", "| say | meaning |", "|---|---|")
    for parameter in command.params:
        record = parameter.get_help_record(context)  # None for an option that is hidden
        if record is not None:
            said, meaning = (text.replace("|", "\\|") for text in record)
            yield f"| `{said}` | {meaning} |"
    yield ""


class Commands(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(page(), allow_section_headings=True)


def setup(sphinx: Sphinx) -> dict[str, Any]:
    sphinx.add_directive("lowtide-commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
