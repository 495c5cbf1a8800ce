"""The lock of a run's folder, which the processes of one run share. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import check_fields, open_regular, parse_json
from toolkit.core.errors import RunError

TOKEN = "TOOLKIT_RUN_TOKEN"
"""The environment variable by which a supervisor tells its ranks which run they belong to."""

RUN_DIR = "TOOLKIT_RUN_DIR"
"""The environment variable with the run's folder, for a rank that runs a script or function."""

SUPERVISOR = "supervisor"

_LOCK_TYPES: Mapping[str, Any] = {"token": str, "pid": int, "started": str, "host": str, "role": str}
_LONGEST_LOCK = 2**20


def supervised() -> bool:
    """Return whether a supervisor of ours started this process: it shows errors and the logs' last lines."""
    return TOKEN in os.environ


def new_token() -> str:
    """Return a token that no other run has."""
    return uuid.uuid4().hex


def run_token() -> str:
    """Return the token that all ranks of this run share: the supervisor's, or else their launcher's."""
    if token := os.environ.get(TOKEN):
        return token
    if "LOCAL_RANK" not in os.environ:
        return new_token()
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return f"{socket.gethostname()}-{os.getppid()}-{started(os.getppid())}"
    return "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))


def hold(path: Path, lock: int, token: str, wait: float, validate: Callable[[], object]) -> bool:
    """Take the lock together with the other processes of this run; true for the first of them. They `sign` it afterwards.

    The file names the run, and all of the run's processes share the lock. The first takes it alone, writes the name,
    and then shares it; `flock` lets go in between, so whoever comes to share reads the name again afterwards. While
    anybody shares, nobody has it alone, and the name stands.

    Args:
        path: the run's folder, for messages.
        lock: descriptor of its open lock file.
        token: names the run.
        wait: seconds to wait for another run's processes to end.
        validate: called by the first, who has the lock alone; raises where the folder is not for this run.

    Raises:
        RunError: after `wait` seconds, with the holders' process ids; where the file system has no `flock`.
    """
    deadline, first = time.monotonic() + wait, False
    while True:
        if _flock(path, lock, shared=True):
            if _holders(lock)[:1] == [{"token": token}]:
                return first
            fcntl.flock(lock, fcntl.LOCK_UN)
        first = False
        if _flock(path, lock, shared=False):
            validate()
            os.ftruncate(lock, 0)
            _write_line(lock, {"token": token})
            first = True
            continue
        if time.monotonic() >= deadline:
            raise RunError(_held_by(path, lock))
        time.sleep(random.uniform(0.02, 0.1))  # two that poll at the same rate would exclude each other


def sign(lock: int, pid: int, role: str) -> None:
    """Write a process that holds the lock into its file."""
    _write_line(lock, {"pid": pid, "started": started(pid), "host": socket.gethostname(), "role": role})


def role() -> str:
    """Return what this process is in its run: a supervisor, or a rank."""
    return SUPERVISOR if "RANK" not in os.environ and not supervised() else f"rank {os.environ.get('RANK', '0')}"


def supervisor_of(path: Path) -> dict[str, Any] | None:
    """Return `pid`, `started` and `host` of the last supervisor in the folder; None without one."""
    with contextlib.suppress(OSError), open_regular(path / "lock") as file:
        lines = list(_lines(file.read(_LONGEST_LOCK)))
        return next((line for line in reversed(lines) if line.get("role") == SUPERVISOR), None)
    return None


def _flock(path: Path, lock: int, *, shared: bool) -> bool:
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunError(
            f"{path} cannot be locked: {error.strerror}. Choose a folder on a file system with flock (--run-dir)."
        ) from error
    return True


def _write_line(lock: int, line: Mapping[str, Any]) -> None:
    os.write(lock, (json.dumps(line) + "\n").encode())


def _holders(lock: int) -> list[dict[str, Any]]:
    return list(_lines(os.pread(lock, _LONGEST_LOCK, 0)))


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines of a lock that name a run or a user process. Others are ignored: the file may be crafted.

    Below pid 2 are groups, all processes, and the system's first one.
    """
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            record = parse_json(line)
            check_fields(record, _LOCK_TYPES)
            if set(record) == {"token"} or ({"pid", "started", "host"} <= set(record) and 1 < record["pid"] < 2**31):
                yield record


def is_lock(path: Path) -> bool:
    """Return whether a file is a signed lock of ours: it starts with the name of a run."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        return next(_lines(file.readline(_LONGEST_LOCK)), {}).keys() == {"token"} and not path.is_symlink()
    return False


def _held_by(path: Path, lock: int) -> str:
    here = socket.gethostname()
    holders = [line for line in _holders(lock) if "pid" in line and line["pid"] != os.getpid()]
    living = [line for line in holders if line["host"] != here or still(line)] or holders
    names = ", ".join(f"process {line['pid']} ({line.get('role')}, on {line['host']})" for line in living)
    who = names or "another run"
    return f"{path} is in use by {who}. Wait until it ends, end it, or choose another folder with --run-dir."


def held_by_others(path: Path) -> bool:
    """Return whether another living process is in the run's folder."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        with contextlib.suppress(RunError):  # no flock here, where a run may have been copied to
            if _flock(path, lock, shared=False):  # for an instant: a process that enters meanwhile retries
                return False
        here, ours = socket.gethostname(), os.getpid()
        return any(
            line["host"] != here or (line["pid"] != ours and still(line)) for line in _holders(lock) if "pid" in line
        )
    finally:
        os.close(lock)


def still(line: Mapping[str, Any]) -> bool:
    """Return whether the process in a line lives here: its number may belong to another one now."""
    return bool(line["started"] == started(line["pid"]) != "")


def started(pid: int) -> str:
    """Return when a process began, in clock ticks: with it, a pid is unique.

    Empty for a zombie process.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state == "Z" else fields[18]
