"""Checkpoints of two ranks under ZeRO-3 and FSDP, exported in one process without an engine, against one process's own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from toolkit.exporters import export

pytestmark = pytest.mark.dist

STEPS = 2
LORA = {"adapter": "lora", "lora_rank": 4}
TWO: dict[str, dict[str, Any]] = {
    "zero3": {"sharding": "zero3"},
    "zero3 bf16": {"sharding": "zero3", "precision": "bf16"},
    "fsdp": {"sharding": "fsdp"},
    "zero3 lora": {"sharding": "zero3", **LORA},
    "fsdp qlora": {"sharding": "fsdp", "adapter": "qlora", "lora_rank": 4},
}
ONE: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "qlora": {"adapter": "qlora", "lora_rank": 4}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base in `base`, and a checkpoint a cell; all trained on the same rows."""
    root = tmp_path_factory.mktemp("made")
    tiny.mixtral(root / "base")

    def cells(group: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"strategy": {"precision": "fp32", **words}, "upto": STEPS, "into": str(root / name), "saves": [STEPS]}
            for name, words in group.items()
        ]

    tiny.run_groups("checkpoint_worker.py", [(2, cells(TWO)), (1, cells(ONE))], root / "base", root / "scratch")
    return root


def exported(made: Path, name: str, out: Path, **words: Any) -> dict[str, Any]:
    """What plain transformers opens: its tensors, and its logits."""
    result = export(made / name / f"step-{STEPS:08d}", out / name, **words)
    assert result.logits_error <= (2e-2 if "bf16" in name else 1e-6)
    model = AutoModelForCausalLM.from_pretrained(out / name, dtype="auto").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 43)[None]).logits
    return {**model.state_dict(), "logits": logits}


def apart(result: dict[str, Any], wanted: dict[str, Any]) -> float:
    return float((result["logits"] - wanted["logits"]).norm() / wanted["logits"].norm())


def test_whole_models_are_what_one_process_trained(made: Path, tmp_path: Path) -> None:
    alone = exported(made, "full", tmp_path)
    for name in ("zero3", "fsdp"):
        result = exported(made, name, tmp_path)
        assert result.keys() == alone.keys()
        assert apart(result, alone) < 1e-4, name
    half = exported(made, "zero3 bf16", tmp_path)
    assert apart(half, alone) < 0.1
    weight = half["model.layers.0.self_attn.q_proj.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float()), "masters, not the copies that were computed with"


def test_adapters_are_merged_as_one_process_trained_them(made: Path, tmp_path: Path) -> None:
    for one, two in (("lora", "zero3 lora"), ("qlora", "fsdp qlora")):
        alone = exported(made, one, tmp_path, merge=True)
        assert apart(exported(made, two, tmp_path, merge=True), alone) < 1e-4, two


def test_no_rank_holds_more_than_its_share_and_the_largest_tensor(tmp_path: Path) -> None:
    """Rank 0 puts one tensor at a time together, next to its own shards. The others only send. All by all takes too long here."""
    base = tiny.llama(tmp_path / "base", hidden_size=512, intermediate_size=1024, num_hidden_layers=6)
    strategies: dict[str, dict[str, Any]] = {
        "fsdp": {"sharding": "fsdp", "precision": "fp32"},
        "zero3": {"sharding": "zero3", "precision": "fp32"},
        "zero3 bf16": {"sharding": "zero3", "precision": "bf16"},
        "zero3 cpu": {"sharding": "zero3", "precision": "bf16", "offload": "cpu"},
    }
    groups: list[tuple[int, list[dict[str, Any]]]] = []
    for count, names in ((2, ("zero3", "zero3 cpu")), (4, ("fsdp", "zero3 bf16"))):
        places = {name: str(tmp_path / name) for name in names}
        cells = [{"measures": "export", "strategy": strategies[name], "into": into} for name, into in places.items()]
        groups.append((count, cells))
    wanted = load_file(base / "model.safetensors")
    for measured in itertools.chain(*tiny.run_groups("checkpoint_worker.py", groups, base, tmp_path / "s")):
        largest, sent, what = measured["largest"], measured["sent"], measured["cell"]["into"]
        assert measured["whole"] > 8 * largest
        assert measured["peaks"][0] <= largest + 4 * sent, what
        assert max(measured["peaks"][1:]) <= 4 * sent, what
        written = load_file(Path(what) / "model.safetensors")
        assert written.keys() == wanted.keys()
        assert all(torch.equal(written[name], tensor.to(written[name].dtype)) for name, tensor in wanted.items()), what
