"""Context parallelism without ranks: refusals, masks, the split of a batch, transfers."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace
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
from toolkit.models.varlen import BOUNDS, document_bounds
from toolkit.training.model_checks import check_requested
from toolkit.transforms import context_parallel
from toolkit.transforms.context_parallel import WHOLE_ROWS, _register, attention_kind
from toolkit.transforms.whole_rows import Rows, zigzag

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def job(config: Any = None, ranks: int = 4, train_config: TrainConfig | None = None, **fields: Any) -> Job:
    spec = describe(config or transformers.LlamaConfig(**SHAPE, vocab_size=256))
    strategy = Strategy(**{"sharding": "fsdp", "cp": 2, **fields})
    return resolve(strategy, train_config or TrainConfig(seq_len=64), spec, ranks, hardware("8x cpu").device)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compile": True}, ("cp 2", "--compile")),
        ({"cp_attention": "ring"}, ("'ring' is not available", "'auto'")),
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
        (
            {
                "config": transformers.BambaConfig(
                    **SHAPE, vocab_size=256, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32
                )
            },
            ("cp 2", "BambaForCausalLM has layers BambaMixer with a state of their own. Leave out --cp"),
        ),
        (
            {"config": transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=256)},
            ("cp 2", "takes position_ids, and BloomForCausalLM does not. Leave out --cp"),
        ),
    ],
    ids=[
        "compile", "ring", "heads", "heads of tp", "fp16", "balance", "ranks", "t5", "mamba", "llama4", "qwen3-next", "bamba",
        "bloom",
    ],
)  # fmt: skip
def test_a_job_that_it_cannot_run_is_refused(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(StrategyError) as refused:
        job(**fields)
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_model_that_it_cannot_split_is_refused_by_the_forecast() -> None:
    """Its attention alone tells."""
    config = transformers.GptOssConfig(**SHAPE, vocab_size=256, num_local_experts=2, head_dim=16)
    with pytest.raises(StrategyError, match="GptOss"):
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


RESTARTING = [*range(5), *range(7)]
"""Positions of two documents in a row of 12 tokens."""


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["ulysses", "gather"])
@pytest.mark.parametrize(
    ("positions", "padding"),
    [
        ([range(12)], None),
        ([RESTARTING], None),
        ([RESTARTING, range(12)], None),
        ([range(12), range(12)], [[1] * 9 + [0] * 3, [1] * 12]),
        ([range(12), range(12)], [[0] * 3 + [1] * 9, [1] * 12]),
        ([range(11)], None),
        ([range(9)], None),
    ],
    ids=["one document", "two", "rows", "padded", "padded before", "lengthened", "without halves"],
)
def test_the_kernel_of_joined_rows_sees_what_a_mask_shows(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kind: str, positions: Any, padding: Any
) -> None:
    """Windows and documents, rank by rank; what ranks would send is there. The batch gives no bounds, as in a user's own loop."""
    made = job(ranks=3, cp=3, sharding="none", train_config=TrainConfig(seq_len=12), cp_attention="gather")
    monkeypatch.setattr(context_parallel, "_exchange", lambda tensor, group: tensor)
    monkeypatch.setattr(context_parallel, "_group", lambda job: SimpleNamespace(size=lambda: 1))
    _register()
    rows = torch.tensor([list(each) for each in positions])
    count, count_of_rows = 3 * -(-rows.shape[1] // 3), len(rows)
    batch = {"input_ids": rows, "position_ids": rows}
    if padding:
        batch["attention_mask"] = torch.tensor(padding)
    module = SimpleNamespace(config=transformers.MistralConfig(), training=False, layer_idx=0)
    real = torch.tensor(padding or [[1] * count] * count_of_rows).bool()
    seen = {}
    for kernel in ("sdpa", "varlen"):
        torch.manual_seed(0)
        query, key, value = (torch.randn(count_of_rows, 2, count, 8, requires_grad=True) for _ in range(3))
        ranked = dataclasses.replace(
            made, strategy=dataclasses.replace(made.strategy, cp_attention=kind, attention=kernel)
        )
        taken = [ranked.split(batch, rank) for rank in range(3)]
        places = [torch.arange(count)[each[WHOLE_ROWS].part] for each in taken]
        assert torch.cat(places).sort().values.tolist() == [*range(count)]
        gathered = torch.cat(places)
        monkeypatch.setattr(context_parallel, "_gather", lambda tensor, group, order=gathered: tensor[:, :, order])
        whole = torch.zeros(count_of_rows, count, 2, 8)
        for own, each in zip(places, taken, strict=True):
            given = {name: each[name] for name in (WHOLE_ROWS, *BOUNDS) if name in each}
            assert (BOUNDS[0] in given) == (kernel == "varlen" and not (padding and not padding[0][0]))
            queries = own if kind == "gather" else torch.arange(count)
            output, _ = context_parallel._attention(
                kernel, module, query[:, :, queries], key, value, None, scaling=0.3, sliding_window=window, **given
            )
            whole = whole.index_copy(1, queries, output)
        (whole[real] * torch.linspace(1, 2, 16).view(2, 8)).sum().backward()  # type: ignore[no-untyped-call]
        seen[kernel] = [whole[real], *(each.grad for each in (query, key, value))]
    for ours, theirs in zip(seen["varlen"], seen["sdpa"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if kind == "gather" and count_of_rows == 1:  # zigzag: equal causal work
        assert places[0].tolist() == ([0, 1, 10, 11] if count == 12 else [0, 1, 2])


def split_by_varlen(monkeypatch: pytest.MonkeyPatch, batch: dict[str, Any], rank: int = 0) -> Any:
    monkeypatch.setattr(context_parallel, "_group", lambda job: None)
    made = job(ranks=2, train_config=TrainConfig(seq_len=8))
    return dataclasses.replace(made, strategy=dataclasses.replace(made.strategy, attention="varlen")).split(batch, rank)


def test_positions_of_one_row_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "position_ids": torch.arange(8)[None]}
    part = split_by_varlen(monkeypatch, batch)
    assert part["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert part[BOUNDS[0]].tolist() == [0, 8, 16]


def test_a_batch_on_a_device_is_divided_by_bounds_of_the_host() -> None:
    """The index operators of two devices do not mix: `meta` stands for a GPU."""
    rows = Rows("gather", None, torch.arange(8)[None], None, False, torch.tensor([0, 1, 6, 7]), True)
    bounds, keys = rows.documents([torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])])
    assert keys is not None
    on_device = [each.device.type for each in rows.to(torch.device("meta")).__dict__.values() if torch.is_tensor(each)]
    assert set(on_device) == {"meta", "cpu"}
    assert (bounds[BOUNDS[0]].tolist(), bounds[BOUNDS[1]].tolist()) == ([0, 2, 4], [0, 2, 10])
    assert keys.tolist() == [0, 1, 0, 1, 4, 5, 6, 7, 2, 3]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (torch.tensor([0, 3, 8]), r"got documents in cu_seq_lens_q that position_ids do not begin at 0. Give one"),
        (torch.tensor([0, 3, 7]), r"that do not end with the one row of 8 tokens. Leave them out"),
        (torch.tensor([[0, 8]]), r"that do not end with the one row of 8 tokens"),
    ],
)
def test_bounds_that_contradict_the_rows_are_refused(monkeypatch: pytest.MonkeyPatch, bounds: Any, words: str) -> None:
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "position_ids": torch.arange(8)[None]}
    with pytest.raises(StrategyError, match=words):
        split_by_varlen(monkeypatch, {**batch, BOUNDS[0]: bounds})


