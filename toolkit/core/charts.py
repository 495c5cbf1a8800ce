"""Pictures by matplotlib: stacked bars by part, and curves over steps.

matplotlib comes with the extra `notebook`. Without it, a sentence with the fix takes a picture's place. Every picture has a white
background, so that it is legible on a dark page, and a name that holds its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.pictures import ALARM, INK, QUIET, WIDTH, colours, figure, ink_on, mark_places, picture
from toolkit.core.redaction import redact
from toolkit.core.units import format_bytes

__all__ = ["POINTS", "Bar", "bars", "curve", "figure", "thinned"]

SMOOTHED = "smoothed"
"""The name of a line over the values that it smooths: these are thin."""

DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
POINTS = 400
"""The most that a line keeps: more than a screen shows."""

DOT_POINTS = 30
"""Points up to which each is a dot, too."""

HOVERED = 60
"""Parts of the x axis that each show their values under a pointer."""

LETTER = 8.0
"""Pixels of a wide letter in the labels' font."""

Point = tuple[float, float | None]


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
    limit_label: str = "limit",
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
    sizes = [{part: size for part, size in row.parts.items() if size > 0} for row in rows]
    totals = [sum(row.parts.values()) for row in rows]
    highest = max([*totals, 0.0])
    sums = [spell(total) for total in totals]
    words = [f"{row.label}: {total} ({_list_parts(row.parts, spell)})" for row, total in zip(rows, sums, strict=True)]
    near, limit_text = limit is not None and limit <= 4 * highest, ""
    if limit is not None:
        limit_text = f"{limit_label} {spell(limit)}"
        words.append(f"The line marks the limit: {limit_text}" if near else f"The limit is far above: {limit_text}")
        share = "less than 0.1%" if near or highest < limit / 1000 else f"{highest / limit:.1%}"
        limit_text += "" if near else f": beyond the picture, {share} of it is used"
    names = list(dict.fromkeys(part for row in sizes for part in row))
    shades = colours(names)
    if all(len(row) == 1 and next(iter(row)) in bar.label for row, bar in zip(sizes, rows, strict=True)):
        names = []  # the labels name them
    top = max(highest, (limit or 0.0) if near else 0.0) or 1.0
    left = min(max((len(row.label) for row in rows), default=0) * LETTER + 14, 250.0)
    right = max(map(len, sums), default=0) * (LETTER + 0.5) + 22

    def draw(axes: Any) -> None:
        pixel, longest = top / (WIDTH - left - right), int((left - 14) / LETTER)
        labels = [redact(row.label) for row in rows]  # before they are cut
        short = [label if len(label) <= longest else label[: longest - 1] + "…" for label in labels]
        axes.set(xlim=(0, top), ylim=(len(rows) or 1, 0))
        mark_places(axes, "y", {place + 0.5: label for place, label in enumerate(short)}, size=13, color=INK)
        mark_places(axes, "x", _spelled(_ticks(0.0, top, binary=spell is format_bytes), spell), lines=True)
        for number, (parts, total) in enumerate(zip(sizes, sums, strict=True)):
            end = top + (right - 10) * pixel
            axes.text(end, number + 0.5, total, ha="right", va="center", size=13, color=INK, weight="bold")
            _stack(axes, number, parts, shades, spell, pixel)
        if limit is not None:
            ink, place = ALARM if highest > limit else INK, limit if near else top
            side = "right" if place > top / 2 else "left"
            axes.text(place, -0.25, limit_text, ha=side, va="bottom", size=12, color=ink, weight="bold")
            if near:
                axes.plot([limit, limit], [-0.1, len(rows)], color=ink, lw=2, ls=(0, (2.5, 1.5)), clip_on=False)

    labels = {name: f"{name} {spell(sizes[0][name])}" if len(rows) == 1 else name for name in names}
    legend = {label: {"color": shades[name], "lw": 12} for name, label in labels.items()}
    heights = (24 if limit_text else 6, 34 * len(rows), 26)
    return picture(title, ". ".join(words) + ".", draw, legend, (left, right), heights)


