"""Traces of shallow models, spread over depth and batch; the ZeRO paper's figures; refusals of what cannot be forecast."""

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from programs import python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import LlavaConfig, OpenAIGPTConfig, T5Config

import toolkit as tk
from toolkit import Strategy, StrategyError, ToolkitError, TrainConfig, describe, forecast, hardware, plan
from toolkit.cli import main
from toolkit.config.run_config import RunConfig
from toolkit.core.display import Result, Table
from toolkit.core.errors import ModelError
from toolkit.core.units import GiB
from toolkit.data.rows import column_names
from toolkit.devices.machine import Hardware
from toolkit.engines.job import Job
from toolkit.engines.ledger import LedgerHistory
from toolkit.engines.resolution import resolve
from toolkit.engines.roofline import EFFICIENT
from toolkit.engines.states import checkpoint_bytes
from toolkit.engines.traces import Segment, TraceConfig
from toolkit.forecasting import fake_kernels, memory, trace_cache, traced_model, tracing
from toolkit.forecasting.fake_kernels import cuda_casts
from toolkit.forecasting.memory_advice import changed
from toolkit.forecasting.plans import Plan
from toolkit.forecasting.prediction import PROCESS, fastest_checkpointing, forecast_job
from toolkit.forecasting.result import Forecast
from toolkit.forecasting.search import Candidate, rank_key
from toolkit.forecasting.trace_cache import trace_of
from toolkit.forecasting.traces import split_segments
from toolkit.forecasting.tracing import trace
from toolkit.forecasting.tracker import Tracker
from toolkit.models import ModelSpec
from toolkit.transforms.adapters import check_quantized
from toolkit.transforms.chunked_loss import CPU_CHUNK

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}


def traced_as(sharding: str = "ddp", precision: str = "fp32", **words: Any) -> TraceConfig:
    strategy = Strategy(sharding=sharding, precision=precision, attention="sdpa", **words)
    job = resolve(strategy, TrainConfig(), None, 2, hardware("2x cpu").device)
    return job.engine.trace_config(job, masked=False)


FP32, AUTOCAST = traced_as(), traced_as(precision="bf16")
CHUNKED = traced_as(precision="bf16", loss="chunked")
CAST = traced_as("fsdp", "bf16", activation_checkpointing="none")
EAGER = dataclasses.replace(FP32, attention="eager", masked=True)
LLAMA_8B, LLAMA_70B = (4096, 14336, 32, 32), (8192, 28672, 80, 64)

pytestmark = pytest.mark.usefixtures("peft")


def config(family: str, layers: int, **more: Any) -> Any:
    if family == "gpt2":
        return transformers.GPT2Config(n_embd=64, n_layer=layers, n_head=4, vocab_size=256)
    if family == "gemma":
        return transformers.Gemma3TextConfig(**SHAPE, num_hidden_layers=layers, vocab_size=256, head_dim=16)
    if family == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return transformers.MixtralConfig(**SHAPE, **experts, num_hidden_layers=layers, vocab_size=256)
    if family == "t5":
        shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "decoder_start_token_id": 0}
        return transformers.T5Config(**shape, num_layers=layers, vocab_size=256)
    if family == "mamba":
        return transformers.MambaConfig(hidden_size=64, num_hidden_layers=layers, state_size=8, vocab_size=256)
    return transformers.LlamaConfig(**{**SHAPE, "vocab_size": 256, **more}, num_hidden_layers=layers)


