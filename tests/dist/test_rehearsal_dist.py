"""`rehearse`: one rank of many holds what the forecast says, and what that rank of a real run holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from toolkit import Strategy, TrainConfig, describe, rehearse
from toolkit.core.errors import StrategyError
from toolkit.models import ModelSpec

pytestmark = pytest.mark.dist

WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 8192}
BATCH = TrainConfig(micro_batch=1, seq_len=256, lr=1e-3)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tiny.llama(tmp_path_factory.mktemp("rehearsal") / "llama", **{**tiny.DENSE, **WIDE})
    return describe(str(folder))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A layer for each of four stages."""
    shape = {**tiny.DENSE, **WIDE, "num_hidden_layers": 4}
    return describe(str(tiny.llama(tmp_path_factory.mktemp("rehearsal") / "deep", **shape)))


@pytest.mark.parametrize(
    ("strategy", "ranks", "rank"),
    [
        ({"sharding": "fsdp"}, 256, 37),
        ({"sharding": "hsdp", "dp_replicate": 4, "adapter": "lora", "precision": "bf16"}, 64, 63),
        ({"sharding": "fsdp_grad_op", "tp": 2, "loss": "chunked"}, 64, 1),
        ({"sharding": "fsdp", "cp": 2}, 64, 33),
        ({"sharding": "fsdp", "precision": "bf16", "mlp_tiles": 2}, 256, 200),
        # More ranks than rows: the padding of a layer outweighs the head, and gloo's copy of its gradients is in the peak.
        ({"sharding": "fsdp", "precision": "bf16"}, 2048, 1000),
    ],
)
def test_a_rank_of_many_holds_what_is_forecast(
    spec: ModelSpec, strategy: dict[str, Any], ranks: int, rank: int
) -> None:
    result = rehearse(spec, Strategy(**strategy), BATCH, ranks=ranks, rank=rank)
    assert 0.98 <= result.ratio <= 1.02
    assert result.sent_bytes == pytest.approx(result.forecast_sent_bytes, rel=0.01)
    assert (result.ranks, result.rank) == (ranks, rank)
    assert result.step_seconds > 0


def test_an_own_tensor_parallel_plan_is_rehearsed(spec: ModelSpec) -> None:
    """Attention, embedding and head stay whole on each rank, which holds more than under the class's plan."""
    styles = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    own = spec.with_tp_plan({f"model.layers.*.mlp.{name}": style for name, style in styles.items()})
    ours, theirs = (rehearse(each, Strategy(tp=2), BATCH, ranks=2, rank=1) for each in (own, spec))
    assert 0.98 <= ours.ratio <= 1.02
    assert ours.phases["step"] > 1.2 * theirs.phases["step"]


def test_the_gradient_of_a_tied_embedding_comes_after_the_layers_copies(tmp_path: Path) -> None:
    """The head's and the embedding's are added when gloo has freed its copy of the first layer's gradients."""
    tied = describe(str(tiny.qwen3(tmp_path / "qwen3", **WIDE, tie_word_embeddings=True)))
    strategy = Strategy(sharding="fsdp", tp=2, precision="bf16")
    assert 0.98 <= rehearse(tied, strategy, BATCH, ranks=64, rank=40).ratio <= 1.02


def test_it_holds_what_the_rank_of_a_real_run_holds(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"w{number % 200}" for number in range(4096)))
    size = ("--seq-len", "256", "--micro-batch", "1", "--steps", "3", "--no-save", "--save-every", "0")
    way = ("--sharding", "fsdp", "--activation-checkpointing", "full", "--loss", "whole", "--run-dir", tmp_path / "run")
    given = ("--model", spec.source, "--data", tmp_path / "text.txt")
    tiny.run_recipe(2, (*given, *way, *size), tmp_path / "scratch")
    real = json.loads((tmp_path / "run" / "memory.json").read_text())["measured"]["per_rank"][1]["phases"]
    alone = rehearse(spec, Strategy(sharding="fsdp", loss="whole"), BATCH, ranks=2, rank=1).phases
    for name in ("forward", "step"):
        assert alone[name] == pytest.approx(real[name], rel=0.02), name
    # A real rank may hold gloo's copy of a group's gradients a moment longer: at most the head's.
    head = 4 * WIDE["vocab_size"] * WIDE["hidden_size"]
    assert real["backward"] - head <= alone["backward"] <= 1.02 * real["backward"]


def test_a_vocabulary_of_any_size_is_rehearsed(tmp_path: Path) -> None:
    """A few hundred words: no tokenizer of ours has so few."""
    few = describe(str(tiny.llama(tmp_path / "llama", **{**tiny.DENSE, **WIDE, "vocab_size": 300})))
    assert 0.98 <= rehearse(few, Strategy(sharding="fsdp"), BATCH, ranks=4, rank=3).ratio <= 1.02


@pytest.mark.parametrize(
    ("strategy", "ranks", "rank", "words"),
    [
        ({"sharding": "fsdp"}, 8, 8, "rank 8: expected 0 to 7"),
        ({"sharding": "none"}, 1, 0, "one rank has no others"),
        ({"sharding": "zero3"}, 8, 0, "DeepSpeed needs the other ranks. Choose fsdp"),
        ({"sharding": "ddp"}, 8, 0, "DDP waits for the sums"),
        ({"sharding": "fsdp", "adapter": "qlora"}, 8, 0, "packs real weights. Choose --adapter lora"),
    ],
)
def test_what_has_no_rehearsal_is_refused(
    spec: ModelSpec, strategy: dict[str, Any], ranks: int, rank: int, words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        rehearse(spec, Strategy(**strategy), BATCH, ranks=ranks, rank=rank)


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        ({"sharding": "fsdp", "precision": "bf16"}, 3),  # the first stage
        ({"sharding": "ddp", "tp": 2}, 35),
        ({"sharding": "fsdp", "tp": 2, "adapter": "lora", "precision": "bf16"}, 63),  # the last one
    ],
)
def test_a_rank_of_each_stage_holds_what_is_forecast(deep: ModelSpec, strategy: dict[str, Any], rank: int) -> None:
    """Other stages send nothing; the schedule is torch's own."""
    batch = TrainConfig(micro_batch=1, seq_len=256, accumulation=4, lr=1e-3)
    assert 0.98 <= rehearse(deep, Strategy(pp=4, **strategy), batch, ranks=64, rank=rank).ratio <= 1.02


@pytest.mark.parametrize(
    "strategy", [{"sharding": "fsdp", "ep": 4, "tp": 2}, {"sharding": "fsdp", "precision": "bf16"}]
)
def test_experts_get_equally_many_tokens(tmp_path: Path, strategy: dict[str, Any]) -> None:
    """Zeros would send all tokens to the first experts."""
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 64, "num_local_experts": 64, "vocab_size": 8192}
    mixture = describe(str(tiny.mixtral(tmp_path / "mixtral", **shape)))
    assert 0.98 <= rehearse(mixture, Strategy(**strategy), BATCH, ranks=64, rank=21).ratio <= 1.02


def test_more_ranks_than_rows_under_tp_are_refused(spec: ModelSpec) -> None:
    with pytest.raises(StrategyError, match=r"k_proj\.weight has 64 rows on a tp rank, which its 128 ranks of FSDP"):
        rehearse(spec, Strategy(sharding="fsdp", tp=2), BATCH, ranks=256)
