"""`Run`: a run seen through its folder, from whatever process; `attach()` and `runs()` find them again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from toolkit.errors import RunError
from toolkit.flags import from_dict
from toolkit.folder import read_events, read_run_json, unheld
from toolkit.launching.progress import Progress, bar, read_progress, tail_of
from toolkit.launching.starting import supervisor_log, supervisor_pid
from toolkit.launching.viewing import page
from toolkit.locking import held_by_others, process_lives, supervisor_of
from toolkit.redacting import redact
from toolkit.reporting import Report, report
from toolkit.show import Shown, Table
from toolkit.strategy import Strategy

STATUSES = ("starting", "running", "finished", "stopped", "failed")

_POLL = 0.2

views: list[Callable[[Run], None]] = []
"""What shows a run that is waited for: a notebook's kernel adds its live view."""


class Run(Shown):
    """A run in processes of its own, seen through its folder: from this process, or from any other (`attach`)."""

    def __init__(
        self, folder: Path, asked: Strategy | None = None, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """`asked` and `process` are known to who launched it; all else is in the folder."""
        self.folder = folder
        self._files = unheld(folder)
        self._asked, self._process = asked, process
        self._said: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            # Open from now on: a new run that never began is removed with its folder, and its last words with it.
            self._said = open(supervisor_log(self._files), "rb")  # noqa: SIM115
            weakref.finalize(self, self._said.close)

    @property
    def alive(self) -> bool:
        """Whether its supervisor runs."""
        if self._process is not None and self._process.poll() is None:
            return True
        return held_by_others(self.folder) or _begins(self.folder)

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        return self._status(self.progress)

    def _status(self, progress: Progress) -> str:
        if self.alive:
            return "running" if progress.step else "starting"
        if self._about().get("finished"):
            return "finished"
        return str(self._end().get("how") or ("stopped" if self.said.startswith("stopped by") else "failed"))

    @property
    def said(self) -> str:
        """What the supervisor said last: how the run was stopped, or why it failed. Empty where it finished."""
        if self._about().get("finished") and not self.alive:
            return ""
        if message := self._end().get("message"):
            return redact(str(message))
        if self._said is None:
            return ""
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        _, found, last = ("\n" + text).rpartition("\ntoolkit: ")
        return redact(last.strip() if found else text.strip()[-2000:])

    @property
    def strategy(self) -> Strategy:
        """As it was resolved, without `auto`; before that, as it was asked for."""
        about = self._about()
        if about:
            return from_dict(Strategy, about["strategy"])
        return self._asked or Strategy()

    @property
    def progress(self) -> Progress:
        """How far it is, against what was forecast."""
        return read_progress(self.folder)

    @property
    def metrics(self) -> Any:
        """The steps so far, with loss, norm, tokens and seconds: a pandas DataFrame, or a list where pandas is not installed."""
        steps = [event for event in read_events(self._files.events) if "loss" in event]
        with contextlib.suppress(ImportError):
            import pandas

            return pandas.DataFrame(steps)
        return steps

    @property
    def memory(self) -> dict[str, Any] | None:
        """`memory.json`: measured peaks, rank by phase, beside the forecast. None before the end."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self._files.memory.read_bytes())
            return found
        return None

    def logs(self, rank: int = 0) -> str:
        """What a rank printed.

        Raises:
            RunError: for a rank that has printed nothing, or that there is not.
        """
        log = self._files.log(rank)
        try:
            return log.read_text(errors="replace")
        except OSError as error:
            there = sorted(path.stem for path in log.parent.glob("rank-*.log"))
            raise RunError(
                f"rank {rank} has no log in {log.parent} ({error.strerror}). There is: {', '.join(there) or 'none yet'}."
            ) from error

    def wait(self, timeout: float | None = None, *, progress: bool = True) -> Run:
        """Until it ends; an interrupt ends the waiting, not the run.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.
            progress: show the run meanwhile, in a notebook live, in a terminal as a bar.

        Raises:
            RunError: where the run failed, with what the rank said that failed first; where `timeout` has passed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for view in views if progress else ():
            view(self)
        try:
            with bar(self.folder, shown=progress and not views and sys.stderr.isatty()) as update:
                while self.alive:
                    update()
                    if deadline is not None and time.monotonic() > deadline:
                        raise RunError(f"{self.folder} still runs after {timeout:g} s. Wait again, or stop() it.")
                    time.sleep(_POLL)
                update()
        except KeyboardInterrupt:
            raise _Interrupted(f"waiting has ended; the run in {self.folder} goes on. run.stop() stops it.") from None
        if self.status == "failed":
            raise RunError(self.said or f"the run in {self.folder} ended without a word: its supervisor was killed.")
        return self

    def stop(self, timeout: float | None = None) -> Run:
        """End the step, publish a checkpoint, leave no process; returns when that is done.

        Args:
            timeout: seconds to wait at most; None: as long as it takes. What is asked stays asked.

        Raises:
            RunError: where it has not ended by then, and for a run on another machine.
        """
        if not self.alive:
            return self
        pid = self._supervisor()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.alive:
            if deadline is not None and time.monotonic() > deadline:
                raise RunError(
                    f"{self.folder} was asked to stop and has not ended after {timeout:g} s: {self.progress.line}."
                )
            time.sleep(_POLL)
        return self

    def report(self) -> Report:
        """What was asked, what was got, forecast beside measured: as it stands."""
        return report(self.folder)

    def tables(self) -> list[Table]:
        """Its status and figures."""
        progress = self.progress
        title = f"{self.folder}: {self._status(progress)}"
        return [progress.table(title, self.said if not self.alive else "")]

    def _repr_html_(self) -> str:
        # Twice a second while it goes: run.json is read once for it.
        progress = self.progress
        status, steps = self._status(progress), tail_of(self._files.events).steps
        return redact(page(str(self.folder), status, progress, steps, "" if status == "running" else self.said))

    def to_dict(self) -> dict[str, Any]:
        """Folder, status, strategy and progress."""
        progress = self.progress
        said = self.said if not self.alive else ""
        about = {"folder": str(self.folder), "status": self._status(progress), "said": said}
        return {**about, "strategy": dataclasses.asdict(self.strategy), **dataclasses.asdict(progress)}

    def _about(self) -> dict[str, Any]:
        try:
            return read_run_json(self.folder)
        except RunError:
            return {}

    def _end(self) -> dict[str, Any]:
        """As the supervisor left it of a run that had begun."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self._files.end.read_bytes())
            return found
        return {}

    def _supervisor(self) -> int:
        """Its process id, as soon as it can be told to stop."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        found = supervisor_of(self.folder)
        if found is None or found[0] != socket.gethostname() or not process_lives(found[1]):
            where = f"process {found[1]} on {found[0]}" if found else "no supervisor of ours"
            raise RunError(
                f"{self.folder} is held by {where}, which cannot be told to stop from here. Stop it where it runs."
            )
        return found[1]


class _Interrupted(KeyboardInterrupt):
    """The waiting ended, and nothing else."""

    def _render_traceback_(self) -> list[str]:
        """In IPython: what this means, and no frames."""
        return [f"KeyboardInterrupt: {self}"]


def _begins(folder: Path) -> bool:
    """Whether a supervisor was started for the folder that has not come to hold it yet."""
    import psutil

    try:
        pid = int(supervisor_pid(unheld(folder)).read_text())
        return str(folder) in psutil.Process(pid).cmdline() and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return False


@dataclass(frozen=True, kw_only=True)
class Runs(Shown):
    """The runs in a folder, the newest first."""

    root: str
    found: tuple[dict[str, Any], ...]
    """A row a run: `Run.to_dict()`."""

    def tables(self) -> list[Table]:
        """Name, status, strategy, how far it came."""
        rows = [
            (
                Path(one["folder"]).name,
                one["status"],
                one["strategy"]["sharding"],
                one["strategy"]["adapter"],
                f"{one['step']} of {one['steps'] or '?'}",
                "–" if one["loss"] is None else f"{one['loss']:.4f}",
            )
            for one in self.found
        ]
        columns = ("run", "status", "sharding", "adapter", "steps", "loss")
        notes = () if rows else (f"There is no run in {self.root}.",)
        return [Table(title=f"Runs in {self.root}", columns=columns, rows=rows, notes=notes)]


def attach(path: str | Path) -> Run:
    """A run that this process did not launch, or no longer knows: it may go on or have ended.

    Raises:
        RunError: for a folder without a run.
    """
    folder = Path(path)
    if not held_by_others(folder) and not _begins(folder):
        read_run_json(folder)
    return Run(folder)


def runs(root: str | Path = "runs") -> Runs:
    """The runs under `root`, the newest first."""
    folders = [path.parent for path in Path(root).glob("*/run.json")]
    found = sorted(folders, key=lambda path: (path / "run.json").stat().st_mtime, reverse=True)
    return Runs(root=str(root), found=tuple(Run(path).to_dict() for path in found))
