"""Memory forecast and measured, side by side: tables with their ratio, and pictures of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.core.display import Table
from toolkit.core.drawing import Bar, bars
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes

INDENT = "\N{NO-BREAK SPACE}" * 2


def by_part(forecast: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> tuple[Table, str]:
    """Return a rank's bytes at its peak, forecast and measured, with their picture.

    What no audit can tell apart is measured as one, `transient`, and forecast part by part.

    Args:
        forecast: as `Forecast.to_dict` says it, or None.
        measured: as `memory.json` says it, or None.
    """
    expected: Mapping[str, int] = forecast["device"]["parts"] if forecast else {}
    measured_parts: Mapping[str, int] = measured["parts"] if measured else {}
    within = [part for part, size in expected.items() if part not in measured_parts and size] if measured else []
    rows = []
    for part, size in measured_parts.items():
        other = expected.get(part, sum(expected[name] for name in within) if part == "transient" else 0)
        rows.append(_row(part, other if forecast else None, size))
    rows += [_row(f"{INDENT}{part}", expected[part], None) for part in within]
    if not measured:
        rows += [_row(part, size, None) for part, size in expected.items() if size]
    peaks = [source["peak_bytes"] if source else None for source in (forecast and forecast["device"], measured)]
    rows.append(_row("all", *peaks))
    drawn = [Bar(label="forecast", parts=expected)] if expected else []
    drawn += [Bar(label="measured", parts=measured_parts)] if measured_parts else []
    limit = forecast["device"].get("limit_bytes") if forecast else None
    picture = bars(drawn, title="Peak of a rank, by part", limit=limit, limit_label="a rank has")
    table = compared("Peak of a rank, by part", "part", rows)
    if within:
        table = replace(table, notes=["Indented: parts of transient, which is measured as one."])
    return _drop_empty_columns(table, forecast, measured), picture


def by_phase(forecast: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> tuple[Table, str]:
    """Return the highest total of each phase, forecast and measured, with a picture."""
    expected: Mapping[str, int] = forecast["device"]["phases"] if forecast else {}
    measured_phases: Mapping[str, int] = measured["phases"] if measured else {}
    names = [name for name in PHASES if name in expected or name in measured_phases]
    bars_ = []
    for name in names:
        for label, source in (("forecast", expected), ("measured", measured_phases)):
            if name in source:
                bars_.append(Bar(label=f"{name}, {label}", parts={name: source[name]}))
    rows = [_row(name, expected.get(name), measured_phases.get(name)) for name in names]
    title = "Highest total of each phase"
    return _drop_empty_columns(compared(title, "phase", rows), forecast, measured), bars(bars_, title=title)


def _row(name: str, expected: int | None, measured: int | None) -> tuple[str, ...]:
    cells = ("–" if size is None else format_bytes(size) for size in (expected, measured))
    return (name, *cells, ratio(expected, measured))


def compared(title: str, what: str, rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table of names, forecasts, measurements and their ratios."""
    return Table(title=title, columns=(what, "forecast", "measured", "forecast / measured"), rows=rows)


def by_rank(memory: Mapping[str, Any]) -> Table:
    """Return each rank's measurement in `memory.json`."""
    ranks = memory["measured"]["per_rank"]
    phases = [name for name in PHASES if any(name in rank["phases"] for rank in ranks)]
    sizes = ("peak_bytes", "live_bytes", "reserved_bytes", "device_bytes", "rss_peak_bytes")
    shown_columns = [name for name in sizes if any(rank.get(name) is not None for rank in ranks)]
    names = {"peak_bytes": "peak", "live_bytes": "between steps", "rss_peak_bytes": "peak RSS"}
    rows = [
        (
            str(rank["rank"]),
            *(_size(rank.get(name)) for name in shown_columns),
            *(_size(rank["phases"].get(n)) for n in phases),
        )
        for rank in ranks
    ]
    columns = ("rank", *(names.get(name, name.removesuffix("_bytes")) for name in shown_columns), *phases)
    notes = [memory["reason"]] if memory.get("reason") else []
    return Table(title="Measured, by rank and phase", columns=columns, rows=rows, notes=notes)


def _drop_empty_columns(table: Table, forecast: object, measured: object) -> Table:
    """Remove columns without values."""
    if forecast and measured:
        return table
    columns = (0, 1) if forecast else (0, 2)
    rows = [[row[place] for place in columns] for row in table.rows]
    return replace(table, columns=[table.columns[place] for place in columns], rows=rows)


def ratio(expected: float | None, measured: float | None) -> str:
    """Return the forecast as a multiple of the measurement."""
    return f"{expected / measured:.2f}x" if expected and measured else "–"


def _size(size: int | None) -> str:
    return "–" if size is None else format_bytes(size)
