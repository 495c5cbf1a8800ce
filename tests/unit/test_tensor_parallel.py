"""Tensor parallelism without ranks: refusals, local shapes, transfers, the forecast from a warm cache."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import python
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)

from toolkit import StrategyError, describe, forecast
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import ModelError
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.ledger import LedgerHistory
from toolkit.engines.mesh.plan import local_job, local_shape
from toolkit.engines.registry import engine_for
from toolkit.engines.resolution import accelerate_config, default_ranks, resolve
from toolkit.engines.states import parameters_of
from toolkit.forecasting.memory import all_steps, replay_ranks, traced, whole_step
from toolkit.models import ModelSpec
from toolkit.training.accelerators import guard_command
from toolkit.training.setup import agree

MACHINE = "8x H100-80GB"
MLP = {
    f"model.layers.*.mlp.{name}_proj": style
    for name, style in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

CHECK = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from toolkit.engines.mesh.plan import local_shape
from toolkit.engines.traces import TraceConfig
from toolkit.forecasting.traced_model import distribute, fake_mesh, local
from toolkit.models import describe

spec = describe(sys.argv[1])
for rank in (0, 1):
    config = TraceConfig(
        weights="float32", trained="float32", autocast=None, attention="sdpa", masked=False, device="cpu", tp=2, tp_rank=rank
    )
    with fake_mesh(config) as mesh:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
        distribute(model, mesh, spec)
        for name, parameter in model.named_parameters():
            for known in spec.parameters:
                if known.name == name:
                    assert tuple(local(parameter).shape) == local_shape(known, spec.tp_plan, 2, rank), (name, rank)
"""

WARM = """
import sys
from toolkit import TrainConfig, Strategy, describe, forecast
made = forecast(describe(sys.argv[1]), Strategy(sharding="fsdp", tp=2), "4x H100-80GB", TrainConfig(seq_len=32))
assert not {"torch", "transformers"} & set(sys.modules)
print(made.peak_bytes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 that two ranks cannot split evenly, as a config alone."""
    folder = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(vocab_size=257, intermediate_size=175, head_dim=16, tie_word_embeddings=True, **SHAPE)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return describe(folder)


