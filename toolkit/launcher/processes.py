"""A run's processes: ranks by the token in their environment, supervisors by the lock. No other is ever signalled."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core import redaction
from toolkit.core.errors import RunError, value_or
from toolkit.run_folder.run_lock import TOKEN, is_lock, still

if TYPE_CHECKING:
    import psutil


KILL_SECONDS = 60.0
"""After which a killed process will not end soon: it waits in the kernel, for a disk or a network that does not answer."""


def kill_run(token: str, launcher: subprocess.Popen[bytes]) -> None:
    """End the rest of a run: kill the launcher, wait two seconds for the others, then kill them.

    Raises:
        RunError: naming processes that are still there a minute later. They hold the run's lock until they end.
    """
    import psutil

    deadline = time.monotonic() + KILL_SECONDS

    launcher.kill()
    launcher.wait()
    _, processes = psutil.wait_procs(run_processes(token), timeout=2)
    while processes:
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in processes)
            raise RunError(
                f"processes {pids} were killed {KILL_SECONDS:.0f} s ago and have not ended: they wait in the kernel, for a "
                "disk or a network that does not answer. They hold the run's folder until they end; look at `dmesg`."
            )
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=2)
        processes = run_processes(token)


def run_processes(token: str) -> list[psutil.Process]:
    """Return living processes of this user with the run's token in their environment."""
    import psutil

    return [process for process in psutil.process_iter() if _carries_token(process, token)]


def is_redaction(process: psutil.Process) -> bool:
    """Return whether this is the process that writes the ranks' output: it ends behind them."""
    return value_or(False, lambda: redaction.__file__ in process.cmdline())


def send(token: str, pids: Iterable[int], number: int) -> None:
    """Signal these processes, as far as they live and carry the token."""
    import psutil

    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if _carries_token(process, token):
                process.send_signal(number)


def _carries_token(process: psutil.Process, token: str) -> bool:
    import psutil

    return value_or(False, lambda: process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE)


def lives(pid: int, token: str) -> bool:
    """Return whether this process of the run is alive."""
    import psutil

    return value_or(False, lambda: _carries_token(psutil.Process(pid), token))


def supervises(record: Mapping[str, Any], path: Path) -> bool:
    """Return whether a process in a lock lives here and has that lock open: the file may be crafted."""
    import psutil

    if record["host"] != socket.gethostname() or not still(record):
        return False
    lock = os.path.join(os.path.realpath(path), "lock")  # itself: a link may lead to a file that anybody has open
    with contextlib.suppress(psutil.Error, OSError):
        return is_lock(path / "lock") and any(file.path == lock for file in psutil.Process(record["pid"]).open_files())
    return False
