"""Peaks on CPU: every change of the allocator's total, over a window, by phase."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from toolkit.core.phases import observe, phase
from toolkit.measurement.window import MEASURED_STEPS, Measured, Window

NOTE = "toolkit-note/"
"""Name prefix of one-byte allocations, at which the profiler records the allocator's total."""

BUSY = "another torch profiler was running, and two at once take each other's events"
TAKEN = "another torch profiler was started within the memory window and took its events"
NO_SAVE = "the save's peak is missing: "

HELD = {"forward", "backward", "step"}
"""Phases that hold a checkpoint's snapshot after the first one."""

RELEASE_SECONDS = 0.02
"""Before a measured optimizer step, so that its phase begins without the backward's buffers."""


class _Recording:
    """Records the CPU allocator's total after each of its calls, until `stop`.

    Two switches make it known: a flag under which the allocator counts what every thread allocates and frees, and
    torch's profiler, which keeps the count after each call. Source: c10/core/CPUAllocator.cpp,
    `ProfiledCPUMemoryReporter`. The profiler keeps no operators: they would cost about a kilobyte of host memory each,
    gigabytes with many layers and micro-batches. Threads that torch did not start from this one are counted, but their
    calls are not recorded: a short peak on them between two calls of this thread is missed.
    """

    def __init__(self) -> None:
        import torch

        # What the extension module links holds the symbols, wherever that library lies.
        library = ctypes.CDLL(torch._C.__file__)
        self._flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
        self._level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        self._thread = threading.get_ident()
        self._running = ExitStack()
        self._lost = False
        self._flag.value = True
        # What stands behind torch.profiler.profile, which would import torch._inductor for a second or more.
        self._profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else its library writes «profiler_start» to every terminal
        self._running.enter_context(self._profiler)
        # Distinguishes ours from a later one: that one sets it again.
        torch.autograd.profiler._set_is_profiler_enabled(False)
        self.note("start")

    def note(self, label: str) -> None:
        """Allocate one byte under a name, so that the allocator records its total, other threads' bytes included."""
        import torch

        if threading.get_ident() != self._thread:
            return
        ours = torch._C._autograd._profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled
        self._lost = self._lost or not ours
        if self._lost:
            return
        operators = {torch.profiler.ProfilerActivity.CPU}
        with self.quiet():  # each of the two warns of GPU events, of which there are none
            self._profiler.toggle_collection_dynamic(True, operators)
            with torch.profiler.record_function(NOTE + label):
                torch.empty(1, dtype=torch.uint8)
            self._profiler.toggle_collection_dynamic(False, operators)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Keep torch's C++ warnings from the terminal; its errors are printed."""
        level, self._level.value = self._level.value, max(2, self._level.value)
        try:
            yield
        finally:
            self._level.value = level

    def stop(self) -> list[tuple[int, str]] | None:
        """End it: each total in its order, in bytes above what stood at the beginning, and the note's label or "".

        None where another profiler has taken the events; that one is left running.
        """
        assert threading.get_ident() == self._thread, "the profiler belongs to the thread that started it"
        self.note("stop")
        self._flag.value = False
        if self._lost:
            return None
        self._running.close()
        assert self._profiler.kineto_results is not None
        totals = sorted(_totals(self._profiler.kineto_results.experimental_event_tree()))
        base = next(total for _, total, label in totals if label == "start")
        return [(total - base, label) for _, total, label in totals]


def _totals(tree: Iterable[Any], label: str = "") -> Iterator[tuple[int, int, str]]:
    """Return time in ns, total and label of each allocation and release in a profiler's event tree."""
    for node in tree:
        if node.name != "[memory]":
            yield from _totals(node.children, node.name.removeprefix(NOTE) if node.name.startswith(NOTE) else label)
            continue
        fields = node.extra_fields
        if not label:
            yield node.start_time_ns, fields.total_allocated, ""
        elif fields.alloc_size > 0:  # without the note's own byte
            yield node.start_time_ns, fields.total_allocated - fields.alloc_size, label


class CpuWindow(Window):
    """The allocator's totals on CPU, from here through the third step, and around the first save of each kind."""

    def __init__(self) -> None:
        super().__init__("cpu")
        import torch  # noqa: F401  before the clock starts: the worker needs it anyway

        self._steps = 0
        self._saved: set[str] = set()
        self._recorded_snapshot = self._later_snapshot = 0
        """Bytes that the first checkpoint left allocated: in the recorded steps, or since. They are freed after the last step."""
        self._recording = self._record("")
        if self._recording is not None:
            self._forget = observe(self._on_phase)

    def _record(self, missing: str) -> _Recording | None:
        """Start to record, unless a torch profiler runs; in other threads only the second flag knows it."""
        import torch

        if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
            self.reason = missing + BUSY
            return None
        with self._count_overhead():
            return _Recording()

    def _read(self, recording: _Recording, missing: str) -> list[tuple[int, str]]:
        """Stop to record. Return the totals; none where another profiler has taken them."""
        with self._count_overhead():
            totals = recording.stop()
        if totals is None:
            self.reason = missing + TAKEN
        return totals or []

    def _on_phase(self, name: str, begins: bool) -> None:
        assert self._recording is not None, "phases are observed while the window is open"
        if begins and name == "step":
            # gloo's thread waits for the interpreter to release what the backward has sent.
            time.sleep(RELEASE_SECONDS)
        self._recording.note(f"{'begin' if begins else 'end'}/{name}")

    def step_done(self, step: int) -> None:
        if self._recording is None:
            for name in HELD & self.peaks.highest.keys() if self._later_snapshot else ():
                self.peaks.highest[name] += self._later_snapshot
            self._later_snapshot = 0
            return
        self._steps += 1
        self._recording.note(f"step/{self._steps}")
        if self._steps == MEASURED_STEPS:
            self.close()

    def close(self) -> None:
        if self._recording is None:
            return
        self._forget()
        totals = self._read(self._recording, "")
        self._recording = None
        self.peaks.follow(totals)
        self.live = [total for total, label in totals if label.startswith("step/")]
        at = {label: total for total, label in reversed(totals)}  # the first of each label
        self._recorded_snapshot = at.get("end/save", 0) - at.get("begin/save", 0)

    @contextmanager
    def saving(self, what: str = "result") -> Iterator[None]:
        first = self._recording is None and bool(self.live) and what not in self._saved
        self._saved.add(what)
        recording = self._record(NO_SAVE) if first else None
        try:
            # torch warns of blocks that are freed here and were allocated while nothing was counted.
            with recording.quiet() if recording else nullcontext(), phase("save"):
                yield
        finally:
            if recording and (totals := self._read(recording, NO_SAVE)):
                if what == "checkpoint":
                    self._later_snapshot = totals[-1][0]
                base = self.live[-1] - (self._recorded_snapshot if what == "result" else 0)
                self.peaks.mark("save", True)
                self.peaks.add(base + max(total for total, _ in totals))

    def result(self) -> Measured:
        assert self._recording is None, "close the window before its result is read"
        return super().result()
