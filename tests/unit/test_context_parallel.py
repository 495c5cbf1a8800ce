"""Context parallelism without ranks: refusals, masks, the split of a batch, transfers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import transformers

from toolkit import StrategyError, describe, forecast
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.resolution import resolve
from toolkit.forecasting.tracing import trace
from toolkit.training.model_checks import check_requested
from toolkit.transforms import context_parallel
from toolkit.transforms.context_parallel import Rows, attention_kind

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def job(config: Any = None, ranks: int = 4, train_config: TrainConfig | None = None, **fields: Any) -> Job:
    spec = describe(config or transformers.LlamaConfig(**SHAPE, vocab_size=256))
    strategy = Strategy(**{"sharding": "fsdp", "cp": 2, **fields})
    return resolve(strategy, train_config or TrainConfig(seq_len=64), spec, ranks, hardware("8x cpu").device)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compile": True}, ("cp 2", "--compile")),
        ({"cp": 8, "ranks": 8, "cp_attention": "ulysses"}, ("cp 8", "4 heads", "gather")),
        ({"cp": 4, "tp": 2, "ranks": 8, "cp_attention": "ulysses"}, ("cp 4", "4 heads over tp 2", "gather")),
        ({"precision": "fp16"}, ("sharding 'fsdp'", "'fp16'", "no loss scaling")),
        (
            {
                "config": transformers.MixtralConfig(
                    **SHAPE, vocab_size=256, num_local_experts=2, intermediate_size=64, output_router_logits=True
                )
            },
            ("cp 2", "MixtralForCausalLM", "output_router_logits"),
        ),
        ({"ranks": 3}, ("cp 2", "3 ranks", "multiple of 2")),
        ({"config": transformers.T5Config(d_model=64, num_layers=1)}, ("causal", "T5")),
        ({"config": transformers.MambaConfig(hidden_size=64, num_hidden_layers=2)}, ("cp 2", "MambaForCausalLM")),
        (
            {
                "config": transformers.Llama4TextConfig(
                    **SHAPE, vocab_size=256, num_local_experts=2, intermediate_size=64
                )
            },
            ("cp 2", "chunked_attention"),
        ),
        (
            {
                "config": transformers.Qwen3NextConfig(
                    **SHAPE, vocab_size=256, layer_types=["linear_attention", "full_attention"]
                )
            },
            ("cp 2", "Qwen3NextForCausalLM has linear_attention", "Leave out --cp"),
        ),
    ],
    ids=["compile", "heads", "heads of tp", "fp16", "balance", "ranks", "t5", "mamba", "llama4", "qwen3-next"],
)
def test_a_job_that_it_cannot_run_is_refused(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(StrategyError) as refused:
        job(**fields)
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=256), "position_ids"),
        (transformers.GptOssConfig(**SHAPE, vocab_size=256, num_local_experts=2, head_dim=16), "GptOss"),
        (
            transformers.BambaConfig(**SHAPE, vocab_size=256, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32),
            "has layers BambaMixer with a state of their own. Leave out --cp",
        ),
    ],
    ids=["bloom", "gpt-oss", "bamba"],
)
def test_a_model_that_it_cannot_split_is_refused_by_the_forecast(config: Any, word: str) -> None:
    with pytest.raises(StrategyError, match=word):
        forecast(describe(config), Strategy(sharding="fsdp", cp=2), "4x cpu", TrainConfig(seq_len=64))


def test_frequencies_that_follow_from_a_ranks_own_positions_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = transformers.LlamaConfig(**SHAPE, vocab_size=256, rope_parameters=rope)
    with pytest.raises(StrategyError, match=r"rotary frequencies \(rope_type 'dynamic'\)\. Leave out --cp"):
        job(config)


def test_rows_that_would_be_lengthened_beyond_the_positions_are_refused() -> None:
    config = transformers.LlamaConfig(**SHAPE, vocab_size=256, max_position_embeddings=64)
    with pytest.raises(StrategyError, match=r"cp 3 lengthens rows to 66 tokens.* 64 positions. Choose --seq-len 63"):
        job(config, ranks=3, cp=3)


def test_longer_rows_are_accepted_where_the_config_is_changed_as_the_refusal_says() -> None:
    shape = {**SHAPE, "vocab_size": 256, "intermediate_size": 96, "max_position_embeddings": 64}
    with pytest.raises(StrategyError, match=r"seq_len 192 is over the limit .* 64 positions") as refused:
        job(transformers.LlamaConfig(**shape), train_config=TrainConfig(seq_len=192))
    said = re.search(r"set max_position_embeddings (\d+) and add (.+) to rope_parameters", str(refused.value))
    assert said is not None
    rope = {"rope_type": "default", "rope_theta": 1e4, **json.loads(f"{{{said[2]}}}")}
    config = transformers.LlamaConfig(**{**shape, "max_position_embeddings": int(said[1]), "rope_parameters": rope})
    made = job(config, train_config=TrainConfig(seq_len=192))
    assert made.train_config.seq_len == 192
    rotary = transformers.LlamaForCausalLM(config).model.rotary_emb
    # The lowest frequency does not turn once in the old rows: it is slower by this factor.
    assert rope["factor"] == 3
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    assert rotary.inv_freq[-1] == pytest.approx(float(plain[-1]) / 3)


def test_a_model_of_another_code_is_refused() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, vocab_size=256, intermediate_size=64))
    with pytest.raises(StrategyError, match=r"cp 2 was requested.*tk\.load\(accelerator\)"):
        check_requested(Strategy(sharding="ddp", cp=2), model)


def test_auto_takes_ulysses_where_the_heads_divide() -> None:
    assert attention_kind(job()) == "ulysses"
    assert attention_kind(job(cp=8, ranks=8)) == "gather"
    assert attention_kind(job(cp=2, tp=2)) == "ulysses"
    assert attention_kind(job(cp=4, tp=2, ranks=8)) == "gather"


def test_ranks_and_batches() -> None:
    made = job()
    assert (made.parallelism.dp_size, made.parallelism.shard_size, made.parallelism.loss_size) == (2, 4, 4)
    assert [made.coordinates(rank).dp_rank for rank in range(4)] == [0, 0, 1, 1]
    assert made.global_batch == 2 * made.train_config.micro_batch


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("own", [False, True])
def test_a_mask_sees_what_a_loop_over_tokens_sees(window: int | None, own: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2], [0] * 8])
    padding = torch.tensor([[1] * 8, [1] * 6 + [0] * 2])
    part = slice(4, 8)
    mask = Rows("gather" if own else "ulysses", None, positions, padding, True, part).mask(window, own)
    assert mask is not None
    for row in range(2):
        for place, query in enumerate(range(8)[part] if own else range(8)):
            for key in range(8):
                seen = key <= query and documents[row, key] == documents[row, query]
                seen = seen and (window is None or query - key < window) and (padding[row, key] == 1 or key == query)
                assert mask[row, 0, place, key] == seen


def test_a_row_of_one_document_needs_no_mask() -> None:
    rows = Rows("ulysses", None, torch.arange(8)[None], None, False, slice(0, 4))
    assert rows.mask(None, False) is None
    assert rows.mask(8, False) is None
    assert rows.mask(4, False) is not None


def test_a_row_is_lengthened_to_a_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "_group", lambda job: None)
    made = job(ranks=2)
    batch = {name: torch.arange(7)[None] for name in ("input_ids", "labels", "position_ids")}
    parts = [made.split({**batch, "attention_mask": torch.ones(1, 7)}, rank) for rank in range(2)]
    assert [part["input_ids"].tolist() for part in parts] == [[[0, 1, 2, 3]], [[4, 5, 6, 0]]]
    assert parts[1]["labels"].tolist() == [[4, 5, 6, -100]]
    assert parts[1]["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert parts[1][context_parallel.ROWS].mask(None, False) is None
    padded = made.split({**batch, "attention_mask": torch.tensor([[1] * 6 + [0]])}, 1)[context_parallel.ROWS]
    assert padded.padding.tolist() == [[1] * 6 + [0] * 2]
    short = {"input_ids": torch.arange(5)[None]}
    odd = TrainConfig(seq_len=5)
    lengths = [
        job(ranks=4, train_config=odd, tp=2, tp_sequence=each).split(short, 0)["input_ids"].shape[1]
        for each in (False, True)
    ]
    assert lengths == [3, 4]


@pytest.mark.parametrize("cp", [2, 4])
def test_causal_work_of_each_rank(cp: int) -> None:
    """Pairs of a query and a key that it sees. Under Ulysses each rank has all of them, for its share of the heads.

    `gather` gives the last rank the most, where a kernel skips what is masked: sdpa with a mask and eager attention do not. Of
    two chunks from both ends of the row, as zigzag would divide it, ranks have equally many.
    """
    count = 16 * cp
    own = [slice(rank * 16, (rank + 1) * 16) for rank in range(cp)]
    masks = [Rows("gather", None, torch.arange(count)[None], None, False, part).mask(None, True) for part in own]
    pairs = [int(mask.sum()) for mask in masks if mask is not None]
    whole = Rows("ulysses", None, torch.arange(count)[None], None, False, own[0]).mask(None, False, implied=False)
    assert whole is not None
    assert sum(pairs) == int(whole.sum()) == count * (count + 1) // 2
    assert [round(pair / pairs[0]) for pair in pairs] == [2 * rank + 1 for rank in range(cp)]
    chunks = whole[0, 0].chunk(2 * cp)
    assert len({int(chunks[rank].sum() + chunks[-1 - rank].sum()) for rank in range(cp)}) == 1


def held_after_forward(cp: int, packed: bool) -> int:
    """Bytes that a rank allocates in a forward of 4 rows of 2,048 tokens and still has when it ends, without masks."""
    made = job(
        train_config=TrainConfig(seq_len=2048, micro_batch=4), cp=cp, loss="chunked", activation_checkpointing="full"
    )
    assert made.spec is not None
    events = trace(made.spec, made.engine.trace_config(made, masked=packed), batch=4, seq_len=2048).events
    forward = [event[0] for event in events].index("backward")
    sizes = [{"+": 1, "-": -1}.get(what, 0) * size for what, size, _ in events[:forward]]
    return sum(size for size in sizes if abs(size) not in (4 * 2048**2, 4 * 512**2))  # bool, one for all layers


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_holds_its_share_of_the_activations(packed: bool) -> None:
    assert held_after_forward(4, packed) <= 0.29 * held_after_forward(1, packed)


def test_transfers() -> None:
    """Two layers of 4 heads and 2 key heads of 16, 64 tokens of 4 rows, forward, recomputation and backward."""
    own = 4 * 32 * 16 * 4
    for fields, heads, half in (
        ({}, (2 * 4 + 2 * 2) / 2, (2 * 2 + 2 * 2) / 2),
        ({"cp_attention": "gather"}, 2 * 2, 2 * 1),
    ):
        (transfer,) = [each for each in job(**fields).communication() if each.link == "cp"]
        assert transfer.size == 3 * 2 * heads * own
        assert transfer.times == 1
        (transfer,) = [each for each in job(tp=2, **fields).communication() if each.link == "cp"]
        assert transfer.size == 3 * 2 * half * own


@pytest.mark.parametrize("fields", [{"cp": 4}, {"cp": 2}, {"cp": 4, "cp_attention": "gather"}])
def test_the_transfers_are_those_of_the_forward(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And of its recomputation; the backward sends as much once more. Four ranks share two heads of keys."""
    made, sent = job(**fields), []
    exchange = context_parallel._all_to_all

    def counted(parts: torch.Tensor, group: Any) -> torch.Tensor:
        sent.append(parts.numel() * parts.element_size() * (len(parts) - 1) / len(parts))
        return exchange(parts, group)

    monkeypatch.setattr(context_parallel, "_all_to_all", counted)
    assert made.spec is not None
    trace(made.spec, made.engine.trace_config(made, masked=False), batch=made.train_config.micro_batch, seq_len=64)
    (transfer,) = [each for each in made.communication() if each.link == "cp"]
    assert transfer.size == 3 / 2 * sum(sent)
