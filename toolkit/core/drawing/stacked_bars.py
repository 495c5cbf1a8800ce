"""`bars()`: stacked horizontal bars by part, with a line for the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from toolkit.core.drawing.elements import (
    GRID,
    INK,
    LETTER,
    LIMIT,
    QUIET,
    WIDTH,
    colour,
    ink_on,
    lay_out,
    line,
    svg,
    text,
    ticks,
)
from toolkit.core.redaction import redact
from toolkit.core.units import format_bytes

PITCH = 34
"""From one bar to the next."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: its label and its parts."""

    label: str
    parts: Mapping[str, float]
    """Part → its size, in the order in which they are stacked. One that is not above 0 is not drawn."""


def bars(
    rows: Sequence[Bar],
    *,
    title: str,
    limit: float | None = None,
    limit_label: str = "",
    spell: Callable[[float], str] = format_bytes,
) -> str:
    """Draw stacked horizontal bars, one colour a part, with a legend; each bar's sum stands at its end.

    Args:
        rows: from top to bottom.
        title: a few words.
        limit: a line across the bars; as text if it is far above all of them.
        limit_label: the meaning of the limit.
        spell: formats a size.
    """
    totals = [sum(row.parts.values()) for row in rows]
    highest = max([*totals, 0.0])
    near = limit is not None and limit <= 4 * highest
    ink = LIMIT if limit is not None and highest > limit else INK  # red is what does not fit
    top = max(highest, limit if limit is not None and near else 0.0) or 1.0
    limit_text = f"{limit_label or 'limit'} {spell(limit)}" if limit is not None else ""
    left = min(max((len(row.label) for row in rows), default=0) * LETTER + 14, 250.0)
    width = WIDTH - left - max((len(spell(total)) for total in totals), default=0) * (LETTER + 0.5) - 22
    body, y = _legend(rows, spell)
    first = y + (24 if limit_text else 6)
    bottom = first + PITCH * len(rows)
    for tick in ticks(0.0, top, binary=spell is format_bytes):
        x = left + width * tick / top
        body.append(line(x, first - 4, x, bottom, GRID))
        body.append(text(x, bottom + 15, spell(tick), size=11, colour=QUIET, anchor="middle"))
    for number, (row, total) in enumerate(zip(rows, totals, strict=True)):
        body += _bar(row, spell(total), first + PITCH * number, left, width / top, spell)
    if limit is not None and near:
        x = left + width * limit / top
        body.append(line(x, first - 6, x, bottom, ink, ' stroke-width="2" stroke-dasharray="5 3"'))
        anchor = "end" if x > left + width / 2 else "start"
        body.append(text(x, first - 11, limit_text, size=12, colour=ink, anchor=anchor, weight=600))
    elif limit is not None:
        share = f"{highest / limit:.1%}" if highest >= limit / 1000 else "less than 0.1%"
        beyond = f"{limit_text}: beyond the picture, {share} of it is used"
        body.append(text(left + width, first - 11, beyond, size=12, colour=ink, anchor="end", weight=600))
    descriptions = [
        f"{row.label}: {spell(total)} ({_in_words(row, spell)})" for row, total in zip(rows, totals, strict=True)
    ]
    if limit is not None:
        descriptions.append(
            f"The line marks the limit: {limit_text}" if near else f"The limit is far above: {limit_text}"
        )
    return svg(title, ". ".join(descriptions) + ".", body, bottom + 26)


def _bar(row: Bar, total: str, y: float, left: float, scale: float, spell: Callable[[float], str]) -> Iterator[str]:
    longest, label = int((left - 14) / LETTER), redact(row.label)  # before it is cut
    short = label if len(label) <= longest else label[: longest - 1] + "…"
    yield text(left - 10, y + 18, short, anchor="end", hover=label)
    x = left
    for part, size in row.parts.items():
        if size <= 0:
            continue
        wide, tooltip = size * scale, f"{part}: {spell(size)}"
        yield (
            f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{max(wide - 1, 0.5):.1f}" height="25" fill="{colour(part)}">'
            f"<title>{escape(tooltip)}</title></rect>"
        )
        if wide > len(spell(size)) * 6.2 + 8:
            yield text(x + wide / 2, y + 18, spell(size), size=11, colour=ink_on(colour(part)), anchor="middle")
        x += wide
    yield text(WIDTH - 10, y + 18, total, anchor="end", weight=600)


def _legend(rows: Sequence[Bar], spell: Callable[[float], str]) -> tuple[list[str], float]:
    """Draw the legend: none where each bar has one part, and with sizes for a single bar."""
    parts = list(dict.fromkeys(part for row in rows for part, size in row.parts.items() if size > 0))
    if all(len(row.parts) == 1 and next(iter(row.parts)) in row.label for row in rows):
        parts = []
    entries = [
        (
            f'<rect x="-1" y="-6" width="12" height="12" fill="{colour(part)}"/>',
            f"{part} {spell(rows[0].parts[part])}" if len(rows) == 1 else part,
        )
        for part in parts
    ]
    return lay_out(entries, 44.0)


def _in_words(row: Bar, spell: Callable[[float], str]) -> str:
    return ", ".join(f"{part} {spell(size)}" for part, size in row.parts.items() if size > 0)
