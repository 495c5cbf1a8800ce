"""DeepSpeed's operators, which torch compiles at their first use."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from toolkit.engines.job import Job

LONGEST_BUILD = 1800.0
"""Seconds that no compilation of an operator takes."""

LOCAL_FILESYSTEMS = ("apfs", "btrfs", "ext", "f2fs", "overlay", "tmpfs", "xfs", "zfs")


def free_builds() -> None:
    """Remove locks that a killed process left where torch compiles DeepSpeed's operators: it would wait for them without a limit.

    torch's `FileBaton` keeps its lock file open while it holds it, so a lock of ours that no process has open is nobody's.
    Where other hosts may share the folder, it must be older than any build, too.
    """
    import psutil

    root = _build_root().resolve()  # as the system names open files
    least_age = 0.0 if _is_local(root) else LONGEST_BUILD
    locks = {str(path) for path in root.glob("**/lock") if _is_own(path, least_age)}
    # Looked at twice: a rank that has just closed its lock removes it itself, and another may take the next one.
    for pause in (0.5, 0.0):
        if not locks:
            return
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                locks -= {file.path for file in process.open_files()}
        time.sleep(pause if locks else 0.0)
    for lock in locks:
        Path(lock).unlink(missing_ok=True)


def _is_own(path: Path, least_age: float) -> bool:
    """Return whether a file exists, belongs to this user and is at least this old, in seconds."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime >= least_age


def _is_local(folder: Path) -> bool:
    """Return whether a folder lies on a filesystem that no other host can have."""
    import psutil

    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    mounts = (kinds[str(path)] for path in (folder, *folder.parents) if str(path) in kinds)
    return next(mounts, "").startswith(LOCAL_FILESYSTEMS)


def announce_build(job: Job) -> None:
    """Say that nothing seems to happen for a while, where an operator has not been compiled yet."""
    name = "deepspeed_shm_comm" if job.device.kind == "cpu" else "cpu_adam"
    needed = job.device.kind == "cpu" or job.strategy.offload != "none"
    if needed and not any(_build_root().glob(f"**/{name}.so")):
        print(f"DeepSpeed compiles {name}, which takes a minute or two, once", file=sys.stderr, flush=True)


def _build_root() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
