"""`Run`: the handle of a run in other processes, which reads the run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from toolkit.config.fields import from_dict
from toolkit.config.strategy import Strategy
from toolkit.core.atomic_io import end_of, open_regular, read_events
from toolkit.core.display import Result, Table
from toolkit.core.errors import RunError, value_or
from toolkit.core.redaction import redact, shorten
from toolkit.launcher.processes import supervises
from toolkit.reports import Report, report
from toolkit.run_folder.folder import run_paths
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import held_by_others, supervisor_of
from toolkit.run_folder.status import (
    Progress,
    page,
    rank_bytes,
    read_memory,
    read_outcome,
    read_progress,
    shown_sharding,
    tail_of,
)

STATUSES = ("starting", "running", "finished", "not audited", "stopped", "failed")

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""Exit statuses of a stopped supervisor; the last two before it handled signals."""

_LOG = 16 * 2**20
"""Bytes of a log that are read: its last."""

LINE_SECONDS = 10.0
"""Seconds between two lines without a terminal."""

_REFRESH_SECONDS = 0.25
"""Seconds: a bar moves four times a second at most."""

views: list[Callable[[Run], Callable[[float], object] | None]] = []
"""Functions that show a run during `wait`: a notebook's kernel adds its live view. Each returns a function that waits, so many
seconds at most, until the run's end is shown; None where nothing follows."""

LAST_VIEW = 5.0
"""Seconds that `wait` gives a view to show the end: a notebook that is executed in one go drops what comes after the cell."""


