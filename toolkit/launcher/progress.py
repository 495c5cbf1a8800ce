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
        sizes = [(f"memory of rank {rank}", size) for rank, size in enumerate(self.bytes_per_rank)]
        sizes += [("forecast peak of a rank", self.forecast_bytes or 0), ("limit of a rank", self.limit_bytes or 0)]
        rows = [*self._figures(), *((label, format_bytes(size)) for label, size in sizes if size)]
        return Table(title=title, columns=("figure", "value"), rows=rows, notes=(note,) if note else ())


class Tail:
    """The steps of an `events.jsonl` that grows: each look reads only new lines. The file of a resumed run is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[dict[str, Any]] = []
        self._read, self._file = 0, 0
        self._one = threading.Lock()

    def look(self) -> list[dict[str, Any]]:
        """Return all lines with a step so far. Several views of a run may read at once."""
        with self._one, contextlib.suppress(OSError), open_regular(self.path) as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._file or stat.st_size < self._read:
                self._file, self._read, self.steps = stat.st_ino, 0, []
            file.seek(self._read)
            # The last line may be incomplete, or longer than any that a run writes.
            while (line := file.readline(LINE + 2)).endswith(b"\n"):
                self._read += len(line)
                with contextlib.suppress(ValueError):
                    event = parse_event(line)
                    if "loss" in event:
                        self.steps.append(event)
        return self.steps


@lru_cache(maxsize=256)
def tail_of(path: Path) -> Tail:
    """Return the run's only reader."""
    return Tail(path)


def rank_bytes(event: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the kind of memory in a step's line, allocated on CUDA and resident on a CPU, and the bytes of each rank."""
    ranks = event.get("bytes") or ()
    kind = "allocated" if any(rank.get("allocated") for rank in ranks) else "resident"
    return kind, tuple(int(rank.get("allocated") or rank.get("rss") or 0) for rank in ranks)


def read_progress(folder: Path) -> Progress:
    """Read the progress from `run.json` and `events.jsonl`, as far as they exist."""
    record: dict[str, Any] = {}
    with contextlib.suppress(RunError):
        record = read_run_json(folder)
    device = (record.get("forecast") or {}).get("device")
    steps = tail_of(folder / "events.jsonl").look()
    last: dict[str, Any] = steps[-1] if steps else {"step": 0, "loss": None}
    total = _count(record.get("train_config"), "steps") or int(
        last.get("steps", 0)
    )  # a loop of the user's logs its own
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
        bytes_per_rank=bytes_per_rank,
        bytes_are=bytes_are,
        forecast_bytes=_count(device, "peak_bytes"),
        limit_bytes=_count(device, "limit_bytes"),
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
