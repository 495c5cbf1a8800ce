"""`diff_forecasts()` → `ForecastDiff`: two forecasts side by side, what differs and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.display import Result, Table
from toolkit.core.drawing import Bar, bars
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.engines.ledger import PARTS
from toolkit.forecasting import Forecast
from toolkit.forecasting.reasons import explain
from toolkit.forecasting.timing import collectives


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One figure of both."""

    what: str
    one: float | None
    """None where it is not known."""
    other: float | None
    unit: str
    """`bytes`, `seconds`, `operations` or `tokens/s`."""

    @property
    def ratio(self) -> float | None:
        """The second as a multiple of the first."""
        return self.other / self.one if self.one and self.other is not None else None

    def spell(self, value: float | None) -> str:
        """Return a value with its unit."""
        if value is None:
            return "–"
        if self.unit == "bytes":
            return format_bytes(value)
        if self.unit == "seconds":
            return format_step_seconds(value)
        return f"{value:.3g}" if self.unit == "operations" else f"{value:,.0f}"


@dataclass(frozen=True, kw_only=True)
class ForecastDiff(Result):
    """Two forecasts side by side. Bytes are of the fullest rank of each."""

    one: Forecast
    other: Forecast
    labels: tuple[str, str]
    """The name of each forecast: the fields in which it differs."""
    fields: Mapping[str, tuple[Any, Any]]
    """Every field of strategy, loop and machine that differs."""
    differences: tuple[Difference, ...]
    why: tuple[tuple[str, str], ...]
    """What differs, and why, in a sentence."""

    @property
    def reason(self) -> str:
        """Both in a sentence."""
        sentences = [
            f"{label} needs {format_bytes(forecast.peak_bytes)} and {'fits' if forecast.fits else 'does not fit'}"
            for label, forecast in zip(self.labels, (self.one, self.other), strict=True)
        ]
        times = [forecast.timing.step_seconds for forecast in (self.one, self.other) if forecast.timing]
        pace = ""
        if len(times) == 2:
            quick, slow = sorted(zip(times, self.labels, strict=True))
            equal = slow[0] < 1.01 * quick[0]
            pace = " Both are as fast." if equal else f" {quick[1]} is {slow[0] / quick[0]:.2f} times as fast."
        return f"{'; '.join(sentences)}.{pace}"

    def to_dict(self) -> dict[str, Any]:
        """Return both forecasts' JSON, and the differences."""
        return {
            "labels": list(self.labels),
            "one": self.one.to_dict(),
            "other": self.other.to_dict(),
            "fields": {name: list(values) for name, values in self.fields.items()},
            "differences": [
                {**dataclasses.asdict(difference), "ratio": difference.ratio} for difference in self.differences
            ],
            "why": [list(cause) for cause in self.why],
        }

    def pictures(self) -> Sequence[str]:
        """Return pictures of both peaks by part, and of what a rank sends."""
        both = list(zip(self.labels, (self.one, self.other), strict=True))
        peaks = [
            Bar(label=f"{label}, {forecast.peak_phase}", parts={part: forecast.parts.get(part, 0) for part in PARTS})
            for label, forecast in both
        ]
        sent = [Bar(label=label, parts=_sent_bytes(forecast)) for label, forecast in both]
        same = self.one.limit_bytes == self.other.limit_bytes
        limit: dict[str, Any] = {"limit": self.one.limit_bytes, "limit_label": "a rank has"} if same else {}
        pictures = [bars(peaks, title=f"{self.one.model}: highest need of a rank, by part", **limit)]
        return (
            [*pictures, bars(sent, title="Bytes that a rank sends in a step")]
            if any(sum(bar.parts.values()) for bar in sent)
            else pictures
        )

    def tables(self) -> list[Table]:
        """Return the different fields, the figures, and why they differ."""
        fields = [(name, *(str(value) for value in values)) for name, values in self.fields.items()]
        rows = [
            (
                difference.what,
                difference.spell(difference.one),
                difference.spell(difference.other),
                "–" if difference.ratio is None else f"{difference.ratio:.2f}",
            )
            for difference in self.differences
        ]
        title = f"{self.one.model}: {self.labels[0]} against {self.labels[1]}"
        first = [Table(title=title, columns=("field", *self.labels), rows=fields)] if fields else []
        figures = Table(
            title="" if first else title, columns=("a rank", *self.labels, "ratio"), rows=rows, notes=(self.reason,)
        )
        why = [Table(title="Why they differ", columns=("what", "because"), rows=self.why)] if self.why else []
        return [*why, *first, figures]


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
        differences=tuple(_differences(one, other)),
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


def _differences(one: Forecast, other: Forecast) -> Iterator[Difference]:
    def row(what: str, first: float | None, second: float | None, unit: str = "bytes") -> Difference:
        return Difference(what=what, one=first, other=second, unit=unit)

    yield row("peak", one.peak_bytes, other.peak_bytes)
    for part in PARTS:
        first, second = one.parts.get(part, 0), other.parts.get(part, 0)
        if first or second:
            yield row(f"{part} at the peak", first, second)
    yield row("sent in a step", one.communication_bytes, other.communication_bytes)
    yield row("host memory of a node", one.host_bytes, other.host_bytes)
    yield row("operations of a step", one.operations, other.operations, "operations")
    times = [forecast.timing for forecast in (one, other)]
    if any(times):
        seconds = [timing.step_seconds if timing else None for timing in times]
        pace = [timing.tokens_per_second if timing else None for timing in times]
        yield row("time of a step", seconds[0], seconds[1], "seconds")
        yield row("tokens/s, all ranks", pace[0], pace[1], "tokens/s")
    yield row("a checkpoint", one.checkpoint_bytes, other.checkpoint_bytes)
