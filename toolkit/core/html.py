"""HTML from the templates beside this file; every value is escaped, except for `markup`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


def markup(html: str) -> Any:
    """Return HTML that templates leave as it is."""
    from markupsafe import Markup

    return Markup(html)


def render(template: str, **values: Any) -> str:
    """Return the HTML of `templates/TEMPLATE.html` with these values."""
    html: str = _environment().get_template(f"{template}.html").render(values)
    return html


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
