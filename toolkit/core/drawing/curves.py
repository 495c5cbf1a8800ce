"""`curve()`: lines over steps or seconds, thinned to what a screen shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from toolkit.core.drawing.elements import COLOURS, GRID, LETTER, QUIET, WIDTH, lay_out, line, svg, text, ticks
from toolkit.core.units import format_bytes

POINTS = 400
"""The most that a line keeps: more than a screen shows."""

FEW = 30
"""Points up to which each is a dot, too."""

HEIGHT = 220.0
"""Of the part that holds the lines."""

DASHES = ("", "7 4", "2 3", "9 3 2 3")
ORDER = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "transient", "workspace")
"""The parts whose colours the lines take, in order."""

Point = tuple[float, float | None]


def curve(
    lines: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str,
    y: str,
    spell_y: Callable[[float], str] = "{:,.4g}".format,
    names: Mapping[float, str] | None = None,
) -> str:
    """Draw lines over steps or seconds. Each is thinned to `POINTS` points, its extremes among them.

    Args:
        lines: name → its points in order; a y of None or not finite leaves a gap.
        title: a few words.
        x, y: the axes' quantities, with units.
        spell_y: formats a value; bytes have ticks at round numbers.
        names: labels at places of the x axis instead of numbers. The description then has each line's maximum only.
    """
    binary = spell_y is format_bytes
    finite = {name: [point for point in points if _finite(point[1])] for name, points in lines.items()}
    low, high = _range([float(value) for points in finite.values() for _, value in points if value is not None])
    rows = [tick for tick in ticks(low, high, binary=binary) if low <= tick <= high] if any(finite.values()) else []
    marks = [line(-6, 0, 14, 0, _colour(number, name), _dash(number)) for number, name in enumerate(lines)]
    descriptions = [_in_words(name, points, spell_y, at_most=names is not None) for name, points in finite.items()]
    body, top = lay_out(list(zip(marks, descriptions, strict=True)), 44.0)
    top, left = top + 20, max((len(spell_y(tick)) for tick in rows), default=1) * LETTER + 22
    right, bottom = WIDTH - 22, top + HEIGHT
    places = [place for points in lines.values() for place, _ in points]
    start, end = min(places, default=0), max(places, default=1)
    end = end if end > start else start + 1

    def across(place: float) -> float:
        return left + (right - left) * (place - start) / (end - start)

    def down(value: float) -> float:
        return bottom - HEIGHT * (value - low) / (high - low)

    for tick in rows:
        body.append(line(left, down(tick), right, down(tick), GRID))
        body.append(text(left - 7, down(tick) + 4, spell_y(tick), size=11, colour=QUIET, anchor="end"))
    marked = names or {tick: f"{tick:,.10g}" for tick in _columns(start, end, places)}
    for tick, word in marked.items():
        body.append(line(across(tick), bottom, across(tick), bottom + 4, QUIET))
        body.append(text(across(tick), bottom + 18, word, size=11, colour=QUIET, anchor="middle"))
    body.append(line(left, bottom, right, bottom, QUIET))
    body += [text(left, top - 9, y, size=12, colour=QUIET), text(right, bottom + 36, x, colour=QUIET, anchor="end")]
    if not rows:
        body.append(text((left + right) / 2, top + HEIGHT / 2, "nothing yet", colour=QUIET, anchor="middle"))
    for number, (name, points) in enumerate(lines.items()):
        body += _drawn(thinned(points), _colour(number, name), _dash(number), across, down)
    return svg(title, f"{y} over {x}. {'. '.join(descriptions) or 'nothing yet'}.", body, bottom + 46)


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """Return at most `most` points: the ends, and the lowest, the highest or a gap of each interval."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 2
    result: list[Point] = [points[0]]
    for number in range(stretches):
        stretch = inner[len(inner) * number // stretches : len(inner) * (number + 1) // stretches]
        finite = [(value, place) for place, value in stretch if value is not None and math.isfinite(value)]
        gap = next(((place, None) for place, value in stretch if not _finite(value)), None)
        extremes: list[Point] = [gap] if gap else []
        if finite:
            ends = [min(finite), max(finite)] if gap is None else [max(finite)]
            extremes += [(place, value) for value, place in ends]
        result += sorted(set(extremes), key=lambda point: point[0])
    return [*result, points[-1]]


def _drawn(
    points: Sequence[Point], colour: str, dash: str, across: Callable[[float], float], down: Callable[[float], float]
) -> Iterator[str]:
    """Draw a line with gaps; short lines and isolated points get dots."""
    strokes, dots, pen = list[str](), list[str](), "M"
    values = [None, *(value if _finite(value) else None for _, value in points), None]
    for number, (place, _) in enumerate(points, start=1):
        value = values[number]
        if value is None:
            pen = "M"
            continue
        spot = f"{across(place):.1f} {down(value):.1f}"
        strokes.append(pen + spot)
        pen = "L"
        if len(points) <= FEW or values[number - 1] is values[number + 1] is None:
            dots.append(f"M{spot}h0")
    ends = f' fill="none" stroke="{colour}" stroke-linejoin="round" stroke-linecap="round"'
    if strokes:
        yield f'<path d="{"".join(strokes)}" stroke-width="2"{ends}{dash}/>'
    if dots:
        yield f'<path d="{"".join(dots)}" stroke-width="6"{ends}/>'


def _columns(start: float, end: float, places: Sequence[float]) -> list[float]:
    """Return the ticks of the x axis; they are integers where all points are."""
    whole = all(float(place).is_integer() for place in places)
    return [tick for tick in ticks(start, end) if start <= tick <= end and (not whole or float(tick).is_integer())]


def _in_words(name: str, points: Sequence[Point], spell: Callable[[float], str], *, at_most: bool) -> str:
    values = [value for _, value in points if value is not None]
    if not values:
        return f"{name}: nothing yet"
    if at_most:
        return f"{name}: up to {spell(max(values))}"
    return f"{name}: first {spell(values[0])}, last {spell(values[-1])}, lowest {spell(min(values))}"


def _colour(number: int, name: str) -> str:
    return COLOURS.get(name) or COLOURS[ORDER[number % len(ORDER)]]


def _dash(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the y axis: the values with some room, and from 0 where that costs little."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < high / 3 else max(low - room, 0.0) if low >= 0 else low - room), high + room


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
