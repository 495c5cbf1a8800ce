"""Measure the memory of a run: peaks by phase for each rank, on CPU and on CUDA.

On a CPU a profiler records the allocator from the process's start through the third step, and again around the first checkpoint
and the export. On CUDA the allocator keeps its own peak, which is read and reset at each phase boundary of the whole run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.core.errors import RunError
from toolkit.core.phases import phase
from toolkit.measurement.cpu import CpuWindow
from toolkit.measurement.cuda import CudaWindow, device_bytes_at
from toolkit.measurement.window import Measured, Memory, Window, collect, rss

if TYPE_CHECKING:
    import torch

__all__ = ["Measured", "Memory", "Window", "collect", "live_bytes", "peak_memory", "start"]

DISABLED = "the memory window was switched off (--no-memory-window)"

LOOK_EVERY = 10.0
"""Seconds for which `live_bytes` repeats NVML's answer, or that there is none."""


def start(device_kind: str, enabled: bool = True) -> Window:
    """Begin to measure this rank, before its first tensor: earlier allocations on a CPU are not counted.

    Args:
        device_kind: the model's device, `cpu` or `cuda`.
        enabled: False for `--no-memory-window`; it has no effect on CUDA, where measuring costs nothing.

    Raises:
        ValueError: for another kind of device.
    """
    if device_kind == "cuda":
        return CudaWindow()
    if device_kind != "cpu":
        raise ValueError(f"device {device_kind!r}: expected cpu or cuda")
    return CpuWindow() if enabled else Window("cpu", DISABLED)


def live_bytes(device: torch.device | str) -> dict[str, int | None]:
    """This rank's memory now, cheap enough for every step: `rss` on CPU; `allocated`, `reserved`, `device` on CUDA."""
    if str(device).startswith("cpu"):
        return {"rss": rss()}
    import torch

    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return {
        "allocated": stats["allocated_bytes"]["all"]["current"],
        "reserved": stats["reserved_bytes"]["all"]["current"],
        "device": device_bytes_at(torch.device(device).index, int(time.monotonic() / LOOK_EVERY)),
    }


def peak_memory(work: Callable[[], object], device_kind: str) -> int:
    """Measure the peak memory of a function call, above the memory in use before. Its result is freed.

    Raises:
        RunError: where another profiler keeps it from being measured.
    """
    gc.collect()  # only what is allocated within may be freed within
    before = 0
    if device_kind == "cuda":
        import torch

        before = torch.cuda.memory_allocated()
    window = start(device_kind)
    with phase("forward"):
        work()
    window.close()
    peaks = window.result()
    if peaks.peak_bytes is None:
        raise RunError(f"nothing was measured: {peaks.reason}.")
    return max(size for name, size in peaks.phases.items() if name != "load") - before  # what lay before this is `load`