def llama3(hidden: int, intermediate: int, layers: int, heads: int) -> ModelSpec:
    """A Llama 3: its 8B has `LLAMA_8B`, its 70B `LLAMA_70B`."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    more = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192}
    return describe(config("llama", layers, **sizes, **more))


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("llama", FP32),
        ("llama", AUTOCAST),
        ("llama", CAST),
        ("llama", EAGER),
        ("gpt2", traced_as(activation_checkpointing="none")),
        ("gpt2", dataclasses.replace(AUTOCAST, device="cuda")),
        ("gemma", FP32),
        ("mixtral", FP32),
        ("mamba", dataclasses.replace(FP32, attention="eager")),
        ("t5", FP32),
        ("t5", AUTOCAST),
        ("llama", traced_as(precision="bf16", adapter="lora")),
        ("llama", traced_as("fsdp", "bf16", adapter="lora", activation_checkpointing="none")),
        ("llama", traced_as(adapter="dora")),
        ("llama", CHUNKED),
        ("t5", traced_as(loss="chunked")),
        ("gpt2", traced_as(adapter="qlora")),
        ("gemma", traced_as(adapter="qlora")),
        ("llama", traced_as(adapter="qlora8", activation_checkpointing="none")),
        ("llama", dataclasses.replace(traced_as(adapter="qlora8"), device="cuda")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_deep_model_is_a_shallow_one_spread(family: str, way: TraceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = describe(config(family, 8))
    spread = split_segments(tracing.trace(spec, way, batch=2, seq_len=32))
    monkeypatch.setattr(traced_model, "_kept_layers", lambda kinds: tuple(range(len(kinds))))
    deep = split_segments(tracing.trace(spec, way, batch=2, seq_len=32))
    assert [name for name, _ in levels(spread)] == [name for name, _ in levels(deep)]
    assert [size for _, size in levels(spread)] == pytest.approx([size for _, size in levels(deep)], rel=0.01)
    assert sum(one.net for one in spread) == 0


def levels(step: Sequence[Segment]) -> list[tuple[str, int]]:
    """The highest total of the forward, and of the backward before each gradient."""
    result, total, highest = [], 0, 0
    for one in step:
        highest, total = max(highest, total + one.rise), total + one.net
        if one.what in ("gradient", "backward", "end"):
            result.append((f"{one.what} {one.name} {one.size}", highest))
            highest = total
    return result


def peak(step: Sequence[Segment]) -> int:
    """The highest total of all."""
    return max(size for _, size in levels(step))


@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", FP32), ("llama", AUTOCAST), ("llama", CHUNKED), ("gemma", FP32), ("mixtral", FP32), ("t5", FP32)],
)
def test_a_large_batch_follows_from_two_small_ones(family: str, way: TraceConfig) -> None:
    spec, length = describe(config(family, 3)), CPU_CHUNK if way is CHUNKED else 32  # each row is a chunk
    two, three = (trace(spec, way, batch=size, seq_len=length) for size in (2, 3))
    assert two.scaled(three, 5) == trace(spec, way, batch=7, seq_len=length)


def test_stage_3_saves_the_inputs_of_frozen_linear_modules() -> None:
    spec = describe(config("llama", 2))
    words = {"adapter": "lora", "lora_rank": 4, "lora_targets": "q_proj", "activation_checkpointing": "none"}
    way = dataclasses.replace(traced_as("fsdp", "bf16", **words), trained="float32")
    saving = trace_of(spec, dataclasses.replace(way, saves_inputs=True), batch=2, seq_len=64)
    inputs = 2 * 64 * (64 + 64 + 192) * 2  # of o_proj, of gate_proj and up_proj, and of down_proj, in bf16
    more = peak(split_segments(saving)) - peak(split_segments(trace_of(spec, way, batch=2, seq_len=64)))
    assert more == 2 * inputs


@pytest.mark.parametrize(
    "computes", [CAST, traced_as(precision="bf16", activation_checkpointing="none")], ids=["bf16", "autocast"]
)
def test_flash_attention_keeps_no_scores_and_a_mask_costs(computes: TraceConfig) -> None:
    """Under autocast query and key come in fp32, and the kernel takes them in bf16."""
    spec = describe(config("llama", 2))
    way = dataclasses.replace(computes, device="cuda")
    segments = [
        split_segments(trace_of(spec, dataclasses.replace(way, masked=masked), batch=1, seq_len=1024))
        for masked in (False, True)
    ]
    kernels = [{kernel for segment in each for kernel, _ in segment.flops} for each in segments]
    assert kernels == [{"bfloat16"}, {"bfloat16", f"bfloat16{EFFICIENT}"}]
    flash, masked = map(peak, segments)
    eager = peak(split_segments(trace_of(spec, dataclasses.replace(way, attention="eager"), batch=1, seq_len=1024)))
    scores = 4 * 1024 * 1024 * 2  # heads x queries x keys, in bf16: once for each of two layers, and more
    assert flash < masked < eager
    assert eager - flash > 2 * scores


def test_autocast_on_a_gpu_computes_more_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = describe(config("gpt2", 2))
    way = dataclasses.replace(traced_as(precision="bf16", activation_checkpointing="none"), device="cuda")
    wide = peak(split_segments(tracing.trace(spec, way, batch=2, seq_len=64)))
    monkeypatch.setattr(fake_kernels, "cuda_casts", contextlib.nullcontext)
    narrow = peak(split_segments(tracing.trace(spec, way, batch=2, seq_len=64)))
    wider = 2 * 64 * 4 * 64 * 2  # two bytes more for what is 4 x hidden wide: the cube in each layer's GELU, at least
    assert wide - narrow > 2 * wider


def test_cuda_casts_touch_fake_tensors_under_autocast_alone() -> None:
    real = torch.ones(4, 8, dtype=torch.bfloat16)
    with FakeTensorMode():
        fake = torch.ones(4, 8, dtype=torch.bfloat16)
        weight = torch.ones(8)
    with torch.autocast("cpu", torch.bfloat16):
        with cuda_casts():
            norm = functional.layer_norm(fake, (8,), weight)
            for wide in (fake**3, norm, fake.softmax(-1), fake.sum(-1), fake.exp()):
                assert wide.dtype == torch.float32
            assert fake.softmax(-1, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert (fake @ fake.T).dtype == (fake + 1).dtype == torch.bfloat16
            assert (real**3).dtype == real.exp().dtype == real.sum(-1).dtype == torch.bfloat16
        assert (fake**3).dtype == fake.exp().dtype == fake.sum(-1).dtype == torch.bfloat16
    with cuda_casts():
        assert (fake**3).dtype == torch.bfloat16


def test_a_softmax_of_fp16_is_one_kernel_on_a_gpu() -> None:
    """It reads fp16 and writes fp32; one of bf16 is cast first."""
    made = {}
    for dtype in (torch.float16, torch.bfloat16):
        tracker = Tracker()
        with FakeTensorMode(), cuda_casts(), torch.autocast("cpu", dtype), tracker:
            scores = torch.ones(64, 64, dtype=dtype).softmax(-1, dtype=torch.float32)
        assert scores.dtype == torch.float32
        made[dtype] = sum(size for what, size, _ in tracker.events if what == "+")
    assert made[torch.float16] == 64 * 64 * (2 + 4)
    assert made[torch.bfloat16] == 64 * 64 * (2 + 4 + 4)


def test_cuda_casts_are_those_of_torch() -> None:
    """What torch's own list has and ours has not, no language model's forward calls, or both devices cast alike."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    for macro, ours in (
        ("AT_FORALL_FP32(_)", fake_kernels.FP32_OPERATIONS.split()),
        ("AT_FORALL_FP32_SET_OPT_DTYPE(_)", fake_kernels.SUMS.split()),
    ):
        block = text[text.index(f"#define {macro}") :]
        result = re.findall(r"_\((\w+)(?:, (\w+))?\)", block[: block.index("\n\n")].partition("\n")[2])
        theirs = {".".join(filter(None, one)) for one in result}
        assert set(ours) <= theirs
        known = {"frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "renorm", "pdist", "kl_div"}
        known |= {"binary_cross_entropy_with_logits", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"}
        left = {name for name in theirs - set(ours) - known if not re.search("_loss|nll_loss2d|upsample", name)}
        assert left == set()


def test_the_logits_are_a_part() -> None:
    """In bf16 a forward has ten bytes of them for each token and word: bf16, fp32 and its logarithm, all at once."""
    large = config("llama", 1, vocab_size=8192)
    strategy = Strategy(sharding="none", precision="bf16_pure", loss="whole")
    train_config = TrainConfig(seq_len=512, micro_batch=4)
    result = forecast(describe(large), strategy, "A100-80GB", train_config, one_document=True)
    each = result.parts["logits"] / (4 * 512 * 8192)
    assert 10 <= each <= 12.1
    assert result.parts["activations"] < result.parts["logits"]
    assert sum(result.parts.values()) == result.peak_bytes
    # A chunk of 2,048 tokens has them in bf16 and fp32, and the gradients that it leaves are none of them.
    longer = dataclasses.replace(train_config, micro_batch=16)
    chunks = forecast(
        describe(large), dataclasses.replace(strategy, loss="chunked"), "A100-80GB", longer, one_document=True
    )
    assert chunks.parts["logits"] == pytest.approx(6 * 2048 * 8192, rel=0.01)
    # Under autocast the head's weight is cast as well, 1 MiB, and is none of them; what it reads is, 256 KiB.
    autocast = dataclasses.replace(strategy, precision="bf16")
    cast = forecast(describe(large), autocast, "A100-80GB", train_config, one_document=True)
    assert cast.parts["logits"] - result.parts["logits"] <= 256 * 1024


def test_the_experts_implementation_is_named() -> None:
    result = forecast(
        describe(config("mixtral", 2)), Strategy(sharding="zero3"), "8x A100-80GB", TrainConfig(seq_len=64)
    )
    assert any(
        "Experts, computed by grouped_mm, are assumed to be evenly loaded" in sentence for sentence in result.unknown
    )


def test_a_mask_is_named_where_it_is_counted() -> None:
    """A forecast of Qwen2-MoE with a mask was 6.8% high, because its rows held one document each."""
    spec = describe(config("llama", 2, hidden_size=64, intermediate_size=128, vocab_size=256))

    def result(attention: str, one_document: bool) -> Forecast:
        strategy, train_config = Strategy(attention=attention), TrainConfig(micro_batch=1, seq_len=2048)
        return forecast(spec, strategy, "H100-80GB", train_config, one_document=one_document)

    def named(result: Forecast) -> bool:
        return any("--one-document" in sentence for sentence in result.unknown)

    masked, bare = result("sdpa", False), result("sdpa", True)
    assert masked.peak_bytes > bare.peak_bytes
    assert (named(masked), named(bare), named(result("flash_attention_2", False))) == (True, False, False)


def test_devices_without_work_are_named_before_another_training() -> None:
    spec = llama3(*LLAMA_8B)
    result = forecast(spec, Strategy(), "8x H100-80GB", TrainConfig(seq_len=1024))
    assert result.change == {"sharding": "fsdp", "processes": 8}
    assert "The smallest change that fits: --sharding fsdp --processes 8" in result.reason
    alone = forecast(spec, Strategy(), "H100-80GB", TrainConfig(seq_len=1024))
    assert alone.change is not None
    assert "sharding" not in alone.change


@pytest.mark.parametrize("packed", [True, False])
def test_traced_batches_have_the_columns_of_the_data(packed: bool) -> None:
    """OPT takes a mask and ignores positions: LoRA on it was 7% low. Positions of each row make rotary embeddings of each."""
    masked, bare = (
        tracing._inputs(llama3(*LLAMA_8B), dataclasses.replace(FP32, masked=way), 2, 8, packed=packed)
        for way in (True, False)
    )
    assert set(masked) == set(column_names(packed))
    assert set(masked) - set(bare) == (set() if packed else {"attention_mask"}), "a mask that masks nothing is left out"
    assert {tuple(column.shape) for column in masked.values()} == {(2, 8)}


def test_a_model_that_keeps_no_documents_apart_is_forecast_with_its_mask() -> None:
    spec = describe(
        transformers.OPTConfig(hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
    )
    masked, bare = (
        forecast(
            spec, Strategy(), hardware("cpu"), TrainConfig(micro_batch=2, seq_len=1024), one_document=way
        ).peak_bytes
        for way in (False, True)
    )
    assert masked - bare >= 2 * 1024 * 1024, "a byte or more of each pair of tokens"


def test_zero3_can_gather_a_module_at_a_time() -> None:
    """DeepSpeed's default keeps models of less than a billion elements whole from forward to backward."""

    def peak(sharding: str, live: int | None = None) -> int:
        strategy = Strategy(sharding=sharding, live_elements=live, loss="whole")
        phases = forecast(None, strategy, "2x cpu", TrainConfig(seq_len=64, micro_batch=2)).phases
        return max(size for phase, size in phases.items() if phase != "save")

    assert peak("zero3", 1) < peak("zero2") < peak("zero3") == peak("zero3", 10**9)


def test_zero3_with_parameters_on_the_host_keeps_a_tied_weights_second_shard() -> None:
    """Measured: 2% to 4% of the peak of a small model, at 1 and 2 ranks, in fp32 and bf16; none without an offload."""

    def parameters(tied: bool, offload: str) -> int:
        spec = describe(config("llama", 2, vocab_size=4096, tie_word_embeddings=tied))
        strategy = Strategy(sharding="zero3", offload=offload, precision="fp32")
        return forecast(spec, strategy, hardware("2x cpu"), TrainConfig(micro_batch=1, seq_len=16)).parts["parameters"]

    shard = 4096 * 64 * 4 // 2
    assert parameters(False, "cpu") - parameters(True, "cpu") == 0
    assert parameters(False, "none") - parameters(True, "none") == shard


@pytest.mark.parametrize(
    ("sharding", "ranks", "phase", "share"),
    [("zero1", 2, "forward", 1.0), ("zero2", 2, "backward", 0.5), ("hsdp", 4, "backward", 0.5)],
)
def test_a_second_micro_batch_takes_what_its_engine_holds(sharding: str, ranks: int, phase: str, share: float) -> None:
    """ZeRO-1 whole gradients and a bucket, ZeRO-2 in fp32 a second partition, HSDP what its groups exchanged. All measured."""
    spec = describe(config("llama", 6, hidden_size=256, intermediate_size=768))
    strategy = Strategy(sharding=sharding, dp_replicate=2 if sharding == "hsdp" else 1)

    def peak(accumulation: int) -> int:
        asked = TrainConfig(micro_batch=1, seq_len=16, accumulation=accumulation)
        return forecast(spec, strategy, hardware("cpu"), asked, ranks=ranks).phases[phase]

    assert peak(2) - peak(1) == pytest.approx(share * 4 * spec.elements, rel=0.25)
    assert peak(3) == peak(2)


def test_the_zero_papers_figure() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters, 64 ranks, K = 12: 120, 31.4, 16.6 and 1.9 GB."""
    spec = parameters(7_500_000_000)
    result = {}
    for word in ("ddp", "zero1", "zero2", "zero3"):
        job = resolve(
            Strategy(sharding=word, precision="bf16"), TrainConfig(), spec, 64, hardware("8 nodes x 8x H100").device
        )
        state = job.engine.expected_state(job)
        # The paper's baseline keeps bf16 weights and gradients with fp32 states; autocast keeps fp32 weights alone.
        share = 1 if word in ("ddp", "zero1") else 64
        states = state.parameters + state.master + (state.optimizer or 0)
        base = 2 * spec.elements + 12 * spec.elements if word == "ddp" else states
        result[word] = (base + 2 * spec.elements / share) / 1e9
    rounded = {word: round(size, 1) for word, size in result.items()}
    assert rounded == {"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}


@pytest.mark.parametrize(
    ("size", "strategy", "machine", "peak"),
    [
        (LLAMA_8B, {"sharding": "none", "precision": "bf16"}, "1x H200", 119.8),
        (LLAMA_70B, {"sharding": "fsdp", "precision": "bf16_pure"}, "8x H100-80GB", 72.3),
    ],
)
def test_what_fits_with_fused_kernels(
    size: tuple[int, ...], strategy: dict[str, str], machine: str, peak: float
) -> None:
    """Llama 3 8B and 70B, all weights: with the temporaries of torch's other kernels neither would fit."""
    request = Strategy(activation_checkpointing="full", **strategy)
    result = forecast(llama3(*size), request, machine, TrainConfig(seq_len=1024, micro_batch=1))
    assert result.fits, result.reason
    assert result.peak_bytes / GiB == pytest.approx(peak, rel=0.01)
    assert result.phases["step"] <= result.phases["backward"]


def parameters(elements: int) -> ModelSpec:
    """A spec of one large matrix."""
    spec = describe(config("llama", 1))
    one = dataclasses.replace(spec.parameters[0], shape=(elements // 1000, 1000))
    return dataclasses.replace(spec, parameters=(one,), tied=())


def test_parts_add_up_to_the_peak_and_phases_hold_it() -> None:
    result = forecast(
        describe(config("llama", 4)), Strategy(sharding="zero3"), "8x A100-80GB", TrainConfig(seq_len=128)
    )
    assert sum(result.parts.values()) == result.peak_bytes == max(result.phases.values())
    assert result.fits
    assert result.limit_bytes == hardware("A100-80GB").device.free_bytes
    assert result.to_dict()["device"]["phases"][result.peak_phase] == result.peak_bytes
    assert "It fits." in str(result)


def test_what_does_not_fit_says_by_how_much() -> None:
    large = llama3(*LLAMA_70B)
    result = forecast(large, Strategy(sharding="ddp"), "8x H100-80GB", TrainConfig(seq_len=128))
    assert not result.fits
    assert "A rank has 79.11 GiB and needs" in result.reason
    smaller = {"micro_batch": 1, "accumulation": 4, "loss": "chunked", "sharding": "fsdp", "offload": "cpu"}
    assert result.change == smaller
    assert "The smallest change that fits: --micro-batch 1" in result.reason
    alone = forecast(large, Strategy(adapter="qlora"), "T4", TrainConfig(seq_len=128, micro_batch=1))
    assert not alone.fits
    assert alone.change is None
    assert "smallest change" not in alone.reason


def test_the_smallest_change_that_fits_is_named() -> None:
    """A smaller batch where that is enough, else several changes together; and it does fit."""
    spec = llama3(*LLAMA_8B)
    for strategy, on, train_config, change in (
        (
            Strategy(sharding="fsdp"),
            "8x A100-80GB",
            TrainConfig(seq_len=4096, micro_batch=16),
            {"micro_batch": 8, "accumulation": 2},
        ),
        (Strategy(sharding="zero1"), "2x A100-80GB", TrainConfig(seq_len=1024, micro_batch=2), {"sharding": "fsdp"}),
    ):
        result = forecast(spec, strategy, on, train_config)
        assert not result.fits
        assert result.change == change
        chosen, batch = changed(strategy, train_config, change)
        smaller = forecast(spec, chosen, on, batch)
        assert smaller.fits
        assert smaller.needed_bytes == result.changed_bytes


@pytest.mark.parametrize(
    ("strategy", "on", "ranks", "said"),
    [
        (Strategy(sharding="hsdp", dp_replicate=2), "2x A100-80GB", None, "needs groups of at least 2 ranks"),
        (Strategy(sharding="ddp"), "2x H100", 0, "ranks 0: expected at least 1"),
    ],
)
def test_what_cannot_be_forecast_is_said(strategy: Strategy, on: str, ranks: int | None, said: str) -> None:
    with pytest.raises((StrategyError, ToolkitError), match=said):
        forecast(describe(config("llama", 2)), strategy, on, ranks=ranks)


def test_a_class_without_activation_checkpointing_is_refused_before_a_launch() -> None:
    spec = describe(OpenAIGPTConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=256))
    with pytest.raises(StrategyError, match="OpenAIGPTLMHeadModel has no activation checkpointing"):
        forecast(spec, Strategy(activation_checkpointing="full"), "T4", TrainConfig(seq_len=64))
    assert forecast(spec, Strategy(), "T4", TrainConfig(seq_len=64)).strategy.activation_checkpointing == "none"


POLICIES = ("none", "selective", "attention", "full")


def test_a_policy_keeps_less_than_the_faster_one_before() -> None:
    """Eight layers, 4 x 256 tokens: the peak over the weights, and all operations."""
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4}
    spec = describe(config("llama", 8, **shape, vocab_size=512))
    peaks, flops = {}, {}
    for policy in (*POLICIES, "every:2"):
        step = split_segments(trace(spec, traced_as(activation_checkpointing=policy), batch=4, seq_len=256))
        peaks[policy] = peak(step)
        flops[policy] = sum(size for segment in step for _, size in segment.flops)
    assert [*peaks.values()][:4] == sorted([*peaks.values()][:4], reverse=True)
    assert peaks["selective"] < 0.45 * peaks["none"]
    assert flops["selective"] < 0.905 * flops["full"]
    assert peaks["none"] / 2 < peaks["every:2"] < 0.6 * peaks["none"]
    assert flops["every:2"] - flops["none"] == (flops["full"] - flops["none"]) / 2


def test_auto_is_the_fastest_policy_that_leaves_room() -> None:
    spec, machine = llama3(1024, 4096, 8, 8), hardware("1x H100-80GB")
    train_config = TrainConfig(seq_len=2048, micro_batch=4)

    def job_on(free: float, policy: str) -> tuple[Job, Hardware]:
        on = dataclasses.replace(machine, device=dataclasses.replace(machine.device, free_bytes=round(free)))
        return resolve(Strategy(activation_checkpointing=policy), train_config, spec, 1, on.device), on

    made = [forecast_job(*job_on(80e9, policy)) for policy in POLICIES]
    times = [one.step_seconds for one in made]
    assert times == sorted(times)  # type: ignore[type-var]
    for number, one in enumerate(made):
        chosen = fastest_checkpointing(*job_on(one.needed_bytes / 0.949, "full"))
        assert chosen
        assert chosen.strategy.activation_checkpointing == POLICIES[number]
    assert fastest_checkpointing(*job_on(made[-1].needed_bytes / 0.951, "full")) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"activation_checkpointing": "attention", "attention": "eager"}, "no operator to keep. .* full"),
        (
            {"activation_checkpointing": "selective", "sharding": "zero3"},
            "adds biases to products in place.* attention",
        ),
        ({"activation_checkpointing": "every:1"}, "'every:1' is unknown"),
        ({"activation_checkpointing": "every:K"}, "'every:K' is unknown"),
    ],
)
def test_a_policy_that_cannot_run_is_refused(fields: dict[str, str], said: str) -> None:
    spec = describe(transformers.Qwen2Config(**SHAPE, num_hidden_layers=2, vocab_size=256))
    with pytest.raises(StrategyError, match=said):
        resolve(Strategy(**fields), TrainConfig(), spec, 1 + ("sharding" in fields), hardware("2x cpu").device)


