"""How far a run is, read from its folder: the step, the loss, tokens a second, when it ends, memory against forecast and limit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.core.atomic_io import LINE, open_regular, parse_event
from toolkit.core.display import Table
from toolkit.core.errors import RunError
from toolkit.core.units import format_bytes, format_seconds
from toolkit.run_folder.run_json import read_run_json

LINE_SECONDS = 10.0
"""Seconds between two lines without a terminal."""

RECENT = 20
"""Steps whose median is the current speed."""


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
    """Which of the two."""
    forecast_bytes: int | None = None
    """The forecast's peak of a rank."""
    limit_bytes: int | None = None
    """The memory of a rank."""
    stall_seconds: float | None = None
    """How long the steps have waited for checkpoints, in all; None before the first."""

    @property
    def line(self) -> str:
        """In a line, for a bar."""
        parts = [f"step {self.step}" + (f" of {self.steps}" if self.steps else "")]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.bytes_per_rank:
            limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
            parts.append(f"{format_bytes(max(self.bytes_per_rank))}{limit} a rank")
            if self.forecast_bytes and self.bytes_are == "allocated":  # a forecast counts no Python
                parts.append(f"{format_bytes(self.forecast_bytes)} forecast")
        if self.left_seconds:
            parts.append(f"{format_seconds(self.left_seconds)} left")
        return ", ".join(parts)

    def table(self, title: str, note: str = "") -> Table:
        """Return all figures, one a row."""
        rows = [("step", f"{self.step}" + (f" of {self.steps}" if self.steps else ""))]
        if self.loss is not None:
            rows.append(("loss", f"{self.loss:.4f}"))
        if self.tokens_per_second:
            rows.append(("tokens/s", f"{self.tokens_per_second:,.0f}"))
        if self.left_seconds:
            rows.append(("left", format_seconds(self.left_seconds)))
        for rank, size in enumerate(self.bytes_per_rank):
            rows.append((f"memory of rank {rank}", format_bytes(size)))
        if self.forecast_bytes:
            rows.append(("forecast peak of a rank", format_bytes(self.forecast_bytes)))
        if self.limit_bytes:
            rows.append(("limit of a rank", format_bytes(self.limit_bytes)))
        if self.stall_seconds is not None:
            rows.append(("waited for checkpoints", format_seconds(self.stall_seconds)))
        return Table(title=title, columns=("figure", "value"), rows=rows, notes=(note,) if note else ())


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
        with self._one:
            return self._look()

    def _look(self) -> list[dict[str, Any]]:
        try:
            with open_regular(self.path) as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._file or stat.st_size < self._read:
                    self._file, self._read, self.steps = stat.st_ino, 0, []
                file.seek(self._read)
                while line := file.readline(LINE + 2):
                    if not line.endswith(b"\n"):
                        break  # it is being written, or longer than any that a run writes
                    self._read += len(line)
                    with contextlib.suppress(ValueError):
                        event = parse_event(line)
                        if self.key in event:
                            self.steps.append(event)
        except OSError:
            pass
        return self.steps


@lru_cache(maxsize=256)
def tail_of(path: Path, key: str = "loss") -> Tail:
    """Return the only reader of a run's `events.jsonl`, or with the key `checkpoint` of its `checkpoints.jsonl`."""
    return Tail(path, key)


def held_bytes(event: Mapping[str, Any]) -> tuple[int, str]:
    """Return the bytes of the rank that holds most, and their kind: allocated on CUDA, resident on a CPU."""
    ranks = event.get("bytes") or ()
    allocated = max((int(rank.get("allocated") or 0) for rank in ranks), default=0)
    return (
        (allocated, "allocated")
        if allocated
        else (max((int(rank.get("rss") or 0) for rank in ranks), default=0), "resident")
    )


def read_progress(folder: Path) -> Progress:
    """Read the progress from `run.json`, `events.jsonl` and `checkpoints.jsonl`, as far as they exist."""
    about: dict[str, Any] = {}
    with contextlib.suppress(RunError):
        about = read_run_json(folder)
    steps = tail_of(folder / "events.jsonl").look()
    device = (about.get("forecast") or {}).get("device")
    stalls = [event.get("stall_seconds", 0.0) for event in tail_of(folder / "checkpoints.jsonl", "checkpoint").look()]
    total = _count(about.get("train_config"), "steps") or 0
    values: dict[str, Any] = {
        "steps": total,
        "forecast_bytes": _count(device, "peak_bytes"),
        "limit_bytes": _count(device, "limit_bytes"),
        "stall_seconds": sum(stalls) if stalls else None,
    }
    if not steps:
        return Progress(**values)
    last, recent = steps[-1], [event for event in steps[-RECENT:] if event.get("seconds")]
    total = total or int(last.get("steps", 0))  # of a loop that is not the recipe's: as it says itself
    pace = median(event["seconds"] for event in recent) if recent else None
    speeds = [event["tokens"] / event["seconds"] for event in recent if event.get("tokens")]
    ranks = last.get("bytes") or ()
    return Progress(
        **{**values, "steps": total},
        bytes_are=held_bytes(last)[1],
        step=int(last["step"]),
        loss=last["loss"],
        tokens_per_second=median(speeds) if speeds else None,
        left_seconds=pace * max(0, total - int(last["step"])) if pace and total else None,
        bytes_per_rank=tuple(int(rank.get("allocated") or rank.get("rss") or 0) for rank in ranks),
    )


def _count(number: Any, name: str) -> int | None:
    """Return a whole number; the file may be crafted."""
    value = number.get(name) if isinstance(number, dict) else None
    return value if type(value) is int else None


@contextlib.contextmanager
def bar(folder: Path, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar in a terminal, and occasional lines elsewhere. Yields the function that updates it."""
    from tqdm import tqdm

    visible, last = shown and sys.stderr.isatty(), 0.0
    words = "{l_bar}{bar}| {n_fmt} of {total_fmt}{postfix}"
    with tqdm(total=None, unit="step", disable=not visible, bar_format=words) as progress_bar:

        def update() -> None:
            nonlocal last
            if visible:
                now = read_progress(folder)
                progress_bar.total, progress_bar.n = now.steps or None, now.step
                progress_bar.set_postfix_str(now.line.partition(", ")[2], refresh=True)
            elif shown and time.monotonic() >= last + LINE_SECONDS:
                last = time.monotonic()
                print(f"{folder.name}: {read_progress(folder).line}", file=sys.stderr)

        yield update
