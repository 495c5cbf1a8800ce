"""A rank's window of measurement, which CPU and CUDA share, and the results of one rank and of all."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.core.display import Result, Table
from toolkit.core.phases import PHASES, phase
from toolkit.core.units import KiB, format_bytes
from toolkit.engines.records import StateMemory

MEASURED_STEPS = 3
"""Optimizer steps that are measured: the first creates the moments, the third is like all that follow."""


@dataclass(frozen=True, kw_only=True)
class Measured(Result):
    """One rank's memory. Bytes are the allocator's, except `device_bytes` and the two of `rss`."""

    device: str
    """`cpu` or `cuda`."""
    peak_bytes: int | None
    """The highest total over all phases; None if nothing was measured, with the reason in `reason`."""
    peak_phase: str | None
    phases: Mapping[str, int] = field(default_factory=dict)
    """The highest total within each phase that was seen. What lies between two phases belongs to the one before."""
    live_bytes: int | None = None
    """Allocated bytes between steps: at the end of the last measured step, usually the third."""
    live_steps: tuple[int, ...] = ()
    """The same for each measured step."""
    reserved_bytes: int | None = None
    """The most bytes reserved by CUDA's caching allocator; None on CPU."""
    device_bytes: int | None = None
    """The most bytes of this process by NVML, CUDA context included; None on CPU, and where NVML lists none."""
    rss_bytes: int
    """Resident bytes of the process: with libraries, mapped files and the C library's free memory."""
    rss_peak_bytes: int
    """The highest resident set since the process started; on CPU reading the window is in it, 2 KB an allocation."""
    seconds: float = 0.0
    """Time to start, stop and read the measurement. On CPU the steps within the window also run a few percent slower."""
    reason: str | None = None
    """Why nothing was measured, or what is missing."""

    def tables(self) -> list[Table]:
        rows = [(name, format_bytes(self.phases[name])) for name in PHASES if name in self.phases]
        notes = [self.reason] if self.reason else []
        return [Table(title="Highest memory of this rank", columns=("phase", "bytes"), rows=rows, notes=notes)]


@dataclass(frozen=True, kw_only=True)
class Memory(Result):
    """Every rank's memory, and the worst rank's by part."""

    json_fields = "measured reason host"

    ranks: tuple[Measured, ...]
    states: tuple[Mapping[str, int], ...]
    """Bytes of parameters, master and optimizer of each rank, from the audit after the first step."""

    @property
    def reason(self) -> str | None:
        """Why nothing was measured, or what is missing: each rank's reason once."""
        reasons = [rank.reason for rank in self.ranks]
        for number, (rank, states) in enumerate(zip(self.ranks, self.states, strict=True)):
            if rank.live_bytes is not None and (elsewhere := sum(states.values()) - rank.live_bytes) > 0:
                reasons.append(
                    f"rank {number} holds {format_bytes(elsewhere)} of its states outside of the allocator (mapped "
                    "from a file, or on another device), and its peaks are without them"
                )
        return "; ".join(dict.fromkeys(filter(None, reasons))) or None

    @property
    def measured(self) -> dict[str, Any] | None:
        """The part of `compare` and `memory.json`: the worst rank's peak, and of each phase the worst rank's in it.

        None where a rank measured nothing.
        """
        per_rank = []
        for number, (rank, states) in enumerate(zip(self.ranks, self.states, strict=True)):
            if rank.peak_bytes is None:
                return None
            # While loading, the states differ from the audit's.
            parts = {} if rank.peak_phase in ("load", "prepare") else dict(states)
            parts["transient"] = rank.peak_bytes - sum(parts.values())
            per_rank.append({"rank": number, "parts": parts, **rank.to_dict()})
        worst = max(per_rank, key=lambda row: row["peak_bytes"])
        phases = {name: max(rank.phases.get(name, 0) for rank in self.ranks) for name in self._phases()}
        top = {key: worst[key] for key in ("peak_bytes", "peak_phase")}
        return {**top, "phases": phases, "parts": worst["parts"], "per_rank": per_rank}

    @property
    def host(self) -> dict[str, Any]:
        """The hosts' memory, summed over all ranks: allocator totals on CPU ranks, peak resident sets on CUDA ranks."""
        peaks = [rank.peak_bytes if rank.device == "cpu" else rank.rss_peak_bytes for rank in self.ranks]
        return {"peak_bytes": None if None in peaks else sum(peak or 0 for peak in peaks)}

    def _phases(self) -> list[str]:
        """Return the phases that any rank has seen."""
        return [name for name in PHASES if any(name in rank.phases for rank in self.ranks)]

    def tables(self) -> list[Table]:
        phases = self._phases()
        rows: list[tuple[Any, ...]] = []
        for number, rank in enumerate(self.ranks):
            sizes = [rank.peak_bytes, *map(rank.phases.get, phases), rank.rss_peak_bytes]
            rows.append((number, *("–" if size is None else format_bytes(size) for size in sizes)))
        notes = [self.reason] if self.reason else []
        columns = ("rank", "peak", *phases, "peak RSS")
        return [Table(title="Highest memory of each rank, by phase", columns=columns, rows=rows, notes=notes)]


def collect(measured: Measured, state_memory: StateMemory, gather: Callable[[list[Any]], list[Any]]) -> Memory:
    """Gather every rank's measurement on every rank. A collective.

    Args:
        measured: this rank's.
        state_memory: from the audit after the first step; the part on the measured device.
        gather: returns the items of all ranks in order: `accelerate.utils.gather_object`.
    """
    parts = {
        "parameters": state_memory.parameters,
        "master": state_memory.master,
        "optimizer": state_memory.optimizer or 0,
    }
    pairs = gather([(asdict(measured), parts)])
    return Memory(ranks=tuple(Measured(**rank) for rank, _ in pairs), states=tuple(states for _, states in pairs))


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

    def follow(self, totals: Iterable[tuple[int, str]]) -> None:
        """Take totals in their order, each with a label: `begin/PHASE`, `end/PHASE`, another one or none."""
        for total, label in totals:
            self.add(total)
            mark, _, name = label.partition("/")
            if mark in ("begin", "end"):
                self.mark(name, mark == "begin")
                self.add(total)


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
    """Return the highest resident bytes. The kernel's own mark is this program's; `ru_maxrss` starts at the parent's."""
    mark = re.search(r"^VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(mark[1] if mark else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * KiB
