"""A sample of the grid of `benchmarks/forecast_accuracy.py`, by its own command: real runs beside forecasts made before them."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.strategy import SHARDINGS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

UNTESTED = sorted(set(SHARDINGS) - {"ddp", "zero3", "fsdp"})
"""Shardings that `test_compare.py` does not compare with their forecasts."""
SEED, SEED_OF_8_BITS = 749, 39
"""Draws with few products in bf16, which CPUs without AVX512-BF16 compute up to 70 times slower than in fp32.

The first has five families, and each adapter and precision."""
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


WITHIN = {"prepare": 0.08, "forward": 0.05, "backward": 0.05, "step": 0.05, "save": 0.08}
"""Most that a phase's forecast may be off. While 4 bits are packed `load` is not forecast to the byte."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmark's folder: its models are created once."""
    return tmp_path_factory.mktemp("work")


def measured(work: Path, tmp_path: Path, name: str, *flags: str, script: str = "forecast_accuracy") -> dict[str, Any]:
    """The results that the benchmark writes with these flags, and their commit. None of the runs has failed."""
    results = tmp_path / "results"
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *flags, "--work", str(work), "--results", str(results)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    commit = runpy.run_path(str(BENCHMARKS / "machine.py"))["commit"]()
    with (tmp_path / "log").open("w") as log:
        made = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        try:
            code = made.wait()
        finally:  # its servers and their ranks end with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(made.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "log").read_text()[-2000:]
    result: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    assert not [row["failed"] for row in result["runs"] if "failed" in row]
    assert result["commit"] == commit
    assert f"\ncommit {commit}\n" in (results / f"{name}.md").read_text()
    return result


def check_phases(row: dict[str, Any]) -> None:
    """Each phase's forecast is near what was measured."""
    for phase, most in WITHIN.items():
        ratio = row["forecast_phases"][phase] / row["measured_phases"][phase]
        assert abs(ratio - 1) <= most, (row["family"], row["strategy"], row["ranks"], phase, ratio)


def test_forecasts_of_8_bits_are_true(work: Path, tmp_path: Path) -> None:
    flags = ["--runs", "2", "--adapters", "qlora8", "--seed", str(SEED_OF_8_BITS)]
    rows = measured(work, tmp_path, "forecast_accuracy_qlora8", *flags)["runs"]
    assert len(rows) == 2
    assert max(abs(row["forecast_peak_bytes"] / row["measured_peak_bytes"] - 1) for row in rows) <= 0.05


@pytest.mark.parametrize(
    ("cases", "kind"),
    [
        (
            (
                "zero3-none-full-sdpa-bf16-Gemma4-PLE-wide-2-one-1",
                "zero3-lora-none-eager-fp32-DeepSeek-V3-deep-2-one-1",
            ),
            "_recent",
        ),
        (("hsdp-none-full-sdpa-fp32-GPT-NeoX-wide-4-one-2",), ""),
    ],
)
def test_forecasts_are_true_of_these_cases(cases: tuple[str, ...], kind: str, work: Path, tmp_path: Path) -> None:
    """One tensor outweighs the others; frozen linear modules without adapters; two micro-batches under HSDP."""
    flags = ["--runs", str(len(cases)), "--only", ",".join(cases), *(["--recent"] if kind else [])]
    rows = measured(work, tmp_path, f"forecast_accuracy{kind}", *flags)["runs"]
    assert len(rows) == len(cases)
    for row in rows:
        check_phases(row)


def test_forecasts_are_true(work: Path, tmp_path: Path) -> None:
    flags = ["--runs", str(len(UNTESTED)), "--shardings", ",".join(UNTESTED), "--seed", str(SEED)]
    rows = measured(work, tmp_path, "forecast_accuracy", *flags)["runs"]
    assert sorted(row["strategy"]["sharding"] for row in rows) == UNTESTED
    assert len({row["family"] for row in rows}) == len(UNTESTED)
    assert {row["strategy"]["adapter"] for row in rows} == {"none", "lora", "qlora"}
    assert {row["strategy"]["precision"] for row in rows} == {"fp32", "bf16", "bf16_pure"}
    errors = [abs(row["forecast_peak_bytes"] / row["measured_peak_bytes"] - 1) for row in rows]
    assert statistics.median(errors) <= 0.015
    assert max(errors) <= 0.08
    assert min(row["measured_peak_bytes"] for row in rows) >= 100 * 2**20
    for row in rows:
        check_phases(row)


MESHES = (
    "Mistral-2-tp2-lora-none",
    "Mistral-4-pp2-fsdp-lora",
    "Qwen3-4-pp2-looped_bfs-fsdp",
    "Qwen2-MoE-2-tp2-ep2",
    "GPT-NeoX-2-cp2-fsdp_grad_op-chunked",
)
"""Cells of `benchmarks/meshes.py`: one of each degree, and stages of one rank that end their backwards one after the other."""


def test_forecasts_of_every_rank_of_a_mesh_are_true(work: Path, tmp_path: Path) -> None:
    flags = ["--only", ",".join(MESHES), "--steps", "0"]
    rows = measured(work, tmp_path, "meshes", *flags, script="meshes")["runs"]
    assert {row["name"] for row in rows} == {*MESHES}
    for row in rows:
        pairs = list(zip(row["forecast_peaks"], row["measured_peaks"], strict=True))
        assert len(pairs) == row["ranks"]
        assert max(abs(expected / peak - 1) for expected, peak in pairs) <= 0.04, row["name"]
        assert min(row["measured_peaks"]) >= 100 * 2**20
