"""Processes that tests start, and what they wait for."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """For programs that import the package and this folder's modules."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, HERE, *paths])),
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def python(*words: object, code: int | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end. `code`: the expected exit status."""
    known = {"env": environment(), "timeout": 600, "capture_output": True, "text": True, "check": False}
    done: subprocess.CompletedProcess[str] = subprocess.run([sys.executable, *map(str, words)], **{**known, **options})
    assert code in (None, done.returncode), done.stdout[-2000:] + done.stderr[-6000:]
    return done


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start Python with these words. Both of its streams are pipes."""
    known = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = subprocess.Popen([sys.executable, *map(str, words)], **{**known, **options})
    return process


def run_benchmark(name: str, *flags: str) -> object:
    """Run a benchmark in this process, by its own command line, over ranks that one server forks: what it gives to `sys.exit`."""
    before = signal.getsignal(signal.SIGTERM)  # a benchmark's handler goes with it
    path = ROOT / "benchmarks" / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        patch.setattr(sys, "argv", [path.name, *flags])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            return ended.code
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0


def launch_config(ranks: int) -> dict[str, Any]:
    """The content of an Accelerate config file."""
    several = {"distributed_type": "MULTI_GPU" if ranks > 1 else "NO", "num_processes": ranks}
    known = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "num_machines": 1, "machine_rank": 0}
    return {**known, **several, "mixed_precision": "no"}


def until(true: Callable[[], object], seconds: float = 150, what: object = "", alive: Any = None) -> None:
    """Wait for it, while the process `alive` runs."""
    end = time.monotonic() + seconds
    while not true():
        assert alive is None or alive.poll() is None, (what, alive.communicate())
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def holds(log: Path, words: str) -> bool:
    """Whether a file is there with these words."""
    return log.exists() and words.encode() in log.read_bytes()


def left_of(folder: Path) -> list[psutil.Process]:
    """Processes of a run that still live: they carry its token."""
    from toolkit.launcher.processes import run_processes

    return run_processes(json.loads((folder / "lock").read_text().splitlines()[0])["token"])


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that nobody has reaped yet has."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


def gone(processes: list[psutil.Process], seconds: float = 2.0) -> None:
    """All of them, in time."""
    until(lambda: not living(processes), seconds, f"the end of {processes}")


def text_table(name: str) -> list[list[str]]:
    """The rows of a text file beside the unit tests: its cells between bars, without comments."""
    lines = (ROOT / "tests/unit" / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")] for line in lines if line and not line.startswith("#")]
