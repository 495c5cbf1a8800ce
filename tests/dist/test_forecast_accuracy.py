"""A sample of the grids of `benchmarks/forecast_accuracy.py` and `meshes.py`: real runs beside forecasts made before them."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import run_benchmark

from toolkit.config.strategy import SHARDINGS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

ADAPTERS = "none,lora,qlora,qlora8"
CASES = (
    "none-qlora-full-sdpa-bf16-GPT-NeoX-deep-1-several-1",
    "none-qlora8-none-eager-bf16_pure-OLMo-wide-1-one-1",
    "ddp-qlora8-full-sdpa-fp32-Gemma3-deep-2-several-2",
    "zero1-lora-none-eager-bf16-Llama-deep-2-several-1",
    "zero2-none-full-sdpa-bf16_pure-Mistral-deep-2-several-1",
    "fsdp_grad_op-qlora-none-eager-fp32-Qwen3-wide-2-one-2",
    "hsdp-none-full-sdpa-fp32-GPT-NeoX-wide-4-one-2",
)
"""Each adapter and precision, and the shardings that `test_compare.py` does not compare with their forecasts.

Few products in bf16, which CPUs without AVX512-BF16 compute up to 70 times slower than in fp32. HSDP has two micro-batches."""
RECENT = (
    "zero3-none-full-sdpa-bf16-Gemma4-PLE-wide-2-one-1",
    "zero3-lora-none-eager-fp32-DeepSeek-V3-deep-2-one-1",
)
"""One tensor outweighs the others; frozen linear modules without adapters."""

WITHIN = {"prepare": 0.08, "forward": 0.05, "backward": 0.05, "step": 0.05, "save": 0.08}
"""Most that a phase may be off. While 4 bits are packed `load` is not forecast to the byte; of 8 bits only the peak is compared."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmarks' folder: their models are created once."""
    return tmp_path_factory.mktemp("work")


def measured(script: str, work: Path, results: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """The rows that the benchmark writes with these flags, with its commit. None of the runs has failed."""
    assert not run_benchmark(script, *flags, "--work", str(work), "--results", str(results))
    result = json.loads((results / f"{name}.json").read_text())
    assert result["commit"] == (commit := sys.modules["machine"].commit())
    assert f"\ncommit {commit}\n" in (results / f"{name}.md").read_text()
    rows: list[dict[str, Any]] = result["runs"]
    assert not [row["failed"] for row in rows if "failed" in row]
    return rows


@pytest.mark.parametrize(
    ("cases", "kind", "flags"),
    [
        (CASES, f"_{ADAPTERS}", ("--adapters", ADAPTERS)),
        (RECENT, "_recent", ("--recent",)),
    ],
    ids=["grid", "recent"],
)
def test_forecasts_are_true(
    cases: tuple[str, ...], kind: str, flags: tuple[str, ...], work: Path, tmp_path: Path
) -> None:
    only = ("--only", ",".join(cases), "--runs", str(len(cases)))
    rows = measured("forecast_accuracy", work, tmp_path, f"forecast_accuracy{kind}", *only, *flags)
    assert len(rows) == len(cases)
    errors = [abs(row["forecast_peak_bytes"] / row["measured_peak_bytes"] - 1) for row in rows]
    assert statistics.median(errors) <= 0.015
    assert max(errors) <= 0.05
    assert min(row["measured_peak_bytes"] for row in rows) >= 100 * 2**20
    for row in (row for row in rows if row["strategy"]["adapter"] != "qlora8"):
        for phase, most in WITHIN.items():
            ratio = row["forecast_phases"][phase] / row["measured_phases"][phase]
            assert abs(ratio - 1) <= most, (row["family"], row["strategy"], row["ranks"], phase, ratio)


def test_each_kind_of_run_is_in_the_sample() -> None:
    cases = [case.split("-") for case in (*CASES, *RECENT)]
    assert {sharding for sharding, *_ in cases} == {*SHARDINGS} - {"fsdp"}
    assert {adapter for _, adapter, *_ in cases} == {*ADAPTERS.split(",")}
    assert {precision for _, _, _, _, precision, *_ in cases} == {"fp32", "bf16", "bf16_pure"}


MESHES = (
    "Mistral-2-tp2-lora-none",
    "Qwen3-4-pp2-looped_bfs-fsdp",
    "Qwen2-MoE-2-tp2-ep2",
    "GPT-NeoX-2-cp2-fsdp_grad_op-chunked",
)
"""Cells of `benchmarks/meshes.py`: one of each degree, and stages of one rank that end their backwards one after the other."""


def test_forecasts_of_every_rank_of_a_mesh_are_true(work: Path, tmp_path: Path) -> None:
    rows = measured("meshes", work, tmp_path, "meshes", "--only", ",".join(MESHES), "--steps", "0")
    assert {row["name"] for row in rows} == {*MESHES}
    for row in rows:
        pairs = list(zip(row["forecast_peaks"], row["measured_peaks"], strict=True))
        assert len(pairs) == row["ranks"]
        assert max(abs(expected / peak - 1) for expected, peak in pairs) <= 0.04, row["name"]
        assert min(row["measured_peaks"]) >= 100 * 2**20
