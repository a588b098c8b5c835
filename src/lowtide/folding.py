"""Text over several lines, for a terminal: no word is broken where a line ends."""

import shutil
import textwrap
from typing import TextIO


def folded(text: str, width: int, *, start: str = "", is_command: bool = False) -> list[str]:
    """Text as lines of at most `width` columns in which no word is broken; a longer word has its own line.

    A command goes on after a backslash, so that all lines can be pasted; a comment behind a long one comes
    first. A text that begins with a space is laid out already.
    """
    if len(start) + len(text) <= width or text.startswith(" "):
        return [start + text]
    rest, lines = " " * len(start), []
    if is_command and (comment := text.partition("   # ")[2]):
        lines, text, start = [f"{start}# {comment}"], text.partition("   # ")[0], rest
    wrapped = textwrap.wrap(
        text,
        width - 2 * is_command,
        initial_indent=start,
        subsequent_indent=rest + "    " * is_command,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines + (" \\\n".join(wrapped).split("\n") if is_command else wrapped)


def print_line(text: str, *, to: TextIO, start: str = "") -> None:
    """Print one line; on a terminal, over as many lines as it needs."""
    lines = folded(text, shutil.get_terminal_size().columns, start=start) if to.isatty() else [start + text]
    print("\n".join(lines), file=to)
