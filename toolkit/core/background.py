"""Work that goes on after a command's answer, in forked processes that outlive it by seconds.

A trace needs torch and transformers, which take longer to import than a trace takes. The process that has them makes the traces
of the next questions, too: other lengths, micro-batches and devices. It is silent, has the lowest priority, and holds no file or
terminal of the command's. `TOOLKIT_BACKGROUND=0` leaves it out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from toolkit.core.cache import cache_file
from toolkit.core.errors import ToolkitError

T = TypeVar("T")

SWITCH = "TOOLKIT_BACKGROUND"
SECONDS = 60
"""Limit of each process's work, in seconds of its core."""

LONGEST_WAIT = 4.0
"""Seconds that another process waits for a result of the work: about what the same costs it."""

RESULT_POLL = 0.05

_enabled = False
_steps: list[tuple[str, Callable[[], None]]] = []
_working = False


def allowed() -> bool:
    """Return whether the user left work in the background on."""
    return os.environ.get(SWITCH) != "0"


def enable() -> bool:
    """Promise a call of `start`, unless the user switched it off."""
    global _enabled
    _enabled = allowed()
    return _enabled


def enabled() -> bool:
    """Return whether added steps will be done."""
    return _enabled


def has_work() -> bool:
    """Return whether there are steps to do."""
    return bool(_steps)


def add(topic: str, steps: Iterable[Callable[[], None]]) -> None:
    """Add steps to the work of `start`, in their order.

    Args:
        topic: of the steps. Processes that need a result of the same topic wait for this work.
        steps: what is done in turn. One that raises is left out.
    """
    _steps.extend((topic, step) for step in steps)


def start() -> None:
    """Do the added steps in forked processes, one for each core, without topics that another process works on.

    Only the command line calls it, at its end, when its threads have ended.
    """
    locks = {topic: lock for topic in dict.fromkeys(topic for topic, _ in _steps) if (lock := _take(topic))}
    steps = [step for topic, step in _steps if topic in locks]
    count = len(os.sched_getaffinity(0)) if steps else 0
    for number in range(count):
        if os.fork() == 0:
            try:
                _detach(locks.values())
                _work(steps[number::count])
            finally:
                os._exit(0)
    for lock in locks.values():
        os.close(lock)  # the children hold it


def wait_for(topic: str, result: Callable[[], T], ready: Callable[[T], bool]) -> T:
    """Return the result once it is ready, or as it is if no process works on the topic."""
    limit = time.monotonic() + LONGEST_WAIT
    while not ready(value := result()) and not _working and _at_work(topic) and time.monotonic() < limit:
        time.sleep(RESULT_POLL)
    return value


def _take(topic: str) -> int | None:
    """Return the locked file of a topic, or None if another process holds it, or there is no cache to fill."""
    try:
        lock = os.open(_lock(topic), os.O_CREAT | os.O_RDWR, 0o600)
    except (OSError, ToolkitError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _lock(topic: str) -> Path:
    return cache_file("background", topic.encode()).with_suffix(".lock")


def _at_work(topic: str) -> bool:
    """Return whether another process works on a topic."""
    with contextlib.suppress(OSError, ToolkitError), _lock(topic).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _detach(locks: Iterable[int]) -> None:
    """Leave the command's session, terminal and files: a pipe that it wrote into ends with it."""
    os.setsid()
    os.nice(19)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    first = 3
    for lock in sorted(locks):
        os.closerange(first, lock)
        first = lock + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _work(steps: list[Callable[[], None]]) -> None:
    """Do each step, and those that it adds."""
    global _working
    _working = True
    _steps.clear()
    while steps:
        with contextlib.suppress(Exception):  # the answer to that question raises it
            steps.pop(0)()
        steps += [step for _, step in _steps]
        _steps.clear()
