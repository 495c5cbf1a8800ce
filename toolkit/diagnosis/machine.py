"""Checks of the machine itself: cheap, safe in the caller's process, and importing no library that could break it.

A check returns its detail, or raises an `Outcome`.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from toolkit.core.units import GiB, format_bytes
from toolkit.devices.machine import hardware, host_memory, torch_build
from toolkit.diagnosis.result import Outcome
from toolkit.models import hub_reachable

LEAST_SHM = GiB
"""Docker's default of 64 MiB kills dataloader workers and NCCL; DeepSpeed's collectives on CPU live there too."""
LEAST_DISK = 5 * GiB
LEAST_FILES = 4096


def python() -> str:
    """Check the interpreter."""
    return f"{platform.python_version()} ({sys.executable})"


def build() -> str:
    """Return the target of the installed torch, without importing it."""
    if target := torch_build():
        return target
    raise Outcome("missing", "torch is not installed", "`pip install torch`; see pytorch.org for CUDA.")


def installed(name: str, use: str) -> str:
    """Return the version of a library of the extra `notebook`, without importing it; `use`: the feature that needs it."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise Outcome("missing", f"not installed: no {use}", "`pip install 'accelerate-toolkit[notebook]'`") from None


def gpus() -> str:
    """Check the NVIDIA GPUs that this process may use."""
    machine = hardware()
    device, notes = machine.device, " ".join(machine.notes)
    if device.kind == "cuda":
        memory = f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"
        return f"{machine.count} x {device.name}, {memory}; natively {', '.join(device.dtypes)} {notes}".strip()
    if notes:
        raise Outcome("broken", notes, "Install torch for CUDA.")
    raise Outcome("n/a", f"none; training runs on {device.name}")


def memory() -> str:
    """Check the memory of the host or its control group."""
    total, free = host_memory()
    return f"{format_bytes(total)}, {format_bytes(free)} free"


def shared_memory() -> str:
    """Check `/dev/shm`, which dataloader workers, NCCL and DeepSpeed's CPU collectives share."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        raise Outcome("n/a", "this system has none")
    size = shutil.disk_usage(folder)
    detail = f"{format_bytes(size.total)}, {format_bytes(size.free)} free"
    return _at_least(LEAST_SHM, size.total, detail, "In Docker: `--shm-size=8g`, or `--ipc=host`.")


def disk() -> str:
    """Check the free disk space for runs."""
    free = shutil.disk_usage(Path.cwd()).free
    fix = f"Make room: a run keeps checkpoints, and {format_bytes(LEAST_DISK)} is little."
    return _at_least(LEAST_DISK, free, f"{format_bytes(free)} free in {Path.cwd()}", fix)


def limits() -> str:
    """Check the shell's limits: open files (dataloaders, shards), locked memory (pinned buffers, RDMA)."""
    import resource

    unlimited = resource.RLIM_INFINITY
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    locked_text = "unlimited" if locked == unlimited else format_bytes(locked)
    detail = f"{'unlimited' if files == unlimited else files} open files, {locked_text} of locked memory"
    return _at_least(LEAST_FILES, sys.maxsize if files == unlimited else files, detail, "`ulimit -n 65536`")


def _at_least(least: int, value: int, detail: str, fix: str) -> str:
    if value < least:
        raise Outcome("broken", detail, fix)
    return detail


def hub_cache() -> str:
    """Check the local cache of the Hugging Face Hub."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(above, os.W_OK):
        raise Outcome("broken", f"{above} cannot be written", "Set HF_HOME to a folder that can be written.")
    models = len(list(folder.glob("models--*")))
    return f"{models} models in {folder}, {format_bytes(shutil.disk_usage(above).free)} free"


def hub() -> str:
    """Check whether the Hugging Face Hub answers. Being offline is not a failure."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise Outcome("n/a", "offline by HF_HUB_OFFLINE")
    if hub_reachable():
        return f"{constants.ENDPOINT} answers"
    fix = "Without a network: `hf download MODEL --local-dir FOLDER` elsewhere, and give the folder."
    raise Outcome("n/a", f"{constants.ENDPOINT} does not answer", fix)
