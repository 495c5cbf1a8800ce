"""Every benchmark still runs: each in this process, by its own command line, over ranks that one server forks."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from programs import ROOT, run_benchmark

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "def main()" in path.read_text())
ELSEWHERE = {"forecast_accuracy"}
"""What `test_forecast_accuracy.py` runs, with more than a smoke test's cells."""


def test_these_are_the_benchmarks() -> None:
    """One of a GPU has a result for each kind of card that it ran on, others may have one for each of their grids."""
    names = {path.stem for path in (FOLDER / "results").glob("*.md")}
    grids = {name for name in names for script in SCRIPTS if name.startswith((f"{script}_", "gpu-"))}
    assert names - grids == {*SCRIPTS} - {"gpu"}


def test_results_say_of_which_commit() -> None:
    """A clean one. The first six were measured before results said so."""
    before = {"hashing", "kill", "load_peak", "forecast_accuracy", "published", "sliders"}
    commits = {path.stem: json.loads(path.read_text()).get("commit") for path in (FOLDER / "results").glob("*.json")}
    assert {name for name, commit in commits.items() if commit is None} <= before
    assert [
        name
        for name, commit in commits.items()
        if commit and not re.fullmatch(r"[0-9a-f]{40}(, [0-9a-f]{40})*", commit)
    ] == []


def test_a_commit_is_named_and_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results alone do not count: each benchmark's would mark the next one's."""
    monkeypatch.syspath_prepend(FOLDER)
    machine = importlib.import_module("machine")
    results = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(machine, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(machine, "RESULTS", results)
    results.mkdir(parents=True)

    def git(*words: str) -> str:
        known = ["-c", "user.name=me", "-c", "user.email=me@here"]
        return subprocess.run(["git", *known, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    commit = machine.commit.__wrapped__
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() == "not recorded"
    git("init")
    git("commit", "--allow-empty", "--message=one")
    (results / "kill.json").touch()
    assert commit() == git("rev-parse", "HEAD").strip()
    (tmp_path / "new.py").touch()
    assert commit() == f"{git('rev-parse', 'HEAD').strip()} + uncommitted changes"


@pytest.mark.parametrize("name", sorted({*SCRIPTS} - ELSEWHERE))
def test_a_benchmark_runs_and_says_of_which_commit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {path: path.read_bytes() for path in (FOLDER / "results").iterdir()}
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not run_benchmark(name, "--smoke", "--results", str(tmp_path))
    assert {path: path.read_bytes() for path in (FOLDER / "results").iterdir()} == stored
    name = {"gpu": "gpu-dry-run"}.get(name, name)
    commit = json.loads((tmp_path / f"{name}.json").read_text())["commit"]
    assert commit == importlib.import_module("machine").commit()
    assert f"\ncommit {commit}\n" in (tmp_path / f"{name}.md").read_text()
