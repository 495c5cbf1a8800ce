"""The first failure of a run as an exception: the rank, its place in the step, and the end of its log."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.core import errors
from toolkit.core.atomic_io import end_of, last_step, open_regular, read_json
from toolkit.core.errors import OutOfMemory, RunError, ToolkitError, value_or
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import Heartbeat, read_beats
from toolkit.training.oom import aborted_for_memory, killed_for_memory

_LAST_LINES = 20
_SAME_TIME = 5.0
_SILENT = 3.0

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_BROKEN = re.compile(r"timed? ?out|connection (was )?(closed|reset|refused)|broken pipe|socket", re.IGNORECASE)
_ABORTED = re.compile(
    r"memory allocation of (?P<bytes>\d+) bytes failed|std::bad_alloc"
)  # Rust's, and C++'s, last words
_ABORT_CHARACTERS = 20_000
_WORKER_KILLED = re.compile(r"killed by signal: Killed")  # torch's DataLoader


class RankDied(RunError):
    """A rank or the launcher ended unexpectedly. It is no user error."""

    exit_code = 1


class RankHung(RankDied):
    """A rank sent no heartbeat, or did not reach a point where the others waited for it."""


def failure(
    folder: Folder,
    code: int,
    *,
    beats: Mapping[int, Heartbeat] | None = None,
    behind: Heartbeat | None = None,
    timeout: float = float("inf"),
    cut_at: float = float("inf"),
    memory_kills: int = 0,
) -> ToolkitError:
    """Return what ended the run first, as an exception. After a user error, remove a new folder without steps.

    Args:
        folder: the run's.
        code: the launcher's exit status.
        beats: the last heartbeat of each rank before the first failure; None where nobody watched.
        behind: that of the rank which the others waited for, as far as they tell.
        timeout: seconds without a heartbeat after which a rank has hung.
        cut_at: when the supervisor itself killed the ranks that were left, in seconds since 1970.
        memory_kills: processes that the system ended meanwhile because memory had run out.
    """
    raised = folder.errors()
    failures = value_or(list[dict[str, Any]](), _read_exits, folder, cut_at)
    for report in raised.values():
        if report["type"] == OutOfMemory.__name__:  # whatever others raised meanwhile
            return OutOfMemory(report["message"])
    rank, exitcode = _first_failure(raised, failures)
    error = raised.get(rank) if rank is not None else None
    if error and (ours := as_raised(error)):
        folder.discard()
        return ours
    if short := _short_of_memory(folder, rank, exitcode, error, memory_kills):
        return short
    if beats is not None and _waited_for_another(folder, rank, error, raised):
        # Equally far, it is the one that does not complain.
        quiet = (beat for number, beat in sorted(beats.items()) if number not in raised and number != rank)
        if beat := behind or next(quiet, None):
            at = min((float(record["time"]) for record in raised.values()), default=0.0)
            return hung_error(folder, beat, timeout, at=at)
    if rank is None:
        lines = last_lines(folder.launcher_log)
        return RankDied(f"accelerate launch {_exit_text(code)}, and no rank had failed. {lines}")
    if exitcode in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return RankDied(f"rank {rank} was stopped by {signal.Signals(exitcode - 128).name}, and the others with it.")
    how = (
        _exit_text(exitcode or code)
        if error is None
        else f"ended with {error['type']}: {error['message']}".removesuffix(": ")
    )
    last = read_beats(folder.logs).get(rank)
    name = last.name if last else f"rank {rank}"
    return RankDied(f"{name} {how.removesuffix('.')}. {_where_was(folder, last)}{end_of_log(folder, rank)}")


def _read_exits(folder: Folder, cut_at: float) -> list[dict[str, Any]]:
    """Return how ranks ended by the launcher's record, before the supervisor killed the others."""
    kinds = {"rank": int, "exitcode": int, "time": float}
    ended = [{name: kind(entry[name]) for name, kind in kinds.items()} for entry in read_json(folder.exits)]
    return [entry for entry in ended if entry["time"] + 1 < cut_at]  # torch elastic notes whole seconds


def as_raised(error: Mapping[str, Any]) -> ToolkitError | None:
    """Return a rank's error if it was a ToolkitError."""
    kind = getattr(errors, error["type"], None)
    return kind(error["message"]) if isinstance(kind, type) and issubclass(kind, ToolkitError) else None


