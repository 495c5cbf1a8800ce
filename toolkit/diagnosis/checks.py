"""`diagnose()`: every check, each in its place, and what follows from them for a Strategy."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.core.display import Result, Table
from toolkit.diagnosis import libraries, machine
from toolkit.diagnosis.result import Finding
from toolkit.diagnosis.support import Ability, list_abilities

LIMIT = 60.0
"""Seconds that one check of a library may take."""
COMPILE_LIMIT = 900.0

_GROUPS = (
    ("torch", "bf16", "processes", "transformers", "accelerate", "datasets"),
    ("bitsandbytes", "peft", "deepspeed", "deepspeed operators", "flash-attn"),
)
"""The checks of one child process, in order. Two processes run at once."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Result):
    """What works on this machine, what does not and why."""

    findings: tuple[Finding, ...]
    abilities: tuple[Ability, ...]

    def status(self, check: str) -> str:
        """Return the status of a check."""
        return next(finding.status for finding in self.findings if finding.check == check)

    def ability(self, field: str, value: str) -> Ability:
        """Return whether a value of a Strategy's field can run here."""
        return next(ability for ability in self.abilities if (ability.field, ability.value) == (field, value))

    def headline(self) -> str:
        """Return how many checks failed, and the shardings that run here."""
        failed = [finding.check for finding in self.findings if finding.status in ("missing", "broken")]
        checks = (
            f"{len(failed)} of {len(self.findings)} checks failed: {', '.join(failed)}."
            if failed
            else "All checks passed."
        )
        shardings = [ability for ability in self.abilities if ability.field == "sharding"]
        runs = [ability.value for ability in shardings if ability.runs]
        return f"{checks} {len(runs)} of {len(shardings)} shardings run here."

    def tables(self) -> list[Table]:
        """Return the checks with their fixes, and the values of a Strategy that run here."""
        checks = [(finding.check, finding.status, finding.detail) for finding in self.findings]
        fixes = [f"{finding.check}: {finding.fix}" for finding in self.findings if finding.fix]
        values = [
            (ability.field, ability.value, "yes" if ability.runs else "no", ability.reason)
            for ability in self.abilities
        ]
        return [
            Table(title="This machine", columns=("check", "status", "detail"), rows=checks, notes=fixes),
            Table(title="Values of a Strategy on this machine", columns=("field", "value", "runs", "why"), rows=values),
        ]


def diagnose(*, compile_ops: bool = False) -> Diagnosis:
    """Check all that training touches, in about 10 s; libraries in child processes, which may die.

    Args:
        compile_ops: also compile DeepSpeed's operator for this machine, which can take minutes. Nothing is otherwise.
    """
    from concurrent.futures import ThreadPoolExecutor

    groups = [_with_compiling(group) if compile_ops else group for group in _GROUPS]
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        try:
            apart = [pool.submit(lambda names: list(run_apart(names, stop=stop)), group) for group in groups]
            here = [check() for check in machine.CHECKS]
            all_findings = [finding for future in apart for finding in future.result()]
        finally:
            # Where somebody interrupts, the pool would else wait for every child.
            stop.set()
    findings = tuple(sorted([*here, *all_findings], key=_rank))
    return Diagnosis(findings=findings, abilities=tuple(list_abilities(findings)))


def _with_compiling(group: Sequence[str]) -> tuple[str, ...]:
    return tuple(name + libraries.COMPILE if name + libraries.COMPILE in libraries.CHECKS else name for name in group)


def _rank(finding: Finding) -> int:
    """Order findings: software, the machine, the Hub."""
    order = (
        "python", "torch", "torch build", "transformers", "accelerate", "deepspeed", "deepspeed operators",
        "bitsandbytes", "peft", "flash-attn", "datasets", "ipywidgets", "GPUs", "bf16", "processes",
        "host memory", "/dev/shm", "disk", "limits", "Hugging Face cache", "Hugging Face Hub",
    )  # fmt: skip
    return order.index(finding.check)


def run_apart(names: Sequence[str], *, each: float = LIMIT, stop: threading.Event | None = None) -> Iterator[Finding]:
    """Check libraries in a child process. Where a check ends it or hangs, continue in another one.

    Args:
        names: of `libraries.CHECKS`.
        each: seconds that one check may take.
        stop: set, it ends the child, and nothing more is checked.
    """
    stop = stop or threading.Event()
    left = list(names)
    while left and not stop.is_set():
        with tempfile.TemporaryFile() as errors:
            # Its own session: compilers that it starts end with it.
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "toolkit.diagnosis", str(os.getpid()), *left],
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip
            try:
                lines = _lines(child)
                while left:
                    limit = COMPILE_LIMIT if left[0].endswith(libraries.COMPILE) else each
                    line = _next_line(lines, limit, stop)
                    if line is None:
                        child.wait()
                        errors.seek(0)
                        yield _exit_text(left.pop(0), child.returncode, errors.read().decode(errors="replace"))
                        break
                    left.pop(0)
                    yield libraries.read(line)
            except queue.Empty:
                yield libraries.broken(left.pop(0), f"did not end within {limit:g} s")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _lines(child: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """Return a queue of the lines that a child prints; None at their end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None, "opened as a pipe"
        with child.stdout:
            for line in child.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next_line(lines: queue.Queue[str | None], limit: float, stop: threading.Event) -> str | None:
    """Return the next line within `limit` seconds.

    Raises:
        queue.Empty: where none came, or somebody said stop.
    """
    deadline = time.monotonic() + limit
    while True:
        try:
            return lines.get(timeout=0.1)
        except queue.Empty:
            if stop.is_set() or time.monotonic() > deadline:
                raise


def _exit_text(name: str, code: int, errors: str) -> Finding:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with {code}"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return libraries.broken(name, f"{how}: {last}" if last else how)
