"""Correct forecasts by one measured run: bytes, the allocator's reserve, and the real speed."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from toolkit.core.errors import RunError
from toolkit.forecasting.timing import Timing
from toolkit.run_folder.run_json import open_finished_run

if TYPE_CHECKING:
    from toolkit.forecasting.result import Forecast

F = TypeVar("F", bound="Forecast")

WINDOW = 3
"""Steps that the memory window slows, and that allocate first; they do not count for speed if there are others."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The corrections of one run."""

    run: Path
    more_bytes: int
    """The run's peak above its forecast: what no trace contains."""
    device: str
    """`cpu` or `cuda`."""
    card_gib: float | None
    """Memory by the catalog, which tells its cards apart (speeds are mended); None of a device that it does not know."""
    reserved_ratio: float | None
    """Reserved over allocated, at the most of each; None on CPU."""
    operations_per_second: float
    """Of a rank, over the whole step."""
    slower: float | None
    """How many times its own forecast a step took; None where that knew of no speed."""


def read_run(path: Path) -> Calibration:
    """Read a run's `memory.json`, `events.jsonl` and `run.json`.

    Raises:
        RunError: for a folder without a finished run, and for one that measured nothing or was not forecast.
    """
    with open_finished_run(path) as (_, memory, steps):
        forecast, measured = memory["forecast"], memory["measured"]
        if not forecast or not measured:
            why = memory.get("unforecast") or memory.get("reason") or "it has no forecast, or no measurement"
            raise RunError(f"Cannot calibrate with {path}: {why}. Name a run that has both in its memory.json.")
        if not steps:
            raise RunError(
                f"Cannot calibrate with {path}: events.jsonl has no steps. Name the folder of a finished run."
            )
        seconds = [event["seconds"] for event in steps]
        worst = max(measured["per_rank"], key=lambda rank: rank["peak_bytes"])
        reserved = worst.get("reserved_bytes")
        took, expected = statistics.median(seconds[WINDOW:] or seconds), forecast["step_seconds"]
        return Calibration(
            run=path,
            more_bytes=measured["peak_bytes"] - forecast["device"]["peak_bytes"],
            device=forecast["hardware"]["device"]["kind"],
            card_gib=card["gib"] if (card := forecast["hardware"]["device"]["card"]) else None,
            reserved_ratio=reserved / worst["peak_bytes"] if reserved else None,
            operations_per_second=forecast["operations"] / took,
            slower=took / expected if expected else None,
        )


def calibrated(forecast: F, lesson: Calibration) -> F:
    """Correct the forecast by a run: what it took more is workspace, what it took less comes off the largest part.

    Raises:
        RunError: for a run on another kind of device.
    """
    device = forecast.hardware.device
    if (device.kind, device.card and device.card.gib) != (lesson.device, lesson.card_gib):
        raise RunError(f"{lesson.run} ran on another kind of device than {device.name}. Name a run on that kind.")
    more = lesson.more_bytes
    peak = forecast.peak_bytes + more
    part = "workspace" if more > 0 else max(forecast.parts, key=lambda name: forecast.parts[name])
    parts = {**forecast.parts, part: forecast.parts[part] + more}
    if forecast.timing is not None and lesson.slower is not None:
        seconds = forecast.timing.step_seconds * lesson.slower
    else:
        seconds = forecast.operations / lesson.operations_per_second
    tokens = forecast.job.global_batch * forecast.train_config.seq_len
    mfu = forecast.timing.mfu if forecast.timing else None
    if mfu is not None and forecast.timing is not None:
        mfu *= forecast.timing.step_seconds / seconds
    return dataclasses.replace(
        forecast,
        peak_bytes=peak,
        parts=parts,
        phases={phase: max(0, size + more) for phase, size in forecast.phases.items()},
        reserved_bytes=round(peak * lesson.reserved_ratio) if lesson.reserved_ratio else None,
        timing=Timing(step_seconds=seconds, tokens_per_second=tokens / seconds, mfu=mfu),
        change=None,
        changed_bytes=None,
        unknown=(
            f"Corrected by {lesson.run}: {more:+,} bytes, {lesson.operations_per_second:.3g} operations/s a rank.",
        ),
    )