def job_of(spec: ModelSpec, ranks: int = 4, **words: Any) -> Job:
    strategy = Strategy(**{"sharding": "fsdp", "tp": 2, **words})
    return resolve(strategy, TrainConfig(seq_len=32, accumulation=2), spec, ranks, hardware(MACHINE).device)


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (
            {"sharding": "zero3"},
            4,
            "sharding 'zero3' does not run with tp 2: DeepSpeed loads the whole model on each rank before it divides layers",
        ),
        ({"sharding": "ddp"}, 2, "sharding 'ddp' with tp 2 needs at least 4 ranks; got 2."),
        (
            {"adapter": "dora"},
            4,
            "adapter 'dora' does not run with tp 2: only LoRA's matrices are divided among ranks. Choose adapter none",
        ),
        ({"offload": "cpu"}, 4, "offload 'cpu' does not run with tp 2: parts"),
        ({"precision": "fp16"}, 4, "precision 'fp16' does not run with tp 2: the loss scaler"),
        ({"tp_sequence": True, "adapter": "lora"}, 4, "tp_sequence does not run with adapter 'lora' yet"),
        ({"tp_sequence": True, "mlp_tiles": 2}, 4, "tp_sequence does not run with --mlp-tiles yet"),
        ({"tp_sequence": True, "tp": 1}, 2, "tp_sequence splits rows over the ranks of a tp group, and tp is 1"),
        ({"tp_sequence": True, "tp": 3}, 6, "tp 3, which does not divide seq_len 32. Choose --seq-len 30."),
        ({"tp": 3}, 6, "3 does not divide its 4 attention heads. Choose --tp 2."),
        ({}, 2, "sharding 'fsdp' with tp 2 needs at least 4 ranks; got 2."),
        ({"sharding": "none"}, 4, "sharding 'none' is 2 ranks; got 4 ranks. Choose sharding 'fsdp', or 2 processes."),
        ({}, 3, "tp 2 does not divide 3 ranks"),
    ],
)
def test_refusals_name_value_and_fix(spec: ModelSpec, words: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(StrategyError) as raised:
        job_of(spec, ranks, **words)
    assert message in str(raised.value)
    assert "Choose" in str(raised.value) or "Leave out" in str(raised.value) or "leave it out" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp_plan": {}}, "transformers has no tensor-parallel plan"),
        ({"tp_plan": {}, "own_tp_plan": True}, "your tp_plan has no rules, so nothing would be split. Choose --tp 1"),
        ({"tp_plan": {**MLP, "a.attn": "rowwise"}, "heads": 3}, "2 does not divide its 3 attention heads"),
        ({"tp_plan": {**MLP, "a": "packed_rowwise"}}, "in its plan 'a' has style 'packed_rowwise'"),
        (
            {"tp_plan": {**MLP, "model.layers.*.mlp.up_proj": "packed_colwise"}},
            "only fused experts, of three dimensions",
        ),
        ({"tp_plan": {**MLP, "model.layers.*.self_attn.k_proj": "mla_kv_a_proj"}}, "has no qk_rope_head_dim"),
        (
            {"tp_plan": {**MLP, "lm_head": "colwise_gather_output"}},
            "splits one of model.embed_tokens.weight and lm_head.weight",
        ),
        (
            {"config": {"activation_sparsity_pattern": [0.95, 0.0]}},
            "its MLP selects activations by their mean over the whole MLP",
        ),
        ({"config": {"attention_dropout": 0.1}}, "attention_dropout is 0.1"),
        ({"heads": 6, "config": {"num_key_value_heads": 3}}, "2 does not divide its 3 key-value heads. Choose --tp 3."),
        ({"kind": "seq2seq"}, "only causal models of text alone"),
    ],
)
def test_models_without_a_plain_plan_are_refused(spec: ModelSpec, change: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as raised:
        job_of(dataclasses.replace(spec, **change))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("model.layers.0.mlp.up_proj", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.up", "model.layers.*.mlp.up_proj"),
    ],
)
def test_a_rule_of_an_own_plan_that_names_nothing_is_refused(folder: Path, name: str, close: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{name!r} names no weights of Qwen3ForCausalLM")) as raised:
        describe(folder, tp_plan={name: "colwise"})
    assert close in str(raised.value)


def test_an_own_plan_is_forecast(folder: Path, spec: ModelSpec) -> None:
    """It keeps other parts on a rank, and sends less. The class's own forecast stays another in the cache."""
    own = describe(folder, tp_plan=MLP)
    strategy, train_config = Strategy(sharding="fsdp", tp=2), TrainConfig(seq_len=32)
    others = [forecast(each, strategy, "4x H100-80GB", train_config) for each in (spec, own, spec)]
    assert [each.peak_bytes for each in others] == [others[0].peak_bytes, others[1].peak_bytes, others[0].peak_bytes]
    assert others[1].peak_bytes > others[0].peak_bytes
    assert others[1].communication_bytes < others[0].communication_bytes
    assert guard_command(job_of(own)) == "tk.guard(spec, strategy)"
    assert "your own, 3 rules" in str(own)
    assert describe(folder) == spec


def test_a_plan_that_comes_after_the_weights_is_refused(spec: ModelSpec) -> None:
    job = job_of(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**spec.config))
    with pytest.raises(StrategyError, match="is not split for fsdp, tp 2"):
        job.engine.before_prepare(job, model)
    model._tp_size = 2  # as if it were
    job.engine.before_prepare(job, model)
    model.tp_plan = MLP
    with pytest.raises(StrategyError, match="with None for 'lm_head' in its tp_plan, and it was split with 'colwise"):
        job.engine.before_prepare(job, model)


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        (MixtralConfig, (97, 4), "2 does not divide the 97 units of its experts"),
        (MixtralConfig, (4, 4), "has 4 bytes, and torch's grouped_mm takes"),
        (GptOssConfig, (96, 4), "has no tensor-parallel plan for its layers"),
        (MixtralConfig, (96, 3), "has 3 experts, which its 2 ranks of FSDP"),
    ],
    ids=["uneven", "narrow", "no plan", "uneven under FSDP"],
)
def test_mixtures_that_cannot_be_split_are_refused(kind: Any, sizes: tuple[int, int], words: str) -> None:
    width, experts = sizes
    with pytest.raises(StrategyError, match=words):
        job_of(describe(kind(intermediate_size=width, num_local_experts=experts, **SHAPE)))


def test_an_adapter_on_a_latent_product_is_refused() -> None:
    """Its part of the rotary keys sees the heads of one rank."""
    spec = describe(AutoConfig.for_model("glm4_moe_lite"))
    with pytest.raises(StrategyError, match=r"kv_a_proj_with_mqa, of which .* Choose --lora-targets \S*kv_b_proj"):
        job_of(spec, adapter="lora")


def test_experts_are_split_inside() -> None:
    """Each rank has the same part of gate and of up, and of the columns of down."""
    spec = describe(MixtralConfig(intermediate_size=96, num_local_experts=4, **SHAPE))
    local = local_job(job_of(spec)).spec
    assert local is not None
    shapes = {each.name.partition("experts.")[2]: each.shape for each in local.parameters if "experts." in each.name}
    assert shapes == {"gate_up_proj": (4, 96, 64), "down_proj": (4, 64, 48)}


