"""Sequence parallelism in the tp group on real ranks: losses and norms of one process, a checkpoint, the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

pytestmark = pytest.mark.dist

SHAPE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2}
SPLIT = {"tp": 2, "tp_sequence": True, "loss": "chunked"}
FULL, NONE = ({"activation_checkpointing": word} for word in ("full", "none"))

WHOLE = {**NONE, "loss": "whole"}
HSDP = {"sharding": "hsdp", "dp_replicate": 2}

CELLS: dict[tuple[int, str], tuple[str, dict[str, Any]]] = {
    (2, "llama"): ("llama", {**SPLIT, **FULL}),
    (2, "qwen3"): ("qwen3", {**SPLIT, **WHOLE}),
    (2, "recomputed"): ("qwen3", {**SPLIT, **WHOLE, **FULL}),
    (2, "whole tokens"): ("qwen3", {"tp": 2, **WHOLE}),
    (2, "whole tokens, recomputed"): ("qwen3", {"tp": 2, **WHOLE, **FULL}),
    (2, "mistral"): ("mistral", {**SPLIT, **NONE}),
    (2, "gpt_neox"): ("gpt_neox", {**SPLIT, **FULL}),
    (4, "four"): ("qwen3", {**SPLIT, **FULL, "tp": 4}),
    (4, "fsdp"): ("qwen3", {**SPLIT, **FULL, "sharding": "fsdp"}),
    (4, "ddp"): ("llama", {**SPLIT, **NONE, "sharding": "ddp"}),
    (4, "fsdp_grad_op"): ("llama", {**SPLIT, **FULL, "sharding": "fsdp_grad_op"}),
    (8, "hsdp"): ("qwen3", {**SPLIT, **NONE, **HSDP}),
    (8, "whole tokens, hsdp"): ("qwen3", {"tp": 2, **WHOLE, **HSDP}),
}
"""Number of ranks, name → model, strategy."""

COUNTED = {
    (2, "qwen3"): {
        "all_reduce": 1 + 1,
        "all_gather_into_tensor": 2 * 2 * 2 + 1 + 2,
        "reduce_scatter_tensor": 2 * 2 * 2,
    },
    (2, "recomputed"): {
        "all_reduce": 1 + 1,
        "all_gather_into_tensor": 2 * 2 * 3 + 1 + 2,
        "reduce_scatter_tensor": 2 * (2 * 3 - 1),
    },
    (2, "whole tokens"): {"all_reduce": 1 + 1 + 2 * 2 * 2, "all_gather_into_tensor": 1},
    (2, "whole tokens, recomputed"): {"all_reduce": 1 + 1 + 2 * (2 * 3 - 1), "all_gather_into_tensor": 1},
}
"""Cells and the collectives of a micro-batch: of the embedding and the head, and of attention and MLP in each of two layers.

Recomputation ends before a layer's last sum."""

Gave = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 has norms over heads and tied embeddings, Mistral windows, GPT-NeoX biases after row-wise products."""
    root = tmp_path_factory.mktemp("sequence")
    tiny.llama(root / "llama", vocab_size=257, tie_word_embeddings=False, **SHAPE)
    tiny.qwen3(root / "qwen3", tie_word_embeddings=True, **{**SHAPE, "num_key_value_heads": 4})
    tiny.mistral(root / "mistral", **SHAPE)
    tiny.gpt_neox(root / "gpt_neox")
    return root


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    """What each run gave, by its number of ranks and its name."""
    models = ("llama", "qwen3", "mistral", "gpt_neox")
    cells: dict[int, list[dict[str, Any]]] = {
        1: [{"name": model, "folder": str(root / model), "strategy": {}, "upto": 4} for model in models]
    }
    more: dict[tuple[int, str], dict[str, Any]] = {(cell): {"counts": True} for cell in COUNTED}
    more |= {(2, "llama"): {"into": str(root / "tp"), "saves": [2]}, (4, "fsdp"): {"export": str(root / "export")}}
    more[8, "whole tokens, hsdp"] = {"into": str(root / "hsdp"), "saves": [2], "export": str(root / "hsdp export")}
    for (count, name), (model, strategy) in CELLS.items():
        cell = {"name": name, "folder": str(root / model), "strategy": strategy, "upto": 4}
        cells.setdefault(count, []).append({**cell, **more.get((count, name), {})})
    again = {"name": "to fsdp", "folder": str(root / "llama"), "strategy": {"sharding": "fsdp"}, "upto": 4}
    cells[2].append({**again, "from": str(root / "tp" / "step-00000002")})
    model, strategy = CELLS[8, "whole tokens, hsdp"]
    resumed = {"name": "hsdp, resumed", "folder": str(root / model), "strategy": strategy, "upto": 4}
    cells[8].append({**resumed, "from": str(root / "hsdp" / "step-00000002")})
    return tiny.run_meshes(list(cells.items()), root / "llama", root / "scratch")


@pytest.mark.parametrize(("count", "name"), [*CELLS, (2, "to fsdp")])
def test_losses_and_norms_are_those_of_one_process(gave: Gave, count: int, name: str) -> None:
    """The worker's audit compares norms on the ranks bit by bit: each saw other tokens."""
    result, model = gave[count, name], CELLS[count, name][0] if (count, name) in CELLS else "llama"
    tiny.assert_same(result["steps"], gave[1, model]["steps"][-len(result["steps"]) :])
    assert result["evaluated"] == pytest.approx(gave[1, model]["evaluated"], rel=1e-5)
    assert result["exact"] or "from" in result["cell"]


def test_a_checkpoint_goes_on_as_if_nothing_had_been(gave: Gave) -> None:
    assert gave[8, "hsdp, resumed"]["steps"] == gave[8, "whole tokens, hsdp"]["steps"][2:]


@pytest.mark.parametrize(("count", "name"), [(4, "fsdp"), (8, "whole tokens, hsdp")])
def test_the_export_is_the_trained_model(gave: Gave, count: int, name: str) -> None:
    assert gave[count, name]["logits_error"] <= 1e-6


@pytest.mark.parametrize(("count", "name"), COUNTED)
def test_collectives_of_a_step_are_those_of_the_forecast(gave: Gave, count: int, name: str) -> None:
    """In number, kind and bytes. Four steps of two micro-batches."""
    result = gave[count, name]
    assert result["calls"] == {kind: 4 * 2 * number for kind, number in COUNTED[count, name].items()}
    reduced = sum(size for what, size in result["transfers"] if "all-reduced" in what)
    others = sum(size for what, size in result["transfers"] if "all-reduced" not in what)
    assert result["sent"]["all_reduce"] == 4 * reduced
    assert sum(result["sent"].values()) == 4 * (reduced + others)
