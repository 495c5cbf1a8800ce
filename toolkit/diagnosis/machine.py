"""Checks of the machine itself: cheap, safe in the caller's process, and importing no library that could break it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from toolkit.core.errors import ToolkitError
from toolkit.core.units import GiB, format_bytes
from toolkit.devices.machine import hardware, host_memory, torch_build
from toolkit.diagnosis.result import Finding
from toolkit.models import hub_reachable

LEAST_SHM = GiB
"""Docker's default of 64 MiB kills dataloader workers and NCCL; DeepSpeed's collectives on CPU live there too."""
LEAST_DISK = 5 * GiB
LEAST_FILES = 4096


def python() -> Finding:
    """Check the interpreter."""
    return Finding(check="python", status="ok", detail=f"{platform.python_version()} ({sys.executable})")


def gpus() -> Finding:
    """Check the NVIDIA GPUs that this process may use."""
    try:
        machine = hardware()
    except ToolkitError as error:
        return Finding(check="GPUs", status="broken", detail=str(error))
    if machine.device.kind == "cuda":
        device = machine.device
        memory = f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"
        precisions = ", ".join(device.dtypes)
        detail = f"{machine.count} x {device.name}, {memory}; natively {precisions}"
        return Finding(check="GPUs", status="ok", detail=" ".join([detail, *machine.notes]))
    if machine.notes:
        return Finding(check="GPUs", status="broken", detail=" ".join(machine.notes), fix="Install torch for CUDA.")
    return Finding(check="GPUs", status="n/a", detail=f"none; training runs on {machine.device.name}")


def memory() -> Finding:
    """Check the memory of the host or its control group."""
    total, free = host_memory()
    return Finding(check="host memory", status="ok", detail=f"{format_bytes(total)}, {format_bytes(free)} free")


def shared_memory() -> Finding:
    """Check `/dev/shm`, which dataloader workers, NCCL and DeepSpeed's CPU collectives share."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding(check="/dev/shm", status="n/a", detail="this system has none")
    size = shutil.disk_usage(folder)
    short = size.total < LEAST_SHM
    return Finding(
        check="/dev/shm",
        status="broken" if short else "ok",
        detail=f"{format_bytes(size.total)}, {format_bytes(size.free)} free",
        fix="In Docker: `--shm-size=8g`, or `--ipc=host`." if short else "",
    )


def disk() -> Finding:
    """Check the free disk space for runs."""
    free = shutil.disk_usage(Path.cwd()).free
    short = free < LEAST_DISK
    return Finding(
        check="disk",
        status="broken" if short else "ok",
        detail=f"{format_bytes(free)} free in {Path.cwd()}",
        fix=f"Make room: a run keeps checkpoints, and {format_bytes(LEAST_DISK)} is little." if short else "",
    )


def limits() -> Finding:
    """Check the shell's limits: open files (dataloaders, shards), locked memory (pinned buffers, RDMA)."""
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    short = files != resource.RLIM_INFINITY and files < LEAST_FILES
    locked_text = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    return Finding(
        check="limits",
        status="broken" if short else "ok",
        detail=f"{'unlimited' if files == resource.RLIM_INFINITY else files} open files, {locked_text} of locked memory",
        fix="`ulimit -n 65536`" if short else "",
    )


def widgets() -> Finding:
    """Check live views in a notebook."""
    if importlib.util.find_spec("ipywidgets") is None:
        fix = "`pip install 'accelerate-toolkit[notebook]'`"
        return Finding(check="ipywidgets", status="missing", detail="not installed: no live view in notebooks", fix=fix)
    from importlib import metadata

    return Finding(check="ipywidgets", status="ok", detail=metadata.version("ipywidgets"))


def hub_cache() -> Finding:
    """Check the local cache of the Hugging Face Hub."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    models = len(list(folder.glob("models--*"))) if folder.is_dir() else 0
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(above, os.W_OK):
        fix = "Set HF_HOME to a folder that can be written."
        return Finding(check="Hugging Face cache", status="broken", detail=f"{above} cannot be written", fix=fix)
    free = format_bytes(shutil.disk_usage(above).free)
    return Finding(check="Hugging Face cache", status="ok", detail=f"{models} models in {folder}, {free} free")


def hub() -> Finding:
    """Check whether the Hugging Face Hub answers. Being offline is not a failure."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Finding(check="Hugging Face Hub", status="n/a", detail="offline, as HF_HUB_OFFLINE says")
    if hub_reachable():
        return Finding(check="Hugging Face Hub", status="ok", detail=f"{constants.ENDPOINT} answers")
    fix = "Without a network: `hf download MODEL --local-dir FOLDER` elsewhere, and give the folder."
    return Finding(check="Hugging Face Hub", status="n/a", detail=f"{constants.ENDPOINT} does not answer", fix=fix)


def build() -> Finding:
    """Return the target of the installed torch, without importing it."""
    build = torch_build()
    if build is None:
        fix = "`pip install torch`; see pytorch.org for CUDA."
        return Finding(check="torch build", status="missing", detail="torch is not installed", fix=fix)
    return Finding(check="torch build", status="ok", detail=build)


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, build, gpus, memory, shared_memory, disk, limits, widgets, hub_cache, hub,
)  # fmt: skip
