"""The runs that `published.py` forecasts, as those who made them published them; and those that cannot be forecast yet.

Configurations are written out from the models' cards. Where a publication leaves something open, the row says what is assumed.
`published_t4.json` holds rows of fitcheck-llm 0.3.1 (pypi.org, its source distribution's data/measurements; Anas Bouzid, MIT):
every run of LoRA over 16-bit weights with kernels that the toolkit takes too, each configuration once. Its runs over 4 bits
keep embeddings, norms and the head in fp32, those of grouped heads under sdpa replace torch's function: the toolkit does neither.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toolkit as tk
from toolkit.core.units import GiB, MiB

LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
MISTRAL_7B = {**LLAMA_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 32768}
YI_34B = {
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "num_hidden_layers": 60,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
}
LLAMA_2_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_2_13B = {
    **LLAMA_7B,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
LLAMA_34B = {**LLAMA_2_70B, "intermediate_size": 22016, "num_hidden_layers": 48}
LLAMA_3_70B = {**LLAMA_2_70B, "vocab_size": 128256, "max_position_embeddings": 8192}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run that somebody published, and what this toolkit would run in its place."""

    what: str
    source: str
    assumed: str
    """What of it our run does otherwise, or what is not said."""
    config: Any
    """A transformers config."""
    hardware: str
    host_memory: str | None = None
    """Of a node; by default the catalog's."""
    strategy: tk.Strategy
    train_config: tk.TrainConfig
    memory: float | None = None
    """Bytes a GPU, as the allocator counts them where the publication says so."""
    phases: Mapping[str, float] | None = None
    """The same, phase by phase."""
    process: float | None = None
    """What the allocator reserved, and CUDA's context."""
    kept: int = 0
    """Bytes that the loop there holds through its backward and step, and the toolkit's does not."""
    host: float | None = None
    """Bytes of a node's host."""
    speed: float | None = None
    """Tokens a second and GPU."""
    tflops: float | None = None
    """10^12 operations a second and GPU, recomputation included."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest micro-batch that somebody published, and an epoch at it."""

    what: str
    config: Any
    """A transformers config."""
    hardware: str
    strategy: tk.Strategy
    seq_len: int
    rows: int
    """Of an epoch."""
    micro_batch: int
    """0: not even 1 fitted."""
    epoch_seconds: float | None
    evaluation: str
    """The largest batch of its evaluation, which generates text with ten beams: the toolkit's computes a loss."""


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """A published run that needs what the toolkit does not have yet."""

    what: str
    said: str
    needs: str
    source: str


def runs() -> Iterator[Published]:
    """What can be forecast: first the runs of two libraries' own documentation and a paper, then others' series."""
    yield Published(
        what="Llama 3 70B, FSDP2, 64 x A100 80 GB",
        source=TITAN,
        assumed="sequence 8,192 as in its configuration",
        config=llama(LLAMA_3_70B),
        hardware="8 nodes x 8x A100-80GB",
        strategy=tk.Strategy(loss="whole", sharding="fsdp", precision="bf16", activation_checkpointing="full"),
        train_config=tk.TrainConfig(seq_len=8192, micro_batch=1),
        speed=331,
    )
    yield from peft()
    yield from zero_offload()
    yield from t4()
    yield from accelerate_blog()
    yield from fms()
    yield from answer_ai()
    yield from long_rows()


def llama(config: Mapping[str, int]) -> Any:
    """A config with a head of its own."""
    from transformers import LlamaConfig

    return LlamaConfig(**config, tie_word_embeddings=False)


def gpt2(layers: int, hidden: int) -> Any:
    """The shapes of the ZeRO-Offload paper."""
    from transformers import GPT2Config

    return GPT2Config(n_layer=layers, n_embd=hidden, n_head=hidden // 128, n_positions=1024)


TITAN = "torchtitan, docs/performance.md"
TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"


LONG = 1_048_576
"""Tokens of a row."""


def qwen3_8b() -> Any:
    """Qwen3 8B with rotary positions for a row of `LONG`."""
    from transformers import Qwen3Config

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "original_max_position_embeddings": 32768}
    return Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=LONG, tie_word_embeddings=False, rope_parameters=yarn,
    )  # fmt: skip


