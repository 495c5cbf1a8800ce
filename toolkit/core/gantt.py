"""The picture of a schedule: a row for each rank, and a span for each time in which it does one thing or waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toolkit.core.pictures import INK, WIDTH, ink_on, mark_places, picture

SHADES = {
    "forward": "#0369a1",
    "backward": "#6d28d9",
    "waits for its first": "#fcd34d",
    "waits between two": "#fdba74",
    "waits after its last": "#d6d3d1",
}
"""The colour of each kind of span: work is dark, and idle time pale, by its cause."""


class Span(NamedTuple):
    """A time of a row."""

    row: int
    begin: float
    end: float
    kind: str
    """Of `SHADES`."""
    text: str = ""


def spans(
    labels: Sequence[str], times: Sequence[Span], *, title: str, description: str, spell: Callable[[float], str]
) -> str:
    """Draw the spans of rows from left to right.

    Args:
        labels: of the rows, from top to bottom.
        times: in any order; those of a row do not overlap.
        title, description: the picture's name.
        spell: formats the end of the last one.
    """
    end = max((span.end for span in times), default=0.0) or 1.0
    left, right = 8.0 * max(map(len, labels), default=0) + 14, 22
    pixel = end / (WIDTH - left - right)

    def draw(axes: Any) -> None:
        axes.set(xlim=(0, end), ylim=(len(labels) or 1, 0))
        mark_places(axes, "y", {row + 0.5: label for row, label in enumerate(labels)}, size=13, color=INK)
        *_, last = mark_places(axes, "x", {0: "0", end: spell(end)})
        last.set_ha("right")  # a long one would leave the picture
        look = {"lw": 0.4, "edgecolor": "#ffffff"}
        for row, kind in dict.fromkeys((span.row, span.kind) for span in times):  # one artist for many
            ends = [(span.begin, span.end - span.begin) for span in times if (span.row, span.kind) == (row, kind)]
            axes.broken_barh(ends, (row + 0.12, 0.76), facecolor=SHADES[kind], **look)
        for span in times:
            shade, wide = SHADES[span.kind], span.end - span.begin
            if span.text and wide / pixel > 7 * len(span.text) + 2:
                middle = (span.begin + span.end) / 2
                axes.text(middle, span.row + 0.5, span.text, ha="center", va="center", size=9, color=ink_on(shade))

    legend = {kind: {"color": SHADES[kind], "lw": 12} for kind in dict.fromkeys(span.kind for span in times)}
    return picture(title, description, draw, legend, (left, right), (6, 26 * len(labels), 26))


def waits(row: int, busy: Sequence[Span], end: float) -> list[Span]:
    """Return the spans in which a row that does something waits, from 0 to `end`."""
    _, _, first, second, third = SHADES
    busy = sorted(busy, key=lambda span: span.begin)
    gaps = [Span(row, 0.0, busy[0].begin, first), Span(row, busy[-1].end, end, third)]
    gaps += [Span(row, one.end, other.begin, second) for one, other in itertools.pairwise(busy)]
    return [gap for gap in gaps if gap.end - gap.begin > end / 10_000]