def hung_error(folder: Folder, beat: Heartbeat, timeout: float, *, at: float = 0.0) -> RankHung:
    """Return the error for a rank that others waited for; `at`: when they gave up, in seconds since 1970."""
    silent = f", without a heartbeat for {at - beat.time:.1f} s" if at - beat.time > _SILENT else ""
    return RankHung(
        f"{beat.name} hung: the others waited for it longer than {timeout:g} s (--timeout). It was {beat.where}{silent}. "
        f"{end_of_log(folder, beat.rank)}"
    )


def _where_was(folder: Folder, beat: Heartbeat | None) -> str:
    """Return where a rank was. Its last heartbeat is up to a second old, so later steps may be done."""
    if beat is None:
        return ""
    done = value_or(0, last_step, folder.events)
    return f"It was {f'after step {done}' if beat.listens and done >= max(beat.step, 1) else beat.where}. "


def _short_of_memory(
    folder: Folder, rank: int | None, exitcode: int | None, error: Mapping[str, Any] | None, memory_kills: int
) -> OutOfMemory | None:
    """Return the error for a rank, or its child, that the system killed for memory or that aborted without it."""
    beats = read_beats(folder.logs)
    if rank is not None and exitcode == -signal.SIGABRT and (match := _ABORTED.search(_log_end(folder.log(rank)))):
        return OutOfMemory(aborted_for_memory(folder, rank, match["bytes"], beats.get(rank)))
    if not memory_kills:
        return None
    if exitcode == -signal.SIGKILL or rank is None or (error and _WORKER_KILLED.search(error["message"])):
        most = max(beats.values(), key=lambda beat: beat.rss, default=None)
        return OutOfMemory(killed_for_memory(folder, rank, most if rank is None else beats.get(rank)))
    return None


def _waited_for_another(
    folder: Folder, rank: int | None, error: Mapping[str, Any] | None, raised: Mapping[int, Any]
) -> bool:
    """Return whether the first error is only about waiting for another rank.

    NCCL's watchdog ends its process by SIGABRT and logs the reason.
    """
    if rank is None:
        return False
    if error is None:
        return "Watchdog caught collective operation timeout" in _log_end(folder.log(rank))
    messages = [str(record["message"]) for record in raised.values()]
    return bool(_BROKEN.search(str(error["message"]))) and any(_TIMED_OUT.search(text) for text in messages)


def _first_failure(raised: Mapping[int, Any], failures: Sequence[Mapping[str, Any]]) -> tuple[int | None, int | None]:
    """Return the rank that failed first, and its exit code unless it raised.

    A rank without an error that the launcher did not end died first, and the others' exceptions («connection
    closed») follow from it, unless they came well before: then the launcher killed it for not ending.
    """
    first = next(iter(raised), None)
    stop_codes = (-signal.SIGTERM, -signal.SIGINT)
    silent = [error for error in failures if error["rank"] not in raised and error["exitcode"] not in stop_codes]
    candidates = silent or (failures if first is None else [])
    died = min(candidates, key=lambda error: float(error["time"]), default=None)
    if died is not None and (first is None or died["time"] <= raised[first]["time"] + _SAME_TIME):
        return died["rank"], died["exitcode"]
    return first, None


def _exit_text(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (which is also how the system ends a process when memory runs out)"
    if code < 0:
        return f"was killed by {value_or(f'signal {-code}', lambda: signal.Signals(-code).name)}"
    return f"ended with exit status {code}"


def end_of_log(folder: Folder, rank: int) -> str:
    """Return the last lines of a rank's log, or the launcher's if the rank had none yet."""
    log = folder.log(rank)
    return last_lines(log if log.exists() else folder.launcher_log)


def _log_end(log: Path) -> str:
    """Return the end of a log, with the lines before the stacks that an abort prints after its reason."""
    with contextlib.suppress(OSError), open_regular(log) as file:
        return end_of(file, _ABORT_CHARACTERS)
    return ""


def last_lines(log: Path) -> str:
    """Return the last lines of a log, and its path."""
    lines = [line.rpartition("\r")[2] for line in _log_end(log).replace("\r\n", "\n").split("\n")]  # a bar's last state
    last = [line for line in lines if line.strip()][-_LAST_LINES:]
    indented = "".join(f"\n    {line}" for line in last)
    return f"Its last lines ({log}):{indented}" if last else f"It printed nothing ({log})."
