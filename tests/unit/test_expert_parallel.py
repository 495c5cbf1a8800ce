"""Expert parallelism without ranks: refusals, local shapes, states, transfers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from programs import python

from toolkit import StrategyError, describe, forecast
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import ModelError
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.mesh.plan import local_job
from toolkit.engines.resolution import accelerate_config, default_ranks, resolve
from toolkit.engines.states import parameters_of
from toolkit.forecasting.expert_placement import placements
from toolkit.models import ModelSpec
from toolkit.training.setup import agree

MACHINE = "8x H100-80GB"
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256}

CHECK = """
import torch
from transformers import AutoModelForCausalLM, MixtralConfig
from toolkit import Strategy, TrainConfig, describe
from toolkit.devices.machine import hardware
from toolkit.engines.mesh.plan import local_job
from toolkit.engines.resolution import resolve
from toolkit.forecasting.traced_model import distribute, fake_mesh, local

config = MixtralConfig(**SHAPE)
for ranks, tp, ep in ((2, 1, 2), (4, 2, 4), (2, 2, 2)):
    strategy = Strategy(sharding="fsdp" if ranks > tp else "none", tp=tp, ep=ep)
    job = resolve(strategy, TrainConfig(seq_len=32), describe(config), ranks, hardware("8x H100-80GB").device)
    shapes = {parameter.name: parameter.shape for parameter in local_job(job).spec.parameters}
    with fake_mesh(job.engine.trace_config(job, masked=False)) as mesh:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        distribute(model, mesh, job.spec)
        assert {name: tuple(local(parameter).shape) for name, parameter in model.named_parameters()} == shapes, (tp, ep)
