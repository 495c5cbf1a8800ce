"""Every benchmark still runs: each in this process, by its own command line, over ranks that one server forks."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "def main()" in path.read_text())


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A benchmark's handler goes with it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def exit_code(name: str) -> object:
    """Run a benchmark; what it gives to `sys.exit`."""
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    except SystemExit as ended:
        return ended.code
    return 0


def test_these_are_the_benchmarks() -> None:
    assert {path.stem for path in (FOLDER / "results").glob("*.md")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_runs_and_says_of_which_commit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {path: path.read_bytes() for path in (FOLDER / "results").iterdir()}
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--smoke", "--results", str(tmp_path)])
    assert not exit_code(name)
    assert {path: path.read_bytes() for path in (FOLDER / "results").iterdir()} == stored
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit = json.loads((tmp_path / f"{name}.json").read_text())["commit"]
    assert commit.removesuffix(" + uncommitted changes") == head.stdout.strip()
    assert f"\ncommit {commit}\n" in (tmp_path / f"{name}.md").read_text()
