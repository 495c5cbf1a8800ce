"""Who writes into a run's folder: one lock that the processes of one run share. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import RunError

TOKEN = "TOOLKIT_RUN_TOKEN"
"""The environment variable by which a supervisor tells its ranks which run they belong to."""

SUPERVISOR = "supervisor"


def supervised() -> bool:
    """Whether a supervisor of ours started this process: it then shows errors and the logs' last lines."""
    return TOKEN in os.environ


def new_token() -> str:
    """A name that no other run has."""
    return uuid.uuid4().hex


def run_token() -> str:
    """What all ranks of this run, and of no other, have in common: what the supervisor set, or else their launcher."""
    if found := os.environ.get(TOKEN):
        return found
    if "LOCAL_RANK" not in os.environ:
        return new_token()
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return f"{socket.gethostname()}-{os.getppid()}-{started(os.getppid())}"
    return "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))


def hold(path: Path, lock: int, token: str, wait: float, admit: Callable[[], object]) -> bool:
    """Take the lock together with the other processes of this run; true for the first of them.

    The file names the run, and all of the run's processes share the lock. The first takes it alone, writes the name,
    and then shares it; `flock` lets go in between, so whoever comes to share reads the name again afterwards. While
    anybody shares, nobody has it alone, and the name stands.

    Args:
        path: the run's folder, for messages.
        lock: descriptor of its open lock file.
        token: names the run.
        wait: seconds to wait for another run's processes to end.
        admit: called by the first, who has the lock alone; raises where the folder is not for this run.

    Raises:
        RunError: after `wait` seconds, with the holders' process ids; where the file system has no `flock`.
    """
    deadline, first = time.monotonic() + wait, False
    while True:
        if _flock(path, lock, shared=True):
            if _holders(lock)[:1] == [{"token": token}]:
                who = {"pid": os.getpid(), "started": started(os.getpid()), "host": socket.gethostname()}
                _write_line(lock, {**who, "role": _role()})
                return first
            _unlock(lock)
        first = False
        if _flock(path, lock, shared=False):
            admit()
            os.ftruncate(lock, 0)
            _write_line(lock, {"token": token})
            first = True
            continue
        if time.monotonic() >= deadline:
            raise RunError(_held_by(path, lock))
        time.sleep(random.uniform(0.02, 0.1))  # two that ask in step would keep each other out


def supervisor_of(path: Path) -> dict[str, Any] | None:
    """`pid`, `started` and `host` of the supervisor that entered the folder last; None where none has."""
    try:
        lines = list(_objects((path / "lock").read_text(errors="replace").splitlines()))
    except OSError:
        return None
    return next((line for line in reversed(lines) if line.get("role") == SUPERVISOR), None)


def _flock(path: Path, lock: int, *, shared: bool) -> bool:
    import fcntl

    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunError(
            f"{path} cannot be locked: {error.strerror}. Choose a folder on a file system with flock (--run-dir)."
        ) from error
    return True


def _unlock(lock: int) -> None:
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_UN)


def _write_line(lock: int, line: Mapping[str, Any]) -> None:
    os.write(lock, (json.dumps(line) + "\n").encode())


def _holders(lock: int) -> list[dict[str, Any]]:
    text = os.pread(lock, 1 << 20, 0).decode(errors="replace")
    return list(_objects(text.splitlines()))


def _objects(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _held_by(path: Path, lock: int) -> str:
    here = socket.gethostname()
    holders = [line for line in _holders(lock) if "pid" in line]
    living = [line for line in holders if line["host"] != here or still(line)] or holders
    who = ", ".join(f"process {line['pid']} ({line['role']}, on {line['host']})" for line in living) or "another run"
    return f"{path} is in use by {who}. Wait until it ends, end it, or choose another folder with --run-dir."


def held_by_others(path: Path) -> bool:
    """Whether a living process beside this one is in the run's folder: it goes on."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        with contextlib.suppress(RunError):  # no flock here, where a run may have been copied to
            if _flock(path, lock, shared=False):  # for an instant: who enters meanwhile asks again
                return False
        here, ours = socket.gethostname(), os.getpid()
        return any(
            line["host"] != here or (line["pid"] != ours and still(line)) for line in _holders(lock) if "pid" in line
        )
    finally:
        os.close(lock)


def process_lives(pid: int) -> bool:
    """Whether there is a process of this number on this machine, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def still(line: Mapping[str, Any]) -> bool:
    """Whether the process that a line names lives here: its number may have come to another one."""
    return process_lives(line["pid"]) and line.get("started") in (None, started(line["pid"]))


def _role() -> str:
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else SUPERVISOR


def started(pid: int) -> str:
    """When a process began, in clock ticks: with it a pid names one process for good.

    Empty without /proc, and of a process that has ended and whose parent has not looked yet.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state == "Z" else fields[18]
