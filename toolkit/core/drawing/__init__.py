"""Pictures as SVG text: stacked bars by part, and curves over steps. Standard library only, no script, no network.

Every picture has a white background, so that it is legible on a dark page, and a text description.
"""

from html import escape

from toolkit.core.display import Table
from toolkit.core.drawing.curves import POINTS, curve, thinned
from toolkit.core.drawing.elements import COLOURS, WIDTH, colour, luminance
from toolkit.core.drawing.embedding import portable
from toolkit.core.drawing.stacked_bars import Bar, bars
from toolkit.core.redaction import redact

__all__ = ["COLOURS", "POINTS", "Bar", "bars", "colour", "curve", "figure", "luminance", "portable", "thinned"]

LONG = 12
"""Rows above which the table of a picture is folded."""


def figure(svg: str, table: Table) -> str:
    """Return a picture and its table; a long table is folded."""
    rows = list(table.rows)
    text = Table(title=table.title, columns=table.columns, rows=rows, notes=table.notes).html()
    if len(rows) > LONG:
        text = f"<details><summary>{escape(table.title or 'as a table')}: {len(rows)} rows</summary>{text}</details>"
    return (
        '<div class="toolkit-figure" style="display:flex;flex-wrap:wrap;gap:0 1.5em;align-items:flex-start">'
        f'<div style="flex:2 1 min(440px,100%);min-width:0;max-width:{WIDTH}px">{svg}</div>'
        f'<div style="flex:1 1 min(300px,100%)">{redact(text)}</div></div>'
    )
