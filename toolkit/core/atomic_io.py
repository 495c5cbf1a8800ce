"""Files that stay whole after a kill, a full disk or a power cut: JSON, and events line by line. Readers trust nothing.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from toolkit.core.errors import RunError
from toolkit.core.redaction import map_leaves, redact_all

LONGEST_JSON = 16 * 2**20
"""Bytes of the longest JSON that is read, of which Python makes objects of 400 MiB at most: a run's files have thousands."""

DEEPEST = 100
"""Levels of nested JSON that are read: every reader of it may recurse."""

DRAFT = ".tmp"
"""Suffix of the names of drafts."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, flushed to the disk with its name; through no link that somebody put there."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}{DRAFT}")
    created = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(created, "wb") as file:
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


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Never block on a pipe or a device in its place.

    Raises:
        OSError: where it cannot be read, or is no regular file.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(opened, "rb")


def outside_target(path: Path, folder: Path) -> Path | None:
    """Return the target of a link that leaves its folder, else None. The Hub cache's links stay inside."""
    real, inside = (Path(os.path.realpath(item)) for item in (path, folder))  # `resolve` raises for links in a circle
    above = [item for item in (inside, *inside.parents) if item.parent.name == "snapshots"]
    roots = [inside, *(item.parents[1] / "blobs" for item in above)]
    return None if any(root in real.parents for root in roots) else real


def read_json(path: Path, *, finite: bool = True) -> Any:
    """Read the JSON in a file; `finite` as in `parse_json`.

    Raises:
        OSError: where it cannot be read.
        ValueError: for what `parse_json` refuses, and for more than `LONGEST_JSON` bytes.
    """
    return parse_json(read_limited(path, LONGEST_JSON), finite=finite)


def read_limited(path: Path, limit: int) -> bytes:
    """Return a regular file's bytes.

    Raises:
        OSError: where it cannot be read, or is no regular file.
        ValueError: for more than `limit` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has more than {limit:,} bytes")
        return file.read(size)  # a bound on memory: a rank without memory reads run.json, too


def end_of(file: IO[bytes], most: int) -> str:
    """Return the last `most` bytes of an open file as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return file.read().decode(errors="replace")


def parse_json(data: bytes | str, *, finite: bool = True, **hooks: Any) -> Any:
    """Parse JSON; with `finite`, only numbers that 64 bits can hold, as this package writes them; `hooks` as in `json.loads`.

    Raises:
        ValueError: for other numbers, for what is no JSON, and for what is nested too deeply.
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    try:
        plain = finite and not hooks  # as the lines of events.jsonl, of which there are many
        value = (_FINITE if plain else json.JSONDecoder(**(_JSON_NUMBERS if finite else {}), **hooks)).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value, DEEPEST):
        raise ValueError("it is nested too deeply")
    return value


def _is_deep(value: Any, most: int) -> bool:
    """Return whether JSON has more than `most` levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, dict | list) and (most <= 1 or _is_deep(item, most - 1)) for item in inner)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as an `object_pairs_hook`; refuse duplicate names."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {shorten_value(twice)!r} stands twice in an object")
    return fields


def check_fields(record: Any, kinds: Mapping[str, Any]) -> None:
    """Refuse a value that is not a JSON object, or has a field of another type. Missing fields are allowed.

    Args:
        record: the parsed JSON.
        kinds: name → type, or union of types; a bool is not a number.

    Raises:
        ValueError: naming the field, its value, and what was expected.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {shorten_value(record)}")
    for name, kind in kinds.items():
        if name in record and (not isinstance(record[name], kind) or isinstance(record[name], bool) > (kind is bool)):
            expected = getattr(kind, "__name__", str(kind))
            raise ValueError(f"{name} is {shorten_value(record[name])}, expected {expected}")


def shorten_value(value: Any, limit: int = 40) -> str:
    """Return a value for a message: its first characters."""
    text = str(value) if isinstance(value, str | int | float | None) else type(value).__name__
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[:limit]}…"


def expand_user(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder; without such a user it is unchanged."""
    return Path(os.path.expanduser(path))


def _int(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"the number {digits[:20]}… has more than 64 bits")
    return int(digits)


