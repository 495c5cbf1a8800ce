"""A running run as HTML: progress, loss, and each rank's memory with forecast and limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.core.charts import Bar, bars, curve
from toolkit.core.display import markup, render
from toolkit.core.units import format_bytes
from toolkit.run_folder.status import Progress

_LOOKS = {
    "starting": ("#92400e", "#fef3c7"),
    "running": ("#1e40af", "#dbeafe"),
    "finished": ("#166534", "#dcfce7"),
    "stopped": ("#374151", "#e5e7eb"),
    "failed": ("#991b1b", "#fee2e2"),
}
"""Status → its ink and its ground."""


def page(name: str, status: str, progress: Progress, steps: Sequence[Mapping[str, Any]], message: str) -> str:
    """Return HTML without scripts: headline, bar, loss curve, each rank's memory, and a table of the figures."""
    ink, ground = _LOOKS[status]
    return render(
        "run",
        name=name,
        status=status,
        ink=ink,
        ground=ground,
        progress=progress,
        begun=progress.steps or status not in ("starting", "running"),
        message=message,
        pictures=[markup(_loss(steps)), markup(_memory(progress))],
        table=markup(progress.table(name).html()),
    )


def _loss(steps: Sequence[Mapping[str, Any]]) -> str:
    if len(steps) < 2:
        return ""
    points = [(float(event["step"]), event["loss"]) for event in steps]
    return curve({"loss": points}, title="Loss", x="step", y="loss")


def _memory(progress: Progress) -> str:
    """Draw each rank's memory next to the forecast's peak, with the limit.

    What a CPU's rank has resident counts Python and its libraries, which a forecast does not, and says so.
    """
    if not progress.bytes_per_rank:
        return ""
    meaning = "resident, Python included" if progress.bytes_are == "resident" else progress.bytes_are
    rows = [Bar(label=f"rank {rank}", parts={meaning: size}) for rank, size in enumerate(progress.bytes_per_rank)]
    if progress.forecast_bytes:
        rows.append(Bar(label="forecast peak", parts={"forecast": progress.forecast_bytes}))
    return bars(
        rows, title="Memory of each rank", limit=progress.limit_bytes, limit_label="limit of a rank", spell=format_bytes
    )
