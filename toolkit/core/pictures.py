"""A picture: an SVG of matplotlib's as an image, with title, legend and name; its colours, and its place in a page."""

from __future__ import annotations

import io
import itertools
import math
import re
import threading
import warnings
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from typing import Any, Literal

from toolkit.core.display import Table, markup, render
from toolkit.core.phases import PHASES
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
}
"""A part's colour, the same in every picture.

They lie at least 29 apart (CIE76), also as people without red, green or blue cones see them (Machado et al. 2009),
and each has a contrast of at least 3:1 against white.
"""

FORECAST, MEASURED = "#0e7490", "#be185d"
SERIES = {
    **dict.fromkeys(("forecast", "highest total", *PHASES), FORECAST),
    **dict.fromkeys(("measured", "measured total", "allocated"), MEASURED),
    "resident, Python included": "#78716c",
    "outside the allocator": "#8a7f5c",
    "loss": "#4d7c0f",
    "smoothed": "#1f2937",
    "evaluation": "#c2410c",
    "tokens/s": "#6d28d9",
    "learning rate": "#0369a1",
    "gradient norm": "#b45309",
}
"""The colours of lines and of bars that are no part, the same in every picture."""

OTHER_COLOURS = ("#0369a1", "#c2410c", "#4d7c0f", "#be185d", "#6d28d9", "#0f766e", "#854d0e", "#475569")
"""Colours for any other names. None is a part's."""

INK, QUIET, GRID, ALARM = "#1f2937", "#4b5563", "#e5e7eb", "#b91c1c"

FOLDED_ROWS = 12
"""Rows above which the table of a picture is folded."""

BARS = 100
"""Rows, and parts, of the largest picture."""

WIDTH = 760
"""Pixels. A picture shrinks with its place and never grows."""

LEGEND_LETTER = 6.7
"""Pixels of a letter in a legend."""

LEGIBLE = 560
"""Pixels below which its letters are too small to read."""

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

FONTS = "font-family: 'DejaVu Sans', 'Verdana', 'Arial', sans-serif; "
"""The fonts as matplotlib writes them with each text."""

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
    return render("figure", **parts, folded=folded, width=WIDTH, legible=LEGIBLE)


def _shortened(svg: str) -> str:
    """Return an SVG in half of its letters: without head, indents and turns by 0, and with places to a hundredth of a pixel."""
    places, tags = re.compile(r"(\d\.\d\d)\d+"), re.compile(r"<[^>]+>")
    short = tags.sub(lambda tag: places.sub(r"\1", tag[0]), svg[svg.index("<svg") :])
    short = short.replace(FONTS, "").replace("<svg ", f'<svg style="{FONTS}" ', 1)
    return re.sub(r"\n\s*", " ", re.sub(r' transform="rotate\(-0 [^)]*\)"', "", short)).replace("> <", "><")


def figures_side_by_side(pictures: Iterable[str]) -> str:
    """Return small pictures next to each other; in a narrow place, below each other."""
    cells = "".join(f'<div style="flex:1 1 300px;min-width:0;max-width:380px">{picture}</div>' for picture in pictures)
    return f'<div style="display:flex;flex-wrap:wrap;max-width:{WIDTH + 8}px">{cells}</div>' if cells else ""


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return each name's colour: its own, or for another name always the same of `OTHER_COLOURS` that the names before leave."""
    result: dict[str, str] = {}
    for name in names:
        start = zlib.crc32(name.encode())
        own = [OTHER_COLOURS[(start + turn) % len(OTHER_COLOURS)] for turn in range(len(OTHER_COLOURS))]
        free = [shade for shade in own if shade not in result.values()]
        result[name] = COLOURS.get(name) or SERIES.get(name) or (free or own)[0]
    return result


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
    width: int = WIDTH,
    values: Sequence[tuple[float, str]] = (),
) -> str:
    """Return the image of axes with a title and a legend above them.

    Notebooks that were not executed here, and GitHub, remove inline SVG, and show an image.

    Args:
        title, description: the picture's name.
        draw: fills the axes.
        legend: label → the look of its line.
        sides: pixels on the left and on the right of the axes.
        heights: pixels above the axes, of the axes, and below them.
        width: pixels in all.
        values: places along the axes, from 0 to 1 in order, each with the text that a pointer over it shows.
    """
    if find_spec("matplotlib") is None:
        return MISSING.format(escape(title))
    import matplotlib
    from matplotlib.figure import Figure

    (left, right), (_, middle, below) = sides, heights
    if max(len(legend), sum(heights) / 34) > BARS:
        return f"<p>{escape(title)}: not drawn, it has more than {BARS} parts or rows.</p>"
    columns = min(max(1, int((width - 24) / (max(map(len, legend), default=0) * LEGEND_LETTER + 40))), len(legend) or 1)
    height = round(34 + 20 * math.ceil(len(legend) / columns) + sum(heights))
    file = io.StringIO()
    with _DRAWS:
        before = {name: matplotlib.rcParams[name] for name in MATPLOTLIB}
        matplotlib.rcParams.update(MATPLOTLIB)
        if not any(getattr(message, "pattern", "") == GLYPH for _, message, *_ in warnings.filters):
            warnings.filterwarnings("ignore", GLYPH)  # a second time, it would let Python repeat a user's warnings
        try:
            whole = Figure((width / 72, height / 72), facecolor="#ffffff")  # SVG has 72 pixels in an inch
            place = (left / width, below / height, 1 - (left + right) / width, middle / height)
            axes = whole.add_axes(place, facecolor="none", axisbelow=True)
            axes.spines[:].set_visible(False)
            axes.xaxis.set_visible(False)  # `mark_places` has the labels
            axes.yaxis.set_visible(False)
            draw(axes)
            whole.text(12 / width, 1 - 24 / height, title, size=15, color=INK, weight="bold")
            _draw_legend(whole, legend, columns)
            whole.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Type", "Format")))
        except (ArithmeticError, ValueError, TypeError) as error:  # of figures that no run has
            return f"<p>{escape(title)}: not drawn, {escape(str(error))}.</p>"
        finally:
            matplotlib.rcParams.update(before)
    data = b64encode(redact(_shortened(file.getvalue())).encode()).decode()
    # With a size before it is decoded, so that a view that is redrawn twice a second does not jump.
    image = (
        f'<img alt="{escape(redact(f"{title}. {description}"))}" width="{width}" height="{height}" decoding="sync" '
        f'style="max-width:100%;height:auto" src="data:image/svg+xml;base64,{data}">'
    )
    box = (left / width, 1 - (left + right) / width, 1 - (middle + below) / height, middle / height)
    return _with_values(image, values, box, width) if values else image


