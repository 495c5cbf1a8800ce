"""What both ways of measuring share: the window, and the process's resident set."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.core.phases import PHASES, phase
from toolkit.core.units import KiB
from toolkit.measurement.results import Measured

STEPS = 3
"""Optimizer steps that are measured: the first creates the moments, the third is like all that follow."""


class PhasePeaks:
    """The highest total within each phase: of nested phases the inner one, until the next phase begins."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}
        self._inside: list[str] = []
        self._now = "load"

    def add(self, total: int) -> None:
        """Credit a total to the phase that is under way."""
        self.highest[self._now] = max(total, self.highest.get(self._now, total))

    def mark(self, name: str, begins: bool) -> None:
        """Enter or leave a phase."""
        if begins:
            self._inside.append(name)
        elif name in self._inside:
            self._inside.remove(name)
        self._now = self._inside[-1] if self._inside else name


class Window:
    """Measures one rank. This one is switched off: it marks the save and gives the reason why nothing is measured."""

    def __init__(self, device_kind: str, reason: str | None = None) -> None:
        self.device_kind = device_kind
        self.reason = reason
        self.seconds = 0.0
        self.peaks = PhasePeaks()
        self.live: list[int] = []
        """Allocated bytes after each measured step."""
        self.reserved: int | None = None
        self.device: int | None = None

    def step_done(self, step: int) -> None:
        """Call after an optimizer step, with its gradients freed. On CPU the third call closes the window."""

    @contextmanager
    def saving(self, what: str = "result") -> Iterator[None]:
        """Mark the phase `save`. On CPU the first one of its kind after the window has closed opens a fresh window."""
        with phase("save"):
            yield

    def close(self) -> None:
        """Call at the end of training. On CPU it closes the window if there were fewer than three steps."""

    def result(self) -> Measured:
        """Return the measurement. Call it last; on a CPU the window must be closed."""
        phases = {name: self.peaks.highest[name] for name in PHASES if name in self.peaks.highest}
        peak_phase = max(phases, key=lambda name: phases[name], default=None)
        return Measured(
            device=self.device_kind,
            peak_bytes=phases[peak_phase] if peak_phase else None,
            peak_phase=peak_phase,
            phases=phases,
            live_bytes=self.live[-1] if self.live else None,
            live_steps=tuple(self.live),
            reserved_bytes=self.reserved,
            device_bytes=self.device,
            rss_bytes=rss(),
            rss_peak_bytes=rss_peak(),
            seconds=round(self.seconds, 4),
            reason=self.reason,
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
    import psutil

    return int(psutil.Process().memory_info().rss)


def rss_peak() -> int:
    """Return the highest resident bytes. Linux's own mark is this program's; `ru_maxrss` starts at the parent's."""
    with suppress(FileNotFoundError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KiB