def _float(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {digits[:20]} is not finite")
    return value


_JSON_NUMBERS: Mapping[str, Any] = {"parse_int": _int, "parse_float": _float, "parse_constant": _float}
_FINITE = json.JSONDecoder(**_JSON_NUMBERS)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all. Numbers that are not finite become null, secrets `[redacted]`.

    Raises:
        RunError: where the disk does not take it.
    """
    write_or_explain(path, (encode_json(value, indent=2) + "\n").encode())


def write_or_explain(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        RunError: where the disk does not take it.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise unwritable(path, len(data), error.strerror or str(error)) from error


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line of JSON in one write: whoever reads sees it whole, and a killed process leaves it.

    Raises:
        RunError: where the disk takes only a part of it, which is taken back, or nothing.
    """
    data = (encode_json(line) + "\n").encode()
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
    raise unwritable(path, len(data), why)


EVENT: Mapping[str, Any] = {
    "step": int, "steps": int | float, "attempt": int, "loss": float | int | None, "eval_loss": float | int | None,
    "grad_norm": float | int | None, "lr": float | int | None, "seconds": float | int, "tokens": float | int | None,
    "samples": str, "skipped": bool, "bytes": list,
    "stall_seconds": float | int, "write_seconds": float | int,
}  # fmt: skip
"""Fields of a line in `events.jsonl`, and in `checkpoints.jsonl`, where `bytes` are those of a checkpoint; `tk.log` adds others."""

LONGEST_LINE = 2**20
"""Bytes of the longest line in them."""


def parse_event(line: bytes) -> dict[str, Any]:
    """Parse a line of `events.jsonl` or `checkpoints.jsonl`.

    Raises:
        ValueError: for one that is too long, no JSON object, or has fields of other types.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it has {len(line):,} bytes, expected {LONGEST_LINE:,} at most")
    event: dict[str, Any] = parse_json(line)
    check_fields(event, {**EVENT, "bytes": int} if isinstance(event, dict) and "checkpoint" in event else EVENT)
    missing = [name for name in ("step", "seconds") if "loss" in event and name not in event]
    if missing or event.get("step", 0) < 0:
        raise ValueError(f"it has no {missing[0]}" if missing else f"step {event['step']} is below 0")
    ranks = event.get("bytes")
    for rank in ranks if isinstance(ranks, list) else ():
        check_fields(rank, dict.fromkeys(rank, int | None) if isinstance(rank, dict) else {})
    return event


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `events.jsonl`. An incomplete last line, as a killed process leaves it, does not count.

    Raises:
        RunError: for any other line that no run writes, with its number, and for a file that cannot be read.
    """
    events: list[dict[str, Any]] = []
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 2), b""), start=1):
                if not line.strip():
                    continue
                try:
                    events.append(parse_event(line))
                except ValueError as error:
                    if not line.endswith(b"\n") and len(line) <= LONGEST_LINE:
                        break
                    raise RunError(f"{path}, line {number}: {error}. Repair or remove the line.") from error
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    return events


def last_step(path: Path) -> int:
    """Return the last step in `events.jsonl`; 0 before the first."""
    return max((int(event.get("step", 0)) for event in read_events(path)), default=0)


def cut_events(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the lines up to `step`; drop later ones and an incomplete last one. Return the kept lines.

    Raises:
        RunError: as `read_events`, and where the disk does not take them.
    """
    if not path.exists():
        return []
    remaining = [event for event in read_events(path) if event.get("step", 0) <= step]
    write_or_explain(path, "".join(json.dumps(event) + "\n" for event in remaining).encode())
    return remaining


def encode_json(value: Any, indent: int | None = None) -> str:
    """Return JSON without secrets, and without NaN and infinity, which it does not have."""
    finite = map_leaves(
        redact_all(value), lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf
    )
    return json.dumps(finite, indent=indent, allow_nan=False)


def unwritable(path: Path, needed: int, why: str) -> RunError:
    """Return the error for a failed write, with the needed and the free bytes."""
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({needed:,} bytes are needed, {shutil.disk_usage(path.parent).free:,} are free)"
    return RunError(f"{path} cannot be written: {why}{free}. Free some space, then run `toolkit resume`.")
