"""Pictures as SVG text: stacked bars by part, and curves over steps. Standard library only, no script, no network.

Every picture has a white ground of its own, so that it reads on a dark page too, and says in words what it shows.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from toolkit.redacting import redact
from toolkit.show import Table
from toolkit.units import format_bytes

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

WIDTH = 760
POINTS = 400
"""The most that a line keeps: more than a screen shows."""

LONG = 12
"""Rows above which a table beside a picture is folded."""

_INK, _QUIET, _GRID = "#1f2937", "#4b5563", "#e5e7eb"
_LETTER = 8.0
"""Pixels that a letter takes at most on average, in a font of 13: of wide ones too."""

_FEW = 30
"""Points up to which each is a dot, too."""

_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_DRAWN = count(1)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: what it is of, and the parts that it is made of."""

    label: str
    parts: Mapping[str, float]
    """Part → its size, in the order in which they are stacked. One that is not above 0 is not drawn."""


def colour(part: str) -> str:
    """The colour of a part or phase; another name gets one of the same, always the same."""
    known = list(COLOURS.values())
    return COLOURS.get(part) or known[zlib.crc32(part.encode()) % len(known)]


def bars(
    rows: Sequence[Bar],
    *,
    title: str,
    limit: float | None = None,
    limit_label: str = "",
    spell: Callable[[float], str] = format_bytes,
) -> str:
    """Stacked horizontal bars, one colour a part, with one legend; each bar's sum stands at its end.

    Args:
        rows: from top to bottom.
        title: what is shown, in a few words.
        limit: drawn as a line across the bars; where it is far above all of them, said instead.
        limit_label: what the limit is.
        spell: how a size is written.
    """
    parts = list(dict.fromkeys(part for row in rows for part, size in row.parts.items() if size > 0))
    totals = [sum(row.parts.values()) for row in rows]
    highest = max([*totals, 0.0])
    near = limit is not None and limit <= 4 * highest
    top = max(highest, limit if limit is not None and near else 0.0) or 1.0
    said = f"{limit_label or 'limit'} {spell(limit)}" if limit is not None else ""
    left = min(max((len(row.label) for row in rows), default=0) * _LETTER + 14, 250.0)
    width = WIDTH - left - max((len(spell(total)) for total in totals), default=0) * (_LETTER + 0.5) - 22
    named = all(list(row.parts)[:1] == [part for part in row.parts if part in row.label] for row in rows)
    legend, y = _legend({} if named else {part: _legend_text(part, rows, spell) for part in parts}, 44.0)
    if said:
        y += 18
    first = y + 6
    ticks = _ticks(0.0, top, binary=spell is format_bytes)
    bottom = first + 34 * len(rows)
    body = [_line(left + width * tick / top, first - 4, left + width * tick / top, bottom, _GRID) for tick in ticks] + [
        _text(left + width * tick / top, bottom + 15, spell(tick), size=11, colour=_QUIET, anchor="middle")
        for tick in ticks
    ]
    for number, (row, total) in enumerate(zip(rows, totals, strict=True)):
        body += _bar(row, total, first + 34 * number, left, width / top, spell)
    if limit is not None and near:
        x = left + width * limit / top
        body.append(_line(x, first - 6, x, bottom, "#b91c1c", ' stroke-width="2" stroke-dasharray="5 3"'))
        anchor = "end" if x > left + width / 2 else "start"
        body.append(_text(x, first - 11, said, size=12, colour="#b91c1c", anchor=anchor, weight=600))
    elif limit is not None:
        share = f"{highest / limit:.1%}" if highest >= limit / 1000 else "less than 0.1%"
        beyond = f"{said}: beyond the picture, {share} of it is used"
        body.append(_text(left + width, first - 11, beyond, size=12, colour="#b91c1c", anchor="end", weight=600))
    told = [f"{row.label}: {spell(total)} ({_parts_text(row, spell)})" for row, total in zip(rows, totals, strict=True)]
    if limit is not None:
        told.append(f"The line marks the limit: {said}" if near else f"The limit is far above: {said}")
    return _svg(title, ". ".join(told) + ".", [*legend, *body], bottom + 26)


