"""`compare_runs()`: the curves of several runs over each other, and a table of where each stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.core.display import Result, Table
from toolkit.core.errors import RunError
from toolkit.core.pictures import figures_side_by_side
from toolkit.launcher.api import attach
from toolkit.launcher.run_handle import Run
from toolkit.run_folder.run_charts import run_pictures, smoothed


@dataclass(frozen=True, kw_only=True)
class RunOverlay(Result):
    """Runs over each other, as they were when they were compared."""

    json_fields = "rows=rows"

    log: bool
    steps: Mapping[str, Sequence[Mapping[str, Any]]]
    """Run → its steps' events."""
    rows: Sequence[Mapping[str, Any]]
    """Of each run: name, status, step, the smoothed loss and tokens a second; None where a run has none."""

    def pictures(self) -> Sequence[str]:
        """Return a picture of each figure, one line a run."""
        return (figures_side_by_side(run_pictures(self.steps, log=self.log)),)

    def tables(self) -> list[Table]:
        """Return where each run stands."""
        spellings = {"smoothed_loss": "{:.4f}", "tokens_per_second": "{:,.0f}"}
        cells = [
            ["–" if value is None else spellings.get(name, "{}").format(value) for name, value in row.items()]
            for row in self.rows
        ]
        columns = [name.replace("tokens_per_second", "tokens/s").replace("_", " ") for name in self.rows[0]]
        return [Table(title="Runs over each other", columns=columns, rows=cells)]


def compare_runs(runs: Sequence[Run | str | Path], *, log: bool = False) -> RunOverlay:
    """Return the curves of several runs over each other: loss, tokens/s, learning rate, gradient norm.

    Args:
        runs: runs, or their folders; they may still run.
        log: logarithmic axes for the loss and the gradient norm.

    Raises:
        RunError: for no runs, and for a folder without one.
    """
    if isinstance(runs, str | Path | Run) or not runs:
        raise RunError(f"compare_runs {runs!r}: expected a list of runs or folders, such as [first, second].")
    handles = [run if isinstance(run, Run) else attach(run) for run in runs]
    steps = {run.name: run.steps() for run in handles}
    rows = []
    for run in handles:
        status, progress = run.status, run.progress
        losses = smoothed((event["step"], event["loss"]) for event in steps[run.name])
        rows.append({
            "run": run.name, "status": status, "step": progress.step,
            "smoothed_loss": next((loss for _, loss in reversed(losses) if loss is not None), None),
            "tokens_per_second": progress.tokens_per_second,
        })  # fmt: skip
    return RunOverlay(log=log, steps=steps, rows=rows)
