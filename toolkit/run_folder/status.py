"""Progress, outcome and page of a run, read from its folder, also during the run or after a failure."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.config.strategy import SHARDINGS
from toolkit.core.atomic_io import LONGEST_LINE, check_fields, open_regular, parse_event, read_json
from toolkit.core.charts import Bar, bars
from toolkit.core.display import Table, markup, render
from toolkit.core.errors import RunError, value_or
from toolkit.core.pictures import LEGIBLE, figures_side_by_side
from toolkit.core.redaction import redact_all
from toolkit.core.units import format_bytes, format_seconds
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import Heartbeat, read_beats
from toolkit.run_folder.run_charts import experts_table, run_pictures
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import held_by_others

SHOWN_RANKS = 32
"""Ranks that a view shows at most: those with the most memory."""

RECENT = 20
"""Steps of which the median is the current speed."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run's figures at one moment."""

    step: int = 0
    steps: int = 0
    """In all; 0 where that is not known."""
    loss: float | None = None
    tokens_per_second: float | None = None
    """Global, of the median of the last steps."""
    left_seconds: float | None = None
    """Until the last step, at that pace."""
    bytes_per_rank: tuple[int, ...] = ()
    """Current memory of each rank: allocated on CUDA, resident on a CPU."""
    bytes_are: str = "resident"
    """`allocated` or `resident`."""
    forecast_bytes: int | None = None
    """The forecast's peak of a rank."""
    limit_bytes: int | None = None
    """The memory of a rank."""
    stall_seconds: float | None = None
    """Total time that steps waited for checkpoints; None before the first."""

    @property
    def memory_kind(self) -> str:
        """`bytes_are` for a reader who compares it with the forecast, which is of the allocator."""
        return "resident, Python included" if self.bytes_are == "resident" else self.bytes_are

    @property
    def fullest(self) -> list[tuple[int, int]]:
        """Rank and bytes of the ranks that are shown."""
        return sorted(sorted(enumerate(self.bytes_per_rank), key=lambda rank: -rank[1])[:SHOWN_RANKS])

    def _figures(self) -> list[tuple[str, str]]:
        """Return the known figures, each with its label."""
        figures = [
            ("step", f"{self.step} of {self.steps}" if self.steps else f"{self.step}"),
            ("loss", "" if self.loss is None else f"{self.loss:.4f}"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else ""),
            ("left", format_seconds(self.left_seconds) if self.left_seconds else ""),
        ]
        return [(label, value) for label, value in figures if value]

    @property
    def line(self) -> str:
        """All figures in a line, for a bar: memory of the rank that holds most."""
        limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        memory = [("memory", f"{format_bytes(max(self.bytes_per_rank))}{limit}")] if self.bytes_per_rank else []
        return ", ".join(f"{label} {value}" for label, value in [*self._figures(), *memory])

    def table(self, title: str, note: str = "") -> Table:
        """Return all figures, one a row."""
        sizes = [(f"rank {rank}, {self.memory_kind}", size) for rank, size in self.fullest]
        sizes += [("forecast peak of a rank", self.forecast_bytes or 0), ("limit of a rank", self.limit_bytes or 0)]
        rows = [*self._figures(), *((label, format_bytes(size)) for label, size in sizes if size)]
        if self.stall_seconds is not None:
            rows.append(("waited for checkpoints", format_seconds(self.stall_seconds)))
        hidden = len(self.bytes_per_rank) - SHOWN_RANKS
        more = f"{hidden:,} more ranks have less memory." if hidden > 0 else ""
        return Table(title=title, columns=("figure", "value"), rows=rows, notes=[*filter(None, (more, note))])


