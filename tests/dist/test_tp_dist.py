"""Tensor parallelism with LoRA, with DDP, and with few heads of keys: losses, checkpoints, replicas, the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from mesh_worker import ACCUMULATION, ROWS, SEQ_LEN
from safetensors.torch import load_file

pytestmark = pytest.mark.dist

LORA = {"adapter": "lora", "lora_rank": 4}
TP = {**LORA, "tp": 2, "loss": "chunked"}
DROPPED = {**LORA, "lora_dropout": 0.1}

LARGE, SPLIT = 4099, {"untied": False, "tied": True}
"""A vocabulary of which whole logits are by far the largest tensor, and models with one. No other size is equal to it."""

LAYERS = "model.decoder.layers.*"
PRODUCTS = {f"{LAYERS}.fc1": "colwise", f"{LAYERS}.fc2": "rowwise"}
"""A plan for a class that has none."""
HALF = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
"""Part of a class's plan: attention, embedding and head stay whole."""

Gave = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with sizes that two ranks cannot share evenly, a Phi-3, a Llama with three heads, a Qwen3 with two heads of keys.

    A Phi-3's products take and give whole tensors. The Qwen3's head is tied, over an uneven vocabulary. The
    three heads have dropout, and stay whole on each rank.
    """
    root = tmp_path_factory.mktemp("lora")
    tiny.llama(root / "llama", vocab_size=257, tie_word_embeddings=False, intermediate_size=175)
    tiny.phi3(root / "phi3")
    tiny.opt(root / "opt")
    tiny.llama(root / "three", hidden_size=48, num_attention_heads=3, num_key_value_heads=3, attention_dropout=0.1)
    for name, tied in SPLIT.items():
        tiny.llama(root / name, vocab_size=LARGE, tie_word_embeddings=tied)
    tiny.qwen3(root / "heads", num_attention_heads=8, head_dim=8, vocab_size=257, tie_word_embeddings=True)
    return root


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    """What each run gave, by its number of ranks and its name."""

    def cell(name: str, model: str, strategy: dict[str, Any], upto: int = 4, **more: Any) -> dict[str, Any]:
        more = {key: str(root / value) if key in ("from", "into", "export") else value for key, value in more.items()}
        return {"name": name, "folder": str(root / model), "strategy": strategy, "upto": upto, **more}

    both = {**TP, "sharding": "fsdp"}
    whole = [
        cell("llama", "llama", LORA, planned=12, export="llama-1"),
        cell("long", "llama", LORA, 12),
        cell("phi3", "phi3", LORA),
        cell("phi3 whole", "phi3", {}, 12),
    ]
    heads = [("heads", {}), ("lora heads", DROPPED)]
    whole += [cell("opt", "opt", {}), cell("lora opt", "opt", LORA)]
    whole += [cell("ddp", "llama", {}), *(cell(name, "heads", strategy) for name, strategy in heads)]
    whole += [cell("half", "llama", {}, upto=12), cell("three", "three", {}), cell("own", "llama", {}, own=True)]
    chain: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("tp", {"tp": 2, "sharding": "fsdp"}, {}),
        ("zero3", {"sharding": "zero3"}, {"from": "bf16-tp/step-00000002"}),
        ("cp", {"cp": 2, "sharding": "fsdp"}, {"from": "bf16-zero3/step-00000002"}),
    ]
    groups = [
        (1, [*whole, cell("dropped", "llama", DROPPED, upto=20)]),
        (
            2,
            [
                cell(
                    "llama", "llama", TP, planned=12, into="tp", saves=[2], export="llama-2",
                    spoil="0.mlp.up_proj.lora_A.default.weight",
                ),
                cell("dropped", "llama", {**DROPPED, "tp": 2, "activation_checkpointing": "full"}, upto=20),
                cell(
                    "to fsdp", "llama", {**LORA, "sharding": "fsdp"}, 12, **{"from": "tp/step-00000002"}, into="fsdp", saves=[2, 3]
                ),
                cell("half", "llama", {"tp": 2}, 12, plan=HALF, into="half", saves=[2], export="half-2"),
                cell("half to zero3", "llama", {"sharding": "zero3"}, 12, **{"from": "half/step-00000002"}),
                cell("lora opt", "opt", TP, plan=PRODUCTS),
                cell("three", "three", {"tp": 2}, plan=HALF, export="three-2"),
                cell("phi3 whole", "phi3", {"tp": 2}, 12, into="phi3-2", saves=[2]),
                cell("own", "llama", {"tp": 2}, own=True),
                *(
                    cell(f"{name} {loss}", name, {"tp": 2, "loss": loss}, 2, logits=True)
                    for name in SPLIT
                    for loss in ("chunked", "whole")
                ),
            ],
        ),
        (
            4,
            [
                cell(
                    "llama", "llama", {**both, "activation_checkpointing": "none"}, planned=12, export="llama-4",
                    into="tp-fsdp", saves=[2],
                ),
                cell("phi3", "phi3", both),
                cell("opt", "opt", {"tp": 2, "sharding": "fsdp"}, plan=PRODUCTS, export="opt-4"),
                cell(
                    "and back", "llama", {**both, "sharding": "fsdp_grad_op"}, 5, **{"from": "fsdp/step-00000003"}, planned=12,
                    into="grad-op", saves=[4], export="grad-op-4",
                ),
                cell("of grad_op", "llama", both, 5, **{"from": "grad-op/step-00000004"}, planned=12),
                cell("ddp", "llama", {"tp": 2, "sharding": "ddp"}, export="ddp-4", into="ddp", saves=[2]),
                cell("own", "llama", {"tp": 2, "sharding": "ddp"}, own=True),
                *(
                    cell(f"bf16 {word}", "llama", {**strategy, "precision": "bf16"}, 3, into=f"bf16-{word}", saves=[2], **source)
                    for word, strategy, source in chain
                ),
                *(cell(name, "heads", {**strategy, "tp": 4}, export=f"{name}-4") for name, strategy in heads),
            ],
        ),
        (
            1,
            [
                cell("to one", "llama", LORA, planned=12, **{"from": "tp/step-00000002"}),
                cell("of ddp", "llama", {}, **{"from": "ddp/step-00000002"}),
                cell("of half", "llama", {}, 12, **{"from": "half/step-00000002"}, into="half-1", saves=[2]),
                cell("of tp fsdp", "llama", LORA, planned=12, **{"from": "tp-fsdp/step-00000002"}),
                cell("of phi3", "phi3", {}, 12, **{"from": "phi3-2/step-00000002"}, into="phi3-1", saves=[2]),
            ],
        ),
    ]  # fmt: skip
    return tiny.run_meshes(groups, root / "llama", root / "scratch")


@pytest.mark.parametrize(
    ("count", "name"),
    [
        (2, "llama"),
        (2, "dropped"),
        (2, "phi3 whole"),
        (2, "half"),
        (2, "lora opt"),
        (2, "three"),
        (4, "opt"),
        (4, "llama"),
        (4, "phi3"),
        (4, "heads"),
        (4, "lora heads"),
        (4, "ddp"),
    ],
)
def test_losses_and_norms_are_those_of_one_process(gave: Gave, count: int, name: str) -> None:
    """With dropout, too: all replicas still have equal bits after 20 steps, or the worker's audit would have failed."""
    reference, result = gave[1, name], gave[count, name]
    tiny.assert_same(result["steps"], reference["steps"])
    assert result["evaluated"] == pytest.approx(reference["evaluated"], rel=1e-5)


