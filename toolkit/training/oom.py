"""Messages for ranks that ran out of memory: figures, and the smallest change that could fit."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.fields import from_dict
from toolkit.config.flags import spell
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import OutOfMemory, ToolkitError, value_or
from toolkit.core.units import format_bytes
from toolkit.devices.machine import Device, hardware, host_memory
from toolkit.engines.resolution import resolve
from toolkit.forecasting.memory_advice import NEW_RUN, changed, changes
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import Heartbeat
from toolkit.run_folder.run_json import read_run_json
from toolkit.transforms.adapters import require_libraries

_REQUEST = re.compile(r"tried to allocate ([\d.,]+) ?([KMGT]?i?B(?:ytes)?)\b", re.IGNORECASE)

OF_OWN_CODE = {"sharding", "offload"}
"""Changes that apply to a user's own script, module or function. Batch and model belong to its code."""


def out_of_memory(error: BaseException, folder: Folder, beat: Heartbeat) -> OutOfMemory:
    """Return a rank's message for an out-of-memory error: figures, and the change to make."""
    size = None
    if match := _REQUEST.search(str(error)):  # torch gives bytes on the host, and larger units on a device
        in_bytes = match[2].lower() == "bytes"
        size = format_bytes(int(match[1].replace(",", ""))) if in_bytes else f"{match[1]} {match[2]}"
    return OutOfMemory(_message(f"rank {beat.rank} ran out of memory", size, _process_usage(), folder, beat))


def killed_for_memory(folder: Folder, rank: int | None, beat: Heartbeat | None) -> str:
    """Return the message for a rank that the system killed, from its last heartbeat."""
    who = f"rank {rank}" if rank is not None else f"rank {beat.rank} (which held most)" if beat else "a rank"
    event = f"{who} was killed by the system, which ran out of memory"
    return _message(event, None, _last_usage(beat), folder, beat)


def aborted_for_memory(folder: Folder, rank: int, request: str | None, beat: Heartbeat | None) -> str:
    """Return the message for a rank that a library aborted; `request`: bytes, if the library named them."""
    size = format_bytes(int(request)) if request else None
    return _message(f"rank {rank} ran out of memory", size, _last_usage(beat), folder, beat)


def _message(event: str, size: str | None, usage: str, folder: Folder, beat: Heartbeat | None) -> str:
    where = f" {beat.where}" if beat else ""
    request = f"It requested {size}" if size else "The requested size is unknown"
    return f"{event}{where}. {request}; {usage}. {advice(folder, beat)}"


def _last_usage(beat: Heartbeat | None) -> str:
    usage = f"it held {format_bytes(beat.rss)} at its last heartbeat, and " if beat else ""
    return f"{usage}the host has {format_bytes(host_memory()[0])}"


def _process_usage() -> str:
    """Return this process's use of its device's memory, else of the host's, and its own limit of addresses."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a device that has failed does not answer
            free, total = map(format_bytes, torch.cuda.mem_get_info())
            allocated, reserved = map(format_bytes, (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            return f"it held {allocated} ({reserved} reserved), and {free} of the device's {total} were free"
    import resource

    import psutil

    memory, (total, free) = psutil.Process().memory_info(), map(format_bytes, host_memory())
    usage = f"it held {format_bytes(memory.rss)}; {free} of the host's {total} were free"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        usage += f"; {format_bytes(memory.vms)} of the {format_bytes(limit)} that `ulimit -v` allows were in use"
    return usage


def advice(folder: Folder, beat: Heartbeat | None) -> str:
    """Return the smallest change that could fit, as a command that resumes the run."""
    return value_or("No change can be proposed: run.json cannot be read.", _advice, folder, beat)


def _advice(folder: Folder, beat: Heartbeat | None) -> str:
    if not folder.run_json.exists():
        return "Take a smaller model, or a machine with more memory."
    recorded = read_run_json(folder.path)
    strategy, train_config = from_dict(Strategy, recorded["strategy"]), from_dict(TrainConfig, recorded["train_config"])
    device, target = hardware().device, recorded.get("target")
    in_a_step = beat is None or (beat.step > 0 and beat.phase != "save")
    possible = changes(strategy, train_config, in_a_step=in_a_step, on_cpu=device.kind == "cpu")
    for change in (change_ for change_ in possible if target is None or OF_OWN_CODE.issuperset(change_)):
        if _can_run(strategy, train_config, change, int(recorded["ranks"]), device):
            flags = " ".join(spell(change))
            if NEW_RUN & change.keys():
                return f"What could fit is a new run that trains less: `toolkit train … {flags}`."
            return f"The smallest change that could fit: {_resume_command(folder, target, change)}."
    if target is not None:
        return f"Choose a smaller micro-batch in {target['name']}, a smaller model, or more memory."
    return "Nothing smaller is left but a smaller model, or more memory."


def _resume_command(folder: Folder, target: Mapping[str, Any] | None, change: Mapping[str, Any]) -> str:
    """Return the command that resumes a run with a change; for a function, a line of Python."""
    if target is not None and target["kind"] == "function":
        words = ", ".join(f"{name}={value!r}" for name, value in change.items())
        return f"`tk.resume({str(folder.path)!r}, {target['name']}, {words})`, or a smaller micro-batch in it"
    command = f"`toolkit resume {shlex.quote(str(folder.path))} {' '.join(spell(change))}`"
    return command if target is None else f"{command}, or a smaller micro-batch in {target['name']}"


def _can_run(
    strategy: Strategy, train_config: TrainConfig, change: Mapping[str, Any], ranks: int, device: Device
) -> bool:
    """Return whether this machine can run it."""
    try:
        require_libraries(resolve(*changed(strategy, train_config, change), None, ranks, device))
    except ToolkitError:
        return False
    return True


def memory_kills() -> int:
    """Return how many processes the system has killed for memory: in this control group, else on the machine."""
    return _kills(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat"))


def _kills(root: Path, own: Path, machine: Path) -> int:
    """Return the file of kill counts of control groups 2 or 1; in a container, the root is often its own."""
    files = {"": "memory.events", "memory": "memory.oom_control"}
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in files:
            for folder in (root / controllers / path.lstrip("/"), root / controllers):
                counts = _read_counts(folder / files[controllers])
                if counts is not None:
                    return counts
    return _read_counts(machine) or 0


def _read_counts(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
            return int(match[1])
    return None
