"""What others published of large runs, beside what `tk.forecast` says of the same; nothing is launched or downloaded.

    python benchmarks/published.py                     # results into benchmarks/results/published.json and .md

Configurations are written out from the models' cards. Where a publication leaves something open, the row says what is assumed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from machine import about, write_results

import toolkit as tk
from toolkit.engines.job import resolve
from toolkit.forecasting import forecast_job
from toolkit.show import Table
from toolkit.units import format_bytes

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


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
    strategy: tk.Strategy
    loop: tk.Loop
    memory: float | None = None
    """Bytes a GPU."""
    host: float | None = None
    """Bytes of a node's host."""
    speed: float | None = None
    """Tokens a second and GPU."""
    tflops: float | None = None
    """10^12 operations a second and GPU, recomputation included."""


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """A published run that needs what the toolkit does not have yet."""

    what: str
    said: str
    needs: str
    source: str


STEP = ("forward", "backward", "step")
"""The phases whose highest is compared."""

TITAN = "torchtitan, docs/performance.md"
TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
PEFT = "PEFT, docs/source/accelerate/fsdp.md"
PEFT_ASSUMED = (
    "highest of forward, backward and step; micro-batch 2, accumulation 2, sequence 2,048, FlashAttention-2 as in its script; "
    "FSDP1, reentrant checkpointing and dropout there; the page does not say whether the context and what the allocator "
    "reserves are in its figure; here they are not"
)
PEFT_STRATEGY = tk.Strategy(
    sharding="fsdp", precision="bf16_pure", adapter="qlora", lora_rank=8, attention="flash_attention_2"
)


def llama(config: dict[str, int]) -> Any:
    """A config with a head of its own."""
    from transformers import LlamaConfig

    return LlamaConfig(**config, tie_word_embeddings=False)


def gpt2(layers: int, hidden: int) -> Any:
    """The shapes of the ZeRO-Offload paper."""
    from transformers import GPT2Config

    return GPT2Config(n_layer=layers, n_embd=hidden, n_head=hidden // 128, n_positions=1024)


def runs() -> tuple[Published, ...]:
    """What can be forecast."""
    llama_2 = llama(LLAMA_70B)
    return (
        Published(
            what="Llama 3 70B, FSDP2, 64 x A100 80 GB",
            source=TITAN,
            assumed="sequence 8,192 as in its configuration",
            config=llama({**LLAMA_70B, "vocab_size": 128256, "max_position_embeddings": 8192}),
            hardware="8 nodes x 8x A100-80GB",
            strategy=tk.Strategy(sharding="fsdp", precision="bf16", activation_checkpointing="full"),
            loop=tk.Loop(seq_len=8192, micro_batch=1),
            speed=331,
        ),
        Published(
            what="Llama 2 70B, QLoRA, FSDP, 2 GPUs",
            source=PEFT,
            assumed=PEFT_ASSUMED,
            config=llama_2,
            hardware="2x A100-80GB",
            strategy=PEFT_STRATEGY,
            loop=tk.Loop(seq_len=2048, micro_batch=2, accumulation=2),
            memory=35.6e9,
        ),
        Published(
            what="the same, offloaded",
            source=PEFT,
            assumed=PEFT_ASSUMED,
            config=llama_2,
            hardware="2x A100-80GB",
            strategy=dataclasses.replace(PEFT_STRATEGY, offload="cpu"),
            loop=tk.Loop(seq_len=2048, micro_batch=2, accumulation=2),
            memory=19.6e9,
            host=107e9,
        ),
        Published(
            what="GPT-2 10B, ZeRO-2, optimizer offloaded, 1 x V100 32 GB",
            source="Ren et al. 2021 (ZeRO-Offload), abstract",
            assumed="50 layers of 4,096, sequence 1,024, micro-batch 10, 51 of them a step; it fitted into 32 GB there: "
            "DeepSpeed adds gradients up in fp32 on the device here, which the paper's did not",
            config=gpt2(50, 4096),
            hardware="1x V100-32GB",
            strategy=tk.Strategy(sharding="zero2", precision="fp16", offload="optimizer"),
            loop=tk.Loop(seq_len=1024, micro_batch=10, accumulation=51),
            tflops=40,
        ),
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


def compared(run: Published) -> dict[str, Any]:
    """The publication's figures and ours."""
    spec = tk.describe(run.config)
    machine = tk.hardware(run.hardware)
    job = resolve(run.strategy, run.loop, spec, machine.ranks, machine.device)
    found = forecast_job(job, machine, one_document=True)
    time = found.timing
    ours = {
        "memory": max(found.phases[name] for name in STEP),
        "host": found.host_bytes,
        "speed": time.tokens_per_second / machine.ranks if time else None,
        "tflops": found.operations / time.step_seconds / 1e12 if time else None,
    }
    return {
        "what": run.what,
        "source": run.source,
        "assumed": run.assumed,
        "published": {name: getattr(run, name) for name in ours},
        "forecast": {**ours, "phases": dict(found.phases)},
        "strategy": dataclasses.asdict(found.strategy),
        "loop": dataclasses.asdict(found.loop),
    }


def _bytes(size: float) -> str:
    return format_bytes(round(size))


FIGURES: dict[str, tuple[str, Any]] = {
    "memory": ("memory of a GPU", _bytes),
    "host": ("memory of the host", _bytes),
    "speed": ("tokens/s a GPU", "{:,.0f}".format),
    "tflops": ("TFLOP/s a GPU", "{:,.1f}".format),
}


def main() -> None:
    """Forecast every one, print the table, write the results."""
    rows = [compared(run) for run in runs()]
    lines = [
        (row["what"], named, shown(said), shown(row["forecast"][name]), f"{row['forecast'][name] / said:.2f}")
        for row in rows
        for name, (named, shown) in FIGURES.items()
        if (said := row["published"][name]) and row["forecast"][name]
    ]
    notes = tuple(f"{row['what']}: {row['source']}; {row['assumed']}." for row in rows)
    columns = ("run", "figure", "published", "forecast", "ratio")
    found = [Table(title="Published runs beside the forecast", columns=columns, rows=lines, notes=notes)]
    left = [(one.what, one.said, one.needs, one.source) for one in BEYOND]
    found.append(Table(title="Not forecastable yet", columns=("run", "published", "needs", "source"), rows=left))
    text = "\n\n".join(map(Table.text, found))
    print(text)
    beyond = [dataclasses.asdict(one) for one in BEYOND]
    write_results("published", found[0].title, {**about(), "runs": rows, "not_forecastable": beyond}, text)


if __name__ == "__main__":
    main()
