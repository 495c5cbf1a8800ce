"""What goes wrong in processes: it is said once, the whole run ends, and nothing is left of it."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import programs
import psutil
import pytest
import tiny
from programs import ROOT, environment, python, until

from toolkit import report

pytestmark = pytest.mark.dist

# Read by every interpreter that starts with this folder on its path: a rank that is asked to raises, wherever it is.
FAULT = """
import os, signal

def fail(*_):
    raise RuntimeError("a fault in the middle")

if os.environ.get("RANK") == "1":
    signal.signal(signal.SIGUSR1, fail)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, text for it, and the fault."""
    root = tmp_path_factory.mktemp("runs")
    tiny.llama(root / "llama")
    (root / "text.jsonl").write_text("".join(f'{{"text": "w{index % 240}"}}\n' for index in range(2_000)))
    (root / "fault").mkdir()
    (root / "fault" / "sitecustomize.py").write_text(FAULT)
    return root


@dataclass
class Ended:
    """A run whose rank 1 was given a signal after two steps."""

    code: int
    out: str
    err: str
    left: list[psutil.Process]
    run: Path


def start(work: Path, name: str) -> subprocess.Popen[str]:
    flags = ["--sharding", "ddp", "--processes", "2", "--steps", "100000", "--seq-len", "32", "--no-memory-window"]
    things = ["--model", str(work / "llama"), "--data", str(work / "text.jsonl"), "--run-dir", str(work / name)]
    environ = environment(work / "fault")
    return programs.start("-m", "toolkit.cli", "train", *things, *flags, cwd=work, env=environ)


def strike(running: subprocess.Popen[str], run: Path, number: int) -> list[psutil.Process]:
    """Give rank 1 a signal once the run is at its second step."""
    events = run / "events.jsonl"
    until(lambda: events.exists() and events.read_bytes().count(b"\n") >= 2, alive=running)
    family = psutil.Process(running.pid).children(recursive=True)
    rank = next(one for one in family if "toolkit.finetune" in one.cmdline() and one.environ().get("RANK") == "1")
    rank.send_signal(number)
    return family


@pytest.fixture(scope="module")
def ended(work: Path) -> Iterator[Ended]:
    """A run in which rank 1 raises."""
    running = start(work, "raised")
    try:
        family = strike(running, work / "raised", signal.SIGUSR1)
        out, err = running.communicate(timeout=150)
        _, left = psutil.wait_procs(family, timeout=1)
        yield Ended(running.returncode, out, err, left, work / "raised")
    finally:
        running.kill()


def test_a_rank_that_fails_ends_the_whole_run(ended: Ended) -> None:
    assert ended.code == 1
    assert ended.left == []
    assert not (ended.run / "export").exists()


def test_what_a_rank_raised_is_shown(ended: Ended) -> None:
    first, _, rest = ended.err.partition(" Its last lines (")
    assert re.fullmatch(r"toolkit: rank 1 ended with RuntimeError: a fault in the middle. It was .* step \d+\.", first)
    assert rest
    assert ended.err.rstrip().endswith("RuntimeError: a fault in the middle")
    assert str(ended.run / "logs" / "rank-1.log") in ended.err


def test_the_report_of_a_run_that_failed_holds_the_ranks_last_words(ended: Ended) -> None:
    found = report(ended.run)
    assert found.status == "failed"
    assert ended.err == f"toolkit: {found.run.words}\n"
    assert "rank 1 " in (ended.run / "report.html").read_text()


def launch(folder: Path, config: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Accelerate's own launcher, without ours."""
    file = ROOT / "accelerate_configs" / f"{config}.yaml"
    launch = ["accelerate.commands.launch", "--main_process_port", "0", "--config_file", file]
    return python("-m", *launch, "-m", "toolkit.finetune", *flags, cwd=folder)


@pytest.mark.parametrize(
    ("config", "flags", "sentence"),
    [
        (
            "zero3",
            ["--sharding", "fsdp"],
            "sharding 'fsdp' was requested, but the Accelerate launch environment has 'zero3'",
        ),
        ("ddp", ["--data", "nothing.jsonl"], "data nothing.jsonl: no such file or folder"),
    ],
)
def test_a_mistake_under_accelerate_launch_is_said_once(
    config: str, flags: list[str], sentence: str, tmp_path: Path
) -> None:
    done = launch(tmp_path, config, *flags)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count(sentence) == 1, done.stderr
    assert "toolkit/" not in done.stderr, "a traceback through our own files"
    assert list(tmp_path.iterdir()) == []
