"""The caching allocator's own peaks on CUDA, and what NVML reports that the process holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from toolkit.core.phases import observe
from toolkit.measurement.results import Measured
from toolkit.measurement.window import STEPS, Window

LOOK_EVERY = 10.0
"""Seconds for which `recent_device_bytes` repeats an answer, or that there is none."""


class CudaWindow(Window):
    """The caching allocator's own peaks, read and reset at the begin and end of each phase.

    Source: torch/cuda/memory.py. Before CUDA is initialised nothing is read: that would initialise the first device in
    every rank. Whoever else asks `torch.cuda.max_memory_allocated` sees the resets.
    """

    def __init__(self) -> None:
        super().__init__("cuda")
        self._phases: dict[str, int] = {}
        self._inside: list[str] = []
        self._now = "load"
        self._live: list[int] = []
        self._reserved: int | None = None
        self._device: int | None = None
        self._forget: Callable[[], None] | None = observe(self._on_phase)

    def _on_phase(self, name: str, begins: bool) -> None:
        with self._count_overhead():
            self._sample()
        if begins:
            self._inside.append(name)
        elif name in self._inside:
            self._inside.remove(name)
        self._now = self._inside[-1] if self._inside else name

    def _sample(self) -> int | None:
        """Credit the peak since the last sample to its phase. Return the live bytes."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict()
        if not stats:
            return None
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats()
        self._phases[self._now] = max(allocated["peak"], self._phases.get(self._now, 0))
        self._reserved = max(reserved["peak"], self._reserved or 0)
        return int(allocated["current"])

    def _ask_device(self) -> None:
        import torch

        used, self.reason = device_bytes(torch.cuda.current_device())
        self._device = max(filter(None, (used, self._device)), default=None)

    def step_done(self, step: int) -> None:
        if len(self._live) < STEPS and (live := self._sample()) is not None:
            self._live.append(live)
            self._ask_device()

    def result(self) -> Measured:
        if self._forget:
            self._forget()
            self._forget = None
            if self._sample() is None:
                self.reason = "CUDA was never initialised in this process"
            else:
                self._ask_device()
        return self._measured(self._phases, self._live, reserved_bytes=self._reserved, device_bytes=self._device)


def device_bytes(index: int | None) -> tuple[int | None, str | None]:
    """Return this process's bytes on a CUDA device by NVML; None with a reason where NVML does not tell."""
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


def recent_device_bytes(index: int | None) -> int | None:
    """Return `device_bytes` of at most `LOOK_EVERY` seconds ago: NVML's list of processes takes milliseconds."""
    return _device_bytes_at(index, int(time.monotonic() / LOOK_EVERY))


@lru_cache(maxsize=8)
def _device_bytes_at(index: int | None, look: int) -> int | None:
    return device_bytes(index)[0]


@cache
def _handle(index: int | None) -> Any:
    """Return NVML's handle of a CUDA device, by UUID: the two libraries number devices differently."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
