"""Context parallelism on real ranks: losses and norms of one process, checkpoints under other strategies, exports, forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from programs import python

from toolkit import Strategy, TrainConfig, describe, forecast

pytestmark = pytest.mark.dist

SHAPE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 4}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
GATHER = {"cp_attention": "gather"}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
LORA = {"adapter": "lora", "lora_rank": 4}

Cell = tuple[str, dict[str, Any], str]
"""A model, a strategy, and what rows hold."""

TWO: dict[str, Cell] = {
    "none": ("llama", {"sharding": "none"}, "whole"),
    "ddp, gather, documents": ("llama", {"sharding": "ddp", **GATHER}, "documents"),
    "zero1, padded": ("llama", {"sharding": "zero1"}, "padded"),
    "zero2, gather, padded": ("llama", {"sharding": "zero2", **GATHER}, "padded"),
    "zero3, window, documents": ("qwen3", {"sharding": "zero3"}, "documents"),
    "fsdp, window, gather": ("qwen3", {"sharding": "fsdp", **GATHER}, "whole"),
    "fsdp_grad_op, eager, selective": (
        "qwen3", {"sharding": "fsdp_grad_op", "attention": "eager", "activation_checkpointing": "selective"}, "documents",
    ),
    "zero3, cpu, whole loss": ("llama", {"sharding": "zero3", "offload": "cpu", "loss": "whole"}, "whole"),
    "ddp, lora": ("llama", {"sharding": "ddp", **LORA}, "documents"),
    "zero3, learned positions": ("gpt2", {"sharding": "zero3"}, "documents"),
    "ddp, soft caps": ("gemma2", {"sharding": "ddp", "attention": "eager"}, "documents"),
    "fsdp, soft caps, gather": ("gemma2", {"sharding": "fsdp", "attention": "eager", **GATHER}, "padded"),
    "fsdp, lora, gather": ("llama", {"sharding": "fsdp", **LORA, **GATHER}, "documents"),
}  # fmt: skip
FOUR: dict[str, Cell] = {
    "cp4 of two key heads": ("llama", {"sharding": "ddp", "cp": 4}, "documents"),
    "cp2 in fsdp": ("qwen3", {"sharding": "fsdp"}, "documents"),
    "cp2 in zero2": ("llama", {"sharding": "zero2"}, "whole"),
}

Gave = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cp")
    tiny.llama(root / "llama", vocab_size=257, tie_word_embeddings=False, num_key_value_heads=2, **SHAPE)
    tiny.qwen3(root / "qwen3", tie_word_embeddings=True, **{**SHAPE, **WINDOW})
    config = json.loads((tiny.gpt2(root / "gpt2").parent / "gpt2" / "config.json").read_text())
    # Each rank draws masks of its own, as data-parallel ranks do: without dropout losses are comparable.
    (root / "gpt2" / "config.json").write_text(json.dumps({**config, **dict.fromkeys(DROPOUTS, 0.0)}))
    tiny.gemma2(root / "gemma2", attn_logit_softcapping=5.0, sliding_window=8)
    return root


def reference(cell: Cell) -> str:
    """The name of the cell in one process."""
    model, strategy, rows = cell
    return f"{model}, {rows}{', lora' * ('adapter' in strategy)}"


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    def cell(name: str, given: Cell, **more: Any) -> dict[str, Any]:
        model, strategy, rows = given
        more = {key: str(root / value) if key in ("from", "into", "export") else value for key, value in more.items()}
        strategy = {"loss": "chunked", **strategy}
        return {"name": name, "folder": str(root / model), "strategy": strategy, "rows": rows, "upto": 4, **more}

    def split(cells: dict[str, Cell]) -> list[dict[str, Any]]:
        return [cell(name, (model, {"cp": 2, **strategy}, rows)) for name, (model, strategy, rows) in cells.items()]

    alone = {reference(given): given for given in (*TWO.values(), *FOUR.values())}
    saved: dict[str, Any] = {"into": "cp", "saves": [2], "export": "exported"}
    groups = [
        (
            1,
            [cell(name, (model, LORA if "adapter" in way else {}, rows)) for name, (model, way, rows) in alone.items()],
        ),
        (
            2,
            [
                *split(TWO),
                cell("saved", ("llama", {"sharding": "ddp", "cp": 2}, "whole"), **saved),
                cell(
                    "to zero3",
                    ("llama", {"sharding": "zero3"}, "whole"),
                    **{"from": "cp/step-00000002"},
                    into="z",
                    saves=[3],
                ),
                cell("and back", ("llama", {"sharding": "fsdp", "cp": 2}, "whole"), **{"from": "z/step-00000003"}),
            ],
        ),
        (4, split(FOUR)),
    ]
    return tiny.run_meshes(groups, root / "llama", root / "scratch")


@pytest.mark.parametrize(("count", "name"), [*((2, name) for name in TWO), *((4, name) for name in FOUR)])
def test_losses_and_norms_are_those_of_one_process(gave: Gave, count: int, name: str) -> None:
    expected = gave[1, reference({2: TWO, 4: FOUR}[count][name])]
    assert len(gave[count, name]["steps"]) == 4
    tiny.assert_same(gave[count, name]["steps"], expected["steps"])
    assert gave[count, name]["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)


@pytest.mark.parametrize("name", ["to zero3", "and back"])
def test_a_checkpoint_goes_on_under_another_strategy(gave: Gave, name: str) -> None:
    steps = gave[2, name]["steps"]
    tiny.assert_same(steps, gave[1, "llama, whole"]["steps"][-len(steps) :])


def test_the_export_is_the_trained_model(gave: Gave) -> None:
    assert gave[2, "saved"]["logits_error"] <= 1e-6


@pytest.mark.parametrize(("kind", "precision"), [("ulysses", "bf16"), ("gather", "fp32")])
def test_a_run_is_forecast_and_holds_a_share_of_the_activations(tmp_path: Path, kind: str, precision: str) -> None:
    """From the shell; rows without padding, so that no mask of s × s hides the activations. In bf16 FSDP2 copies the rows."""
    (tmp_path / "text.txt").write_text(" ".join(f"w{number * 7 % 2000}" for number in range(20_000)))
    size = (
        "--seq-len",
        "1024",
        "--micro-batch",
        "1",
        "--steps",
        "1",
        "--activation-checkpointing",
        "none",
        "--no-save",
    )
    way = ("--processes", "2", "--sharding", "fsdp", "--cp", "2", "--cp-attention", kind, "--precision", precision)
    way += ("--no-guard",)
    python("-m", "toolkit.cli", "train", "--data", "text.txt", *way, *size, "--run-dir", "run", cwd=tmp_path, code=0)
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    for rank in memory["measured"]["per_rank"]:
        assert memory["forecast"]["device"]["peak_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.04)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    alone = Strategy(**{**run["strategy"], "cp": 1, "cp_attention": "auto"})
    whole = forecast(describe(None), alone, "2x cpu", TrainConfig(**run["train_config"]), one_document=True)
    # Keys and values are whole under gather.
    limit = {"ulysses": 0.6, "gather": 0.75}[kind]
    assert memory["forecast"]["device"]["parts"]["activations"] < limit * whole.parts["activations"]