"""


def job_of(config: Any = None, ranks: int = 4, spec: ModelSpec | None = None, **words: Any) -> Job:
    spec = spec or describe(config or transformers.MixtralConfig(**SHAPE, **EXPERTS))
    strategy = Strategy(**{"sharding": "fsdp", "ep": 2, **words})
    return resolve(strategy, TrainConfig(seq_len=32, accumulation=2), spec, ranks, hardware(MACHINE).device)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ({"config": transformers.LlamaConfig(**SHAPE, vocab_size=256)}, ("ep 2", "LlamaForCausalLM", "no experts")),
        ({"config": transformers.T5Config(d_model=64, num_layers=1)}, ("ep 2", "T5", "only causal models")),
        ({"ep": 3, "tp": 2, "ranks": 6}, ("ep 3 is no multiple of tp 2", "--ep 4")),
        ({"ep": 8}, ("ep 8 does not divide the 4 ranks", "multiple of 8 processes")),
        ({"ranks": 8}, ("an ep rank has 2 of 4 experts, which its 4 ranks of FSDP", "'hsdp' with --dp-replicate 2")),
        ({"ranks": 6}, ("its 3 ranks of FSDP", "cannot share evenly", "'hsdp' with --dp-replicate 3")),
        ({"ep": 4, "sharding": "hsdp", "dp_replicate": 2}, ("ep 4 does not divide the 2 ranks",)),
        ({"ep": 8, "ranks": 8}, ("8 does not divide its 4 experts", "--ep 2")),
        ({"sharding": "none", "ranks": 2}, ("ep 2 with sharding 'none' needs tp 2", "--tp 2")),
        *(({"sharding": word}, (f"sharding '{word}'", "ep 2", "fsdp")) for word in ("ddp", "zero1", "zero2", "zero3")),
        *(({"adapter": word}, (f"adapter '{word}'", "ep 2", "adapter none")) for word in ("dora", "qlora")),
        ({"adapter": "lora", "lora_targets": "gate_up_proj"}, ("lora_targets 'gate_up_proj'", "q_proj")),
        ({"precision": "fp16"}, ("precision 'fp16'", "ep 2", "bf16")),
        ({"offload": "cpu"}, ("offload 'cpu'", "ep 2", "offload none")),
        ({"compile": True}, ("compile", "ep 2")),
    ],
)
def test_refusals_name_value_and_fix(words: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(StrategyError) as refused:
        job_of(**words)
    text = str(refused.value)
    assert [part for part in parts if part not in text] == []
    assert "Choose" in text or "Leave out" in text or "Known" in text
    if fix := re.search(r"'hsdp' with --dp-replicate (\d+)", text):
        assert job_of(**words, sharding="hsdp", dp_replicate=int(fix[1])).parallelism.dp_replicate == int(fix[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ep_plan": {}}, "no expert-parallel plan"),
        ({"ep_plan": {"model.layers.*.mlp.experts.down_proj": "grouped_gemm", "a": "b"}}, "its plan has style 'b'"),
        ({"kind": "seq2seq"}, "only causal models of text alone"),
    ],
)
def test_models_without_a_plan_are_refused(change: dict[str, Any], message: str) -> None:
    spec = describe(transformers.MixtralConfig(**SHAPE, **EXPERTS))
    with pytest.raises(StrategyError) as refused:
        job_of(spec=dataclasses.replace(spec, **change))
    assert message in str(refused.value)
    assert "Choose --ep 1" in str(refused.value)


def test_switch_is_refused() -> None:
    """Its experts are those of an encoder and a decoder."""
    spec = describe(transformers.SwitchTransformersConfig(num_layers=2, num_decoder_layers=2))
    with pytest.raises(StrategyError, match="SwitchTransformersForConditionalGeneration: only causal models of text"):
        job_of(spec=spec)


MIXED = {**SHAPE, "vocab_size": 256, "intermediate_size": 96, "head_dim": 16}


def test_layers_without_experts_run_between_those_with() -> None:
    config = transformers.Qwen3MoeConfig(
        **MIXED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[0]
    )
    inner = local_job(job_of(config))
    assert inner.spec is not None
    experts = [each for each in inner.spec.parameters if ".experts." in each.name]
    assert {each.name.split(".")[2] for each in experts} == {"1"}
    assert {each.shape[0] for each in experts} == {2}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "num_experts",
            r"field 'num_experts': TypeError: Field 'num_experts' expected int, got list \(value: \[4, 2\]\)",
        ),
        ("moe_topk", "4 experts a layer, and its config does not say in one number how many a token uses"),
    ],
)
def test_unequal_numbers_of_experts_are_refused(tmp_path: Path, field: str, message: str) -> None:
    """Hunyuan's config has room for a list, one number a layer; transformers' own experts take one number."""
    config = transformers.HunYuanMoEV1Config(
        **MIXED, num_experts=4, moe_topk=2, architectures=["HunYuanMoEV1ForCausalLM"]
    )
    assert job_of(config).parallelism.ep == 2
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: [4, 2]}))
    with pytest.raises(ModelError, match=message) as refused:
        describe(tmp_path)
    assert "\n" not in str(refused.value)


def test_local_shapes_are_those_of_transformers() -> None:
    python("-c", f"SHAPE = {SHAPE | EXPERTS}\n{CHECK}", code=0)


@pytest.mark.parametrize(("ranks", "tp", "ep"), [(4, 1, 2), (4, 1, 4), (4, 2, 2), (4, 2, 4)])
def test_ranks_of_a_copy_hold_each_expert_once(ranks: int, tp: int, ep: int) -> None:
    job = job_of(ranks=ranks, tp=tp, ep=ep)
    assert job.spec is not None
    inner = local_job(job)
    for whole, local in zip(parameters_of(job), parameters_of(inner), strict=True):
        if ".experts." in whole.name:
            assert local.elements == whole.elements // ep
            assert inner.engine.rank_elements(inner, local) == whole.elements // 4  # each rank holds one


def test_tokens_are_exchanged_twice_in_each_pass() -> None:
    job = job_of(precision="bf16", activation_checkpointing="none")
    (sent,) = [one for one in job.engine.communication(job) if one.link == "ep"]
    tokens = job.train_config.micro_batch * job.train_config.seq_len
    # To the experts and back, in the forward and in the backward of two layers; half of the tokens stay.
    assert sent.size == 2 * 4 * tokens * 2 * 64 * 2 / 2
    assert sent.times == 2
    plain = job_of(ep=1, precision="bf16", activation_checkpointing="none")
    gathered = [sum(one.size for one in each.communication() if one.link == "ring") for each in (job, plain)]
    assert gathered[0] < gathered[1]


def test_a_worker_finds_what_was_launched() -> None:
    fsdp = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert agree({"ep": 2, "sharding": "fsdp"}, fsdp) == Strategy(ep=2, sharding="fsdp", precision="bf16")
    assert "parallelism_config" not in accelerate_config(Strategy(sharding="hsdp", dp_replicate=2, ep=2), 8)
    assert [Strategy(sharding="fsdp", tp=tp, ep=ep).least_ranks for tp, ep in ((1, 2), (1, 4), (2, 2), (2, 4))] == [
        2, 4, 4, 4,
    ]  # fmt: skip
    assert default_ranks(Strategy(tp=2, ep=2), hardware(MACHINE)) == 2


def test_an_imbalance_needs_ranks_that_share_experts() -> None:
    spec = describe(transformers.MixtralConfig(**SHAPE, **EXPERTS))
    with pytest.raises(StrategyError, match=r"expert_imbalance 1.5 needs expert parallelism.* Give --ep N"):
        forecast(spec, Strategy(sharding="fsdp"), "2x cpu", expert_imbalance=1.5)
    for value in (0.5, 3):
        with pytest.raises(StrategyError, match=f"expert_imbalance {value:g}: expected 1, all ranks alike, to 2"):
            forecast(spec, Strategy(sharding="fsdp", ep=2), "2x cpu", expert_imbalance=value)


def test_other_places_of_experts_have_another_imbalance() -> None:
    config = transformers.MixtralConfig(**SHAPE, **{**EXPERTS, "num_local_experts": 8})
    job = dataclasses.replace(job_of(config, ep=4), expert_imbalance=2.0)
    ways = {way.name: way for way in placements(job, 3.0, 2.0)}
    # One expert of the 8 gets 5/3 of a rank's mean, and each of the others 1/3: one rank has 2, three have 2/3.
    assert {name: way.imbalance for name, way in ways.items()} == pytest.approx(
        {
            "as given": 2,
            "its hottest expert on 2 ranks": 5 / 6 + 2 / 3,
            "its hottest expert on 4 ranks": 5 / 12 + 2 / 3,
            "1 of its other experts moved": 5 / 3,
            "all ranks alike": 1,
        }
    )
    assert all(way.step_seconds == pytest.approx(1 + way.imbalance) for way in ways.values())
