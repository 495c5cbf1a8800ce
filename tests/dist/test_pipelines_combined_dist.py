"""Pipelines with adapters, data and tensor parallelism on real ranks: losses and norms of one process, checkpoints, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.dist

Gave = dict[tuple[int, str], dict[str, Any]]

LORA, BF16 = {"adapter": "lora"}, {"precision": "bf16"}
FSDP, DDP = {"sharding": "fsdp"}, {"sharding": "ddp"}
INTERLEAVED, ZERO_BUBBLE = {"pp_schedule": "interleaved"}, {"pp_schedule": "InterleavedZeroBubble"}
CHUNKED, PLAIN = {"loss": "chunked"}, {"activation_checkpointing": "none"}

CELLS: dict[str, tuple[int, str, str, dict[str, Any], dict[str, str]]] = {
    "lora": (2, "lora", "llama", LORA, {"into": "two", "export": "lora-exported"}),
    "dora, interleaved": (2, "dora", "llama", {"adapter": "dora", **INTERLEAVED}, {}),
    "lora in bf16": (2, "lora in bf16", "llama", LORA | BF16, {}),
    "zero bubble, tied": (2, "tied", "qwen3", ZERO_BUBBLE, {}),
    "looped bfs": (2, "tied", "qwen3", {"pp_schedule": "looped_bfs", **PLAIN}, {}),
    "fsdp, tied": (4, "tied", "qwen3", FSDP | CHUNKED, {"from": "one/step-00000002", "into": "four"}),
    "fsdp, zero bubble": (4, "tied", "qwen3", FSDP | ZERO_BUBBLE | PLAIN, {}),
    "fsdp, lora, interleaved": (4, "lora", "llama", FSDP | LORA | INTERLEAVED, {"from": "two/step-00000002"}),
    "ddp, tied": (4, "tied", "qwen3", DDP, {"from": "four/step-00000003", "export": "ddp-exported"}),
    "tp, windows": (4, "windows", "gemma3", {"tp": 2}, {}),
    "tp and fsdp": (
        8,
        "tied",
        "qwen3",
        FSDP | {"tp": 2},
        {"from": "four/step-00000003", "into": "eight", "export": "eight-exported"},
    ),
}
"""Ranks, the reference, the model, the strategy besides --pp 2, and folders of checkpoints of each cell."""

ALONE = {
    "tied": ("qwen3", {}),
    "windows": ("gemma3", {}),
    "lora": ("llama", LORA),
    "lora in bf16": ("llama", LORA | BF16),
}
ALONE |= {"dora": ("llama", {"adapter": "dora"})}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("combined")
    tiny.llama(root / "llama", num_hidden_layers=4, tie_word_embeddings=False)
    tiny.qwen3(root / "qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    kinds = ["sliding_attention", "full_attention"] * 2
    gemma3 = {**tiny.TEXT, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8}
    tiny._save("Gemma3ForCausalLM", root / "gemma3", **gemma3)
    return root


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    def cell(name: str, model: str, strategy: dict[str, Any], saves: int = 2, **folders: str) -> dict[str, Any]:
        paths = {key: str(root / value) for key, value in folders.items()}
        common = {"upto": 4, "accumulation": 4, "rows": "whole", "saves": [saves]}
        return {"name": name, "folder": str(root / model), "strategy": strategy, **common, **paths}

    def cells(count: int) -> list[dict[str, Any]]:
        saves = {2: 2, 4: 3, 8: 4}[count]
        return [
            cell(name, model, {"pp": 2, **words}, saves, **folders)
            for name, (ranks, _, model, words, folders) in CELLS.items()
            if ranks == count
        ]

    one = [cell(name, *rest, **({"into": "one"} if name == "tied" else {})) for name, rest in ALONE.items()]
    # The last step of eight ranks, evaluated and exported by one process.
    last = cell("after eight", "qwen3", {}, **{"from": "eight/step-00000004"})
    groups = [(1, one), (2, cells(2)), (4, cells(4)), (8, cells(8)), (1, [last])]
    return tiny.run_meshes(groups, root / "llama", root / "scratch")


@pytest.mark.parametrize("name", CELLS)
def test_losses_and_norms_are_those_of_one_process(gave: Gave, name: str) -> None:
    count, reference, _, words, folders = CELLS[name]
    result, alone = gave[count, name], gave[1, reference]
    done = {"one": 2, "two": 2, "four": 3}.get(folders.get("from", "").partition("/")[0], 0)
    tiny.assert_same(result["steps"], alone["steps"][done:])
    assert len(result["steps"]) == 4 - done
    assert result["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
    assert result["exact"] or "adapter" in words


def test_a_checkpoint_of_three_dimensions_is_whole(gave: Gave) -> None:
    assert gave[1, "after eight"]["evaluated"] == pytest.approx(gave[1, "tied"]["evaluated"], rel=1e-5)


@pytest.mark.parametrize("name", [name for name, (*_, folders) in CELLS.items() if "export" in folders])
def test_the_export_is_the_trained_model(gave: Gave, root: Path, name: str) -> None:
    count, _, _, words, folders = CELLS[name]
    assert gave[count, name]["logits_error"] <= 1e-6
    if "adapter" not in words:
        _, info = AutoModelForCausalLM.from_pretrained(root / folders["export"], output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
