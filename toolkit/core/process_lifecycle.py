"""Ranks die with their launcher. Standard library only, for before any heavy import."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LAUNCHER = "TOOLKIT_LAUNCHER"
"""The environment variable in which our launcher leaves its process id for its ranks."""

LAUNCHED = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Variables of which every launcher sets one: torchrun the first, `accelerate launch` of one process the second."""

_SET_BY_US = "set by accelerate-toolkit"
SAFE_PATH = {"PYTHONSAFEPATH": os.environ.get("PYTHONSAFEPATH") or _SET_BY_US}
"""Variable that stops a child from importing files of its working directory; any value works. A user's own setting stays."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_SMALLEST_MAPPED, _LARGEST_IN_HEAP = 256 * 1024, 32 * 1024 * 1024
_POLL_SECONDS = 0.5


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process when its parent ends, however it ends. Call it first, in the main thread.

    The kernel does it by `prctl(PR_SET_PDEATHSIG)`; where it refuses, a thread looks twice a second. A parent that was gone before
    the call ends this process at once. The signal comes when the *thread* that forked ends: torch elastic and
    `accelerate launch` fork in their main thread. What this process's main thread forks later (a DataLoader's workers)
    dies with it, too. Started by hand, without a launcher, a process stays its own master and nothing is done.

    Args:
        parent: the process id of the parent, where the caller knows it; otherwise what our launcher left in `LAUNCHER`.
    """
    named = os.environ.pop(LAUNCHER, None)  # it is no business of what this process starts
    if parent is None and named is not None:
        parent = int(named)
    if parent is None and not any(name in os.environ for name in LAUNCHED):
        return
    parent_id = os.getppid()
    _watch(parent_id)
    if parent_id != parent if parent is not None else not _is_launcher(parent_id):
        with contextlib.suppress(OSError):
            os.write(2, f"toolkit: the launcher of process {os.getpid()} has ended, and so it ends, too.\n".encode())
        os._exit(1)
    _register_fork_hooks()


def leave_safe_path() -> None:
    """Remove `SAFE_PATH` from the environment: the user's child processes import as usual."""
    if os.environ.get("PYTHONSAFEPATH") == _SET_BY_US:
        del os.environ["PYTHONSAFEPATH"]


def _watch(parent: int) -> None:
    if _ask_kernel():
        return

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=look, name="die-with-parent", daemon=True).start()


def _ask_kernel() -> bool:
    import ctypes

    unused = ctypes.c_ulong(0)
    done: int = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), unused, unused, unused)
    return done == 0


def _is_launcher(pid: int) -> bool:
    """Return whether `pid` looks like a launcher, not like the init process that adopts orphans.

    A launcher has the module or script that it starts on its command line, as this process has; one that was called
    from Python has not, but runs Python and is not process 1.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    own = sys.orig_argv[1:]
    started = own[own.index("-m") + 1] if "-m" in own[:-1] else next((word for word in own if word[:1] != "-"), "")
    return started in command or (pid != 1 and "python" in os.path.basename(command[0]))


def _register_fork_hooks() -> None:
    """Apply the same to forked children, unless another thread forks: they would die with that thread."""
    main, forking = threading.get_ident(), os.getpid()

    def before() -> None:
        nonlocal forking
        forking = os.getpid()

    def in_child() -> None:
        if threading.get_ident() == main:
            _die_with(forking)

    os.register_at_fork(before=before, after_in_child=in_child)


def begin_child(parent: int) -> None:
    """Let a forked worker die with its parent, and end on a signal without the parent's handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the parent ends the others
    _die_with(parent)


def _die_with(parent: int) -> None:
    _watch(parent)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Let glibc return the memory of a freed tensor to the system at once.

    By default the size from which it does so rises to 32 MiB as tensors are freed (mallopt(3)). Smaller tensors then leave
    holes in the heap, and a process that reads weights takes more memory than its tensors. Training keeps the default's end.
    A user's own thresholds stay.
    """
    import ctypes

    if os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}:
        yield
        return

    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # musl has none
    mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPED)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP)


def import_libraries(*names: str) -> None:
    """Import modules without garbage collections, and leave what they made out of later ones. For processes of ours alone.

    Modules are no garbage, but each collection looks at their million objects: 2 of the 6 s of processor time before a rank's
    first step.
    """
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()


def skip_last_collection() -> None:
    """Look for no garbage when this process ends: a second of a rank's end. For processes of ours alone.

    What lives then is a million objects of libraries. Their files are closed by those who opened them.
    """
    atexit.register(gc.freeze)


def collect_rarely() -> None:
    """Look for garbage once in 50,000 new objects, not in 700, and not at the end. For processes without weights of their own."""
    gc.set_threshold(50_000)
    skip_last_collection()
