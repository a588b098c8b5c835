"""Text for terminals that lack characters: `µs` becomes `us`, and nothing ends in an error."""

import codecs
import sys

ASCII = {
    "µ": "u",
    "μ": "mu",
    "×": "x",
    "±": "+-",
    "−": "-",
    "–": "-",
    "—": "-",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "…": "...",
    "·": "-",
    "•": "*",
    "─": "-",
    "━": "-",
    "│": "|",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
}
HANDLER = "lowtide-ascii"


def in_ascii(text: str) -> str:
    """The same text in ASCII; a character without a counterpart becomes a question mark."""
    return "".join(each if each.isascii() else ASCII.get(each, "?") for each in text)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return in_ascii(error.object[error.start : error.end]), error.end


def write_what_can_be_read() -> None:
    """Let this process's stdout and stderr replace characters that their encoding lacks."""
    codecs.register_error(HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=HANDLER)