def test_a_request_is_resolved_without_a_trace_as_its_forecast_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, config_ = describe(config("llama", 2)), TrainConfig(seq_len=64)
    job = forecast(spec, Strategy(sharding="zero3"), "8x A100-80GB", config_).job
    monkeypatch.setattr("toolkit.forecasting.prediction.forecast_job", None)
    assert tk.resolve(spec, Strategy(sharding="zero3"), "8x A100-80GB", config_) == job
    assert (job.ranks, job.strategy.precision) == (8, "bf16")
    with pytest.raises(StrategyError, match="fp16"):
        tk.resolve(spec, Strategy(sharding="fsdp", precision="fp16"), "2x cpu")
    with pytest.raises(StrategyError, match="strategy 'zero3': expected Strategy"):
        tk.resolve(spec, "zero3")  # type: ignore[arg-type]


def test_what_a_run_refuses_a_forecast_refuses_with_the_same_sentence() -> None:
    spec, strategy = describe(config("mixtral", 2)), Strategy(sharding="ddp", adapter="qlora8")
    with pytest.raises(ModelError) as of_the_run:
        check_quantized(spec, "qlora8", allow_unquantized=False)
    said = re.escape(str(of_the_run.value))
    with pytest.raises(ModelError, match=said):
        forecast(spec, strategy, "2x T4", TrainConfig(seq_len=64))
    with pytest.raises(ModelError, match=said):
        plan(spec, "2x T4", global_batch=2, strategy=strategy, seq_len=64)


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp"])
def test_frozen_parts_are_in_a_forecast(sharding: str) -> None:
    """A deeper vision tower adds its bytes: whole, or a half on each of two ranks; no gradient, master or moment."""

    def of(layers: int) -> tuple[ModelSpec, Any]:
        vision = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 256, "patch_size": 14}
        vision |= {"num_hidden_layers": layers, "num_attention_heads": 4, "image_size": 28}
        text = {"model_type": "llama", **SHAPE, "num_hidden_layers": 2, "vocab_size": 256}
        spec = describe(LlavaConfig(text_config=text, vision_config=vision))
        return spec, forecast(spec, Strategy(sharding=sharding, precision="fp32"), "2x cpu", TrainConfig(seq_len=64))

    (small, less), (large, more) = of(2), of(6)
    added = 4 * (large.elements - small.elements)
    parts = {part: more.parts[part] - less.parts[part] for part in ("parameters", "gradients", "master", "optimizer")}
    share = 0.5 if sharding in ("zero3", "fsdp") else 1
    assert parts["parameters"] == pytest.approx(share * added, rel=0.05)
    assert (parts["gradients"], parts["master"], parts["optimizer"]) == (0, 0, 0)


