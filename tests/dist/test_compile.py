"""`--compile`: the same losses as without it, one graph for all blocks, no graph break and no recompilation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import MissingLibrary, StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines.resolution import resolve
from toolkit.models import describe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

FIELDS = ("sharding", "activation_checkpointing", "packed", "precision")
CELLS: list[tuple[int, dict[str, Any]]] = [
    (ranks, {**dict(zip(FIELDS, fields, strict=True)), **more})
    for ranks, *fields, more in (
        (1, "none", "none", True, "fp32", {"backend": "inductor", "loss": "chunked"}),
        (1, "none", "attention", True, "fp32", {}),
        (1, "none", "selective", False, "fp32", {"loss": "chunked"}),
        (1, "none", "every:2", False, "fp32", {}),
        (2, "ddp", "none", False, "fp32", {}),
        (2, "ddp", "full", True, "bf16", {"loss": "chunked"}),
        (2, "zero1", "full", True, "fp32", {}),
        (2, "zero2", "none", True, "bf16", {}),
        (2, "zero2", "selective", False, "fp32", {"loss": "chunked"}),
        (2, "fsdp", "none", True, "fp32", {"loss": "chunked"}),
        (2, "fsdp", "full", True, "bf16", {}),
        (2, "fsdp", "full", False, "fp32", {"adapter": "lora", "backend": "inductor"}),
        (2, "fsdp_grad_op", "attention", False, "fp32", {}),
        (4, "hsdp", "none", True, "fp32", {"dp_replicate": 2}),
    )
]
LIKE = ("packed", "precision", "adapter")
"""Fields on which the losses depend."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The result of each cell, and of one process without `compile`."""
    root = tmp_path_factory.mktemp("compile")
    folder = tiny.llama(root / "llama", num_hidden_layers=3)
    groups = [(ranks, [{**cell, "compile": True} for number, cell in CELLS if number == ranks]) for ranks in (1, 2, 4)]
    plain = [
        {"sharding": "none", "activation_checkpointing": "none", "loss": "whole", **dict(values)}
        for values in dict.fromkeys(map(_like, (cell for _, cell in CELLS)))
    ]
    *compiled, references = tiny.run_groups("compile_worker.py", [*groups, (1, plain)], folder, root)
    by_fields = {_like(reference["cell"]): reference for reference in references}
    return [(result, by_fields[_like(result["cell"])]) for group in compiled for result in group]


def _like(cell: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, cell[name]) for name in LIKE if name in cell)


def test_losses_are_those_without_it(results: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for compiled, plain in results:
        close = 1e-5 if compiled["cell"]["precision"] == "fp32" else 2e-3
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=close), compiled["cell"]


def test_one_graph_no_break_no_recompilation(results: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """With `every:2` there are two kinds of blocks. An evaluation adds no graph."""
    for compiled, plain in results:
        kinds = 2 if compiled["cell"]["activation_checkpointing"] == "every:2" else 1
        assert compiled["breaks"] == [], compiled["cell"]
        assert compiled["graphs"] == [kinds] * 5, compiled["cell"]
        assert f"compile: 3 blocks, {kinds} graph{'s' * (kinds > 1)}; " in compiled["said"], compiled["said"]
        assert (plain["graphs"], plain["said"]) == ([0] * 5, "")


def test_no_peak_is_above_its_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than 3%, with inductor's own code. What a block keeps is recomputed: the forecast has little to spare."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as in the worker
    wide = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "vocab_size": 2048}
    folder, run = tiny.llama(tmp_path / "llama", **{**tiny.DENSE, **wide}), tmp_path / "run"
    (tmp_path / "text.txt").write_text(" ".join(f"w{number % 200}" for number in range(16_384)))
    given = ("--model", folder, "--data", tmp_path / "text.txt", "--run-dir", run, "--no-save", "--steps", "2")
    size = ("--seq-len", "256", "--micro-batch", "12", "--loss", "chunked")
    tiny.run_recipe(1, (*given, *size, "--compile", "--activation-checkpointing", "full"), tmp_path / "scratch")
    assert "compile: 2 blocks, 1 graph; " in (run / "logs" / "rank-0.log").read_text()
    memory = json.loads((run / "memory.json").read_text())
    measured, forecast = memory["measured"]["per_rank"][0], memory["forecast"]["device"]
    assert measured["peak_bytes"] >= 100 * 2**20
    assert measured["peak_bytes"] == max(measured["phases"]["forward"], measured["phases"]["backward"])
    assert measured["peak_bytes"] <= forecast["peak_bytes"] / 0.97


def test_names_are_unchanged(results: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for compiled, plain in results:
        assert compiled["names"] == plain["names"], compiled["cell"]


@pytest.mark.parametrize(
    ("ranks", "fields", "words"),
    [
        (2, {"sharding": "zero3"}, "sharding 'zero3'"),
        (2, {"tp": 2}, "tp 2"),
        (1, {"adapter": "qlora"}, "adapter 'qlora'"),
        (1, {"attention": "flex"}, "attention 'flex'"),
    ],
)
def test_refused_before_a_process_starts(ranks: int, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    spec, device = describe(tiny.llama(tmp_path / "llama")), hardware("cpu").device
    device = dataclasses.replace(device, attentions=(*device.attentions, "flex"))
    with pytest.raises(StrategyError, match=f"compile does not run with {words}: .+ Leave out one of the two"):
        resolve(Strategy(compile=True, **fields), TrainConfig(), spec, ranks, device)


def test_t5_recomputes_nothing(tmp_path: Path) -> None:
    spec, device = describe(tiny.t5(tmp_path / "t5")), hardware("cpu").device
    resolve(Strategy(compile=True, activation_checkpointing="none"), TrainConfig(), spec, 1, device)
    with pytest.raises(StrategyError, match=r"activation_checkpointing 'full': t5's bias breaks the graphs"):
        resolve(Strategy(compile=True, activation_checkpointing="full"), TrainConfig(), spec, 1, device)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingLibrary, match=r"compile needs the compiler g\+\+, which is not installed"):
        resolve(Strategy(compile=True), TrainConfig(), None, 1, hardware("cpu").device)