class Tail:
    """The events of a file that grows: each look reads only new lines. The file of a resumed run is read again."""

    def __init__(self, path: Path, key: str) -> None:
        """Take the file, and the field that an event has to have."""
        self.path, self.key = path, key
        self.steps: list[dict[str, Any]] = []
        self._read, self._file = 0, 0
        self._one = threading.Lock()

    def look(self) -> list[dict[str, Any]]:
        """Return all events so far. Several views of a run may read at once."""
        with self._one, contextlib.suppress(OSError), open_regular(self.path) as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._file or stat.st_size < self._read:
                self._file, self._read, self.steps = stat.st_ino, 0, []
            file.seek(self._read)
            # The last line may be incomplete, or longer than any that a run writes.
            while (line := file.readline(LONGEST_LINE + 2)).endswith(b"\n"):
                self._read += len(line)
                with contextlib.suppress(ValueError):
                    event = parse_event(line)
                    if self.key in event:
                        self.steps.append(event)
        return self.steps


@lru_cache(maxsize=256)
def tail_of(path: Path, key: str = "loss") -> Tail:
    """Return the only reader of a run's `events.jsonl`, or with the key `checkpoint` of its `checkpoints.jsonl`."""
    return Tail(path, key)


def rank_bytes(event: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the kind of memory in a step's line, allocated on CUDA and resident on a CPU, and the bytes of each rank."""
    ranks = event.get("bytes") or ()
    kind = "allocated" if any(rank.get("allocated") for rank in ranks) else "resident"
    return kind, tuple(int(rank.get("allocated") or rank.get("rss") or 0) for rank in ranks)


def read_progress(folder: Path) -> Progress:
    """Read the progress from `run.json`, `events.jsonl` and `checkpoints.jsonl`, as far as they exist."""
    record = value_or(dict[str, Any](), read_run_json, folder)
    device = (record.get("forecast") or {}).get("device")
    steps = tail_of(folder / "events.jsonl").look()
    stalls = [event.get("stall_seconds", 0.0) for event in tail_of(folder / "checkpoints.jsonl", "checkpoint").look()]
    last: dict[str, Any] = steps[-1] if steps else {"step": 0, "loss": None}
    # A loop of the user's logs its own.
    total = _count(record.get("train_config"), "steps") or int(last.get("steps", 0))
    recent = [event for event in steps[-RECENT:] if event.get("seconds")]
    pace = median(event["seconds"] for event in recent) if recent else None
    speeds = [event["tokens"] / event["seconds"] for event in recent if event.get("tokens")]
    bytes_are, bytes_per_rank = rank_bytes(last)
    return Progress(
        step=int(last["step"]),
        steps=total,
        loss=last["loss"],
        tokens_per_second=median(speeds) if speeds else None,
        left_seconds=pace * max(0, total - int(last["step"])) if pace and total else None,
        bytes_per_rank=bytes_per_rank[: record.get("ranks")],
        bytes_are=bytes_are,
        forecast_bytes=_count(device, "peak_bytes"),
        limit_bytes=_count(device, "limit_bytes"),
        stall_seconds=sum(stalls) if stalls else None,
    )


def _count(number: Any, name: str) -> int | None:
    """Return a whole number; the file may be crafted."""
    value = number.get(name) if isinstance(number, dict) else None
    return value if type(value) is int else None


def read_memory(folder: Folder, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return this attempt's `memory.json`; until a resumed run finishes again, the file is an older attempt's.

    Raises:
        RunError: where it cannot be read.
    """
    try:
        if folder.memory.stat().st_mtime < _started(about):
            return None
        record: dict[str, Any] = redact_all(read_json(folder.memory))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{folder.memory} cannot be read: {error}. Repair or remove it.") from error
    return record


def read_outcome(folder: Folder, about: Mapping[str, Any]) -> tuple[str, str]:
    """Return the status and the message of a run that has begun."""
    beats = list(read_beats(folder.logs).values())
    if about.get("finished"):
        if shown_sharding(folder, about) == NOT_AUDITED:
            return NOT_AUDITED, "It finished, and no Accelerator was prepared in it: nothing shows how it was sharded."
        return "finished", f"It finished at {about['finished']}."
    if held_by_others(folder.path):
        shown = sorted(beats, key=lambda beat: beat.rank)[:SHOWN_RANKS]
        return "running", " ".join(["It is running.", *map(_rank_location, shown)])
    if (message := _supervisor_message(folder, about)) is not None:
        return message
    if raised := folder.errors():
        rank, error = next(iter(raised.items()))
        return "failed", f"Rank {rank} ended with {error['type']}: {error['message']}"
    if beats and all(beat.phase == "ended" for beat in beats):
        return "stopped", "It was stopped by a user."
    killed = "Its processes are gone and left no word: they were killed, or the machine went down."
    return "failed", " ".join([killed, *map(_rank_location, beats[:1])])


NOT_AUDITED = "not audited"
"""The status of a script without an audit at its end, and its sharding."""


def shown_sharding(folder: Folder, about: Mapping[str, Any]) -> str:
    """Return a run's sharding: of a script, module or function as an audit found it, and not as it was requested."""
    if not about.get("target"):
        return str(about["strategy"].get("sharding", "?"))
    return value_or(NOT_AUDITED, lambda: SHARDINGS[read_json(folder.audit)["sharding"]].word)


def _supervisor_message(folder: Folder, about: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the supervisor's message of this attempt, not of an older one."""
    try:
        end = read_json(folder.end)
        check_fields(end, {"how": str, "message": str, "attempt": int})
        # Not by times: a clock may be set back.
        own = end["attempt"] == len(about.get("attempts", ())) and end["how"] in ("stopped", "failed")
        return (end["how"], end["message"]) if own else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _started(about: Mapping[str, Any]) -> float:
    """Return when the last attempt began, in seconds since 1970; 0 if unknown."""
    from datetime import datetime

    return value_or(0.0, lambda: datetime.fromisoformat(about["attempts"][-1]["started"]).timestamp())


def _rank_location(beat: Heartbeat) -> str:
    return f"{beat.name.capitalize()} was {beat.where}."


# The page of a run -----------------------------------------------------------------------------------------------------

_LOOKS = {
    "starting": ("#92400e", "#fef3c7"),
    "running": ("#1e40af", "#dbeafe"),
    "finished": ("#166534", "#dcfce7"),
    "stopped": ("#374151", "#e5e7eb"),
    NOT_AUDITED: ("#92400e", "#fef3c7"),
    "failed": ("#991b1b", "#fee2e2"),
}
"""Status → its ink and its ground."""


def page(
    name: str,
    status: str,
    progress: Progress,
    steps: Sequence[Mapping[str, Any]],
    message: str,
    *,
    log: bool = False,
) -> str:
    """Return HTML without scripts: headline, bar, curves over the steps, each rank's memory, and a table of the figures.

    `log` makes the axes of loss and gradient norm logarithmic.
    """
    ink, ground = _LOOKS[status]
    experts = experts_table(steps[-RECENT:])
    return render(
        "run",
        name=name,
        status=status,
        ink=ink,
        ground=ground,
        progress=progress,
        begun=progress.steps or status not in ("starting", "running"),
        message=message,
        curves=markup(figures_side_by_side(run_pictures({name: steps}, log=log) if len(steps) > 1 else ())),
        memory=markup(_memory(progress)),
        legible=LEGIBLE,
        table=markup("".join(table.html() for table in (progress.table(name), experts) if table)),
    )


def _memory(progress: Progress) -> str:
    """Draw each rank's memory with the limit; allocated memory also next to the forecast's peak.

    The resident memory of a CPU rank includes Python and its libraries, and a forecast does not: it stands in the table.
    """
    if not progress.bytes_per_rank:
        return ""
    rows = [Bar(label=f"rank {rank}", parts={progress.memory_kind: size}) for rank, size in progress.fullest]
    if progress.forecast_bytes and progress.bytes_are == "allocated":
        rows.append(Bar(label="forecast peak", parts={"forecast": progress.forecast_bytes}))
    title = f"Memory of each rank: {progress.memory_kind}"
    return bars(rows, title=title, limit=progress.limit_bytes, limit_label="limit of a rank", spell=format_bytes)
