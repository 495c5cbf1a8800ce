"""Measurements of one rank and of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.core.display import Result, Table
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes
from toolkit.engines.records import StateMemory


@dataclass(frozen=True, kw_only=True)
class Measured(Result):
    """One rank's memory. Bytes are the allocator's, except `device_bytes` and the two of `rss`."""

    device: str
    """`cpu` or `cuda`."""
    peak_bytes: int | None
    """The highest total over all phases; None where nothing was measured, and `reason` says why."""
    peak_phase: str | None
    phases: Mapping[str, int] = field(default_factory=dict)
    """The highest total within each phase that was seen. What lies between two phases belongs to the one before."""
    live_bytes: int | None = None
    """Allocated bytes between steps: at the end of the last measured step, usually the third."""
    live_steps: tuple[int, ...] = ()
    """The same for each measured step."""
    reserved_bytes: int | None = None
    """The most that CUDA's caching allocator held; None on CPU."""
    device_bytes: int | None = None
    """The most that NVML saw this process hold, CUDA context included; None on CPU, and where NVML does not say."""
    rss_bytes: int
    """Resident bytes of the process: with libraries, mapped files and the C library's free memory."""
    rss_peak_bytes: int
    """The highest resident set since the process started; on CPU reading the window is in it, 2 KB an allocation."""
    seconds: float = 0.0
    """What measuring cost: to start, stop and read. On CPU the steps within the window run a few percent slower too."""
    reason: str | None = None
    """Why nothing was measured, or what is missing."""

    def tables(self) -> list[Table]:
        rows = [(name, format_bytes(self.phases[name])) for name in PHASES if name in self.phases]
        notes = [self.reason] if self.reason else []
        return [Table(title="Highest memory of this rank", columns=("phase", "bytes"), rows=rows, notes=notes)]


@dataclass(frozen=True, kw_only=True)
class Memory(Result):
    """Every rank's memory, and the worst rank's by part."""

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

    def to_dict(self) -> dict[str, Any]:
        """Return `measured` (or None), `reason` and `host`, in bytes and seconds."""
        return {"measured": self.measured, "reason": self.reason, "host": self.host}

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