def test_a_model_that_cannot_be_traced_is_refused_by_name() -> None:
    without_start = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=256)
    with pytest.raises(ModelError, match=r"model 'T5Config' cannot be traced.*decoder_start_token_id"):
        forecast(describe(without_start), Strategy(sharding="none"), "T4")


def test_a_forecast_imports_no_engine_and_traces_an_adapter_in_a_child_process() -> None:
    """What `peft` imports never comes into the caller's process; what was traced once needs no child."""
    program = (
        "import subprocess, sys, toolkit as tk\n"
        "loop = tk.TrainConfig(seq_len=64, micro_batch=2)\n"
        "ask = lambda: tk.forecast('embedded', tk.Strategy(adapter='qlora'), '1x cpu', loop)\n"
        "tk.forecast('embedded', tk.Strategy(sharding='zero3'), '2x cpu', loop)\n"
        "first = ask()\n"
        "subprocess.run = None\n"
        "assert ask().parts == first.parts\n"
        "print(sorted({'deepspeed', 'bitsandbytes', 'peft'} & set(sys.modules)), first.parts['buffers'] > 0)"
    )
    assert python("-c", program, code=0).stdout.strip() == "[] True"


def test_a_first_answer_has_traced_for_the_other_engines_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec, train_config = describe(config("llama", 3)), TrainConfig(seq_len=64, micro_batch=8)
    forecast(spec, Strategy(sharding="zero3", precision="bf16"), "8x A100-80GB", train_config)
    monkeypatch.setattr(tracing, "trace", None)  # nothing is traced again, whatever the strategy, batch and world size
    for word in ("ddp", "zero2", "fsdp", "fsdp_grad_op"):
        forecast(spec, Strategy(sharding=word, precision="bf16"), "8x A100-80GB", train_config)
    forecast(
        spec, Strategy(sharding="fsdp", precision="bf16"), "4x H100", dataclasses.replace(train_config, micro_batch=5)
    )


