"""Tables of a report: forecasts compared with measurements, and the sampled lines of a long run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from toolkit.core.charts import Bar, bars
from toolkit.core.display import Table
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.run_folder.run_charts import speed

SAMPLED_ROWS = 12
"""The most rows of a table that samples a file's lines."""

WARM = 5
"""Steps that do not count for tokens/s: the memory window lies in them."""

INDENT = "\N{NO-BREAK SPACE}" * 2

Line = TypeVar("Line")

Row = tuple[str, float | None, float | None]
"""A name, its forecast and its measurement."""


def sample(lines: Sequence[Line], file: str) -> tuple[Sequence[Line], list[str]]:
    """Return at most `SAMPLED_ROWS` of a file's lines, evenly spaced, with the first and the last; and a note on the others."""
    if len(lines) <= SAMPLED_ROWS:
        return lines, []
    places = [round(place * (len(lines) - 1) / (SAMPLED_ROWS - 1)) for place in range(SAMPLED_ROWS)]
    return [lines[place] for place in places], [f"{SAMPLED_ROWS} of {len(lines):,}; all are in {file}."]


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of the median step after the fifth."""
    return float(median(event["seconds"] for event in steps[WARM:] or steps))


def throughput(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return tokens a second of all ranks in the median step after the fifth; None without token counts."""
    rates = [rate for event in steps[WARM:] or steps if (rate := speed(event)) is not None]
    return float(median(rates)) if rates else None


def spell_number(value: float | None) -> str:
    """Return a number's text; JSON has null for a value that is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def spell_bytes(size: float | None) -> str:
    """Return bytes as text, also where a rank measured none."""
    return "–" if size is None else format_bytes(size)


def ratio(expected: float | None, measured: float | None) -> str:
    """Return the forecast as a multiple of the measurement; a dash where one of the two is next to nothing."""
    told = expected and measured and 0.001 <= expected / measured <= 1000
    return f"{expected / measured:.2f}x" if told and expected and measured else "–"


def by_part(forecast: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> Table:
    """Return a rank's bytes at its peak, forecast and measured, with their picture.

    Parts that no audit separates are measured as one, `transient`, and forecast one by one.

    Args:
        forecast: the result of `Forecast.to_dict`, or None.
        measured: from `memory.json`, or None.
    """
    device = forecast["device"] if forecast else {"parts": {}, "peak_bytes": None}
    expected: dict[str, int] = {part: size for part, size in device["parts"].items() if size}
    parts: Mapping[str, int] = measured["parts"] if measured else {}
    within = {part: size for part, size in expected.items() if part not in parts} if measured else {}
    sums = {"transient": sum(within.values())} | expected
    rows: list[Row] = [(part, sums.get(part, 0) if forecast else None, size) for part, size in parts.items()]
    mark, rest = (INDENT, within) if measured else ("", expected)
    rows += [(mark + part, size, None) for part, size in rest.items()]
    rows.append(("all", device["peak_bytes"], measured["peak_bytes"] if measured else None))
    sources = {"forecast": expected, "measured": parts}
    bar_rows = [Bar(label=label, parts=source) for label, source in sources.items() if source]
    title, limit = "Peak of a rank, by part", device.get("limit_bytes")
    picture = bars(bar_rows, title=title, limit=limit, limit_label="a rank has")
    notes = ["Indented: parts of transient, which is measured as one."] if within else []
    return _compared(title, "part", rows, notes, picture)


def by_phase(forecast: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> Table:
    """Return the highest total of each phase, forecast and measured, with a picture."""
    sources = {
        "forecast": forecast["device"]["phases"] if forecast else {},
        "measured": measured["phases"] if measured else {},
    }
    names = [name for name in PHASES if any(name in source for source in sources.values())]
    bar_rows = [
        Bar(label=f"{name}, {label}", parts={label: source[name]})
        for name in names
        for label, source in sources.items()
        if name in source
    ]
    rows: list[Row] = [(name, sources["forecast"].get(name), sources["measured"].get(name)) for name in names]
    title = "Highest total of each phase"
    return _compared(title, "phase", rows, (), bars(bar_rows, title=title))


def by_rank(memory: Mapping[str, Any]) -> Table:
    """Return each rank's measurement in `memory.json`."""
    ranks = memory["measured"]["per_rank"]
    phases = [name for name in PHASES if any(name in rank["phases"] for rank in ranks)]
    names = {
        "peak_bytes": "peak",
        "live_bytes": "between steps",
        "reserved_bytes": "reserved",
        "device_bytes": "device",
        "rss_peak_bytes": "peak RSS",
    }
    sizes = [name for name in names if any(rank.get(name) is not None for rank in ranks)]
    rows = []
    for rank in ranks:
        values = [*(rank.get(name) for name in sizes), *(rank["phases"].get(name) for name in phases)]
        rows.append((str(rank["rank"]), *map(spell_bytes, values)))
    columns = ("rank", *(names[name] for name in sizes), *phases)
    notes = [memory["reason"]] if memory.get("reason") else []
    return Table(title="Measured, by rank and phase", columns=columns, rows=rows, notes=notes)


def by_time(forecast: Mapping[str, Any], seconds: float, rate: float | None) -> Table:
    """Return the seconds and the tokens a second of the median step, forecast and measured."""
    rows = []
    for name, expected, measured, spell in (
        ("a step", forecast.get("step_seconds"), seconds, format_step_seconds),
        ("tokens/s", forecast.get("tokens_per_second"), rate, "{:,.0f}".format),
    ):
        if measured is not None:
            rows.append((name, spell(expected) if expected else "–", spell(measured), ratio(expected, measured)))
    columns = ("figure", "forecast", "measured", "forecast / measured")
    return Table(title="Time, of the median step", columns=columns, rows=rows, notes=forecast.get("unknown") or ())


def _compared(title: str, what: str, rows: Sequence[Row], notes: Sequence[str], picture: str) -> Table:
    """Return a table of bytes, without the columns that have no value."""
    columns = (what, "forecast", "measured", "forecast / measured")
    empty = [place for place in (1, 2) if all(row[place] is None for row in rows)]
    places = [place for place in range(4) if place not in empty and not (empty and place == 3)]
    cells = [(name, spell_bytes(one), spell_bytes(other), ratio(one, other)) for name, one, other in rows]
    return Table(
        title=title,
        columns=[columns[place] for place in places],
        rows=[[row[place] for place in places] for row in cells],
        notes=notes,
        picture=picture,
    )
