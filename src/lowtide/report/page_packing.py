"""Data packed into the page: small, and no data can run as code.

Series of whole numbers change little from one run to the next: they are stored as differences, in bytes of
seven bits, as base64. Repeated strings are stored once and referred to by index. `templates/decode.js` is the
other half.
"""

import base64
import json
from collections.abc import Iterable, Sequence

from markupsafe import Markup


def pack_integers(values: Iterable[int]) -> str:
    """Base64 of the zigzag-encoded differences of `values`."""
    packed = bytearray()
    previous = 0
    for value in values:
        difference = value - previous
        previous = value
        rest = 2 * difference if difference >= 0 else -2 * difference - 1
        while rest >= 128:
            packed.append(rest & 127 | 128)
            rest >>= 7
        packed.append(rest)
    return base64.b64encode(packed).decode("ascii")


def pack_strings(values: Sequence[str]) -> dict[str, object]:
    """Distinct strings in order of appearance, and an index into them per value."""
    table: dict[str, int] = {}
    indices = [table.setdefault(value, len(table)) for value in values]
    return {"table": list(table), "index": pack_integers(indices)}


def script_json(data: object) -> Markup:
    """JSON for a `<script type="application/json">`; no name in it can end the element.

    Inside a script element, HTML ends at `</script` and changes state at `<!--`, whatever the
    quotes; `<` is therefore written as an escape, and so are `>`, `&` and JavaScript's line ends.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
