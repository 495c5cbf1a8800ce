"""Prepare a run's folder, and start `accelerate launch` in a new process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolkit.core.atomic_io import read_json, unwritable, write_whole
from toolkit.core.process_lifecycle import SAFE_PATH
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.run_lock import TOKEN, check_process, is_lock, still


def clear(folder: Folder, config: Mapping[str, Any]) -> None:
    """Write the config file, and remove the records of an earlier attempt's end."""
    import yaml

    folder.logs.mkdir(exist_ok=True)
    for old in (
        *folder.logs.glob("rank-*.error.json"),
        *folder.logs.glob("rank-*.beat"),
        failures_of(folder),
        folder.end,
    ):
        old.unlink(missing_ok=True)
    text = yaml.safe_dump(dict(config), sort_keys=False).encode()
    try:
        write_whole(folder.config, text)
    except OSError as error:
        raise unwritable(folder.config, len(text), error.strerror or str(error)) from error


def failures_of(folder: Folder) -> Path:
    """Return the file in which the launcher records how ranks ended."""
    return folder.logs / "failures.json"


def launcher_log(folder: Folder) -> Path:
    """Return the launcher's log."""
    return folder.logs / "launcher.log"


def supervisor_log(folder: Folder) -> Path:
    """Return the log of a supervisor in its own session: restarts, and how the run ended."""
    return folder.logs / "supervisor.log"


def supervisor_file(folder: Folder) -> Path:
    """Return the file of the supervisor's process: JSON with `pid`, `started` and `host`, as in the lock."""
    return folder.logs / "supervisor.json"


def live_supervisor(folder: Folder) -> dict[str, Any] | None:
    """Return the process that was started last as the folder's supervisor, if it lives."""
    try:
        record: dict[str, Any] = read_json(supervisor_file(folder))
        check_process(record)
    except (OSError, ValueError):
        return None
    return record if supervises(record, folder.path) else None


def supervises(record: Mapping[str, Any], path: Path) -> bool:
    """Return whether a process in a file lives here and supervises this folder: the file may be crafted.

    Its command line is ours and names the folder, or it has the folder's lock open.
    """
    import psutil

    if record.get("host") != socket.gethostname() or not still(record):
        return False
    try:
        process = psutil.Process(record["pid"])
        words, here = process.cmdline(), process.cwd()
        if "toolkit.cli" in words and any(
            os.path.realpath(os.path.join(here, word)) == os.path.realpath(path) for word in words
        ):
            return True
        lock = os.path.join(os.path.realpath(path), "lock")  # itself: a link may lead to a file that anybody has open
        return is_lock(path / "lock") and any(file.path == lock for file in process.open_files())
    except (psutil.Error, OSError, ValueError):
        return False


def function_file(folder: Folder) -> Path:
    """Return the file of a shipped function."""
    return folder.logs / "function.pkl"


def ranks_here(config: Mapping[str, Any]) -> int:
    """Return the number of this machine's ranks."""
    return int(config.get("num_processes", 1)) // int(config.get("num_machines", 1))


def start(
    folder: Folder,
    module: str,
    arguments: Sequence[str],
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    output: IO[Any] | int | None,
) -> subprocess.Popen[bytes]:
    """Start the launcher; arguments as in `supervise`."""
    port = [] if "main_process_port" in config else ["--main_process_port", "0"]  # 0: a free one
    launch = ["accelerate", "launch", "--config_file", str(folder.config), *port, "-m", module, *arguments]
    command = [sys.executable, "-m", "toolkit.launcher", str(os.getpid()), str(failures_of(folder)), *launch]
    threads = {"OMP_NUM_THREADS": _threads(ranks_here(config))}
    with open(launcher_log(folder), "wb") as log:
        return subprocess.Popen(
            command,
            env={**_on_one_host(config), **os.environ, **SAFE_PATH, **threads, **environ, TOKEN: folder.token},
            stdin=subprocess.DEVNULL,  # a library that asks would stop a group in the background for good
            stdout=output,
            stderr=log,
            process_group=0,  # a terminal's Ctrl-C reaches the supervisor only, which passes it on once
        )


def _on_one_host(config: Mapping[str, Any]) -> dict[str, str]:
    """Let ranks on one machine communicate over its loopback, which no other machine can reach."""
    if int(config.get("num_machines", 1)) != 1:
        return {}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def _threads(ranks: int) -> str:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))
