"""Loading on real ranks: quantized weights train right, every kind of model loads, and no rank reads what it need not hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.dist

SHARDED = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op")
EXPERTS = [("mixtral", sharding) for sharding in ("ddp", "zero2", "zero3", "fsdp")] + [("qwen3_moe", "fsdp")]
"""Fused experts in 4 bits."""

Cells = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each kind, and what 4 and 8 bits make of the first one, as plain fp32 weights."""
    root = tmp_path_factory.mktemp("models")
    made = {
        "llama": tiny.llama(root / "llama"),
        "tied": tiny.llama(root / "tied", tie_word_embeddings=True),
        "mixtral": tiny.mixtral(root / "mixtral"),
        "qwen3_moe": tiny.qwen3_moe(root / "qwen3_moe"),
        "t5": tiny.t5(root / "t5"),
        "deepseek": tiny.deepseek(root / "deepseek"),
        "bloom": tiny.bloom(root / "bloom"),
        "phi": tiny.phi(root / "phi"),
        "broken": tiny.llama(root / "broken"),
    }
    without(made["broken"], "model.norm.weight")
    for kind in ("llama", "t5", "mixtral", "qwen3_moe"):
        plain = tiny.dequantized(made[kind], root / f"{kind} nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4")
        made[f"{kind} nf4"] = plain
    made["int8"] = tiny.dequantized(made["llama"], root / "int8", load_in_8bit=True)
    return made


def without(folder: Path, name: str) -> None:
    """Take one tensor out of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def cells(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """What every cell gave, by its name."""
    cells: Cells = {}

    def ask(kind: str, sharding: str, adapter: str, precision: str, **more: Any) -> None:
        words = {"sharding": sharding, "adapter": adapter, "precision": precision, **more}
        cells[f"{kind} {sharding} {adapter} {precision}"] = {"folder": str(models[kind]), **words}

    ask("llama nf4", "ddp", "lora", "fp32", steps=3)
    ask("int8", "ddp", "lora", "fp32", steps=3)
    ask("llama", "ddp", "qlora8", "fp32", steps=3)
    for sharding in SHARDED:
        ask("llama", sharding, "qlora", "fp32", steps=3)
    for sharding in ("ddp", "zero2", "zero3", "fsdp"):
        for kind in ("tied", "mixtral", "t5"):
            ask(kind, sharding, "none", "fp32")
            if sharding != "zero2":
                ask(kind, sharding, "lora", "fp32")
        ask("mixtral", sharding, "none", "bf16")
    for sharding in ("ddp", "zero3", "fsdp"):
        ask("bloom", sharding, "none", "bf16")
        ask("phi", sharding, "lora", "bf16")
    targets = "q_proj,v_proj,o_proj"
    for kind, sharding in EXPERTS:
        ask(f"{kind} nf4", "ddp", "lora", "fp32", steps=4, lora_targets=targets)
        ask(kind, sharding, "qlora", "fp32", steps=4, lora_targets=targets)
    # Matrices of this rank are below ZeRO-3's threshold of 10 x hidden elements, and stay whole.
    ask("llama", "zero3", "lora", "fp32", lora_rank=8)
    ask("mixtral", "ddp", "qlora8", "fp32", allow_unquantized=True)
    ask("mixtral", "ddp", "qlora8", "bf16")
    ask("t5 nf4", "ddp", "lora", "fp32")
    for sharding in ("ddp", "zero3", "fsdp"):
        ask("t5", sharding, "qlora", "fp32", allow_unquantized=True)
    ask("broken", "fsdp", "none", "fp32")
    ask("broken", "zero3", "none", "fp32")
    for sharding in ("ddp", "zero3", "fsdp"):
        ask("deepseek", sharding, "none", "fp32")
    ask("deepseek", "ddp", "lora", "fp32")
    ask("deepseek", "zero3", "lora", "fp32")
    ask("deepseek", "zero2", "lora", "fp32", lora_targets="q_proj,gate_proj,up_proj,down_proj")
    ask("deepseek", "fsdp", "lora", "bf16", lora_targets="q_proj,o_proj")
    scratch = tmp_path_factory.mktemp("loading")
    gave = tiny.run_cells({2: list(cells.values())}, models["llama"], scratch)[2]
    return dict(zip(cells, gave, strict=True))


@pytest.mark.parametrize(("kind", "sharding"), [*(("llama", sharding) for sharding in SHARDED), *EXPERTS])
def test_qlora_trains_as_its_dequantized_weights_do(cells: Cells, kind: str, sharding: str) -> None:
    """Weights that are packed again by a shard's first forward would be right once and wrong from then on."""
    reference = cells[f"{kind} nf4 ddp lora fp32"]
    quantized = cells[f"{kind} {sharding} qlora fp32"]
    tiny.assert_alike(quantized, reference, bytes_too=kind != "llama")
    assert quantized["losses"][-1] < quantized["losses"][0]