def curve(
    lines: Mapping[str, Sequence[tuple[float, float | None]]],
    *,
    title: str,
    x: str,
    y: str,
    spell_y: Callable[[float], str] = "{:,.4g}".format,
) -> str:
    """Lines over steps or seconds, each thinned to `POINTS` points that keep its highest and lowest ones.

    Args:
        lines: name → its points in order; one whose y is None or not finite leaves a gap.
        title: what is shown, in a few words.
        x, y: what the axes count, with units.
        spell_y: how a value is written.
    """
    known = {name: [point for point in points if _finite(point[1])] for name, points in lines.items()}
    values = [float(value) for points in known.values() for _, value in points if value is not None]
    places = [place for points in lines.values() for place, _ in points]
    low, high = _range(values)
    start, end = (min(places), max(places)) if places else (0.0, 1.0)
    end = end if end > start else start + 1
    rows = [tick for tick in _ticks(low, high) if low <= tick <= high] if values else []
    left = max((len(spell_y(tick)) for tick in rows), default=1) * _LETTER + 22
    texts = {name: _line_text(name, points, spell_y) for name, points in known.items()}
    legend, first = _legend(texts, 44.0, dashed=True)
    first, height, width = first + 20, 220.0, WIDTH - left - 22

    def across(place: float) -> float:
        return left + width * (place - start) / (end - start)

    def down(value: float) -> float:
        return first + height * (1 - (value - low) / (high - low))

    body = [_text(left, first - 9, y, size=12, colour=_QUIET)]
    for tick in rows:
        body.append(_line(left, down(tick), left + width, down(tick), _GRID))
        body.append(_text(left - 7, down(tick) + 4, spell_y(tick), size=11, colour=_QUIET, anchor="end"))
    whole = all(float(place).is_integer() for place in places)
    for tick in _ticks(start, end):
        if start <= tick <= end and (not whole or float(tick).is_integer()):
            body.append(_line(across(tick), first + height, across(tick), first + height + 4, _QUIET))
            body.append(
                _text(across(tick), first + height + 18, f"{tick:,.10g}", size=11, colour=_QUIET, anchor="middle")
            )
    body.append(_line(left, first + height, left + width, first + height, _QUIET))
    body.append(_text(left + width, first + height + 36, x, size=12, colour=_QUIET, anchor="end"))
    if not values:
        body.append(_text(left + width / 2, first + height / 2, "nothing yet", colour=_QUIET, anchor="middle"))
    for number, (name, points) in enumerate(lines.items()):
        found = thinned(points)
        body.append(_path(number, name, _strokes(found, across, down), f' stroke-width="2"{_stroke(number)}'))
        body.append(_dots(number, name, found, across, down))
    told = ". ".join(texts.values()) or "nothing yet"
    return _svg(title, f"{y} over {x}. {told}.", [*legend, *body], first + height + 46)


