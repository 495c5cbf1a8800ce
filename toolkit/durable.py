"""Files that a kill, a full disk or a power cut leaves whole: JSON, and events line by line. Standard library only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import RunError
from toolkit.redacting import redact_all


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, flushed to the disk with its name."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder to the disk: the names in it, too, survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all. Numbers that are not finite become null, secrets `[redacted]`.

    Raises:
        RunError: where the disk does not take it.
    """
    text = json.dumps(_finite(redact_all(value)), indent=2, allow_nan=False) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise _unwritable(path, len(text.encode()), error.strerror or str(error)) from error


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line of JSON in one write: whoever reads sees it whole, and a killed process leaves it.

    Raises:
        RunError: where the disk takes only a part of it, which is taken back, or nothing.
    """
    data = (json.dumps(_finite(redact_all(line)), allow_nan=False) + "\n").encode()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            written = os.write(file, data)
            if written == len(data):
                return
            os.ftruncate(file, os.lseek(file, 0, os.SEEK_CUR) - written)
            why = "the disk is full"
        finally:
            os.close(file)
    except OSError as error:
        why = error.strerror or str(error)
    raise _unwritable(path, len(data), why)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`. A torn last line, as a killed process leaves it, does not count.

    Raises:
        RunError: for any other line that is no JSON object, with its number.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    torn = len(lines)  # what stands behind the last newline
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError as error:
            if number == torn:
                break
            raise RunError(f"{path}, line {number}: no JSON ({error}). Repair or remove the line.") from error
        if not isinstance(event, dict):
            raise RunError(
                f"{path}, line {number}: expected a JSON object, found {line[:40]!r}. Repair or remove the line."
            )
        events.append(event)
    return events


def last_step(path: Path) -> int:
    """The last step in `events.jsonl`; 0 before the first."""
    return max((int(event.get("step", 0)) for event in read_events(path)), default=0)


def cut_events(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the lines up to `step`, drop later ones and a torn last one. What is kept comes back."""
    if not path.exists():
        return []
    kept = [event for event in read_events(path) if event.get("step", 0) <= step]
    write_whole(path, "".join(json.dumps(event) + "\n" for event in kept).encode())
    return kept


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _unwritable(path: Path, needed: int, why: str) -> RunError:
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({needed:,} bytes are needed, {shutil.disk_usage(path.parent).free:,} are free)"
    return RunError(f"{path} cannot be written: {why}{free}. Make room, then go on with `toolkit resume`.")