def test_qlora8_trains_as_its_dequantized_weights_do(cells: Cells) -> None:
    """On a CPU bitsandbytes multiplies by dequantized weights; on a GPU LLM.int8 rounds activations to 8 bits too."""
    tiny.assert_alike(cells["llama ddp qlora8 fp32"], cells["int8 ddp lora fp32"])


def test_quantized_share_is_said(cells: Cells) -> None:
    """Of 131,392 weights the embedding and the head are 32,768, the norms 320."""
    said = cells["llama zero3 qlora fp32"]["said"]
    assert any("4 bits (nf4, double quantization); 25% of 131" in line for line in said), said
    assert any(line.startswith("adapter: qlora, rank 16; ") for line in said), said


def test_mostly_unquantized_models_are_refused(cells: Cells) -> None:
    refused = cells["mixtral ddp qlora8 bf16"]
    assert refused["kind"] == "ModelError"
    assert "unquantized: fused experts, 7" in refused["refused"]
    assert "--allow-unquantized" in refused["refused"]
    allowed = cells["mixtral ddp qlora8 fp32"]
    assert allowed["losses"][-1] < allowed["losses"][0]


@pytest.mark.parametrize("sharding", ["ddp", "zero3", "fsdp"])
def test_linear_modules_that_transformers_keeps_are_no_surprise(cells: Cells, sharding: str) -> None:
    """T5's `wo` is never quantized, and gets an adapter all the same."""
    reference, result = cells["t5 nf4 ddp lora fp32"], cells[f"t5 {sharding} qlora fp32"]
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert result["measured"]["frozen"] == pytest.approx(result["expected"]["frozen"], rel=0.02)
    assert result["measured"]["trainable"] == pytest.approx(
        reference["measured"]["trainable"] / (2 if sharding != "ddp" else 1), rel=0.1
    )


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_a_checkpoint_that_lacks_a_weight_is_refused_by_every_rank(cells: Cells, sharding: str) -> None:
    """Every rank refuses: else the next cell would find no partner."""
    refused = cells[f"broken {sharding} none fp32"]
    assert refused["kind"] == "ModelError"
    assert "1 of its weights are missing" in refused["refused"]
    assert "The first: model.norm.weight" in refused["refused"]


