"""The caching allocator's own peaks on CUDA, and what NVML reports that the process holds."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from typing import Any

from toolkit.core.phases import observe
from toolkit.measurement.window import MEASURED_STEPS, Measured, Window


class CudaWindow(Window):
    """The caching allocator's own peaks, read and reset at the begin and end of each phase.

    Source: torch/cuda/memory.py. Before CUDA is initialised nothing is read: that would initialise the first device in
    every rank. Other callers of `torch.cuda.max_memory_allocated` see the resets.
    """

    def __init__(self) -> None:
        super().__init__("cuda")
        self._forget = observe(self._on_phase)

    def _on_phase(self, name: str, begins: bool) -> None:
        with self._count_overhead():
            self._sample()
        self.peaks.mark(name, begins)

    def _sample(self) -> int | None:
        """Credit the peak since the last sample to its phase. Return the live bytes."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict()
        if not stats:
            return None
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats()
        self.peaks.add(allocated["peak"])
        self.reserved = max(reserved["peak"], self.reserved or 0)
        return int(allocated["current"])

    def _read_device_bytes(self) -> None:
        import torch

        used, self.reason = device_bytes(torch.cuda.current_device())
        self.device = max(filter(None, (used, self.device)), default=None)

    def step_done(self, step: int) -> None:
        if len(self.live) < MEASURED_STEPS and (live := self._sample()) is not None:
            self.live.append(live)
            self._read_device_bytes()

    def result(self) -> Measured:
        self._forget()
        if self._sample() is None:
            self.reason = "CUDA was never initialised in this process"
        else:
            self._read_device_bytes()
        return super().result()


def device_bytes(index: int | None) -> tuple[int | None, str | None]:
    """Return this process's bytes on a CUDA device by NVML; None with a reason if NVML does not list them."""
    try:
        import pynvml
    except ImportError:
        return None, "device bytes are missing: NVML needs nvidia-ml-py (pip install nvidia-ml-py)"
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(index))
    except pynvml.NVMLError as error:
        return None, f"device bytes are missing: NVML reports {error}"
    used = next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
    problem = "device bytes are missing: NVML does not list this process (a container with process ids of its own?)"
    return used, None if used is not None else problem


@lru_cache(maxsize=8)
def device_bytes_at(index: int | None, look: int) -> int | None:
    """Return `device_bytes`, once for each `look`: NVML's list of processes takes milliseconds."""
    return device_bytes(index)[0]


@cache
def _handle(index: int | None) -> Any:
    """Return NVML's handle of a CUDA device, by UUID: the two libraries number devices differently."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
