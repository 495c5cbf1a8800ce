"""`run.json`, and the files of a finished run. Standard library only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import check_fields, read_events, read_json
from toolkit.core.errors import RunError

RUN_TYPES: Mapping[str, Any] = {
    "strategy": dict, "train_config": dict, "run_config": dict, "ranks": int, "parallelism": dict, "settings": dict,
    "forecast": dict | None, "versions": dict, "hardware": dict, "seed": int, "data": dict, "started": str,
    "finished": str | None, "export": dict | None, "target": dict | None, "attempts": list,
}  # fmt: skip
"""Fields of `run.json`."""

ATTEMPT: Mapping[str, Any] = {"strategy": dict, "ranks": int, "started": str, "from_step": int}
"""Fields of one of its attempts."""

MOST_RANKS = 2**20
"""More than any run has."""


def read_run_json(path: Path) -> dict[str, Any]:
    """Read `run.json` of a run's folder and check the types of its fields.

    Raises:
        RunError: for a missing or invalid run.json.
    """
    file = path / "run.json"
    try:
        record: dict[str, Any] = read_json(file)
        check_fields(record, RUN_TYPES)
        for attempt in record.get("attempts", ()):
            check_fields(attempt, ATTEMPT)
    except FileNotFoundError:
        raise no_run(path) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}. Name the folder of a run.") from error
    missing = {"strategy", "train_config", "run_config", "ranks"} - set(record)
    if missing:
        raise RunError(f"{file} lacks {', '.join(sorted(missing))}. Name the folder of a run.")
    if not 0 < record["ranks"] <= MOST_RANKS:
        raise RunError(f"{file}: ranks is {record['ranks']}, expected 1 to {MOST_RANKS:,}. Name the folder of a run.")
    sizes = record.get("parallelism", {}).values()
    if not all(type(size) is int and 0 < size <= MOST_RANKS for size in sizes):
        raise RunError(f"{file}: parallelism needs sizes of at least 1. Name the folder of a run.")
    return record


@contextlib.contextmanager
def open_finished_run(path: Path) -> Iterator[tuple[dict[str, Any], Any, list[dict[str, Any]]]]:
    """Yield `run.json`, `memory.json` and the steps of a finished run, for a block that converts them.

    Raises:
        RunError: for a folder without a finished run, and for a file that lacks what the block reads.
    """
    record = read_run_json(path)
    try:
        memory = read_json(path / "memory.json")
        yield record, memory, [event for event in read_events(path / "events.jsonl") if "loss" in event]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{path / 'memory.json'} cannot be read: {error}. Name the folder of a finished run.") from error


def no_run(path: Path) -> RunError:
    """Return the error for a folder without a run."""
    return RunError(
        f"{path} holds no run: {path / 'run.json'} does not exist. Name a run's folder, as `toolkit runs` lists them; one that "
        "was stopped before it had begun is started again."
    )