def test_local_shapes_are_those_of_transformers(folder: Path) -> None:
    python("-c", CHECK, folder, code=0)


def test_ranks_of_a_group_hold_the_whole_model_once(spec: ModelSpec) -> None:
    whole = {parameter.name: parameter.elements for parameter in spec.parameters}
    for parameter in spec.parameters:
        parts = [local_shape(parameter, spec.tp_plan, 2, rank) for rank in (0, 1)]
        elements = sum(dataclasses.replace(parameter, shape=shape).elements for shape in parts)
        assert elements == whole[parameter.name] * (2 if "norm" in parameter.name else 1), parameter.name
    job = job_of(spec)
    assert local_job(job).parallelism.ranks == 2
    assert list(job.engine.simulated_ranks(job)) == [0, 1]


def test_transfers_follow_the_plan(spec: ModelSpec) -> None:
    job = job_of(spec, precision="bf16", activation_checkpointing="none")
    sent = [one for one in job.engine.communication(job) if one.link == "tp"]
    tokens = job.train_config.micro_batch * job.train_config.seq_len
    # An all-reduce of two ranks sends a tensor once: the embedding, and two a layer.
    assert sent[0].size == tokens * (1 + 2 * 2) * 64 * 2
    assert sent[1].size == tokens * 257 * 2 / 2
    # The gradient of the input of the head, and of attention and MLP in each layer.
    assert sent[2].size == tokens * (1 + 2 * 2) * 64 * 2
    assert {one.times for one in sent} == {2}


def test_split_tokens_are_gathered_and_scattered(spec: ModelSpec) -> None:
    job = job_of(spec, precision="bf16", activation_checkpointing="none", tp_sequence=True)
    sent = [one for one in job.engine.communication(job) if one.link == "tp"]
    tokens = job.train_config.micro_batch * job.train_config.seq_len
    # A whole sum is left of the embedding, and a whole gradient of the head's input.
    assert (sent[0].size, sent[2].size) == (tokens * 64 * 2, tokens * 64 * 2)
    # Of each layer's attention and MLP the input and the output, forward and backward; and once before and behind the layers.
    assert sent[3].size == tokens * 64 * 2 / 2 * (2 * 2 * 2 * 2 + 2)
    odd = dataclasses.replace(spec, tp_plan={**spec.tp_plan, "model.layers.*.mlp.down_proj": "rowwise_split_input"})
    with pytest.raises(StrategyError, match="layers have style 'rowwise_split_input'"):
        job_of(odd, tp_sequence=True)


def test_dropout_would_repeat_itself_in_split_tokens(spec: ModelSpec) -> None:
    drops = dataclasses.replace(spec, config={**spec.config, "residual_dropout": 0.1, "classifier_dropout": 0.1})
    with pytest.raises(StrategyError, match=r"residual_dropout 0\.1.*Set residual_dropout to 0"):
        job_of(drops, tp_sequence=True)


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen3Config])
def test_split_tokens_keep_less_for_the_backward(kind: Any) -> None:
    """By the trace: of twelve layers' inputs each rank keeps a half."""
    deep = describe(kind(vocab_size=256, intermediate_size=96, head_dim=16, **{**SHAPE, "num_hidden_layers": 12}))
    kept = []
    for split in (False, True):
        job = job_of(deep, sharding="none", ranks=2, tp_sequence=split, loss="chunked")
        (step,) = all_steps(job, traced(job, masked=False))
        forward = step[: 1 + next(index for index, segment in enumerate(step) if segment.what == "backward")]
        kept.append(sum(segment.net - segment.logits_net for segment in forward))
    assert kept[1] <= 0.6 * kept[0]


def test_a_rank_cuts_its_part_out_of_an_embeddings_whole_gradient() -> None:
    """Before FSDP2 reduces it: for a moment both are there, with the head's shard."""
    rows, width = 65536, SHAPE["hidden_size"]
    wide = describe(LlamaConfig(vocab_size=rows, intermediate_size=96, **SHAPE))
    job = resolve(
        Strategy(sharding="fsdp", tp=2), TrainConfig(micro_batch=1, seq_len=16), wide, 4, hardware("4x cpu").device
    )
    trace = traced(job, masked=False)
    (ledger,) = replay_ranks(job, trace, whole_step(job, trace), save=False, num_checkpoints=0, kind=LedgerHistory)
    assert ledger.highest["backward"]["gradients"] == pytest.approx(4 * rows * width * (1 + 1 / 2 + 1 / 4), rel=0.02)