def test_a_way_that_cannot_be_traced_spoils_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tracing.trace

    def picky(spec: ModelSpec, way: TraceConfig, **sizes: int) -> Any:
        if way.autocast:
            raise RuntimeError("no such kernel")
        return real(spec, way, **sizes)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tracing, "trace", picky)
    spec, train_config = describe(config("llama", 3)), TrainConfig(seq_len=64)
    assert forecast(spec, Strategy(sharding="zero3", precision="bf16"), "8x A100-80GB", train_config).fits
    with pytest.raises(ModelError, match="no such kernel"):
        forecast(spec, Strategy(sharding="ddp", precision="bf16"), "8x A100-80GB", train_config)


def test_what_is_offloaded_is_the_hosts() -> None:
    """Masters, moments and fp32 gradients of ZeRO-2; the parameters of FSDP too. Of CPU ranks it is all one memory."""
    spec, train_config = describe(config("llama", 8)), TrainConfig(seq_len=64)
    for strategy, most in ((Strategy(sharding="zero2"), "optimizer"), (Strategy(sharding="fsdp"), "cpu")):
        here = forecast(spec, strategy, "4x A100-80GB", train_config)
        there = forecast(spec, dataclasses.replace(strategy, offload=most), "4x A100-80GB", train_config)
        states = 8 * spec.elements // 4  # both moments, in fp32
        assert there.peak_bytes <= here.peak_bytes - states
        assert there.host_bytes >= 12 * spec.elements, "masters and moments, which a checkpoint does not copy"
        assert there.parts["optimizer"] == 0
    assert there.unknown[-1].startswith("Host memory is not in the name: 144 GiB for each GPU")
    cpu = forecast(spec, Strategy(sharding="zero2", offload="optimizer"), machine := hardware("2x cpu"), train_config)
    assert cpu.limit_bytes == machine.host_free_bytes // 2 - PROCESS
    assert any("less 300.0 MiB for Python" in note for note in cpu.unknown)
    assert cpu.host_bytes == 2 * cpu.peak_bytes
    assert cpu.parts["optimizer"] > 0


