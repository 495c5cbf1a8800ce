"""A picture: an SVG of matplotlib's as an image, with title, legend and name; its colours, and its place in a page."""

from __future__ import annotations

import io
import math
import threading
import warnings
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from typing import Any

from toolkit.core.display import Table, markup, render
from toolkit.core.redaction import redact

COLOURS = {
    "parameters": "#1649ff",
    "master": "#3c0751",
    "gradients": "#a21600",
    "optimizer": "#33a36b",
    "activations": "#cf8000",
    "logits": "#a531ba",
    "buffers": "#465156",
    "workspace": "#4a0000",
    "transient": "#a886b6",
    "load": "#465156",
    "prepare": "#a886b6",
    "forward": "#1649ff",
    "backward": "#a21600",
    "step": "#33a36b",
    "save": "#cf8000",
}
"""A part's or a phase's colour, the same in every picture.

Parts lie at least 29 apart (CIE76), phases too, also as people without red, green or blue cones see them (Machado et al. 2009),
and each has a contrast of at least 3:1 against white.
"""

INK, QUIET, GRID, ALARM = "#1f2937", "#4b5563", "#e5e7eb", "#b91c1c"

FOLDED_ROWS = 12
"""Rows above which the table of a picture is folded."""

BARS = 100
"""Rows, and parts, of the largest picture."""

WIDTH = 760
"""Pixels. A picture shrinks with its place and never grows."""

MATPLOTLIB = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "svg.fonttype": "none",
    "svg.hashsalt": "toolkit",
    "savefig.bbox": None,
    "text.parse_math": False,
    "text.usetex": False,
}
"""The settings that no argument replaces: text stays text, and equal pictures are equal bytes."""

GLYPH = r"Glyph \d+"
"""A warning about a letter that matplotlib's font lacks: the viewer's font may have it."""

MISSING = "<p>{}: the picture needs matplotlib. <code>pip install matplotlib</code> installs it.</p>"

_DRAWS = threading.Lock()
"""The settings are the process's, and a live view draws in a thread."""


def figure(picture: str, table: Table) -> str:
    """Return a picture and its table; a long table is folded."""
    rows = list(table.rows)
    table, folded = replace(table, rows=rows), len(rows) if len(rows) > FOLDED_ROWS else 0
    parts = {"picture": markup(picture), "table": markup(redact(table.html())), "title": table.title}
    return render("figure", **parts, folded=folded, width=WIDTH)


def colour(part: str) -> str:
    """Return the colour of a part or phase. Another name always gets the same one of them."""
    return COLOURS.get(part) or list(COLOURS.values())[zlib.crc32(part.encode()) % len(COLOURS)]


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` by WCAG 2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(ground: str) -> str:
    """Return black or white, whichever has a contrast of 4.5:1 on this ground."""
    return "#ffffff" if luminance(ground) < 0.179 else "#000000"


def picture(
    title: str,
    description: str,
    draw: Callable[[Any], None],
    legend: Mapping[str, Mapping[str, Any]],
    sides: tuple[float, float],
    heights: tuple[float, float, float],
) -> str:
    """Return the image of axes with a title and a legend above them.

    Notebooks that were not executed here, and GitHub, remove inline SVG, and show an image.

    Args:
        title, description: the picture's name.
        draw: fills the axes.
        legend: label → the look of its line.
        sides: pixels on the left and on the right of the axes.
        heights: pixels above the axes, of the axes, and below them.
    """
    if find_spec("matplotlib") is None:
        return MISSING.format(escape(title))
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    (left, right), (_, middle, below) = sides, heights
    if max(len(legend), sum(heights) / 34) > BARS:
        return f"<p>{escape(title)}: not drawn, it has more than {BARS} parts or rows.</p>"
    columns = min(max(1, int((WIDTH - 24) / (max(map(len, legend), default=0) * 6.5 + 38))), len(legend) or 1)
    height = round(34 + 20 * math.ceil(len(legend) / columns) + sum(heights))
    file = io.StringIO()
    with _DRAWS:
        before = {name: matplotlib.rcParams[name] for name in MATPLOTLIB}
        matplotlib.rcParams.update(MATPLOTLIB)
        if not any(getattr(message, "pattern", "") == GLYPH for _, message, *_ in warnings.filters):
            warnings.filterwarnings("ignore", GLYPH)  # a second time, it would let Python repeat a user's warnings
        try:
            whole = Figure((WIDTH / 72, height / 72), facecolor="#ffffff")  # SVG has 72 pixels in an inch
            place = (left / WIDTH, below / height, 1 - (left + right) / WIDTH, middle / height)
            axes = whole.add_axes(place, facecolor="none", axisbelow=True)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, pad=6, labelsize=11, labelcolor=QUIET)
            draw(axes)
            whole.text(12 / WIDTH, 1 - 24 / height, title, size=15, color=INK, weight="bold")
            lines = [Line2D([], [], solid_capstyle="butt", **look) for look in legend.values()]
            look = {"loc": "upper left", "bbox_to_anchor": (8 / WIDTH, 1 - 32 / height), "frameon": False}
            whole.legend(lines, list(legend), ncols=columns, labelcolor=INK, handlelength=1.2, fontsize=12, **look)
            whole.savefig(file, format="svg", metadata={"Date": None})
        except (ArithmeticError, ValueError, TypeError) as error:  # of figures that no run has
            return f"<p>{escape(title)}: not drawn, {escape(str(error))}.</p>"
        finally:
            matplotlib.rcParams.update(before)
    data = b64encode(redact(file.getvalue()).encode()).decode()
    # With a size before it is decoded, so that a view that is redrawn twice a second does not jump.
    return (
        f'<img alt="{escape(redact(f"{title}. {description}"))}" width="{WIDTH}" height="{height}" decoding="sync" '
        f'style="max-width:100%;height:auto" src="data:image/svg+xml;base64,{data}">'
    )
