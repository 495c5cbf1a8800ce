"""A rank's sign of life: a small file that a thread rewrites about once a second."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import check_fields, read_json
from toolkit.core.phases import observe

BEAT_SECONDS = 1.0
"""Seconds between two beats."""

_SIZE = 256  # a constant size: a full disk has room to overwrite it
IN_A_STEP = ("begin", "forward", "backward", "step")
"""Phases in which every rank waits for all others."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A rank's last sign of life."""

    rank: int
    pid: int
    step: int
    """The step that it was in, or had done last; 0 before the first."""
    phase: str
    """One of `phases.PHASES`, or outside of them: `start`, `begin` (in a step, waiting), `between` (a step is done),
    `evaluate`, `wait` (for rank 0, which works alone), `ended`."""
    marks: int
    """Number of changes of its place: among ranks of one stage, the one with the fewest is behind."""
    stage: int | None = None
    """Its first pipeline stage; None without one. Marks of different stages cannot be compared: their code differs."""
    listens: bool
    """Whether the rank handles a stop signal at the end of its step. Otherwise the signal ends it."""
    rss: int
    """Bytes of the process that were in memory."""
    cpu: float
    """Seconds of processor time that the process has used."""
    time: float
    """Seconds since 1970."""

    @property
    def name(self) -> str:
        """`rank 1`, in a pipeline with its stage."""
        return f"rank {self.rank}" + ("" if self.stage is None else f" (pipeline stage {self.stage})")

    @property
    def where(self) -> str:
        """`in the backward of step 3`, to follow «it was»."""
        if self.phase in IN_A_STEP[1:]:
            return f"in the {self.phase} of step {self.step}"
        places = {
            "start": "before its first step",
            "begin": f"in step {self.step}",
            "between": f"after step {self.step}" if self.step else "before its first step",
            "wait": "waiting for rank 0" + (f", after step {self.step}" if self.step else ""),
            "ended": f"at its end, after step {self.step}",
        }
        return places.get(self.phase, f"in phase {self.phase}" + (f", after step {self.step}" if self.step else ""))


JSON_TYPES: Mapping[str, Any] = {"int": int, "str": str, "bool": bool, "float": int | float, "int | None": int | None}
"""A field's type → the types of its values in JSON."""

_beating: list[Beat] = []
"""The heartbeat of this process: none or one."""


@contextlib.contextmanager
def show_waiting(*, main: bool) -> Iterator[None]:
    """Show in this process's heartbeat that it waits for rank 0. Rank 0, `main`, stays in its phase."""
    here = [(beat, beat.phase if main else "wait") for beat in _beating]
    for beat, name in here:
        beat._observe(name, True)  # on all ranks: their marks stay comparable
    try:
        yield
    finally:
        for beat, name in here:
            beat._observe(name, False)


class Beat:
    """Writes a rank's heartbeat from the process's beginning to its end.

    The main thread sets fields in memory, which costs nothing; a thread of its own writes them down once a second.
    """

    def __init__(self, path: Path, rank: int, *, every: float = BEAT_SECONDS) -> None:
        """Create the heartbeat. `path`: the file, in an existing folder; `every`: seconds."""
        self.path, self.rank, self.every = path, rank, every
        self.step, self.marks, self.listens = 0, 0, False
        self.stage: int | None = None
        self._place = "start"
        self._phases: list[str] = []
        self._stop = threading.Event()

    @property
    def phase(self) -> str:
        """The rank's place: see `Heartbeat.phase`."""
        return self._phases[-1] if self._phases else self._place

    def note(self, place: str, *, step: int | None = None) -> None:
        """Record the rank's place outside of phases, and its step."""
        self._place, self.marks = place, self.marks + 1
        self.step = self.step if step is None else step

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record at once that this rank handles stop signals."""
        self.listens = True
        self._write()
        try:
            yield
        finally:
            self.listens = False
            self._write()

    @property
    def last(self) -> Heartbeat:
        """The next heartbeat to write."""
        import psutil

        return Heartbeat(
            rank=self.rank,
            pid=os.getpid(),
            step=self.step,
            phase=self.phase,
            marks=self.marks,
            stage=self.stage,
            listens=self.listens,
            rss=psutil.Process().memory_info().rss,
            cpu=round(time.process_time(), 3),
            time=time.time(),
        )

    def _observe(self, name: str, begins: bool) -> None:
        self.marks += 1
        if begins:
            self._phases.append(name)
        elif self._phases and sys.exc_info()[1] is None:  # after an exception its phase stays the rank's last place
            self._phases.pop()

    def _write(self) -> None:
        text = json.dumps(vars(self.last)).ljust(_SIZE - 1) + "\n"
        with contextlib.suppress(OSError):  # a missing beat is the message
            os.pwrite(self._file, text.encode(), 0)

    def _go_on(self) -> None:
        while not self._stop.wait(self.every):
            self._write()

    def __enter__(self) -> Beat:
        """Begin to beat."""
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write()
        self._unobserve = observe(self._observe)
        _beating.append(self)
        self._thread = threading.Thread(target=self._go_on, name="toolkit-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Write the last beat, with the rank's last place or `ended`."""
        self._stop.set()
        self._thread.join()
        self._unobserve()
        _beating.remove(self)
        if kind is None:
            self._phases.clear()
            self.note("ended")
        self._write()
        os.close(self._file)


def read_beats(logs: Path) -> dict[int, Heartbeat]:
    """Rank → its last heartbeat, of those that have written one into `logs`. Files of another content are left out."""
    beats = {}
    for path in logs.glob("rank-*.beat"):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # just being written
            record = read_json(path)
            check_fields(record, {f.name: JSON_TYPES[str(f.type)] for f in fields(Heartbeat)})
            if 0 < record["pid"] < 2**31:
                beats[record["rank"]] = Heartbeat(**record)
    return beats