def long_rows() -> Iterator[Published]:
    """One row a step, divided among the GPUs of a node."""
    yield Published(
        what="Qwen3 8B, FSDP2, context parallel over 8, 1 x 1,048,576, 8x H100-80GB",
        source="huggingface/trl, pull request 6846 and docs/source/long_context_training.md",
        assumed="a ring of keys and values there, heads exchanged here; a step took 364, 373 and 380 s, and the middle one is "
        "compared; fp32 masters, as Accelerate makes them of bf16 weights under FSDP2; whether its 56.2 GB are what the allocator "
        "reserves is not said",
        config=qwen3_8b(),
        hardware="8x H100-80GB",
        strategy=tk.Strategy(
            loss="chunked",
            sharding="fsdp",
            cp=8,
            precision="bf16",
            activation_checkpointing="full",
            activation_offload=True,
        ),
        train_config=tk.TrainConfig(seq_len=LONG, micro_batch=1),
        memory=56.2e9,
        speed=LONG / 373 / 8,
    )


def peft() -> Iterator[Published]:
    """70B on two GPUs, in device memory and with offload."""
    assumed = (
        "micro-batch 2, accumulation 2, sequence 2,048, FlashAttention-2 as in its script; FSDP1, reentrant checkpointing, "
        "dropout and the loss of transformers in early 2024 there, which copied the logits once more; the page does not say "
        "whether the context and what the allocator reserves are in its figure, here they are not; AnswerDotAI/fsdp_qlora reserved "
        "14.92 GiB in nearly the same offloaded run"
    )
    for offload, memory, host in (("none", 35.6e9, None), ("cpu", 19.6e9, 107e9)):
        yield Published(
            what=f"Llama 2 70B, QLoRA, FSDP, 2 GPUs{', offloaded' if host else ''}",
            source="PEFT, docs/source/accelerate/fsdp.md",
            assumed=assumed,
            config=llama(LLAMA_2_70B),
            hardware="2x A100-80GB",
            strategy=tk.Strategy(
                loss="whole",
                sharding="fsdp",
                precision="bf16_pure",
                adapter="qlora",
                lora_rank=8,
                attention="flash_attention_2",
                offload=offload,
            ),
            train_config=tk.TrainConfig(seq_len=2048, micro_batch=2, accumulation=2),
            memory=memory,
            host=host,
        )


def zero_offload() -> Iterator[Published]:
    """One GPU; the host has the optimizer."""
    for size, layers, batch, accumulation, tflops in (("10B", 50, 10, 51, 40), ("13B", 65, 4, 128, 30)):
        yield Published(
            what=f"GPT-2 {size}, ZeRO-2, optimizer offloaded, 1 x V100 32 GB",
            source="Ren et al. 2021 (ZeRO-Offload)",
            assumed="layers of 4,096, sequence 1,024, 512 sequences a step; the 13B's speed is said to be more than 30; "
            "gradients add up in fp16, as in DeepSpeed of that time; the host is a DGX-2's, with 1.5 TB",
            config=gpt2(layers, 4096),
            hardware="1x V100-32GB",
            host_memory="1536GiB",
            strategy=tk.Strategy(
                loss="whole", sharding="zero2", precision="fp16", offload="optimizer", grad_accum_dtype="fp16"
            ),
            train_config=tk.TrainConfig(seq_len=1024, micro_batch=batch, accumulation=accumulation),
            tflops=tflops,
        )


