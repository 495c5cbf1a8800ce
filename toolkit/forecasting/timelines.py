"""`timeline()` → `Timeline`: memory by phase: the forecast, and the measurement of a finished run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.charts import Bar, bars, curve
from toolkit.core.display import Result, Table
from toolkit.core.errors import RunError
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes
from toolkit.devices.machine import Hardware
from toolkit.engines.ledger import PARTS, LedgerHistory
from toolkit.forecasting import Forecast
from toolkit.forecasting.finished_run import FinishedRun, read_finished_run
from toolkit.forecasting.memory import all_steps, replay_ranks, traced
from toolkit.forecasting.prediction import build_forecast, resolve_request
from toolkit.models import ModelSpec

MEASURED_TOTAL = "measured total"
"""The part of a picture with a run's measured bytes."""

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Timeline(Result):
    """Memory of the fullest rank through load, one step and save."""

    json_fields = "forecast phases=parts run measured notes"

    forecast: Forecast
    parts: Mapping[str, Mapping[str, int]]
    """Phase → parts at its highest moment; they add up to the phase's bytes in the forecast."""
    course: tuple[tuple[str, int], ...]
    """Phase and bytes after every change, in order."""
    run: str | None = None
    """Folder of the compared run."""
    measured: Mapping[str, int] | None = None
    """Phase → the highest bytes of that run."""
    notes: tuple[str, ...] = ()
    """Differences between run and forecast that prevent a comparison, a sentence each."""

    @property
    def reason(self) -> str:
        """Return the phase with the peak, in a sentence; with a run, also the forecast's error."""
        forecast = self.forecast
        sentence = (
            f"{forecast.strategy.label} is highest in {forecast.peak_phase}, with {format_bytes(forecast.peak_bytes)}."
        )
        if self.measured:
            peak = max(self.measured.values())
            sentence += (
                f" The run measured {format_bytes(peak)}: the forecast is {forecast.peak_bytes / peak:.2f} of it."
            )
        return sentence

    def pictures(self) -> Sequence[str]:
        """Return pictures of each phase's peak by part, with the measured one, and of the course of a step."""
        rows = []
        for phase, parts in self.parts.items():
            rows.append(Bar(label=phase, parts={part: parts[part] for part in PARTS if parts.get(part)}))
            if self.measured and phase in self.measured:
                rows.append(Bar(label="measured", parts={MEASURED_TOTAL: self.measured[phase]}))
        title = f"{self.forecast.model}, {self.forecast.strategy.label}: the highest moment of each phase"
        phase_bars = bars(rows, title=title, limit=self.forecast.limit_bytes, limit_label="a rank has")
        lines, names = self._course_points()
        course = curve(
            lines,
            title="The way there: one step of the forecast",
            x="phases, each as wide as the others",
            y="bytes of a rank",
            spell_y=format_bytes,
            names=names,
        )
        return [phase_bars, course]

    def _course_points(self) -> tuple[dict[str, list[Point]], dict[float, str]]:
        """Return each phase's points over a section of its own, and where its name stands.

        The moments of the optimizer, which the first step alone makes before its forward, have no section.
        """
        lines: dict[str, list[Point]] = {}
        names: dict[float, str] = {}
        end, place, begun = 0.0, 0, False
        for phase, moments in itertools.groupby(self.course, lambda moment: moment[0]):
            sizes = [float(size) for _, size in moments]
            begun = begun or phase == "forward"
            if begun or phase != "step":
                line = lines.setdefault(phase, [])
                line += [(float(place), None)] if line else []
                line += [(place + index / len(sizes), size) for index, size in enumerate([end, *sizes])]
                names[place + 0.5] = phase
                place += 1
            end = sizes[-1]
        return lines, names

    def tables(self) -> list[Table]:
        """Return by phase the forecast by part, the measured bytes, and their ratio."""
        used = [part for part in PARTS if any(parts.get(part) for parts in self.parts.values())]
        rows = []
        for phase, parts in self.parts.items():
            total = sum(parts.values())
            row = [phase, *(_cell(parts.get(part)) for part in used), format_bytes(total)]
            if self.measured:
                size = self.measured.get(phase)
                row += [_cell(size), f"{total / size:.2f}" if size else "–"]
            rows.append(row)
        forecast = self.forecast
        where = f"{forecast.ranks} x {forecast.hardware.device.name}"
        title = f"{forecast.model}, sharding {forecast.strategy.label}, {where}: by phase"
        columns = ("phase", *used, "all", *(("measured", "forecast x") if self.measured else ()))
        return [Table(title=title, columns=columns, rows=rows, notes=(self.reason, *self.notes))]


def _cell(size: int | None) -> str:
    return format_bytes(size) if size else "–"


def timeline(
    model: ModelSpec | str | None = None,
    strategy: Strategy | None = None,
    on: Hardware | str | None = None,
    train_config: TrainConfig | None = None,
    *,
    ranks: int | None = None,
    one_document: bool = False,
    run: str | Path | None = None,
) -> Timeline:
    """Forecast a step phase by phase. No launch, no device.

    Args:
        model: as in `forecast`; by default the run's own, as for the next four.
        strategy: how it is trained.
        on: the machine, or its name.
        train_config: batch and lengths.
        ranks: processes.
        one_document: as in `forecast`.
        run: folder of a run; its measured bytes stand next to the forecast.

    Raises:
        StrategyError: for what this device, model or number of ranks cannot do, or what has no forecast yet.
        RunError: for a folder without a run that measured anything.
    """
    finished = read_finished_run(run) if run is not None else None
    if finished is not None and finished.phases is None:
        raise RunError(f"{run} measured nothing: {finished.why}. Name a run with a measured peak.")
    job, machine = resolve_request(model, strategy, on, train_config, ranks=ranks, run=finished)
    trace = traced(job, masked=not one_document, others=True)
    steps = all_steps(job, trace)
    save, num_checkpoints = (finished.save, finished.num_checkpoints) if finished else (True, 1)
    ledgers = replay_ranks(job, trace, steps[0], save=save, num_checkpoints=num_checkpoints, kind=LedgerHistory)
    ledger = max(ledgers, key=lambda each: each.peak)
    forecast = build_forecast(job, machine, steps, ledgers)
    return Timeline(
        forecast=forecast,
        parts={
            phase: {part: size for part, size in ledger.highest[phase].items() if size}
            for phase in PHASES
            if phase in ledger.phases
        },
        course=tuple(ledger.moments),
        run=str(run) if run is not None else None,
        measured=finished.phases if finished else None,
        notes=_notes(finished, forecast) if finished else (),
    )


def _notes(finished: FinishedRun, forecast: Forecast) -> tuple[str, ...]:
    differences = finished.differences(forecast.strategy, forecast.train_config, forecast.ranks)
    if finished.hardware is not None and finished.hardware.device.kind != forecast.hardware.device.kind:
        differences.append(f"on {finished.hardware.device.name}, not {forecast.hardware.device.name}")
    text = f"The run was another: {'; '.join(differences)}. Its bytes are no measure of this forecast."
    return (text,) if differences else ()