class Run(Result):
    """A run in other processes, read from its folder: by the process that launched it, or any other (`attach`)."""

    changes = True

    def __init__(
        self, folder: Path, strategy: Strategy | None = None, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Open a run. The process that launched it passes `strategy` and `process`; the rest is in the folder."""
        self.folder = folder.absolute()  # this process may change its working directory
        self._files = run_paths(self.folder)
        self._requested, self._process = strategy, process
        self._reading = threading.Lock()
        self._supervisor_output: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            # Opened now: a run that does not begin is removed with its folder, and this log with it.
            self._supervisor_output = open_regular(self._files.supervisor_log)
            weakref.finalize(self, self._supervisor_output.close)

    @property
    def name(self) -> str:
        """Its folder, relative to the working directory if it lies below that."""
        here = Path.cwd()
        return str(self.folder.relative_to(here) if here in self.folder.parents else self.folder)

    @property
    def alive(self) -> bool:
        """Whether its supervisor runs."""
        if self._process is not None and self._process.poll() is None:
            return True
        return held_by_others(self.folder)

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        return self._look()[0]

    def _look(self) -> tuple[str, Progress, str]:
        """Read status, figures and message at one moment. The check for a living supervisor takes the lock, so it runs once.

        The end comes from the supervisor that this `Run` started, or else from the folder.
        """
        progress = read_progress(self.folder)
        if self.alive:
            status = "running" if progress.step and not self._is_new else "starting"
            return status, progress, self._last_message()
        code = self._process.poll() if self._process is not None and self._is_last else None
        about = self._run_record()
        if code in (None, 0) and about:
            status, message = read_outcome(self._files, about)
        else:
            status = "stopped" if code in STOPPED else "failed"
            message = self._last_message() or (f"{status} before it had begun" if code is not None else "")
        message = "" if status == "finished" else shorten(message)
        return status, dataclasses.replace(progress, left_seconds=None), message

    @property
    def _is_new(self) -> bool:
        """Whether its steps so far are those of an earlier attempt."""
        changed = (self._files.events, self.folder / "lock")
        return value_or(False, lambda: changed[0].stat().st_mtime < changed[1].stat().st_mtime)

    @property
    def message(self) -> str:
        """The supervisor's last message: how the run was stopped, or why it failed. Empty while it runs, or if it finished."""
        return self._look()[2]

    @property
    def _is_last(self) -> bool:
        """Whether the folder has had no later supervisor, from this process or from a shell."""
        last = supervisor_of(self.folder)  # a new run that never began was removed with its folder
        return self._process is not None and (last is None or bool(last["pid"] == self._process.pid))

    def _last_message(self) -> str:
        if self._supervisor_output is None:
            return ""
        with self._reading:
            text = end_of(self._supervisor_output, _LOG)
        _, separator, last = ("\n" + text).rpartition("\ntoolkit: ")
        return shorten(last.strip() if separator else text.strip()[-2000:])

    @property
    def strategy(self) -> Strategy:
        """The resolved strategy, without `auto`; at first, and for code of your own, the requested one."""
        about = self._run_record()
        if about:
            return from_dict(Strategy, about["strategy"])
        return self._requested or Strategy()

    @property
    def progress(self) -> Progress:
        """The current step, loss, speed and memory, next to the forecast."""
        return self._look()[1]

    @property
    def metrics(self) -> Any:
        """The steps so far, with loss, norm, tokens and seconds: a pandas DataFrame, or a list where pandas is not installed.

        `bytes` are those of the rank with the most memory at the start of the step. `eval_loss` is in the rows of steps after
        which the run evaluated.
        """
        rows: list[dict[str, Any]] = []
        for event in read_events(self._files.events):
            if "loss" in event:
                largest = {"bytes": max(rank_bytes(event)[1], default=0)} if "bytes" in event else {}
                rows.append({**event, **largest})
            elif "eval_loss" in event and rows and rows[-1]["step"] == event["step"]:
                rows[-1]["eval_loss"] = event["eval_loss"]
            elif "eval_loss" in event:  # before the first step, or from a loop that logs no losses
                rows.append(event)
        with contextlib.suppress(ImportError):
            import pandas

            return pandas.DataFrame(rows)
        return rows

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps' events so far."""
        return list(tail_of(self._files.events).look())

    @property
    def memory(self) -> dict[str, Any] | None:
        """`memory.json`: measured peaks by rank and phase, with the forecast. None before the end.

        Raises:
            RunError: for an unreadable file.
        """
        return read_memory(self._files, self._run_record())

    def logs(self, rank: int = 0) -> str:
        """Return what a rank printed: the last 16 MiB.

        Raises:
            RunError: for a rank without a log.
        """
        log = self._files.log(rank)
        try:
            with open_regular(log) as file:
                return end_of(file, _LOG)
        except OSError as error:
            names = sorted(path.stem for path in log.parent.glob("rank-*.log"))
            raise RunError(
                f"rank {rank} has no log in {log.parent} ({error.strerror}). There is: {', '.join(names) or 'none yet'}."
            ) from error

    def wait(self, timeout: float | None = None, *, progress: bool = True) -> Run:
        """Wait until the run ends; an interrupt ends the waiting only.

        Args:
            timeout: seconds to wait at most; None: no limit.
            progress: show the run meanwhile, live in a notebook, as a bar in a terminal.

        Raises:
            RunError: if the run failed, with the error of the rank that failed first; after `timeout` seconds.
        """
        shown = [view(self) for view in views] if progress else []
        try:
            with _progress_bar(self.folder, shown=progress and not views) as update:
                if not self._ends_within(timeout, update):
                    raise RunError(f"{self.name} still runs after {timeout:g} s. Wait again, or stop() it.")
        except KeyboardInterrupt:
            raise _Interrupted(
                f"waiting has ended; the run in {self.name} continues. `toolkit stop {self.name}` or run.stop() stops it."
            ) from None
        for until_shown in filter(None, shown):
            until_shown(LAST_VIEW)
        status, _, message = self._look()
        if status == "failed":
            raise RunError(message or f"the run in {self.name} ended without a message: its supervisor was killed.")
        return self

    def _ends_within(self, timeout: float | None, update: Callable[[], None]) -> bool:
        """Wait for the end, at most `timeout` seconds, and show the run meanwhile. Return whether it has ended."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (alive := self.alive) and time.monotonic() <= deadline:
            update()
            time.sleep(_REFRESH_SECONDS)
        update()
        return not alive

    def stop(self, timeout: float | None = None) -> Run:
        """Finish the step, publish a checkpoint, end all processes; then return.

        Args:
            timeout: seconds to wait at most; None: no limit. The request stays in force.

        Raises:
            RunError: if the run has not ended by then, and for a run on another machine.
        """
        if not self.alive:
            return self
        pid = self._supervisor()
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has just ended
        except PermissionError:
            raise RunError(
                f"{self.name} is another user's run: process {pid} may not be signalled from here."
            ) from None
        if not self._ends_within(timeout, lambda: None):
            raise RunError(f"{self.name} has not stopped after {timeout:g} s: {self.progress.line}.")
        return self

    def report(self) -> Report:
        """Return the report: request, audit, forecast and measurement so far."""
        return report(self.folder)

    def tables(self) -> list[Table]:
        """Return status and figures."""
        status, progress, message = self._look()
        return [progress.table(f"{self.name}: {status}", message)]

    def _repr_html_(self) -> str:
        return self.view()

    def view(self, *, log: bool = False) -> str:
        """Return the run as HTML; `log` makes the axes of loss and gradient norm logarithmic."""
        # Twice a second while it runs: run.json is read once for it.
        (status, progress, message), steps = self._look(), tail_of(self._files.events).steps
        return redact(page(self.name, status, progress, steps, message, log=log))

    def to_dict(self) -> dict[str, Any]:
        """Return folder, status, strategy and progress."""
        status, progress, message = self._look()
        about = {"folder": str(self.folder), "status": status, "message": message}
        strategy = dataclasses.asdict(self.strategy)
        if about_run := self._run_record():
            strategy["sharding"] = shown_sharding(self._files, about_run)
        return {**about, "strategy": strategy, **dataclasses.asdict(progress)}

    def _run_record(self) -> dict[str, Any]:
        return value_or({}, read_run_json, self.folder)

    def _supervisor(self) -> int:
        """Return the supervisor's process id while it lives."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        supervisor = supervisor_of(self.folder)
        if supervisor is None or not supervises(supervisor, self.folder):
            where = f"process {supervisor['pid']} on {supervisor['host']}" if supervisor else "no supervisor of ours"
            raise RunError(f"{self.name} is held by {where}. Stop it on that machine.")
        return int(supervisor["pid"])

    def __repr__(self) -> str:
        """Return one line for a terminal."""
        status, progress, _ = self._look()
        return f"<Run {self.name}: {status}, {progress.line}>"


class _Interrupted(KeyboardInterrupt):
    """An interrupt that ended the waiting; the run continues."""

    def _render_traceback_(self) -> list[str]:
        """Return a plain message for IPython, without frames."""
        return [f"KeyboardInterrupt: {self}"]


@contextlib.contextmanager
def _progress_bar(folder: Path, *, shown: bool) -> Iterator[Callable[[], None]]:
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