def curve(
    lines: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str,
    y: str,
    spell_y: Callable[[float], str] = "{:,.4g}".format,
    names: Mapping[float, str] | None = None,
    log: bool = False,
    width: int = WIDTH,
) -> str:
    """Draw lines over steps or seconds. Each is thinned to `POINTS` points, its extremes among them.

    Args:
        lines: name → its points in order; a y of None or not finite leaves a gap.
        title: a few words.
        x, y: the axes' quantities, with units.
        spell_y: formats a value; bytes have ticks at round numbers.
        names: labels at places of the x axis instead of numbers and of a legend. The description then has each line's
            maximum only.
        log: a logarithmic y axis; a y of 0 or less leaves a gap, too.
        width: pixels; below `WIDTH` the picture is lower, too.
    """
    if log:
        lines = {name: [(x, y if y and y > 0 else None) for x, y in points] for name, points in lines.items()}
    looks, words, shades = {}, {}, colours(lines)
    for number, (name, points) in enumerate(lines.items()):
        dashes = "-" if names or SMOOTHED in lines else DASHES[number % len(DASHES)]
        looks[name] = {"color": shades[name], "ls": dashes, "lw": 1 if SMOOTHED in lines and name != SMOOTHED else 2}
        words[name] = _describe(name, _finite(points), spell_y, at_most=names is not None)
    places: list[float] = [place for points in lines.values() for place, _ in points] or [0.0]
    values = [value for points in lines.values() for _, value in _finite(points)]
    low, high = _range(values) if not log or not values else (min(values) / 1.1, max(values) * 1.1)
    start, end = min(places), max(max(places), min(places) + 1)

    def draw(axes: Any) -> None:
        axes.set(xlim=(start, end), ylim=(low, high), yscale="log" if log and values else "linear")
        ticks = _log_ticks(low, high) if log else _ticks(low, high, binary=spell_y is format_bytes)
        mark_places(axes, "y", _spelled(ticks if values else [], spell_y), lines=True)
        axes.spines["bottom"].set(visible=True, color=QUIET)
        whole = all(float(place).is_integer() for place in places)
        marked = names or {tick: f"{tick:,.10g}" for tick in _ticks(start, end, whole=whole, most=6 * width // WIDTH)}
        mark_places(axes, "x", marked)
        for across, up, side, text in ((0, 1.04, "left", y), (1, -40 / heights[1], "right", x)):
            axes.text(across, up, text, transform=axes.transAxes, ha=side, size=12, color=QUIET)
        if not values:
            axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", size=13, color=QUIET)
        for name, points in lines.items():
            _draw_line(axes, thinned(points), looks[name])

    description = f"{y} over {x}. {'. '.join(words.values()) or 'nothing yet'}."
    # Without values, which stand in the description: first and last mean something for a loss, not for any line.
    legend = {} if names or list(lines) == [y] else looks
    left = max(len(spell_y(value)) for value in (low, high)) * LETTER + 22
    heights = (26, 220 if width == WIDTH else 120, 46)
    where = "" if names else f", {x} {{:,.6g}}"
    near = _values_near(lines, start, end, lambda name, value, x: f"{name}: {spell_y(value)}" + where.format(x))
    return picture(title, description, draw, legend, (left, 22), heights, width, near)


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """Return at most `most` points: the ends, and the lowest, the highest or a gap of each interval."""
    if len(points) <= most:
        return list(points)
    inner, intervals = points[1:-1], (most - 2) // 2
    result: list[Point] = [points[0]]
    for number in range(intervals):
        interval = inner[len(inner) * number // intervals : len(inner) * (number + 1) // intervals]
        finite = sorted(_finite(interval), key=lambda point: point[1])
        gaps: list[Point] = [(place, None) for place, value in interval if value is None or not math.isfinite(value)]
        ends = [*gaps[:1], *finite[-1:]] if gaps else [finite[0], finite[-1]]
        result += sorted(set(ends), key=lambda point: point[0])
    return [*result, points[-1]]


def _stack(
    axes: Any,
    number: int,
    parts: Mapping[str, float],
    shades: Mapping[str, str],
    spell: Callable[[float], str],
    pixel: float,
) -> None:
    """Draw the parts of a bar from left to right, each with its size where that has room."""
    from matplotlib.patches import Rectangle

    start = 0.0
    for part, size in parts.items():
        shade, words, wide = shades[part], spell(size), max(size - pixel, pixel / 2)
        axes.add_artist(Rectangle((start, number + 0.12), wide, 0.76, color=shade, lw=0, clip_on=False))
        if size / pixel > len(words) * 6.2 + 8:
            middle = start + size / 2
            axes.text(middle, number + 0.5, words, ha="center", va="center", size=11, color=ink_on(shade))
        start += size


def _spelled(ticks: Sequence[float], spell: Callable[[float], str]) -> dict[float, str]:
    """Return each tick with its label."""
    return {tick: spell(tick) for tick in ticks}


def _draw_line(axes: Any, points: Sequence[Point], look: Mapping[str, Any]) -> None:
    """Draw a line with gaps; short lines and isolated points get dots."""
    values = [math.nan if value is None or not math.isfinite(value) else value for _, value in points]
    padded, few = [math.nan, *values, math.nan], len(points) <= DOT_POINTS
    dots = [
        place for place in range(len(points)) if few or (math.isnan(padded[place]) and math.isnan(padded[place + 2]))
    ]
    style = {"marker": "o", "ms": 6, "mew": 0, "markevery": dots, "clip_on": False, "solid_capstyle": "round", **look}
    axes.plot([place for place, _ in points], values, **style)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 of each power of ten from `low` to `high`; over many powers, each power alone."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    heads = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [tick for power in powers for head in heads if low <= (tick := head * 10.0**power) <= high]
    return ticks if len(ticks) > 2 else _ticks(low, high)


def _ticks(low: float, high: float, *, binary: bool = False, whole: bool = False, most: int = 6) -> list[float]:
    """Return about five round numbers from `low` to `high`; bytes are round in their binary unit."""
    from matplotlib.ticker import MaxNLocator

    unit = 1024.0 ** max(0, int(math.log(high, 1024))) if binary and high >= 1 else 1.0
    numbers = MaxNLocator(most, steps=[1, 2, 5, 10], integer=whole).tick_values(low / unit, high / unit)
    return [float(number) * unit for number in numbers if low <= number * unit <= high]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the y axis: the values with some room, and from 0 where that costs little."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < high / 3 else max(low - room, 0.0) if low >= 0 else low - room), high + room


def _describe(name: str, points: Sequence[tuple[float, float]], spell: Callable[[float], str], *, at_most: bool) -> str:
    """Return a line's values as text."""
    values = [value for _, value in points]
    if not values:
        return f"{name}: nothing yet"
    if at_most:
        return f"{name}: up to {spell(max(values))}"
    return f"{name}: first {spell(values[0])}, last {spell(values[-1])}, lowest {spell(min(values))}"


def _list_parts(parts: Mapping[str, float], spell: Callable[[float], str]) -> str:
    return ", ".join(f"{part} {spell(size)}" for part, size in parts.items() if size > 0)


def _values_near(
    lines: Mapping[str, Sequence[Point]], start: float, end: float, spell: Callable[[str, float, float], str]
) -> list[tuple[float, str]]:
    """Return places of the x axis, from 0 to 1, each with the point nearest to it of each line."""
    found: dict[int, dict[str, tuple[float, float]]] = {}
    nearest: dict[tuple[int, str], float] = {}
    for name, points in lines.items():
        for place, value in _finite(points):
            exact = HOVERED * (place - start) / (end - start)
            number, away = round(exact), abs(exact - round(exact))
            if away < nearest.get((number, name), 1.0):
                nearest[number, name] = away
                found.setdefault(number, {})[name] = (value, place)
    return [
        (number / HOVERED, "\n".join(spell(name, *point) for name, point in near.items()))
        for number, near in sorted(found.items())
    ]


def _finite(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(place, value) for place, value in points if value is not None and math.isfinite(value)]