def test_buffers_of_a_checkpoint_are_not_lost(cells: Cells) -> None:
    reference = cells["deepseek ddp none fp32"]
    for sharding in ("zero3", "fsdp"):
        assert cells[f"deepseek {sharding} none fp32"]["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert all(map(math.isfinite, cells["deepseek fsdp lora bf16"]["losses"]))


def test_fused_experts_are_not_adapted_behind_ones_back(cells: Cells) -> None:
    """PEFT takes the dense layer's and the shared experts' modules for names of the fused experts."""
    alone, sharded = cells["deepseek ddp lora fp32"], cells["deepseek zero3 lora fp32"]
    assert any(
        "nor have 6 modules that PEFT takes for them (down_proj, gate_proj, up_proj)" in s for s in alone["said"]
    )
    assert sharded["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    refused = cells["deepseek zero2 lora fp32"]
    assert refused["kind"] == "StrategyError"
    assert "in the place of down_proj, gate_proj, up_proj" in refused["refused"]
    assert "--lora-targets q_proj" in refused["refused"]
    assert any(line.endswith("; fused experts have none") for line in cells["mixtral ddp lora fp32"]["said"])


def test_adapters_below_the_threshold_of_zero3_stay_whole(cells: Cells) -> None:
    held, expected = (cells["llama zero3 lora fp32"][which] for which in ("measured", "expected"))
    assert held["trainable"] == expected["trainable"] > 1.9 * held["master"]


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("kind", ["tied", "mixtral", "t5"])
def test_every_kind_of_model_trains_alike(cells: Cells, kind: str, adapter: str) -> None:
    reference = cells[f"{kind} ddp {adapter} fp32"]
    assert reference["losses"][-1] < reference["losses"][0]
    for sharding in ("zero2", "zero3", "fsdp") if adapter == "none" else ("zero3", "fsdp"):
        result = cells[f"{kind} {sharding} {adapter} fp32"]
        tiny.assert_alike(result, reference, bytes_too=True, where=sharding)


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp"])
def test_fused_experts_train_in_bf16_with_exact_masters(cells: Cells, sharding: str) -> None:
    """The files hold each expert in a tensor of its own, from which the masters are joined, too."""
    result = cells[f"mixtral {sharding} none bf16"]
    assert all(map(math.isfinite, result["losses"]))
    assert result["losses"] == pytest.approx(cells["mixtral ddp none fp32"]["losses"], rel=2e-3)
    assert result["exact"]
    assert "experts: 4 a layer, 2 active, computed by grouped_mm" in result["said"]


@pytest.mark.parametrize("sharding", ["zero3", "fsdp"])
@pytest.mark.parametrize("cell", [("bloom", "none"), ("phi", "lora")])
def test_norms_outside_of_every_layer_compute_in_bf16(cells: Cells, cell: tuple[str, str], sharding: str) -> None:
    """A LayerNorm takes no fp32 input with weights in bf16. An RMSNorm does."""
    kind, adapter = cell
    result, reference = (cells[f"{kind} {word} {adapter} bf16"] for word in (sharding, "ddp"))
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-3)
    assert result["norms"] == pytest.approx(reference["norms"], rel=3e-2)


def test_checkpoints_hold_more_than_bf16_can(models: dict[str, Path]) -> None:
    """So that masters which are exactly the checkpoint's were not simply rounded."""
    for kind in ("llama", "mixtral"):
        whole = load_file(models[kind] / "model.safetensors")
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in whole.values())


def test_no_rank_reads_what_it_need_not_hold(cells: Cells) -> None:
    whole = cells["tied ddp none fp32"]["bytes_read"]
    assert whole[0] == whole[1]
    # Under FSDP the weights are read in `prepare`, half of them by each of two ranks.
    assert all(size < 0.01 * whole[0] for size in cells["tied fsdp none fp32"]["bytes_read"])
    assert all(0.45 * whole[0] < size < 0.55 * whole[0] for size in cells["tied fsdp none fp32"]["bytes_streamed"])
    assert all(size < 0.6 * whole[0] for size in cells["tied zero3 none fp32"]["bytes_read"])
    assert cells["tied fsdp none fp32"]["said"][0] == "loading: every rank reads its own part of each weight"


def test_what_was_set_up_is_said(cells: Cells) -> None:
    said = cells["tied zero3 none fp32"]["said"]
    assert said[1] == "attention: sdpa; activation checkpointing: full; loss: whole; KV cache off"
    assert cells["tied zero3 none fp32"]["pad"] == 0
