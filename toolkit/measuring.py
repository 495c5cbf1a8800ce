"""What a run's memory really was: peaks by phase, rank by rank, on CPU and on CUDA.

On CPU the allocator itself is asked, over a window from the process's start through the third step, and once more around the
first save. On CUDA the allocator keeps its own peak, which is read and reset wherever a phase begins or ends, for the whole run.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.engines.job import Holdings
from toolkit.phases import PHASES, PREFIX, observe, phase
from toolkit.show import Shown, Table
from toolkit.units import KiB, format_bytes

if TYPE_CHECKING:
    import torch

STEPS = 3
"""Optimizer steps that the window on CPU covers: the first creates the moments, the third is like all that follow."""

PROBE = "toolkit-probe/"
"""Marks an allocation of one byte that is made only for the allocator to say its total."""

DISABLED = "the memory window was switched off (--no-memory-window)"
BUSY = "another torch profiler was running, and two at once take each other's events"
TAKEN = "another torch profiler was started within the memory window and took its events"


@dataclass(frozen=True, kw_only=True)
class Measured(Shown):
    """What one rank's memory was. Bytes are the allocator's, but for `device_bytes` and the two of `rss`."""

    device: str
    """`cpu` or `cuda`."""
    peak_bytes: int | None
    """The highest total over all phases; None where nothing was measured, and `reason` says why."""
    peak_phase: str | None
    phases: Mapping[str, int] = field(default_factory=dict)
    """The highest total within each phase that was seen. What lies between two phases belongs to the one before."""
    live_bytes: int | None = None
    """Between steps: what is allocated at the end of the last measured step, the third where there are as many."""
    live_steps: tuple[int, ...] = ()
    """The same for each measured step."""
    reserved_bytes: int | None = None
    """The most that CUDA's caching allocator held; None on CPU."""
    device_bytes: int | None = None
    """The most that NVML saw this process hold, CUDA context included; None on CPU, and where NVML does not say."""
    rss_bytes: int
    """Resident set of the process now: libraries, files mapped and what the C library keeps are in it."""
    rss_peak_bytes: int
    """The highest resident set since the process started."""
    seconds: float = 0.0
    """What measuring cost once: to start, stop and read. Not in it: on CPU the steps within the window run slower."""
    reason: str | None = None
    """Why nothing was measured, or what is missing."""

    def tables(self) -> list[Table]:
        rows = [(name, format_bytes(self.phases[name])) for name in PHASES if name in self.phases]
        notes = [self.reason] if self.reason else []
        return [Table(title="Highest memory of this rank", columns=("phase", "bytes"), rows=rows, notes=notes)]


@dataclass(frozen=True, kw_only=True)
class Memory(Shown):
    """Every rank's memory, and the worst rank's by part."""

    ranks: tuple[Measured, ...]
    held: tuple[Mapping[str, int], ...]
    """Bytes of parameters, master and optimizer of each rank, from the audit after the first step."""

    @property
    def reason(self) -> str | None:
        """Why nothing was measured, or what is missing: each rank's reason once."""
        return "; ".join(dict.fromkeys(rank.reason for rank in self.ranks if rank.reason)) or None

    @property
    def measured(self) -> dict[str, Any] | None:
        """What `compare` and `memory.json` say; the top is the worst rank's. None where a rank measured nothing."""
        if any(rank.peak_bytes is None for rank in self.ranks):
            return None
        per_rank = [
            {"rank": number, "parts": _parts(rank, held), **rank.to_dict()}
            for number, (rank, held) in enumerate(zip(self.ranks, self.held, strict=True))
        ]
        worst = max(per_rank, key=lambda row: row["peak_bytes"])
        return {**{key: worst[key] for key in ("peak_bytes", "peak_phase", "phases", "parts")}, "per_rank": per_rank}

    @property
    def host(self) -> dict[str, Any]:
        """The hosts' memory, summed over all ranks: allocator totals on CPU ranks, peak resident sets on CUDA ranks."""
        peaks = [rank.peak_bytes if rank.device == "cpu" else rank.rss_peak_bytes for rank in self.ranks]
        known = [peak for peak in peaks if peak is not None]
        return {"peak_bytes": sum(known) if len(known) == len(peaks) else None}

    def to_dict(self) -> dict[str, Any]:
        """`measured` (or None), `reason` and `host`, in bytes and seconds."""
        return {"measured": self.measured, "reason": self.reason, "host": self.host}

    def tables(self) -> list[Table]:
        def cell(size: int | None) -> str:
            return "–" if size is None else format_bytes(size)

        seen = [name for name in PHASES if any(name in rank.phases for rank in self.ranks)]
        rows = [
            (number, cell(rank.peak_bytes), *(cell(rank.phases.get(name)) for name in seen), cell(rank.rss_peak_bytes))
            for number, rank in enumerate(self.ranks)
        ]
        notes = [self.reason] if self.reason else []
        columns = ("rank", "peak", *seen, "peak RSS")
        return [Table(title="Highest memory of each rank, by phase", columns=columns, rows=rows, notes=notes)]


