"""Persistent buffers under every engine, and text training of vision-language models, each cell against ddp's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

BUFFERS = {
    "gemma4": "layer_scalar",
    "deepseek": "e_score_correction_bias",
    "glm4_moe": "e_score_correction_bias",
    "bart": "final_logits_bias",
}
SHARDED = ("ddp", "zero3", "fsdp")
VISION = {"qwen3_vl": "model.visual", "llava": "model.vision_tower, model.multi_modal_projector"}
FROZEN = ("visual.", "vision_tower.", "multi_modal_projector.")
"""In the names of what text does not pass, in the model and on the disk."""

Cells = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """What every cell gave, by its name."""
    root = tmp_path_factory.mktemp("families")
    models = {name: getattr(tiny, name)(root / name) for name in (*BUFFERS, *VISION)}
    models["llava nf4"] = tiny.dequantized(models["llava"], root / "nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    cells: dict[int, Cells] = {2: {}, 4: {}}

    def ask(ranks: int, kind: str, sharding: str, adapter: str = "none", precision: str = "fp32", **more: Any) -> None:
        name = f"{kind} {sharding} {adapter} {precision}"
        words = {"sharding": sharding, "adapter": adapter, "precision": precision, **more}
        words |= {"export": str(root / f"out {name}")} if adapter == "none" else {"allow_unquantized": True}
        cells[ranks][name] = {"folder": str(models[kind]), **words}

    for kind, sharding in itertools.product(BUFFERS, ("ddp", "fsdp")):
        ask(2, kind, sharding)
    ask(2, "gemma4", "ddp", "lora")
    ask(2, "gemma4", "fsdp", "lora")
    ask(4, "gemma4", "hsdp", dp_replicate=2)
    for kind, sharding, adapter in itertools.product(VISION, SHARDED, ("none", "lora", "qlora")):
        ask(2, kind, sharding, adapter)
    ask(2, "llava nf4", "ddp", "lora")
    ask(2, "qwen3_vl", "ddp", "none", "bf16")
    ask(2, "qwen3_vl", "fsdp", "none", "bf16")
    groups = {ranks: list(own.values()) for ranks, own in cells.items()}
    gave = tiny.run_cells(groups, models["bart"], tmp_path_factory.mktemp("scratch"))
    return {name: result for ranks, own in cells.items() for name, result in zip(own, gave[ranks], strict=True)}


@pytest.mark.parametrize("cell", [*(f"{kind} fsdp none" for kind in BUFFERS), "gemma4 hsdp none", "gemma4 fsdp lora"])
def test_models_with_persistent_buffers_train_under_fsdp(cells: Cells, cell: str) -> None:
    """Their values are no model's own, so that a rank with others would train otherwise."""
    kind, _, adapter = cell.split()
    result, reference = cells[f"{cell} fp32"], cells[f"{kind} ddp {adapter} fp32"]
    tiny.assert_alike(result, reference)
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.parametrize("cell", [*(f"{kind} fsdp none" for kind in BUFFERS), "gemma4 hsdp none"])
def test_buffers_are_in_the_export_byte_by_byte(cells: Cells, cell: str) -> None:
    exported = cells[f"{cell} fp32"]["exported"]
    buffers = [name for name in exported["names"] if name.endswith(BUFFERS[cell.split()[0]])]
    assert buffers
    assert exported["unchanged"] == buffers, "and everything else was trained"
    assert exported["error"] <= 1e-6


@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
@pytest.mark.parametrize("kind", VISION)
def test_the_text_part_trains_alike(cells: Cells, kind: str, adapter: str) -> None:
    reference = cells[f"{kind} ddp {adapter} fp32"]
    assert reference["losses"][-1] < reference["losses"][0]
    for sharding in SHARDED:
        result = cells[f"{kind} {sharding} {adapter} fp32"]
        tiny.assert_alike(result, reference, bytes_too=True, where=sharding)
        assert result["measured"]["frozen"] > 0, sharding
        assert any(line.startswith(f"frozen: {VISION[kind]}: ") for line in result["said"]), result["said"]


def test_qlora_of_the_text_part_trains_as_its_dequantized_weights_do(cells: Cells) -> None:
    quantized, reference = cells["llava zero3 qlora fp32"], cells["llava nf4 ddp lora fp32"]
    assert quantized["losses"] == pytest.approx(reference["losses"], rel=1e-5)


@pytest.mark.parametrize(
    "cell",
    [
        *(f"{kind} {sharding} none fp32" for kind in VISION for sharding in SHARDED),
        "qwen3_vl ddp none bf16",
        "qwen3_vl fsdp none bf16",
    ],
)
def test_what_is_frozen_leaves_as_it_came(cells: Cells, cell: str) -> None:
    """Byte by byte, also where it is computed with in bf16; and no checkpoint holds it."""
    exported = cells[cell]["exported"]
    frozen = [name for name in exported["names"] if any(part in name for part in FROZEN)]
    assert frozen
    assert sorted(exported["unchanged"]) == frozen, "and everything else was trained"
    assert not [name for name in exported["checkpoint"] if any(part in name for part in FROZEN)]
    assert exported["error"] <= (2e-2 if "bf16" in cell else 1e-6)
    assert ("preprocessor_config.json" in exported["files"]) == cell.startswith("qwen3_vl")


def test_what_is_frozen_is_held_in_the_compute_dtype(cells: Cells) -> None:
    half, whole = cells["qwen3_vl fsdp none bf16"], cells["qwen3_vl fsdp none fp32"]
    assert half["measured"]["frozen"] == pytest.approx(whole["measured"]["frozen"] / 2, rel=0.02)
    assert half["measured"]["dtypes"]["frozen"] == "bfloat16"
    assert half["losses"] == pytest.approx(cells["qwen3_vl ddp none bf16"]["losses"], rel=1e-3)
