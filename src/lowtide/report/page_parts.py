"""What pages share: templates that escape every text, shipped scripts, and a policy to run only these."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment as JinjaEnvironment
from jinja2 import FunctionLoader, StrictUndefined
from markupsafe import Markup

from lowtide.report import style

UPLOT = "vendor/uplot/uPlot.iife.min.js"


def render_page(template: str, *, scripts: Sequence[str], **data: Any) -> str:
    """A template with the given data, the style sheet and the scripts (of `templates/`) after uPlot."""
    texts = [_text(UPLOT), *(_text(f"templates/{name}") for name in scripts)]
    return (
        _environment()
        .get_template(template)
        .render(
            policy=_policy(texts),
            style=Markup(_text("vendor/uplot/uPlot.min.css") + _text("templates/style.css")),
            licence=_text("vendor/uplot/LICENSE"),
            scripts=[Markup(text) for text in texts],
            **data,
        )
    )


def _environment() -> JinjaEnvironment:
    environment = JinjaEnvironment(
        loader=FunctionLoader(lambda name: _text(f"templates/{name}")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        added=style.added,
        breakable=style.breakable,
        breakable_path=style.breakable_path,
        duration=style.duration,
        measured_place=style.measured_place,
        noisy=style.is_noisy,
        percent=style.percent,
        size=style.size,
    )
    return environment


def _text(path: str) -> str:
    return files("lowtide.report").joinpath(path).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """The page's policy: load nothing, run only the scripts shipped here."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