def test_adapters_send_little(spec: ModelSpec) -> None:
    """Of a pair the part between its halves is sent, so bytes grow with its rank alone."""
    jobs = [job_of(spec, adapter="lora", lora_rank=rank, activation_checkpointing="none") for rank in (1, 3)]
    first, second = ([one.size for one in job.engine.communication(job) if one.link == "tp"] for job in jobs)
    tokens = jobs[0].train_config.micro_batch * jobs[0].train_config.seq_len
    # Two matrices a layer are split by inputs, five by outputs; bf16.
    assert second[0] - first[0] == tokens * 2 * 2 * 2 * 2
    assert second[1] == first[1]
    assert second[2] - first[2] == tokens * 2 * 5 * 2 * 2


def test_ranks_share_a_head_of_keys_where_there_are_fewer(spec: ModelSpec) -> None:
    job = job_of(spec, 8, tp=4, activation_checkpointing="none")
    plan = job.settings["plan"]
    assert {plan[f"model.layers.*.self_attn.{name}_proj"] for name in "kv"} == {"colwise_shared_heads"}
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    tokens = job.train_config.micro_batch * job.train_config.seq_len
    gathered = [one.size for one in job.engine.communication(job) if one.link == "tp"][1]
    # The head's logits once; two heads of 16 of keys and of values in two layers, and their gradients. bf16.
    assert gathered == tokens * (257 + 2 * 2 * 2 * 32) * 2 * 3 / 4


def test_an_adapter_is_split_like_its_matrix(spec: ModelSpec) -> None:
    job = job_of(spec, adapter="lora", lora_rank=4)
    states = {state.name.removeprefix("model.layers.0."): state.shape for state in parameters_of(local_job(job))}
    assert states["self_attn.q_proj.lora_A.default.weight"] == (4, 64)
    assert states["self_attn.q_proj.lora_B.default.weight"] == (32, 4)
    assert states["self_attn.o_proj.lora_A.default.weight"] == (4, 32)
    assert states["self_attn.o_proj.lora_B.default.weight"] == (64, 4)


def test_a_worker_finds_what_was_launched() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "2"}
    assert agree({"tp": 2}, environ) == Strategy(tp=2)
    fsdp = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    asked = {"tp": 2, "sharding": "hsdp", "dp_replicate": 2}
    assert agree(asked, fsdp) == Strategy(**asked, precision="bf16")
    written = accelerate_config(Strategy(**asked), 8)
    assert written["distributed_type"] == "FSDP"
    assert "parallelism_config" not in written
    assert accelerate_config(Strategy(tp=2), 2)["distributed_type"] == "MULTI_GPU"


def test_an_own_loop_names_the_guard(spec: ModelSpec) -> None:
    assert guard_command(job_of(spec)) == f"toolkit guard {spec.name} --sharding fsdp --tp 2"
    assert guard_command(job_of(spec, tp=1)) == ""
    split = guard_command(job_of(spec, 8, sharding="hsdp", dp_replicate=2, tp_sequence=True))
    assert split == f"toolkit guard {spec.name} --sharding hsdp --dp-replicate 2 --tp 2 --tp-sequence"


def test_without_data_parallelism_tp_is_the_number_of_ranks() -> None:
    assert default_ranks(Strategy(tp=2), hardware(MACHINE)) == 2
    assert default_ranks(Strategy(tp=2, sharding="fsdp"), hardware(MACHINE)) == 8
    assert engine_for("none") is engine_for("ddp")
    assert engine_for("none", 2) is engine_for("none", 4)


def test_groups_over_nodes_are_warned_of_with_their_cost() -> None:
    wide = describe(
        Qwen3Config(
            hidden_size=512, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16, vocab_size=512
        )
    )
    config, machine = TrainConfig(seq_len=32), "2 nodes x 8x H100-80GB"
    over, within = (
        forecast(wide, Strategy(sharding=word, tp=tp), machine, config) for word, tp in (("none", 16), ("fsdp", 8))
    )
    (cost,) = [note for note in over.unknown if "spans nodes" in note]
    assert within.tokens_per_second is not None
    assert f"by --tp 8 --sharding fsdp: {within.tokens_per_second:,.0f} tokens/s, which fits" in cost
    assert not any("spans nodes" in note for note in within.unknown)


def test_a_warm_forecast_imports_no_torch(folder: Path) -> None:
    strategy, train_config = Strategy(sharding="fsdp", tp=2), TrainConfig(seq_len=32)
    peak = forecast(describe(folder), strategy, "4x H100-80GB", train_config).peak_bytes
    assert int(python("-c", WARM, folder, code=0).stdout) == peak
