"""`diff_forecasts()` → `ForecastDiff`: two forecasts side by side, what differs and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolkit.core.charts import Bar, bars
from toolkit.core.display import JsonRecord, Result, Table
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.engines.ledger import PARTS
from toolkit.forecasting.reasons import explain
from toolkit.forecasting.result import Forecast
from toolkit.forecasting.timing import collectives

SPELL: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "seconds": format_step_seconds,
    "operations": "{:.3g}".format,
    "tokens/s": "{:,.0f}".format,
}
"""Unit → how a value is written."""

COMPARED: dict[str, tuple[str, Callable[[Forecast], float | None]]] = {
    "peak": ("bytes", lambda forecast: forecast.peak_bytes),
    **{
        f"{part} at the peak": ("bytes", partial(lambda part, forecast: forecast.parts.get(part), part))
        for part in PARTS
    },
    "CUDA's own memory": ("bytes", lambda forecast: forecast.context_bytes),
    "sent in a step": ("bytes", lambda forecast: forecast.communication_bytes),
    "host memory of a node": ("bytes", lambda forecast: forecast.host_bytes),
    "operations of a step": ("operations", lambda forecast: forecast.operations),
    "time of a step": ("seconds", lambda forecast: forecast.step_seconds),
    "tokens/s, all ranks": ("tokens/s", lambda forecast: forecast.tokens_per_second),
    "a checkpoint": ("bytes", lambda forecast: forecast.checkpoint_bytes),
}
"""Figure → its unit, and its value in a forecast."""


@dataclass(frozen=True, kw_only=True)
class Difference(JsonRecord):
    """One figure of both forecasts."""

    json_fields = "* ratio"

    what: str
    one: float | None
    """None where it is not known."""
    other: float | None
    unit: str
    """`bytes`, `seconds`, `operations` or `tokens/s`."""

    @property
    def ratio(self) -> float | None:
        """The second as a multiple of the first; None where one is less than a thousandth of the other: it would say nothing."""
        ratio = self.other / self.one if self.one and self.other is not None else 0.0
        return ratio if 0.001 <= ratio <= 1000 else None

    @property
    def cells(self) -> tuple[str, ...]:
        """Both with their unit, and the ratio, for a table."""
        values = ("–" if value is None else SPELL[self.unit](value) for value in (self.one, self.other))
        return self.what, *values, "–" if self.ratio is None else f"{self.ratio:.2f}"


@dataclass(frozen=True, kw_only=True)
class ForecastDiff(Result):
    """Two forecasts side by side. Bytes are of the fullest rank of each."""

    json_fields = "labels one other fields differences why"

    one: Forecast
    other: Forecast
    labels: tuple[str, str]
    """The name of each forecast: the fields in which it differs."""
    fields: Mapping[str, tuple[Any, Any]]
    """Every field of strategy, loop and machine that differs."""
    differences: tuple[Difference, ...]
    why: tuple[tuple[str, str], ...]
    """Part and reason of each difference, a sentence each."""

    @property
    def reason(self) -> str:
        """Return the needs and the speeds of both, in a sentence."""
        both = list(zip((self.one, self.other), self.labels, strict=True))
        sentences = [
            f"{label} needs {format_bytes(forecast.needed_bytes)} and {'fits' if forecast.fits else 'does not fit'}"
            for forecast, label in both
        ]
        # By tokens: their steps may have different numbers of rows.
        speeds = [(forecast.tokens_per_second, label) for forecast, label in both if forecast.tokens_per_second]
        pace = ""
        if len(speeds) == 2:
            slow, quick = sorted(speeds)
            equal = quick[0] < 1.01 * slow[0]
            pace = " Both are as fast." if equal else f" {quick[1]} is {quick[0] / slow[0]:.2f} times as fast."
        return f"{'; '.join(sentences)}.{pace}"

    def pictures(self) -> Sequence[str]:
        """Return pictures of both peaks by part, and of what a rank sends."""
        both = list(zip(self.labels, (self.one, self.other), strict=True))
        peaks = [
            Bar(label=f"{label}, {forecast.peak_phase}", parts={part: forecast.parts.get(part, 0) for part in PARTS})
            for label, forecast in both
        ]
        limit = self.one.limit_bytes if self.one.limit_bytes == self.other.limit_bytes else None
        title = f"{self.one.model}: highest need of a rank, by part"
        pictures = [bars(peaks, title=title, limit=limit, limit_label="a rank has")]
        if self.one.communication_bytes or self.other.communication_bytes:
            sent = [Bar(label=label, parts=_sent_bytes(forecast)) for label, forecast in both]
            pictures.append(bars(sent, title="Bytes that a rank sends in a step"))
        return pictures

    def tables(self) -> list[Table]:
        """Return why they differ, the different fields, and the figures."""
        title = f"{self.one.model}: {self.labels[0]} against {self.labels[1]}"
        fields = [(name, *map(str, values)) for name, values in self.fields.items()]
        figures = [difference.cells for difference in self.differences]
        tables = [
            Table(title="Why they differ", columns=("what", "because"), rows=self.why),
            Table(title=title, columns=("field", *self.labels), rows=fields),
            Table(
                title="" if fields else title,
                columns=("a rank", *self.labels, "ratio"),
                rows=figures,
                notes=(self.reason,),
            ),
        ]
        return [table for table in tables if table.rows]


def _sent_bytes(forecast: Forecast) -> dict[str, float]:
    """Return the bytes that a rank sends in a step: parameters and gradients."""
    parts = {"parameters": 0.0, "gradients": 0.0}
    for sent in collectives(forecast.job):
        parts["gradients" if sent.what.startswith("gradients") else "parameters"] += sent.size * sent.times
    return parts


def diff_forecasts(one: Forecast, other: Forecast) -> ForecastDiff:
    """Return the differences between two forecasts, and their reasons.

    Args:
        one: the first.
        other: the second, of the same model or of another.
    """
    fields = _differing_fields(one, other)
    labels = _label(one, fields, 0), _label(other, fields, 1)
    if labels[0] == labels[1]:
        labels = (f"{labels[0]} (1)", f"{labels[1]} (2)")
    return ForecastDiff(
        one=one,
        other=other,
        labels=labels,
        fields=fields,
        differences=tuple(
            Difference(what=what, one=value(one), other=value(other), unit=unit)
            for what, (unit, value) in COMPARED.items()
            if value(one) or value(other)
        ),
        why=tuple(explain(one, other, labels)),
    )


def _differing_fields(one: Forecast, other: Forecast) -> dict[str, tuple[Any, Any]]:
    def fields(forecast: Forecast) -> dict[str, Any]:
        machine = {"model": forecast.model, "hardware": forecast.hardware.device.name, "ranks": forecast.ranks}
        return {**dataclasses.asdict(forecast.strategy), **dataclasses.asdict(forecast.train_config), **machine}

    first, second = fields(one), fields(other)
    return {name: (first[name], second[name]) for name in first if first[name] != second[name]}


def _label(forecast: Forecast, fields: Mapping[str, tuple[Any, Any]], place: int) -> str:
    """Return the sharding if it differs, else another difference: `zero3`, `offload cpu`, `micro_batch 8`."""
    words = [
        str(values[place]) if name in ("model", "hardware") else f"{name} {values[place]}"
        for name, values in fields.items()
        if name not in ("dp_replicate", "lr")
    ]
    return forecast.strategy.label if "sharding" in fields or not words else ", ".join(words[:2])
