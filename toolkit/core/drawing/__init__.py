"""Pictures as SVG text: stacked bars by part, and curves over steps. Standard library only, no script, no network.

Every picture has a white background, so that it is legible on a dark page, and a text description.
"""

from toolkit.core.display import Table
from toolkit.core.drawing.curves import POINTS, curve, thinned
from toolkit.core.drawing.elements import COLOURS, WIDTH, colour, luminance
from toolkit.core.drawing.embedding import portable
from toolkit.core.drawing.stacked_bars import Bar, bars
from toolkit.core.html import markup, render
from toolkit.core.redaction import redact

__all__ = ["COLOURS", "POINTS", "Bar", "bars", "colour", "curve", "figure", "luminance", "portable", "thinned"]

LONG = 12
"""Rows above which the table of a picture is folded."""


def figure(svg: str, table: Table) -> str:
    """Return a picture and its table; a long table is folded."""
    rows = list(table.rows)
    html = Table(title=table.title, columns=table.columns, rows=rows, notes=table.notes).html()
    folded = len(rows) if len(rows) > LONG else 0
    parts = {"picture": markup(svg), "table": markup(redact(html)), "title": table.title}
    return render("figure", **parts, folded=folded, width=WIDTH)