def t4() -> Iterator[Published]:
    """The allocator's own peak, torch 2.10 to 2.14 and transformers 5."""
    from transformers import LlamaConfig, Qwen2Config

    for row in json.loads((Path(__file__).parent / "published_t4.json").read_text()):
        kind = Qwen2Config if row["model"].startswith("Qwen/") else LlamaConfig
        tokens = row["micro_batch"] * row["seq_len"]
        name = row["model"].partition("/")[2]
        yield Published(
            what=f"{name}, LoRA, {row['attention']}, {row['micro_batch']} x {row['seq_len']:,}, T4",
            source="fitcheck-llm 0.3.1, data/measurements",
            assumed="its loop keeps the fp16 logits until the step ends: they are added to backward and step, not to the "
            "forward, where Accelerate's cast to fp32 frees them before the loss; adapters compute in fp32 there, and the time "
            "is one step's; by these runs' time the T4's sustained share was chosen",
            config=kind(**row["config"], max_position_embeddings=8192),
            hardware="1x T4",
            strategy=tk.Strategy(
                loss="whole",
                sharding="none",
                precision="fp16",
                adapter="lora",
                lora_rank=row["lora_rank"],
                lora_targets=row["lora_targets"],
                attention=row["attention"],
            ),
            train_config=tk.TrainConfig(seq_len=row["seq_len"], micro_batch=row["micro_batch"], max_grad_norm=0),
            memory=max(row["peak_mib"].values()) * MiB,
            phases={phase: size * MiB for phase, size in row["peak_mib"].items()},
            process=row["process_mib"] * MiB,
            speed=tokens / row["step_seconds"],
            kept=2 * tokens * row["config"]["vocab_size"],
        )


def accelerate_blog() -> Iterator[Published]:
    """ZeRO-3 beside FSDP, both under Accelerate."""
    for sharding, speed in (("fsdp", 3158.7), ("zero3", 3094.5)):
        yield Published(
            what=f"Granite 7B, {sharding}, 8 x 4,096, 4x A100-80GB",
            source="huggingface.co/blog/deepspeed-to-fsdp-and-back",
            assumed="sequence 4,096, which its tokens a second, step time and batch give; activation checkpointing, which is not "
            "said and without which it does not fit",
            config=llama(LLAMA_7B),
            hardware="4x A100-80GB",
            strategy=tk.Strategy(loss="whole", sharding=sharding, precision="bf16", activation_checkpointing="full"),
            train_config=tk.TrainConfig(seq_len=4096, micro_batch=8),
            speed=speed,
        )


ARTICLE_HOST = "60GB"


def accelerate_article() -> Iterator[Largest]:
    """Both tables of huggingface.co/blog/accelerate-deepspeed with a DeepSpeed file.

    BlenderBot reads 128 tokens in 2 encoder layers and 64 in 12 decoder layers. The toolkit's source and target are of one
    length: 73 tokens of each make as many tokens times layers. GPT-XL's epoch is wikitext-2 in blocks of 128.
    """
    from transformers import BlenderbotConfig, GPT2Config

    heads, wide = 32, 5120
    blenderbot = BlenderbotConfig(
        vocab_size=8008, max_position_embeddings=128, d_model=1280,
        encoder_layers=2, encoder_ffn_dim=wide, encoder_attention_heads=heads,
        decoder_layers=12, decoder_ffn_dim=wide, decoder_attention_heads=heads,
    )  # fmt: skip
    gpt_xl = GPT2Config(n_layer=48, n_embd=1600, n_head=25, n_positions=1024)
    plain = tk.Strategy(
        loss="whole", sharding="none", precision="fp16", activation_checkpointing="none", attention="eager"
    )
    bucket = 200_000_000
    zero = dataclasses.replace(plain, sharding="zero2", overlap_comm="on")
    for strategy, batch, seconds, evaluation in (
        (dataclasses.replace(plain, sharding="ddp"), 100, 27.36, "50, 48.41 s"),
        (dataclasses.replace(zero, bucket_elements=bucket, gather_bucket_elements=bucket), 200, 19.06, "100, 39.27 s"),
    ):
        yield Largest(
            what=f"BlenderBot 400M, {strategy.sharding}, 2x TITAN-RTX", config=blenderbot, hardware="2x TITAN-RTX",
            strategy=strategy, seq_len=73, rows=10_000, micro_batch=batch, epoch_seconds=seconds, evaluation=evaluation,
        )  # fmt: skip
    offloaded = dataclasses.replace(zero, sharding="zero3", offload="cpu")
    for strategy, batch, epoch in ((plain, 0, None), (offloaded, 16, 6608.35)):
        yield Largest(
            what=f"GPT-XL 1.5B, {strategy.sharding}{', offloaded' if batch else ''}, 1x TITAN-RTX", config=gpt_xl,
            hardware="1x TITAN-RTX", strategy=strategy, seq_len=128, rows=18_686, micro_batch=batch,
            epoch_seconds=epoch, evaluation="–",
        )  # fmt: skip


