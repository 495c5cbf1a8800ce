"""Fused experts in 4 bits: they train, on several ranks, as their dequantized values do."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

pytestmark = pytest.mark.dist

KINDS = {"mixtral": tiny.mixtral, "qwen3_moe": tiny.qwen3_moe}
CELLS = [("mixtral", sharding) for sharding in ("ddp", "zero2", "zero3", "fsdp")] + [("qwen3_moe", "fsdp")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What each cell gave on two ranks; `reference` is LoRA over the dequantized weights."""
    root = tmp_path_factory.mktemp("experts")
    folders = {kind: make(root / kind) for kind, make in KINDS.items()}
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, folder in folders.items():
        plain = tiny.dequantized(folder, root / f"{kind}-nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4")
        words = {"precision": "fp32", "steps": 4, "lora_targets": "q_proj,v_proj,o_proj"}
        cells[kind, "reference"] = {"folder": str(plain), "sharding": "ddp", "adapter": "lora", **words}
        for own, sharding in CELLS:
            if own == kind:
                cells[kind, sharding] = {"folder": str(folder), "sharding": sharding, "adapter": "qlora", **words}
    gave = tiny.run_cells({2: list(cells.values())}, folders["mixtral"], root)[2]
    return dict(zip(cells, gave, strict=True))


@pytest.mark.parametrize(("kind", "sharding"), CELLS)
def test_packed_experts_train_as_their_dequantized_weights_do(
    results: dict[tuple[str, str], dict[str, Any]], kind: str, sharding: str
) -> None:
    reference, result = results[kind, "reference"], results[kind, sharding]
    assert result.get("refused") is None
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(reference["norms"], rel=1e-4)
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.parametrize(("kind", "sharding"), CELLS)
def test_each_rank_holds_what_was_expected(
    results: dict[tuple[str, str], dict[str, Any]], kind: str, sharding: str
) -> None:
    result = results[kind, sharding]
    for part in ("trainable", "frozen", "master", "optimizer"):
        assert result["measured"][part] == pytest.approx(result["expected"][part], rel=0.02), part