def thinned(points: Sequence[tuple[float, float | None]], most: int = POINTS) -> list[tuple[float, float | None]]:
    """At most so many points: first and last, and of each stretch between them the lowest, the highest, or a gap."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 2
    kept: list[tuple[float, float | None]] = [points[0]]
    for number in range(stretches):
        stretch = inner[len(inner) * number // stretches : len(inner) * (number + 1) // stretches]
        finite = [(value, place) for place, value in stretch if value is not None and math.isfinite(value)]
        gap = next(((place, None) for place, value in stretch if not _finite(value)), None)
        found: list[tuple[float, float | None]] = [gap] if gap else []
        if finite:
            ends = [min(finite), max(finite)] if gap is None else [max(finite)]
            found += [(place, value) for value, place in ends]
        kept += sorted(set(found), key=lambda point: point[0])
    return [*kept, points[-1]]


def figure(svg: str, table: Table) -> str:
    """A picture and the table of what it shows beside it; a long table is folded."""
    rows = list(table.rows)
    text = Table(title=table.title, columns=table.columns, rows=rows, notes=table.notes).html()
    if len(rows) > LONG:
        text = f"<details><summary>{escape(table.title or 'as a table')}: {len(rows)} rows</summary>{text}</details>"
    return (
        '<div class="toolkit-figure" style="display:flex;flex-wrap:wrap;gap:0 1.5em;align-items:flex-start">'
        f'<div style="flex:2 1 440px;max-width:{WIDTH}px">{svg}</div><div style="flex:1 1 300px">{redact(text)}</div></div>'
    )


def _bar(row: Bar, total: float, y: float, left: float, scale: float, spell: Callable[[float], str]) -> Iterator[str]:
    longest = int((left - 14) / _LETTER)
    label = row.label if len(row.label) <= longest else row.label[: longest - 1] + "…"
    yield _text(left - 10, y + 18, label, anchor="end", hover=row.label)
    x = left
    for part, size in row.parts.items():
        if size <= 0:
            continue
        wide, told = size * scale, f"{part}: {spell(size)}"
        yield (
            f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{max(wide - 1, 0.5):.1f}" height="25" fill="{colour(part)}">'
            f"<title>{escape(told)}</title></rect>"
        )
        if wide > len(spell(size)) * 6.2 + 8:
            yield _text(x + wide / 2, y + 18, spell(size), size=11, colour=_on(colour(part)), anchor="middle")
        x += wide
    yield _text(WIDTH - 10, y + 18, spell(total), anchor="end", weight=600)


def _legend(texts: Mapping[str, str], y: float, *, dashed: bool = False) -> tuple[list[str], float]:
    """Its elements from line `y` on, and the line below it."""
    found, x = [], 12.0
    for number, (name, text) in enumerate(texts.items()):
        wide = len(text) * 6.6 + 40
        if x + wide > WIDTH and x > 12:
            x, y = 12.0, y + 20
        if dashed:
            found.append(_line(x, y - 4, x + 20, y - 4, _line_colour(number, name), _stroke(number)))
        else:
            found.append(f'<rect x="{x + 6:.1f}" y="{y - 10:.1f}" width="12" height="12" fill="{colour(name)}"/>')
        found.append(_text(x + 26, y, text, size=12))
        x += wide
    return found, y + 14 if texts else y - 6


def _legend_text(part: str, rows: Sequence[Bar], spell: Callable[[float], str]) -> str:
    return f"{part} {spell(rows[0].parts[part])}" if len(rows) == 1 else part


def _parts_text(row: Bar, spell: Callable[[float], str]) -> str:
    return ", ".join(f"{part} {spell(size)}" for part, size in row.parts.items() if size > 0)


def _line_text(name: str, points: Sequence[tuple[float, float | None]], spell: Callable[[float], str]) -> str:
    values = [value for _, value in points if value is not None]
    if not values:
        return f"{name}: nothing yet"
    return f"{name}: first {spell(values[0])}, last {spell(values[-1])}, lowest {spell(min(values))}"


def _strokes(
    points: Sequence[tuple[float, float | None]], across: Callable[[float], float], down: Callable[[float], float]
) -> Iterator[str]:
    """The commands of an SVG path."""
    pen = "M"
    for place, value in points:
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        yield f"{pen}{across(place):.1f} {down(value):.1f}"
        pen = "L"


def _path(number: int, name: str, strokes: Iterator[str], more: str = ' stroke-width="2"') -> str:
    ends = f' fill="none" stroke-linejoin="round" stroke-linecap="round"{more}'
    found = "".join(strokes)
    return f'<path d="{found}" stroke="{_line_colour(number, name)}"{ends}/>' if found else ""


def _dots(
    number: int,
    name: str,
    points: Sequence[tuple[float, float | None]],
    across: Callable[[float], float],
    down: Callable[[float], float],
) -> str:
    """A dot for each point of a short line, and for what stands alone between two gaps."""
    values = [None, *(value if _finite(value) else None for _, value in points), None]
    few = len(points) <= _FEW
    shown = [
        (place, value)
        for (place, value), before, after in zip(points, values, values[2:], strict=False)
        if value is not None and _finite(value) and (few or before is after is None)
    ]
    dots = (f"M{across(place):.1f} {down(value):.1f}h0" for place, value in shown)
    return _path(number, name, dots, ' stroke-width="6"')


def _line_colour(number: int, name: str) -> str:
    order = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "transient", "workspace")
    return COLOURS.get(name) or COLOURS[order[number % len(order)]]


def _stroke(number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _svg(title: str, description: str, body: Sequence[str], height: float) -> str:
    """The whole picture. Its ids are no other's in a page, also of a notebook whose kernel was restarted."""
    body = [_text(12, 24, title, size=15, weight=600), *body]
    digest = hashlib.sha256("".join([description, *body]).encode()).hexdigest()[:8]
    name = f"toolkit-{digest}-{next(_DRAWN)}"
    return redact(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{name}-t {name}-d" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" style="max-width:100%;height:auto" '
        "font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,sans-serif\">"
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="#ffffff"/>{"".join(body)}</svg>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    colour: str = _INK,
    anchor: str = "start",
    weight: int = 400,
    hover: str = "",
) -> str:
    more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (
        f' font-weight="{weight}"' if weight != 400 else ""
    )
    told = f"<title>{escape(hover)}</title>" if hover not in ("", text) else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{more}>{told}{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as WCAG 2 counts it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _on(ground: str) -> str:
    """Black or white, whichever reads better on this ground: one of them always has 4.5:1."""
    return "#ffffff" if luminance(ground) < 0.179 else "#000000"


def _ticks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """About five round numbers from `low` to `high`; bytes are round in their binary unit."""
    unit = 1024.0 ** max(0, int(math.log(high, 1024))) if binary and high >= 1 else 1.0
    rough = (high - low) / unit / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * 0.999) * unit
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """What the y axis spans: the values with a little room, and from 0 where that costs little."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < high / 3 else max(low - room, 0.0) if low >= 0 else low - room), high + room


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
