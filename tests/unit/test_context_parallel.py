"""Context parallelism without ranks: refusals, masks, the split of a batch, transfers."""

from __future__ import annotations

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
from toolkit.transforms.context_parallel import Rows, attention_kind

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def job(config: Any = None, ranks: int = 4, train_config: TrainConfig | None = None, **fields: Any) -> Job:
    spec = describe(config or transformers.LlamaConfig(**SHAPE, vocab_size=256))
    strategy = Strategy(**{"sharding": "fsdp", "cp": 2, **fields})
    return resolve(strategy, train_config or TrainConfig(seq_len=64), spec, ranks, hardware("8x cpu").device)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cp": 3, "ranks": 3}, ("cp 3", "seq_len 64", "--seq-len 63")),
        ({"tp": 2}, ("cp 2", "--tp")),
        ({"compile": True}, ("cp 2", "--compile")),
        ({"cp": 8, "ranks": 8, "cp_attention": "ulysses"}, ("cp 8", "4 heads", "gather")),
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
    ],
    ids=["rows", "tp", "compile", "heads", "ranks", "t5", "mamba", "llama4"],
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
    ],
    ids=["bloom", "gpt-oss"],
)
def test_a_model_that_it_cannot_split_is_refused_by_the_forecast(config: Any, word: str) -> None:
    with pytest.raises(StrategyError, match=word):
        forecast(describe(config), Strategy(sharding="fsdp", cp=2), "4x cpu", TrainConfig(seq_len=64))


def test_auto_takes_ulysses_where_the_heads_divide() -> None:
    assert attention_kind(job()) == "ulysses"
    assert attention_kind(job(cp=8, ranks=8)) == "gather"


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


def test_transfers() -> None:
    """Two layers of 4 heads and 2 key heads of 16, 64 tokens of 4 rows, forward, recomputation and backward."""
    own = 4 * 32 * 16 * 4
    for fields, heads in (({}, (2 * 4 + 2 * 2) / 2), ({"cp_attention": "gather"}, 2 * 2)):
        (transfer,) = [each for each in job(**fields).communication() if each.link == "cp"]
        assert transfer.size == 3 * 2 * heads * own
        assert transfer.times == 1