@pytest.mark.parametrize("count", [2, 4])
def test_an_own_loop_computes_what_one_process_does(gave: Gave, count: int) -> None:
    """In one call, which refuses other rows on the ranks of a group."""
    result, expected = gave[count, "own"], gave[1, "own"]["steps"]
    assert len(expected) == 4
    for ours, theirs in zip(result["steps"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    (rows,) = result["refused"]
    assert "other rows on rank 1 than on rank 0" in rows


@pytest.mark.parametrize(("count", "name"), [(2, "llama"), (2, "phi3 whole"), (4, "ddp")])
def test_a_rank_reads_its_part_alone(gave: Gave, count: int, name: str) -> None:
    """Joined matrices in two pieces, and norms whole."""
    size = (Path(gave[count, name]["cell"]["folder"]) / "model.safetensors").stat().st_size
    assert len(gave[count, name]["read"]) == count
    assert all(0.45 * size < read <= 0.55 * size for read in gave[count, name]["read"])


@pytest.mark.parametrize("name", SPLIT)
def test_with_the_chunked_loss_no_rank_holds_whole_logits(gave: Gave, name: str) -> None:
    """Nor the whole weight of the head. A single row of numbers is there, which the head returns in the place of logits."""
    assert gave[2, f"{name} chunked"]["logits"] == [1, 1]
    assert min(gave[2, f"{name} whole"]["logits"]) >= ROWS // ACCUMULATION * SEQ_LEN


def test_dropout_drops(gave: Gave) -> None:
    assert gave[1, "dropped"]["steps"][0][1] != pytest.approx(gave[1, "llama"]["steps"][0][1], rel=1e-3)


def test_a_replica_with_other_values_is_found(gave: Gave) -> None:
    (sentence,) = gave[2, "llama"]["differing"]
    assert sentence.endswith("0.mlp.up_proj.lora_A.default.weight has other values on rank 1 than on rank 0")


@pytest.mark.parametrize(
    ("count", "name", "reference"),
    [
        (2, "to fsdp", "long"),
        (4, "and back", "long"),
        (4, "of grad_op", "long"),
        (1, "of tp fsdp", "long"),
        (1, "to one", "long"),
        (1, "of ddp", "ddp"),
        (1, "of half", "half"),
        (2, "half to zero3", "half"),
        (1, "of phi3", "phi3 whole"),
    ],
)
def test_a_checkpoint_goes_on_under_another_layout(gave: Gave, count: int, name: str, reference: str) -> None:
    """One of each kind of matrices for ten steps, the others for one or two."""
    result, start = gave[count, name]["steps"], int(gave[count, name]["cell"]["from"][-8:])
    assert len(result) == 10 or name not in ("to fsdp", "of half", "half to zero3", "of phi3")
    assert result
    tiny.assert_same(result, gave[1, reference]["steps"][start : start + len(result)])


@pytest.mark.parametrize(
    ("one", "other"),
    [("tp", "fsdp"), ("phi3-2", "phi3-1"), ("half", "half-1"), ("bf16-tp", "bf16-zero3"), ("bf16-tp", "bf16-cp")],
)
def test_weights_and_moments_are_read_bit_for_bit_under_another_layout(
    gave: Gave, root: Path, one: str, other: str
) -> None:
    """Those of a Phi-3 have joined matrices, those of an adapter its two halves, and bf16 its masters."""
    assert gave
    assert not tiny.differing(root / one / "step-00000002", root / other / "step-00000002")


@pytest.mark.parametrize("count", [2, 4])
def test_the_exported_adapter_has_the_layout_of_one_process(gave: Gave, root: Path, count: int) -> None:
    assert gave[1, "llama"]["logits_error"] == 0.0
    ours, theirs = (load_file(root / f"llama-{ranks}" / "adapter_model.safetensors") for ranks in (count, 1))
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


@pytest.mark.parametrize(
    ("count", "name"),
    [(2, "half"), (2, "three"), *((4, name) for name in ("llama", "heads", "lora heads", "ddp", "opt", "and back"))],
)
def test_the_export_is_the_trained_model(gave: Gave, count: int, name: str) -> None:
    assert gave[count, name]["logits_error"] <= 1e-6