def mark_places(
    axes: Any, along: Literal["x", "y"], labels: Mapping[float, str], *, lines: bool = False, **look: Any
) -> list[Any]:
    """Write labels below the axes, or on their left, at places of their scale; return the texts.

    matplotlib's own ticks are five artists each, and take half of a picture's time.

    Args:
        axes: of `picture`.
        along: the axis that the places are of.
        labels: place → label.
        lines: whether a line crosses the axes at each place.
        look: of the text.
    """
    from matplotlib.collections import LineCollection

    text = {"size": 11, "color": QUIET, **look}
    if lines:
        ends = [[(place, 0), (place, 1)] if along == "x" else [(0, place), (1, place)] for place in labels]
        across = axes.get_xaxis_transform() if along == "x" else axes.get_yaxis_transform()
        grid = LineCollection(ends, colors=GRID, linewidths=1, transform=across, clip_on=False, zorder=0.5)
        axes.add_collection(grid, autolim=False)
    if along == "x":
        text |= {"transform": axes.get_xaxis_text1_transform(6)[0], "va": "top"}
        return [axes.text(place, 0, label, **{"ha": "center", **text}) for place, label in labels.items()]
    text |= {"transform": axes.get_yaxis_text1_transform(6)[0], "va": "center_baseline", "ha": "right"}
    return [axes.text(0, place, label, **text) for place, label in labels.items()]


def _draw_legend(whole: Any, legend: Mapping[str, Mapping[str, Any]], columns: int) -> None:
    """Draw a legend's lines and labels below the title, column by column: matplotlib's own measures each letter."""
    from matplotlib.lines import Line2D

    width, height = (72 * inches for inches in whole.get_size_inches())
    labels, start = iter(legend), 16.0
    rows, more = divmod(len(legend), columns)
    for number in range(min(columns, len(legend))):
        column = list(itertools.islice(labels, rows + (number < more)))
        for row, label in enumerate(column):
            up = 1 - (45 + 18 * row) / height
            ends = (start / width, (start + 14.4) / width)
            whole.add_artist(Line2D(ends, (up, up), solid_capstyle="butt", **legend[label]))
            whole.text((start + 22) / width, up, label, size=12, color=INK, va="center_baseline")
        start += LEGEND_LETTER * max(map(len, column)) + 40


def _with_values(image: str, values: Sequence[tuple[float, str]], box: tuple[float, ...], width: int) -> str:
    """Return an image beneath strips without colour, each over one value's part of the axes: an image has no hover of its own.

    Without their style sheet, which a sanitizer removes, the strips show nothing.

    Args:
        image, values, width: as in `picture`.
        box: left end, width, top and height of the axes, as shares of the image.
    """
    ends = [0.0, *((one + other) / 2 for (one, _), (other, _) in itertools.pairwise(values)), 1.0]
    strips = [(start, end - start, redact(text)) for start, end, (_, text) in zip(ends, ends[1:], values, strict=False)]
    return render("hover", image=markup(image), strips=strips, box=box, width=width)