FMS: tuple[tuple[str, dict[str, int], str, str, int, str, int], ...] = (
    # size, config, sharding, activation checkpointing, micro-batch, hardware, tokens a second and GPU
    ("7B", LLAMA_7B, "hsdp", "none", 2, "16 nodes x 8x A100-80GB", 3700),
    ("13B", LLAMA_2_13B, "hsdp", "none", 1, "16 nodes x 8x A100-80GB", 1700),
    ("34B", LLAMA_34B, "fsdp", "full", 2, "16 nodes x 8x A100-80GB", 700),
    ("34B", LLAMA_34B, "fsdp", "full", 8, "16 nodes x 8x A100-80GB", 772),
    ("70B", LLAMA_2_70B, "fsdp", "full", 6, "16 nodes x 8x A100-80GB", 380),
    ("7B", LLAMA_7B, "hsdp", "none", 2, "12 nodes x 8x H100-80GB", 7500),
    ("34B", LLAMA_34B, "fsdp", "full", 2, "12 nodes x 8x H100-80GB", 1550),
)


def fms() -> Iterator[Published]:
    """Pretraining on 96 and 128 GPUs."""
    for size, config, sharding, checkpointing, batch, hardware, speed in FMS:
        nodes = int(hardware.partition(" ")[0])
        yield Published(
            what=f"Llama 2 {size}, {sharding}, {batch} x 4,096, {hardware}",
            source="github.com/foundation-model-stack/fms-fsdp, README, of today and of early 2024",
            assumed="gradients are reduced in bf16 there, in fp32 here; the catalog's H100s have a faster network; whether torch "
            "compiled is not said; from its two runs on H100 comes the H100's sustained share in the catalog",
            config=llama(config),
            hardware=hardware,
            strategy=tk.Strategy(
                loss="whole",
                sharding=sharding,
                precision="bf16",
                activation_checkpointing=checkpointing,
                dp_replicate=nodes if sharding == "hsdp" else 1,
            ),
            train_config=tk.TrainConfig(seq_len=4096, micro_batch=batch),
            speed=speed,
        )


