"""`attach()` and `runs()`: runs found again, by a process that did not launch them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.strategy import Strategy
from toolkit.core.atomic_io import expand_user
from toolkit.core.display import Result, Table
from toolkit.launcher.run_handle import Run
from toolkit.run_folder.folder import RUNS
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import is_lock
from toolkit.run_folder.status import Progress


@dataclass(frozen=True, kw_only=True)
class Runs(Result):
    """The runs in a folder, the newest first: a sequence of `Run`s."""

    root: str
    entries: tuple[dict[str, Any], ...]
    """A row a run: `Run.to_dict()`."""

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Run]:
        return (Run(Path(entry["folder"])) for entry in self.entries)

    def __getitem__(self, place: int) -> Run:
        return Run(Path(self.entries[place]["folder"]))

    def tables(self) -> list[Table]:
        """Name, status, strategy, how far it came."""
        rows = [
            (
                Path(entry["folder"]).name,
                entry["status"],
                entry["strategy"]["sharding"],
                entry["strategy"]["adapter"],
                f"{entry['step']} of {entry['steps'] or '?'}",
                "–" if entry["loss"] is None else f"{entry['loss']:.4f}",
            )
            for entry in self.entries
        ]
        columns = ("run", "status", "sharding", "adapter", "steps", "loss")
        notes = [
            f"{Path(entry['folder']).name}: {entry['message']}"
            for entry in self.entries
            if entry["status"] == "unreadable"
        ]
        notes += [] if rows else [f"No runs in {self.root}."]
        return [Table(title=f"Runs in {self.root}", columns=columns, rows=rows, notes=notes)]


def attach(path: str | Path) -> Run:
    """Return a run that this process did not launch, whether it continues or has ended.

    `path` is its folder, or its name under `runs/`.

    Raises:
        RunError: for a folder without a run.
    """
    folder = expand_user(path)
    if not folder.exists() and (Path(RUNS) / folder).exists():
        folder = Path(RUNS) / folder  # as `runs()` names it
    if not is_lock(folder / "lock"):
        read_run_json(folder)
    return Run(folder)


def runs(root: str | Path = RUNS) -> Runs:
    """Return the runs under `root`, the newest first."""
    place = expand_user(root)
    places = {path.parent for path in place.glob("*/run.json")}
    places |= {path.parent for path in place.glob("*/lock") if is_lock(path)}  # also those that never began
    folders = sorted(places, key=lambda path: path.stat().st_mtime, reverse=True)
    return Runs(root=str(root), entries=tuple(_row(Run(path)) for path in folders))


def _row(run: Run) -> dict[str, Any]:
    """Return a row. An unreadable run, as of another version, does not hide others."""
    try:
        return run.to_dict()
    except Exception as error:
        plain = {"strategy": dataclasses.asdict(Strategy()), **dataclasses.asdict(Progress())}
        return {
            "folder": str(run.folder),
            "status": "unreadable",
            "message": str(error) or type(error).__name__,
            **plain,
        }