def test_bounds_alone_tell_where_documents_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a joined row that cp does not divide is lengthened: its last document gets the padding."""
    monkeypatch.setattr(context_parallel, "_group", lambda job: None)
    made = job(ranks=2, train_config=TrainConfig(seq_len=7))
    made = dataclasses.replace(made, strategy=dataclasses.replace(made.strategy, attention="varlen"))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    ids = torch.arange(7)[None]
    for given in ({"position_ids": positions}, document_bounds(positions)):
        first, second = (made.split({"input_ids": ids, "labels": ids, **given}, rank) for rank in (0, 1))
        assert first["position_ids"].tolist() == [[0, 1, 2, 0]]
        assert second["position_ids"].tolist() == [[1, 2, 3, 4]]
        assert second["labels"].tolist() == [[4, 5, 6, -100]]
        assert [second[name] if name.startswith("max") else second[name].tolist() for name in BOUNDS] == [
            [0, 3, 8], [0, 3, 8], 5, 5,
        ]  # fmt: skip


def test_auto_takes_a_kernel_that_ranks_of_a_row_can_share() -> None:
    """flash-attn's reads rows in a way of its own; alone it is the first choice."""
    card = dataclasses.replace(hardware("8x H100-80GB").device, attentions=("flash_attention_2", "varlen", "sdpa"))
    spec = describe(transformers.LlamaConfig(**SHAPE, vocab_size=256, intermediate_size=64))
    chosen = [
        resolve(Strategy(sharding="fsdp", cp=cp, **more), TrainConfig(seq_len=64), spec, 8, card).strategy.attention
        for cp, more in ((1, {}), (2, {}), (8, {"cp_attention": "gather"}))
    ]
    assert chosen == ["flash_attention_2", "varlen", "varlen"]


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
    assert parts[1][context_parallel.WHOLE_ROWS].mask(None, False) is None
    padded = made.split({**batch, "attention_mask": torch.tensor([[1] * 6 + [0]])}, 1)[context_parallel.WHOLE_ROWS]
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
    two chunks from both ends of the row (zigzag), as the varlen kernel gets them, ranks have equally many.
    """
    count = 16 * cp
    own = [slice(rank * 16, (rank + 1) * 16) for rank in range(cp)]
    masks = [Rows("gather", None, torch.arange(count)[None], None, False, part).mask(None, True) for part in own]
    pairs = [int(mask.sum()) for mask in masks if mask is not None]
    whole = Rows("ulysses", None, torch.arange(count)[None], None, False, own[0]).mask(None, False, implied=False)
    assert whole is not None
    assert sum(pairs) == int(whole.sum()) == count * (count + 1) // 2
    assert [round(pair / pairs[0]) for pair in pairs] == [2 * rank + 1 for rank in range(cp)]
    assert len({int(whole[0, 0][places].sum()) for places in zigzag(cp, 16)}) == 1


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