class Window:
    """What measures one rank. This one is switched off: it marks the save and otherwise says why there is nothing."""

    def __init__(self, device_kind: str, reason: str | None = None) -> None:
        self.device_kind = device_kind
        self.reason = reason
        self.seconds = 0.0

    def step_done(self, step: int) -> None:
        """Say that an optimizer step has ended and its gradients are gone. On CPU the third call closes the window."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Mark the phase `save`. On CPU the first one after the window has closed opens a fresh window."""
        with phase("save"):
            yield

    def close(self) -> None:
        """Stop measuring. A second call does nothing."""

    def result(self) -> Measured:
        """What was measured until now. On CPU the window must have been closed."""
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
            rss_bytes=_rss(),
            rss_peak_bytes=_rss_peak(),
            seconds=round(self.seconds, 4),
            reason=self.reason,
            **more,
        )

    @contextmanager
    def _costing(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


def start(device_kind: str, enabled: bool = True) -> Window:
    """Begin to measure this rank, before its first tensor: on CPU, what was allocated earlier is not counted.

    Args:
        device_kind: `cpu` or `cuda`, where the model will live.
        enabled: False for `--no-memory-window`, which concerns the CPU alone: on CUDA measuring costs nothing.

    Raises:
        ValueError: for another kind of device.
    """
    if device_kind == "cuda":
        return _CudaWindow()
    if device_kind != "cpu":
        raise ValueError(f"device {device_kind!r}: expected cpu or cuda")
    return _CpuWindow() if enabled else Window("cpu", DISABLED)


def live_bytes(device: torch.device | str) -> dict[str, int | None]:
    """This rank's memory now, cheap enough for every step: `rss` on CPU; `allocated`, `reserved`, `device` on CUDA."""
    if str(device).startswith("cpu"):
        return {"rss": _rss()}
    import torch

    stats = torch.cuda.memory_stats_as_nested_dict(device)
    used, _ = _device_bytes(torch.device(device).index)
    return {
        "allocated": stats["allocated_bytes"]["all"]["current"],
        "reserved": stats["reserved_bytes"]["all"]["current"],
        "device": used,
    }


def collect(measured: Measured, holdings: Holdings, gather: Callable[[list[Any]], list[Any]]) -> Memory:
    """Bring every rank's measurement together; a collective, every rank gets the whole.

    Args:
        measured: This rank's.
        holdings: From the audit after the first step; of what lives on the device that was measured.
        gather: Takes a list of one item and gives that of all ranks, in their order: `accelerate.utils.gather_object`.
    """
    held = {"parameters": holdings.parameters, "master": holdings.master, "optimizer": holdings.optimizer or 0}
    pairs = gather([(asdict(measured), held)])
    return Memory(ranks=tuple(Measured(**rank) for rank, _ in pairs), held=tuple(held for _, held in pairs))


def _parts(rank: Measured, held: Mapping[str, int]) -> dict[str, int]:
    """The bytes at the peak by part, adding up to it. Before the first step the states are not yet what the audit found."""
    assert rank.peak_bytes is not None
    known = {} if rank.peak_phase in ("load", "prepare") else dict(held)
    return {**known, "transient": rank.peak_bytes - sum(known.values())}


# ---- CPU


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """What a recording saw; times in ns, totals in bytes above what stood when it began."""

    totals: Sequence[tuple[int, int]]
    """When the allocator's total changed on a thread that the profiler follows, and to what, all threads' memory in it."""
    probes: Mapping[str, int]
    """The total at each labelled probe."""
    marks: Sequence[tuple[int, int, str]]
    """Begin, end and name of every phase."""

    def peaks(self, before: str) -> dict[str, int]:
        """The highest total within each phase; until the first mark it is the phase `before`.

        The innermost of nested phases counts. Between two phases the one before goes on.
        """
        moments: list[tuple[int, str, Any]] = [(when, "total", total) for when, total in self.totals]
        for mark in self.marks:
            moments += [(mark[0], "begin", mark), (mark[1], "end", mark)]
        highest, level = {before: 0}, 0
        inside: list[tuple[int, int, str]] = []
        now = before
        for _, what, value in sorted(moments, key=lambda moment: moment[0]):
            if what == "total":
                level = value
            elif what == "begin":
                inside.append(value)
            else:
                inside.remove(value)
            now = inside[-1][2] if inside else now
            highest[now] = max(level, highest.get(now, 0))
        return highest


class _Recording:
    """torch's profiler, and the flag under which the CPU allocator counts what every thread allocates and frees.

    Source: c10/core/CPUAllocator.cpp, `ProfiledCPUMemoryReporter`. Threads that torch did not start from a followed one are
    in the totals, though they make no event of their own: a peak that comes and goes on such a thread alone, between
    two events and two probes, is not seen.
    """

    def __init__(self, quiet: bool = False) -> None:
        import torch

        # What the extension module links holds the symbol, wherever the library lies.
        library = ctypes.CDLL(torch._C.__file__)
        self._flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
        self._level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        self._was = (self._flag.value, self._level.value)
        self._flag.value = True
        if quiet:  # torch warns of each thousandth block that is freed here and was allocated while nothing was counted
            self._level.value = max(2, self._level.value)
        # What stands behind torch.profiler.profile, which would import torch._inductor for a second or more.
        self._running = ExitStack()
        self._profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        with _without_kineto_lines():
            self._running.enter_context(self._profiler)
        probe("start")

    def stop(self) -> _Trace | None:
        """End it and read. None where another profiler has taken the events."""
        import torch

        if torch._C._autograd._profiler_enabled():
            probe("end")
            self._running.close()
        self._flag.value, self._level.value = self._was
        results = self._profiler.kineto_results
        return _read(results.experimental_event_tree()) if results else None


def probe(label: str) -> None:
    """Make the allocator say its total, under a name: an event of the profiler, which counts what unseen threads did."""
    import torch

    with torch.profiler.record_function(PROBE + label):
        torch.empty(1, dtype=torch.uint8)


def busy() -> bool:
    """Whether a torch profiler runs: in this thread, or over all threads (then only the second flag knows)."""
    import torch

    return torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


class _CpuWindow(Window):
    """The allocator's truth on CPU, from here through the third step, and around the first save."""

    def __init__(self) -> None:
        super().__init__("cpu")
        import torch  # noqa: F401  before the clock starts: the worker needs it anyway

        self._phases: dict[str, int] = {}
        self._live: tuple[int, ...] = ()
        self._steps = 0
        self._recording: _Recording | None = None
        self._forget: Callable[[], None] = lambda: None
        self._saved = False
        if busy():
            self.reason = BUSY
            return
        with self._costing():
            self._recording = _Recording()
        self._forget = observe(lambda name, begins: probe("phase"))

    def step_done(self, step: int) -> None:
        if self._recording is None:
            return
        self._steps += 1
        probe(f"step-{self._steps}")
        if self._steps == STEPS:
            self.close()

    def close(self) -> None:
        if self._recording is None:
            return
        self._forget()
        with self._costing():
            trace = self._recording.stop()
        self._recording = None
        if trace is None:
            self.reason = TAKEN
            return
        self._phases = trace.peaks("load")
        self._live = tuple(trace.probes[f"step-{number}"] for number in range(1, self._steps + 1))

    @contextmanager
    def saving(self) -> Iterator[None]:
        fresh = self._recording is None and self._live and not self._saved
        if fresh and busy():
            self.reason = f"the save's peak is missing: {BUSY}"
            fresh = False
        self._saved = True
        if not fresh:
            with phase("save"):
                yield
            return
        with self._costing():
            recording = _Recording(quiet=True)
        try:
            with phase("save"):
                yield
        finally:
            with self._costing():
                trace = recording.stop()
            if trace is None:
                self.reason = f"the save's peak is missing: {TAKEN}"
            else:
                rise = max((total for _, total in trace.totals), default=0)
                self._phases["save"] = self._live[-1] + max(0, rise)

    def result(self) -> Measured:
        assert self._recording is None, "close the window before its result is asked for"
        return self._measured(self._phases, self._live)


def _read(tree: Iterable[Any]) -> _Trace | None:
    """The profiler's event tree as a trace. None where the window's first event is missing."""
    totals: list[tuple[int, int]] = []
    probes: dict[str, int] = {}
    marks: list[tuple[int, int, str]] = []
    todo: list[tuple[Any, str | None]] = [(node, None) for node in tree]
    while todo:
        node, label = todo.pop()
        name = node.name
        if name == "[memory]":
            fields = node.extra_fields
            if fields.device.type != "cpu":
                continue
            if label is None:
                totals.append((node.start_time_ns, fields.total_allocated))
            elif fields.alloc_size > 0:  # the total without the probe's own byte
                probes[label] = fields.total_allocated - fields.alloc_size
                totals.append((node.start_time_ns, probes[label]))
            continue
        if name.startswith(PREFIX):
            marks.append((node.start_time_ns, node.end_time_ns, name.removeprefix(PREFIX)))
        elif name.startswith(PROBE):
            label = name.removeprefix(PROBE)
        todo += [(child, label) for child in node.children]
    if "start" not in probes:
        return None
    base = probes["start"]
    return _Trace(
        totals=sorted((when, total - base) for when, total in totals),
        probes={label: total - base for label, total in probes.items()},
        marks=sorted(marks),
    )


@contextmanager
def _without_kineto_lines() -> Iterator[None]:
    """Keep the profiler's library from writing «profiler_start» to every user's terminal; it reads this once."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"
    try:
        yield
    finally:
        del os.environ[name]


def _rss() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _rss_peak() -> int:
    """The mark of this program alone on Linux: `ru_maxrss` there begins with what the parent held when it forked."""
    with suppress(FileNotFoundError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KiB


# ---- CUDA


class _CudaWindow(Window):
    """The caching allocator's own peaks, read and reset wherever a phase begins or ends.

    Source: torch/cuda/memory.py. Before CUDA is initialised nothing is read, because reading would initialise the wrong
    device. The reset is felt by whoever else asks `torch.cuda.max_memory_allocated`.
    """

    def __init__(self) -> None:
        super().__init__("cuda")
        self._phases: dict[str, int] = {}
        self._inside: list[str] = []
        self._now = "load"
        self._live: list[int] = []
        self._reserved = 0
        self._device: int | None = None
        self._open = True
        self._forget = observe(self._turn)

    def _turn(self, name: str, begins: bool) -> None:
        with self._costing():
            self._look()
        if begins:
            self._inside.append(name)
            self._now = name
        else:
            self._inside.remove(name)
            self._now = self._inside[-1] if self._inside else name

    def _look(self) -> int | None:
        """Credit the peak since the last look to the phase that it belongs to; the bytes that are live now."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict()
        if not stats:
            return None
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats()
        self._phases[self._now] = max(allocated["peak"], self._phases.get(self._now, 0))
        self._reserved = max(reserved["peak"], self._reserved)
        return int(allocated["current"])

    def step_done(self, step: int) -> None:
        if len(self._live) < STEPS and (live := self._look()) is not None:
            self._live.append(live)
            self._ask_device()

    def _ask_device(self) -> None:
        import torch

        used, self.reason = _device_bytes(torch.cuda.current_device())
        self._device = max(filter(None, (used, self._device)), default=None)

    def close(self) -> None:
        if not self._open:
            return
        if self._look() is not None:
            self._ask_device()
        self._forget()
        self._open = False

    def result(self) -> Measured:
        if self._open:
            self._look()
        if not self._phases:
            self.reason = "CUDA was never initialised in this process"
        return self._measured(self._phases, self._live, reserved_bytes=self._reserved, device_bytes=self._device)


def _device_bytes(index: int | None) -> tuple[int | None, str | None]:
    """What NVML says that this process holds on a CUDA device, and where it does not say, why."""
    try:
        import pynvml
    except ImportError:
        return None, "device bytes are missing: NVML needs nvidia-ml-py (pip install nvidia-ml-py)"
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(index))
    except pynvml.NVMLError as error:
        return None, f"device bytes are missing: NVML says {error}"
    used = next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
    lost = "device bytes are missing: NVML does not list this process (a container with process ids of its own?)"
    return used, None if used is not None else lost


@cache
def _handle(index: int | None) -> Any:
    """NVML's handle of a CUDA device, by its UUID: the two libraries count devices differently."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
