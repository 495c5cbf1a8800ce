"""Files that a new run may find in its folder: its own from an earlier beginning, and none of the user's."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolkit.core.atomic_io import DRAFT
from toolkit.core.errors import RunError
from toolkit.run_folder.run_lock import is_lock

LOGS = re.compile(
    r"rank-\d+\.(log|beat|error\.json)|\.rank-\d+\.spare|(launcher|supervisor)\.log|(failures|end)\.json|function\.pkl"
)
"""Files that a run writes into `logs`; other files there are the user's."""

_DRAFT = re.compile(rf"\..+\.[0-9a-f]{{16}}{re.escape(DRAFT)}")

LONGEST = 200
"""Bytes of a run's name: files in its folder have longer ones."""


def refuse_old(path: Path) -> None:
    """Refuse to start a new run in a folder with other files than a lock and logs of ours."""
    if path.name.startswith("-") or not path.name.isprintable() or len(os.fsencode(path.name)) > LONGEST:
        raise RunError(
            f"{path.name[:40]!r} can be no run's name: expected at most {LONGEST} bytes, no control characters, and no - "
            "at the beginning, which begins a flag. Choose another with --run-dir."
        )
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"{path} is a file: expected a folder for the run. Choose another with --run-dir.")
    if (path / "run.json").exists() or (path / "events.jsonl").exists():
        raise RunError(f"{path} holds a run already. Choose another folder with --run-dir, or remove it.")
    if entry := foreign_files(path):
        raise RunError(
            f"{path} is not empty (it has {min(entry)}): expected a new or an empty folder. "
            "Choose another with --run-dir."
        )


def foreign_files(path: Path) -> set[str]:
    """Return files in a folder that no run of ours writes before it begins: a new run leaves them alone."""
    ours, logs = {"run.json"}, path / "logs"
    if is_lock(path / "lock"):
        ours |= {"lock", "accelerate.yaml"}  # a run of ours writes it behind its lock
    if logs.is_dir():
        ours.add("logs")
    names = {entry.name for entry in path.iterdir()} - ours
    for entry in logs.iterdir() if logs.is_dir() else ():
        if entry.is_dir() or not LOGS.fullmatch(entry.name):
            names.add(f"logs/{entry.name}")
    return {name for name in names if not _DRAFT.fullmatch(Path(name).name)}  # of a process that was killed
