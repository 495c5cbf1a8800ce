"""What both ways of measuring share: the window, and the process's resident set."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.core.phases import PHASES, phase
from toolkit.core.units import KiB
from toolkit.measurement.results import Measured

if TYPE_CHECKING:
    import psutil

STEPS = 3
"""Optimizer steps that are measured: the first creates the moments, the third is like all that follow."""


class Window:
    """What measures one rank. This one is switched off: it marks the save and otherwise says why there is nothing."""

    def __init__(self, device_kind: str, reason: str | None = None) -> None:
        self.device_kind = device_kind
        self.reason = reason
        self.seconds = 0.0

    def step_done(self, step: int) -> None:
        """Say that an optimizer step has ended and its gradients are gone. On CPU the third call closes the window."""

    @contextmanager
    def saving(self, what: str = "result") -> Iterator[None]:
        """Mark the phase `save`. On CPU the first one of its kind after the window has closed opens a fresh window."""
        with phase("save"):
            yield

    def close(self) -> None:
        """Say that training has ended. On CPU it closes the window where there were fewer than three steps."""

    def result(self) -> Measured:
        """Return the measurement. Call it last; on a CPU the window must be closed."""
        return self._measured({}, ())

    def _measured(self, phases: Mapping[str, int], live: Sequence[int], **more: int | None) -> Measured:
        peak_phase = max(phases, key=lambda name: phases[name]) if phases else None
        return Measured(
            device=self.device_kind,
            peak_bytes=phases[peak_phase] if peak_phase else None,
            peak_phase=peak_phase,
            phases={name: phases[name] for name in PHASES if name in phases},
            live_bytes=live[-1] if live else None,
            live_steps=tuple(live),
            rss_bytes=rss(),
            rss_peak_bytes=rss_peak(),
            seconds=round(self.seconds, 4),
            reason=self.reason,
            **more,
        )

    @contextmanager
    def _count_overhead(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


def rss() -> int:
    """Return the resident bytes of this process."""
    return int(_process(os.getpid()).memory_info().rss)


@lru_cache(maxsize=1)
def _process(pid: int) -> psutil.Process:
    """Return this process, created once: creation costs more than asking, and every step asks."""
    import psutil

    return psutil.Process(pid)


def rss_peak() -> int:
    """Return the highest resident bytes. Linux's own mark is this program's; `ru_maxrss` starts at the parent's."""
    with suppress(FileNotFoundError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KiB
