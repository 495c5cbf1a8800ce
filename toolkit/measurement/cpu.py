"""The allocator's truth on CPU: every change of its total, over a window, cut by the phases."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from toolkit.core.phases import observe, phase
from toolkit.measurement.results import Measured
from toolkit.measurement.window import STEPS, Window

NOTE = "toolkit-note/"
"""Marks an allocation of one byte that is made only for the allocator to say its total."""

BUSY = "another torch profiler was running, and two at once take each other's events"
TAKEN = "another torch profiler was started within the memory window and took its events"


class _Recording:
    """Records the CPU allocator's total after each of its calls, until `stop`.

    Two switches make it known: a flag under which the allocator counts what every thread allocates and frees, and
    torch's profiler, which keeps the count after each call. Source: c10/core/CPUAllocator.cpp,
    `ProfiledCPUMemoryReporter`. The profiler keeps no operators: they would cost about a kilobyte of host memory each,
    gigabytes with many layers and micro-batches. Threads that torch did not start from this one are counted, but their
    calls are not kept: a peak that comes and goes on them between two calls of this one is not seen.
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
        with _silence_kineto():
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
        was, self._level.value = self._level.value, max(2, self._level.value)
        try:
            yield
        finally:
            self._level.value = was

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


def _peaks(totals: Iterable[tuple[int, str]]) -> dict[str, int]:
    """Return the highest total within each phase: of nested phases the inner one, until the next phase begins."""
    highest: dict[str, int] = {}
    inside: list[str] = []
    now = "load"
    for total, label in totals:
        highest[now] = max(total, highest.get(now, total))
        what, _, name = label.partition("/")
        if what == "begin":
            inside.append(name)
        elif what == "end" and name in inside:
            inside.remove(name)
        now = inside[-1] if inside else now
        highest[now] = max(total, highest.get(now, total))
    return highest


def _is_profiler_active() -> bool:
    """Return whether a torch profiler runs, in this thread or in others (only the second flag knows those)."""
    import torch

    return torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


class CpuWindow(Window):
    """The allocator's truth on CPU, from here through the third step, and around the first save of each kind."""

    def __init__(self) -> None:
        super().__init__("cpu")
        import torch  # noqa: F401  before the clock starts: the worker needs it anyway

        self._phases: dict[str, int] = {}
        self._live: tuple[int, ...] = ()
        self._steps = 0
        self._recording: _Recording | None = None
        self._saved: set[str] = set()
        if _is_profiler_active():
            self.reason = BUSY
            return
        with self._count_overhead():
            recording = self._recording = _Recording()
        self._forget = observe(lambda name, begins: recording.note(f"{'begin' if begins else 'end'}/{name}"))

    def step_done(self, step: int) -> None:
        if self._recording is None:
            return
        self._steps += 1
        self._recording.note(f"step/{self._steps}")
        if self._steps == STEPS:
            self.close()

    def close(self) -> None:
        if self._recording is None:
            return
        self._forget()
        with self._count_overhead():
            totals = self._recording.stop()
        self._recording = None
        if totals is None:
            self.reason = TAKEN
            return
        self._phases = _peaks(totals)
        self._live = tuple(total for total, label in totals if label.startswith("step/"))

    @contextmanager
    def saving(self, what: str = "result") -> Iterator[None]:
        fresh = self._recording is None and bool(self._live) and what not in self._saved
        self._saved.add(what)
        if fresh and _is_profiler_active():
            self.reason = f"the save's peak is missing: {BUSY}"
        elif fresh:
            with self._save_window(), phase("save"):
                yield
            return
        with phase("save"):
            yield

    @contextmanager
    def _save_window(self) -> Iterator[None]:
        with self._count_overhead():
            recording = _Recording()
        try:
            # torch warns of blocks that are freed here and were allocated while nothing was counted.
            with recording.quiet():
                yield
        finally:
            with self._count_overhead():
                totals = recording.stop()
            if totals is None:
                self.reason = f"the save's peak is missing: {TAKEN}"
            else:
                rise = max(total for total, _ in totals)
                self._phases["save"] = max(self._live[-1] + rise, self._phases.get("save", 0))

    def result(self) -> Measured:
        assert self._recording is None, "close the window before its result is asked for"
        return self._measured(self._phases, self._live)


@contextmanager
def _silence_kineto() -> Iterator[None]:
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
