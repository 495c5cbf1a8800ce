"""The end of a rank with gloo: its worker threads come to rest before a process group or the interpreter is destroyed.

A gloo worker drops the tensors of a collective after the caller has its result, and needs the GIL for it
(`AsyncWork` → `decref_pyobject`). Two faults of torch 2.13 follow:

- Whatever holds a process group last (DDP's reducer) destroys it with the GIL held, and joins the workers: a deadlock.
- CPython before 3.14 ends a thread that requests the GIL during finalization by unwinding its stack. The destructors
  are `noexcept`: «terminate called without an active exception», SIGABRT.

Waiting for idle workers avoids both. The kernel shows a worker's state, so no time is guessed.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKER = "pt_gloo_runloop"
"""The name of gloo's worker threads: torch, `ProcessGroupGloo::runLoop`."""

LIMIT = 5.0
"""Seconds to wait for workers. Idle workers need none; workers in a collective without its peers never become idle."""

BLIND_LIMIT = 0.1
"""Seconds to wait where the kernel does not show system calls (gVisor)."""

_FUTEX_WAIT_BITSET, _FUTEX_COMMANDS = 9, 0x7F  # <linux/futex.h>

_installed = False


def install() -> None:
    """Call `wait_for_workers()` before every `destroy_process_group` (`end_training` included) and before finalization."""
    global _installed
    import torch.distributed as dist

    if _installed or not dist.is_available():
        return
    _installed = True
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def wait_and_destroy(*args: Any, **kwargs: Any) -> None:
        wait_for_workers()
        destroy(*args, **kwargs)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = wait_and_destroy
    atexit.register(wait_for_workers)


def wait_for_workers() -> None:
    """Wait until gloo's workers are idle. If some are not, keep the process groups: nothing joins their workers then."""
    deadline = time.monotonic() + (LIMIT if Path("/proc/self/syscall").exists() else BLIND_LIMIT)
    while not all(map(_is_idle, workers())):
        if time.monotonic() > deadline:
            _keep_groups()
            return
        time.sleep(0.001)  # without the GIL, which they need


def workers() -> Iterator[Path]:
    """Return the `/proc` folders of gloo's worker threads; none on other systems than Linux."""
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().rstrip("\n") == WORKER:
                yield task
        except OSError:  # the thread has ended
            continue


def _is_idle(worker: Path) -> bool:
    """Return whether the thread waits for work.

    It is then in `pthread_cond_wait`, the futex call FUTEX_WAIT_BITSET without a timeout. Waits for the GIL and for
    peers have a timeout, and a wait for a mutex is a FUTEX_WAIT. A thread that is not blocked shows «running».
    """
    try:
        fields = (worker / "syscall").read_text().split()
    except OSError:
        return not worker.exists()
    if len(fields) < 5:
        return False
    command, timeout = int(fields[2], 16), int(fields[4], 16)
    return command & _FUTEX_COMMANDS == _FUTEX_WAIT_BITSET and timeout == 0


def _keep_groups() -> None:
    """Keep torch's process groups until the process ends, through finalization too."""
    import ctypes

    dist = sys.modules.get("torch.distributed")
    for group in dist.distributed_c10d._world.pg_map if dist else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