def test_a_host_that_is_too_small_is_said() -> None:
    """FSDP reads the whole model in rank 0, whatever the devices hold."""
    machine = hardware("8x A100-80GB")
    small = dataclasses.replace(machine, host_free_bytes=1_000_000)
    result = forecast(describe(config("llama", 4)), Strategy(sharding="fsdp"), small, TrainConfig(seq_len=64))
    assert not result.fits
    assert "A node's host has" in result.reason
    # A checkpoint's copy of weights and moments alone would be too much.
    enough = dataclasses.replace(machine, host_free_bytes=result.host_bytes - result.host_checkpoint_bytes)
    named = forecast(describe(config("llama", 4)), Strategy(sharding="fsdp"), enough, TrainConfig(seq_len=64))
    assert named.host_checkpoint_bytes > 0
    assert "without them (--save-every 0 --save-seconds 0) it fits" in named.reason
    assert forecast(describe(config("llama", 4)), Strategy(sharding="fsdp"), machine).host_checkpoint_bytes == 0


def test_a_damaged_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = describe(config("llama", 2))
    first = trace_of(spec, FP32, batch=1, seq_len=16)
    (path,) = (tmp_path / "accelerate-toolkit" / "traces").iterdir()
    path.write_text(path.read_text()[:100])
    assert trace_of(spec, FP32, batch=1, seq_len=16) == first


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp"])
def test_a_replay_that_heeds_fewer_events_finds_the_same(sharding: str) -> None:
    spec = describe(config("llama", 4))
    job = resolve(Strategy(sharding=sharding), TrainConfig(seq_len=64), spec, 2, hardware("2x cpu").device)
    trace = memory.traced(job, masked=True)
    few, all_of_them = memory.whole_step(job, trace), split_segments(trace)
    assert len(few) <= len(all_of_them)
    one, other = (memory.replay(job, trace, step, num_checkpoints=1) for step in (few, all_of_them))
    assert one.phases == other.phases


def test_gradients_larger_than_zero2s_bucket_stay_until_the_backward_ends() -> None:
    """Of a rank's own partition: DeepSpeed adds them to the fp32 sum, and does not clear them."""
    spec = describe(config("llama", 4))
    strategy = Strategy(sharding="zero2", precision="bf16", bucket_elements=1)
    job = resolve(strategy, TrainConfig(micro_batch=1, seq_len=16), spec, 2, hardware("2x cpu").device)
    trace = memory.traced(job, masked=False)
    ledger = memory.replay(job, trace, memory.whole_step(job, trace), save=False, num_checkpoints=0, kind=LedgerHistory)
    assert ledger.highest["backward"]["gradients"] == pytest.approx((4 + 2) * spec.elements / 2, rel=0.1)


