"""A sample of the grid of `benchmarks/memory_truth.py`, by its own command: real runs beside forecasts made before them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

RUNS = 20
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory_truth.py"


def test_forecasts_are_true(tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = [sys.executable, str(BENCHMARK), "--runs", str(RUNS), "--seed", "9"]
    command += ["--work", str(tmp_path), "--results", str(results)]
    made = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert made.returncode == 0, made.stderr[-2000:]
    rows = json.loads((results / "memory_truth.json").read_text())["runs"]
    assert len(rows) == RUNS
    assert not [row["failed"] for row in rows if "failed" in row]
    assert {row["strategy"]["sharding"] for row in rows} >= {"none", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"}
    errors = [abs(row["forecast_peak_bytes"] / row["measured_peak_bytes"] - 1) for row in rows]
    assert statistics.median(errors) <= 0.015
    assert max(errors) <= 0.08
    assert min(row["measured_peak_bytes"] for row in rows) >= 100 * 2**20