ANSWER_AI: tuple[tuple[str, str, str, str, str, int, int, int, float | None], ...] = (
    # model, adapter, sharding, offload, hardware, micro-batch, sequence, seconds for 1,024 samples, GiB allocated
    ("Llama 2 7B", "lora", "fsdp", "none", "2x RTX-3090", 1, 512, 2597, 8.28),
    ("Llama 2 7B", "lora", "fsdp", "none", "2x RTX-3090", 1, 2048, 3090, 9.16),
    ("Llama 2 7B", "qlora", "fsdp", "none", "2x RTX-3090", 1, 512, 1082, None),
    ("Llama 2 7B", "qlora", "fsdp", "none", "2x RTX-3090", 1, 2048, 1564, None),
    ("Llama 2 7B", "lora", "fsdp", "none", "2x RTX-3090", 4, 2048, 1366, None),
    ("Llama 2 7B", "lora", "fsdp", "none", "2x RTX-3090", 6, 2048, 1199, None),
    ("Llama 2 7B", "qlora", "fsdp", "none", "2x RTX-3090", 4, 2048, 998, None),
    ("Llama 2 7B", "qlora", "fsdp", "none", "2x RTX-3090", 10, 2048, 936, None),
    ("Llama 2 7B", "lora", "ddp", "none", "2x RTX-3090", 4, 2048, 881, None),
    ("Llama 2 7B", "qlora", "ddp", "none", "2x RTX-3090", 8, 2048, 875, None),
    ("Yi 34B", "qlora", "fsdp", "none", "2x RTX-3090", 2, 2048, 5041, None),
    ("Yi 34B", "qlora", "fsdp", "cpu", "2x RTX-3090", 4, 2048, 4830, None),
    ("Llama 2 70B", "qlora", "fsdp", "cpu", "2x RTX-3090", 2, 2048, 11795, None),
    ("Llama 2 7B", "lora", "ddp", "none", "2x RTX-4090", 4, 2048, 437, None),
    ("Llama 2 7B", "lora", "fsdp", "none", "2x RTX-4090", 6, 2048, 481, None),
    ("Llama 2 7B", "lora", "fsdp", "cpu", "2x RTX-4090", 10, 2048, 482, None),
    ("Llama 2 7B", "qlora", "ddp", "none", "2x RTX-4090", 8, 2048, 450, None),
    ("Llama 2 7B", "qlora", "fsdp", "none", "2x RTX-4090", 10, 2048, 466, None),
    ("Llama 2 7B", "qlora", "fsdp", "cpu", "2x RTX-4090", 12, 2048, 464, None),
    ("Yi 34B", "qlora", "fsdp", "none", "2x RTX-4090", 2, 2048, 2072, None),
    ("Yi 34B", "qlora", "fsdp", "cpu", "2x RTX-4090", 4, 2048, 2061, None),
    ("Llama 2 70B", "qlora", "fsdp", "cpu", "2x RTX-4090", 2, 2048, 4399, None),
    ("Mistral 7B", "qlora", "fsdp", "cpu", "2x RTX-4090", 12, 2048, 483, None),
    ("Mistral 7B", "qlora", "fsdp", "cpu", "2x RTX-4090", 1, 24576, 7809, None),
    ("Llama 2 70B", "qlora", "fsdp", "none", "2x A100-40GB", 1, 2048, 3277, None),
    ("Llama 2 70B", "qlora", "fsdp", "none", "4x A100-40GB", 4, 2048, 1266, None),
    ("Llama 2 70B", "qlora", "fsdp", "none", "8x A100-40GB", 4, 2048, 672, None),
    ("Llama 2 70B", "qlora", "fsdp", "none", "4x H100-80GB", 8, 2048, 667, None),
)
"""The runs of the source on GPUs that the catalog knows. Its other memory figures are what the allocator reserved."""

MODELS = {"Llama 2 7B": LLAMA_7B, "Yi 34B": YI_34B, "Llama 2 70B": LLAMA_2_70B, "Mistral 7B": MISTRAL_7B}


def answer_ai() -> Iterator[Published]:
    """LoRA and QLoRA on workstations and in the cloud, early 2024."""
    for model, adapter, sharding, offload, hardware, batch, length, seconds, allocated in ANSWER_AI:
        gpus = int(hardware.partition("x")[0])
        offloaded = ", offloaded" if offload == "cpu" else ""
        yield Published(
            what=f"{model}, {adapter}, {sharding}{offloaded}, {batch} x {length:,}, {hardware}",
            source="AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md",
            assumed="rank 64 on the six projections of its script; FSDP1 (ddp is its NO_SHARD) and dropout there, and transformers "
            "of that time; the 3090s had a limit of 280 W and slow PCIe, which no forecast knows and a small batch shows most",
            config=llama(MODELS[model]),
            hardware=hardware,
            strategy=tk.Strategy(
                loss="whole",
                sharding=sharding,
                precision="bf16_pure",
                adapter=adapter,
                offload=offload,
                lora_rank=64,
                lora_targets="k_proj,q_proj,v_proj,up_proj,down_proj,gate_proj",
            ),
            train_config=tk.TrainConfig(seq_len=length, micro_batch=batch),
            memory=allocated * GiB if allocated else None,
            speed=1024 * length / seconds / gpus,
        )


BEYOND = (
    Beyond(
        what="Llama 3 8B, FSDP2, 64 x A100 80 GB",
        said="2,973 tokens/s a GPU",
        needs="selective checkpointing of operators",
        source=TITAN,
    ),
    Beyond(
        what="Llama 3.1 8B, FSDP2, 8 x H100 of 96 GB",
        said="82.4 GiB, 5,762 tokens/s a GPU",
        needs="selective checkpointing of operators",
        source=TITAN_H100,
    ),
    Beyond(
        what="Llama 3.1 405B, 16,384 x H100",
        said="30.84M GPU hours",
        needs="tensor and pipeline parallelism",
        source="meta-llama/Llama-3.1-405B, model card",
    ),
)