def test_layers_whose_types_follow_from_periods_are_traced() -> None:
    """Jamba's config computes `layer_types`, which a model of fewer layers needs, too."""
    values = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    periods = {"attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 8, "expert_layer_offset": 7}
    state = {"num_key_value_heads": 2, "mamba_dt_rank": 4, "mamba_d_state": 4, "num_experts": 2}
    jamba = transformers.JambaConfig(**values, **periods, **state, num_hidden_layers=8, pad_token_id=0)
    job = resolve(Strategy(), TrainConfig(micro_batch=1, seq_len=16), describe(jamba), 1, hardware("1x cpu").device)
    (stack,) = memory.traced(job, masked=False).stacks
    assert stack.kinds == (0, 0, 0, 1, 0, 0, 0, 2)
    assert stack.indices == (0, 1, 3, 6, 7)


def test_what_a_run_does_not_save_is_not_forecast() -> None:
    """A checkpoint's snapshot, and the export's tensors on rank 0, count only in runs that write them."""
    strategy, train_config = Strategy(sharding="fsdp", precision="bf16"), TrainConfig(micro_batch=1, seq_len=16)
    spec = describe(config("llama", 4))

    def saving(**options: Any) -> int:
        return forecast(spec, strategy, hardware("2x cpu"), train_config, **options).phases["save"]

    between_steps = saving(save=False, num_checkpoints=0)
    kept = forecast(spec, strategy, hardware("2x cpu"), train_config, save=False, num_checkpoints=0).parts
    assert between_steps == kept["parameters"] + kept["optimizer"] + spec.buffer_bytes
    job = resolve(strategy, train_config, spec, 2, hardware("2x cpu").device)
    assert saving(save=False) == between_steps + checkpoint_bytes(job) // 2 == saving()
    assert between_steps < saving(num_checkpoints=0) < saving()


def test_cpu_ranks_hold_a_snapshot_from_the_first_checkpoint_on() -> None:
    strategy, train_config = Strategy(sharding="fsdp"), TrainConfig(micro_batch=1, seq_len=16)
    spec, machine = describe(config("llama", 4)), hardware("2x cpu")
    counts = [RunConfig(save_every=save_every).count_checkpoints(10) for save_every in (0, 10, 9, 1)]
    assert (counts, RunConfig(save_seconds=0).count_checkpoints(10)) == ([1, 1, 2, 10], 0)
    resumed = [RunConfig(save_every=4).count_checkpoints(10, start) for start in (0, 3, 4, 8, 9)]
    assert resumed == [3, 3, 2, 1, 1]
    one, several = (forecast(spec, strategy, machine, train_config, num_checkpoints=count) for count in (1, 2))
    snapshot = checkpoint_bytes(resolve(strategy, train_config, spec, 2, machine.device)) // 2
    added = {phase: several.phases[phase] - one.phases[phase] for phase in one.phases}
    assert added == {"load": 0, "prepare": 0, "forward": snapshot, "backward": snapshot, "step": snapshot, "save": 0}


def test_flags_of_a_forecast_say_what_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config("llama", 4, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    flags = ["--sharding", "fsdp", "--hardware", "2x cpu", "--micro-batch", "1", "--seq-len", "16", "--json", "-"]
    phases = []
    for more in ([], ["--no-save", "--no-checkpoints"]):
        assert main(["forecast", str(tmp_path), *flags, *more]) == 0
        phases.append(json.loads(capsys.readouterr().out)["device"]["phases"]["save"])
    assert phases[1] < phases[0]


class _Doubled(torch.autograd.Function):
    """Adds in Python, and goes on to use what it added to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        part, other = gradient * 1, gradient * 1
        return torch.add(part, other) * part


USES: dict[str, Any] = {
    "two products": lambda x: (x * 2).square().sum() + (x * 3).square().sum(),
    "a residual": lambda x: (x + x.tanh()).square().sum(),
    "a view": lambda x: (x + x.t().tanh()).square().sum(),
    "expanded": lambda x: x.sum() + (x * 2).sum(),
    "in Python": lambda x: _Doubled.apply(x).square().sum(),
}
"""Losses in which a value is used twice, or a gradient is added elsewhere."""


@pytest.mark.parametrize("use", USES)
def test_gradients_are_added_in_place_where_autograd_does(use: str) -> None:
    """The additions of a traced backward that make a tensor, and those that do not, against a real one's."""
    loss = USES[use](torch.ones(64, 64, requires_grad=True) * 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    expected = [event.name for event in profile.events() if event.name in ("aten::add", "aten::add_")]
    tracked: list[str] = []

    class Names(Tracker):
        def _count(self, func: Any, *arguments: Any) -> None:
            tracked.append(func._schema.name)
            super()._count(func, *arguments)

    with FakeTensorMode(), Names() as tracker:
        loss = USES[use](torch.ones(64, 64, requires_grad=True) * 1)
        tracked.clear()
        tracker.mark("backward")
        loss.backward()
    assert [name for name in tracked if name in ("aten::add", "aten::add_")] == expected
    assert expected


def test_a_plan_traces_its_adapters_in_few_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One configuration that fails is left out, the others are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trace_cache, "_needs_child", lambda config: True)
    shares: list[int] = []

    def child(spec: Any, share: Sequence[TraceConfig], batches: Sequence[int], seq_len: int, strict: bool) -> Any:
        shares.append(len(share))
        return tracing.trace_all(spec, share, batches, seq_len, strict=strict)

    monkeypatch.setattr(trace_cache, "_trace_in_child", child)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    wrong = dataclasses.replace(FP32, attention="none such")
    spec = describe(config("llama", 2))
    trace_cache.trace_ahead(spec, [wrong, FP32, AUTOCAST, FP32], batches=[1, 2], seq_len=16)
    assert shares == [3]
    monkeypatch.setattr(tracing, "trace_all", None)
    assert all(trace_of(spec, known, batch=batch, seq_len=16) for known in (FP32, AUTOCAST) for batch in (1, 2))
    trace_cache.trace_ahead(spec, [FP32, AUTOCAST], batches=[1, 2], seq_len=16)
    assert shares == [3]


def test_a_plan_ranks_what_fits_and_says_why_the_rest_does_not() -> None:
    result = plan(llama3(*LLAMA_8B), "8x H100-80GB", global_batch=48, seq_len=1024)
    timings = [one.forecast.timing for one in result.ranked if one.forecast and one.forecast.timing]
    speeds = [round(timing.tokens_per_second, 6) for timing in timings]  # equal ones differ in the last bit
    assert len(speeds) == len(result.ranked) > 0
    assert speeds == sorted(speeds, reverse=True)
    assert all(one.forecast and one.forecast.needed_bytes <= 0.95 * one.forecast.limit_bytes for one in result.ranked)
    assert all(one.reason for one in result.rejected)
    assert {"ddp"} <= {one.strategy.sharding for one in result.rejected}
    batches = {(one.train_config.micro_batch, one.train_config.accumulation) for one in result.ranked}
    assert batches == {(1, 6), (2, 3), (3, 2), (6, 1)}
    assert result.best is result.ranked[0]
    assert result.command("M").startswith(
        "accelerate launch --config_file accelerate.yaml -m toolkit.finetune --model M --data YOUR_DATA"
    )
    assert result.config()["num_processes"] == 8


def test_a_plan_that_no_memory_helps_says_why() -> None:
    result = plan(describe(config("llama", 2)), "2x T4", global_batch=2, seq_len=100_000)
    assert "seq_len 100000 is over the limit" in result.headline()
    assert {"seq_len"} in [one.change.keys() for one in result.alternatives]


def test_a_global_batch_is_shared_evenly_or_refused() -> None:
    with pytest.raises(StrategyError, match=r"global_batch 12: expected a multiple of 8.* Choose 16"):
        plan(describe(config("llama", 2)), "8x T4", global_batch=12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"global_batch": "4"}, "global_batch '4': expected int"),
        ({"strategy": "zero3"}, "strategy 'zero3': expected Strategy"),
        ({"train_config": {}}, "train_config {}: expected TrainConfig"),
        ({"seq_len": 0}, "seq_len 0: expected int of at least 2"),
        ({"tokens": "2e9"}, "tokens '2e9': expected a number above 0"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(words: dict[str, Any], message: str) -> None:
    spec = describe(config("llama", 2))
    with pytest.raises(ToolkitError, match=re.escape(message)):
        plan(spec, "2x T4", **{"global_batch": 4, **words})
    if "strategy" in words:
        with pytest.raises(StrategyError, match=re.escape(message)):
            forecast(spec, words["strategy"], "2x T4")


def test_a_plan_is_written_and_its_command_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "accelerate.yaml"
    words = ["plan", "--hardware", "2x H100", "--global-batch", "4", "--seq-len", "64", "--write", str(file)]
    assert main([*words, "--json", "-"]) == 0
    said = capsys.readouterr()
    best = json.loads(said.out)["ranked"][0]
    assert yaml.safe_load(file.read_text())["num_processes"] == 2
    assert (
        f"--micro-batch {best['train_config']['micro_batch']}" in said.err
        or best["train_config"]["micro_batch"] == TrainConfig().micro_batch
    )
    words = ["forecast", "--sharding", "fsdp", "--hardware", "2x cpu", "--seq-len", "64"]
    assert main([*words, "--json", str(tmp_path / "fc.json")]) == 0
    assert json.loads((tmp_path / "fc.json").read_text())["ranks"] == 2


def test_a_forecast_for_several_devices_without_a_sharding_shows_them_side_by_side(tmp_path: Path) -> None:
    """The rows are the forecasts of each sharding alone, and the plan's best."""
    words = ["forecast", "--hardware", "2x H100", "--seq-len", "64", "--micro-batch", "2", "--json"]
    printed = {}
    for name, more in {"open": [], "zero3": ["--sharding", "zero3"]}.items():
        assert main([*words, str(tmp_path / name), *more]) == 0
        printed[name] = json.loads((tmp_path / name).read_text())
    assert set(printed["open"]["shardings"]) == {"ddp", "zero2", "zero3", "fsdp"}
    one = printed["open"]["shardings"]["zero3"]["forecast"]
    assert one["device"]["peak_bytes"] == printed["zero3"]["device"]["peak_bytes"]
    assert printed["open"]["choice"]["global_batch"] == 4


def test_a_command_in_several_lines_can_be_pasted() -> None:
    class Advice(Result):
        def headline(self) -> str:
            return f"Run it:\n    {shlex.join(words)}"

        def tables(self) -> list[Table]:
            return []

    words = ["toolkit", "train", "--model", "a folder/of a model with a long name", *(["--micro-batch", "2"] * 9)]
    _, *lines = str(Advice()).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == words


@pytest.fixture(scope="module")
def tight() -> tuple[ModelSpec, Any]:
    """A model, and its plan on a machine where its optimizer's states fit neither on the device nor on the host."""
    spec, machine = describe(config("llama", 24, hidden_size=1024, intermediate_size=2816)), hardware("2x H100-80GB")
    small = dataclasses.replace(machine.device, free_bytes=1_360 * 2**20)
    machine = dataclasses.replace(machine, device=small, host_free_bytes=2**30)
    return spec, plan(spec, machine, global_batch=4, seq_len=512)


def test_where_nothing_fits_a_plan_says_what_would(tight: tuple[ModelSpec, Any]) -> None:
    spec, result = tight
    assert not result.ranked
    assert "The changes below fit." in result.headline()
    changes = [one.change for one in result.alternatives]
    assert {"adapter": "lora"} in changes
    assert {"adapter": "qlora"} in changes
    assert any("hardware" in change for change in changes)
    with pytest.raises(StrategyError, match="What fits: --adapter lora"):
        _ = result.best
    for one in result.alternatives:
        fields = {name: value for name, value in one.change.items() if name not in ("hardware", "global_batch")}
        strategy, train_config = changed(one.strategy, one.train_config, fields)
        again = forecast(spec, strategy, one.forecast.hardware, train_config, ranks=one.forecast.ranks)
        assert again.fits, one.flags
        assert again.peak_bytes == one.forecast.peak_bytes


def test_rejections_are_grouped_unless_all_are_wanted(tight: tuple[ModelSpec, Any]) -> None:
    spec, result = tight
    grouped = result.tables()[-1]
    assert sum(int(row[0]) for row in grouped.rows) == len(result.rejected)
    no_host = plan(spec, dataclasses.replace(result.hardware, host_free_bytes=2**28), global_batch=4, seq_len=512)
    assert any(row[3].endswith("of host memory") for row in no_host.tables()[-1].rows)
    for table in (grouped, no_host.tables()[-1]):
        lines = table.text(80).splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert "Host memory is not in the name: 256 GiB" in " ".join(lines)
    whole = dataclasses.replace(result, whole=True).tables()[-1]
    assert len(list(whole.rows)) == len(result.rejected)


@pytest.fixture(scope="module")
def alone() -> Plan:
    return plan(describe(config("llama", 2)), "1x RTX-3090", global_batch=2, seq_len=64)


def test_one_device_is_planned_with_offload(alone: Plan) -> None:
    chosen = {(one.strategy.sharding, one.strategy.offload) for one in alone.ranked}
    assert {("none", "none"), ("zero2", "optimizer"), ("zero3", "cpu"), ("fsdp", "cpu")} <= chosen
    assert all(offload != "none" for sharding, offload in chosen if sharding != "none")


def timed(candidate: Candidate, speed: float) -> Candidate:
    """Return a candidate with another speed."""
    assert candidate.forecast is not None
    timing = dataclasses.replace(candidate.forecast.timing, step_seconds=1 / speed, tokens_per_second=speed)
    return dataclasses.replace(candidate, forecast=dataclasses.replace(candidate.forecast, timing=timing))


@pytest.mark.parametrize(("speed", "first"), [(77.0, "none"), (73.0, "cpu")])
def test_an_offload_that_is_little_faster_comes_second(alone: Plan, speed: float, first: str) -> None:
    offloads = {one.strategy.offload: one for one in alone.ranked}
    candidates = timed(offloads["cpu"], 100.0), timed(offloads["none"], speed)
    ordered = sorted(candidates, key=rank_key)
    assert ordered[0].strategy.offload == first
    headline = dataclasses.replace(alone, ranked=tuple(ordered)).headline()
    assert ("with offload cpu is forecast at 100 tokens/s: not enough more" in headline) == (first == "none")


def test_the_best_is_compared_with_its_like(alone: Plan) -> None:
    """Of equal speed are a zero3 that recomputes and one that does not: recomputation is then no reason."""
    names, offloaded = (
        ("sharding", "recompute", "batch"),
        [one for one in alone.ranked if one.strategy.offload == "cpu"],
    )
    cells = {tuple(one.cells[name] for name in names): one for one in offloaded}
    best = timed(cells["fsdp", "none", "2 x 1"], 100.0)
    others = [timed(cells["zero3", recompute, "2 x 1"], 80.0) for recompute in ("full", "none")]
    slower = dataclasses.replace(alone, ranked=(best, *others)).headline()
    assert "A step of zero3 takes 12 ms instead of 10 ms" in slower
    assert "it computes" not in slower
    assert "Nothing fits without an offload: --adapter any and --precision any look for" in slower
    assert ", a node's host " in slower
    equal = dataclasses.replace(alone, ranked=(best, timed(others[1], 100.0))).headline()
    assert f"zero3 is as fast, and needs {others[1].cells['need']}." in equal
    plain = timed(next(one for one in alone.ranked if one.strategy.offload == "none"), 100.0)
    other = dataclasses.replace(alone, ranked=(plain, timed(others[1], 100.0))).headline()
    assert "zero3 with offload cpu is as fast, and needs" in other


def test_hours_and_costs_of_a_plan_follow_from_its_speed() -> None:
    result = plan(describe(config("llama", 2)), "2x T4", global_batch=2, seq_len=64, tokens=2e9, price=2.5)
    best = result.ranked[0]
    hours, cost = best.hours, best.cost
    assert cost == pytest.approx(hours * 2 * 2.5)
    plain = 2e9 / best.forecast.timing.tokens_per_second / 3600
    assert plain <= hours < 1.01 * plain
    assert "Best by cost" in str(result)
    dear = plan(describe(config("llama", 2)), "2x T4", global_batch=2, seq_len=64, tokens=1e13, price=2.5)
    assert best.forecast.tokens_per_second == dear.best.forecast.tokens_per_second
    assert max(map(len, str(dear).splitlines())) <= 80
    for wrong in ({"price": 2.5}, {"tokens": 0.0}, {"tokens": float("nan")}, {"vary": ["colour"]}):
        with pytest.raises(ToolkitError):
            plan(describe(config("llama", 2)), "2x T4", global_batch=2, seq_len=64, **wrong)  # type: ignore[arg-type]


def test_open_fields_of_a_plan_stand_below_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--hardware", "any x H100", "--precision", "any", "--global-batch", "4", "--seq-len", "64"]
    assert main([*words, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {one["strategy"]["precision"] for one in result["ranked"]} == {"bf16"}
    assert [one["change"] for one in result["alternatives"]] == [
        {"precision": "bf16_pure"},
        {"hardware": "2x H100-80GB"},
        {"hardware": "4x H100-80GB"},
        {"hardware": "8x H100-80GB", "global_batch": 8},
    ]
    assert result["alternatives"][-2]["train_config"]["micro_batch"] == 1
    assert result["alternatives"][-3]["train_config"]["micro_batch"] == 2
