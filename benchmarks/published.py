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
    """A run that somebody published."""

    what: str
    source: str
    config: dict[str, int]
    hardware: str
    strategy: tk.Strategy
    loop: tk.Loop
    memory: float | None
    """Bytes a GPU."""
    speed: float | None
    """Tokens a second and GPU."""
    assumed: str
    """What of it our run does otherwise, or what is not said."""


STEP = ("forward", "backward", "step")
"""The phases whose highest is compared."""

TITAN = "torchtitan, docs/performance.md and benchmarks/llama3_h100_202412_torchtitan.md"

RUNS = (
    Published(
        what="Llama 3 70B, FSDP2, 64 x A100 80 GB",
        source=TITAN,
        config={**LLAMA_70B, "vocab_size": 128256, "max_position_embeddings": 8192},
        hardware="8 nodes x 8x A100-80GB",
        strategy=tk.Strategy(sharding="fsdp", precision="bf16", activation_checkpointing="full"),
        loop=tk.Loop(seq_len=8192, micro_batch=1),
        memory=None,
        speed=331,
        assumed="sequence 8,192 as in its configuration",
    ),
    Published(
        what="Llama 3 8B, FSDP2, 64 x A100 80 GB",
        source=TITAN,
        config=LLAMA_8B,
        hardware="8 nodes x 8x A100-80GB",
        strategy=tk.Strategy(sharding="fsdp", precision="bf16", activation_checkpointing="none"),
        loop=tk.Loop(seq_len=8192, micro_batch=1),
        memory=None,
        speed=2973,
        assumed="selective checkpointing of operators there, which computes no product again; none here",
    ),
    Published(
        what="Llama 3.1 8B, FSDP2, 8 x H100",
        source=TITAN,
        config=LLAMA_8B,
        hardware="8x H100-80GB",
        strategy=tk.Strategy(sharding="fsdp", precision="bf16", activation_checkpointing="none"),
        loop=tk.Loop(seq_len=8192, micro_batch=2),
        memory=None,
        speed=5762,
        assumed="cards of 96 GB, 2.4 TB/s and 500 W there; selective checkpointing there, none here",
    ),
    Published(
        what="Llama 2 70B, QLoRA, FSDP, 2 GPUs",
        source="PEFT, docs/source/accelerate/fsdp.md",
        config=LLAMA_70B,
        hardware="2x A100-80GB",
        strategy=tk.Strategy(sharding="fsdp", precision="bf16", adapter="qlora", lora_rank=8),
        loop=tk.Loop(seq_len=2048, micro_batch=2),
        memory=35.6e9,
        speed=None,
        assumed="the highest of forward, backward and step: FSDP1 reads once for all ranks, FSDP2 here in each; micro-batch 2 "
        "and sequence 2,048 as in its script",
    ),
)


def compared(run: Published) -> dict[str, Any]:
    """The publication's figures and ours."""
    from transformers import LlamaConfig

    spec = tk.describe(LlamaConfig(**run.config, tie_word_embeddings=False))
    machine = tk.hardware(run.hardware)
    job = resolve(run.strategy, run.loop, spec, machine.ranks, machine.device)
    found = forecast_job(job, machine, one_document=True)
    speed = found.timing.tokens_per_second / machine.ranks if found.timing else None
    return {
        "what": run.what,
        "source": run.source,
        "assumed": run.assumed,
        "published": {"memory": run.memory, "speed": run.speed},
        "forecast": {"memory": max(found.phases[name] for name in STEP), "speed": speed, "phases": dict(found.phases)},
        "strategy": dataclasses.asdict(found.strategy),
        "loop": dataclasses.asdict(found.loop),
    }


def _beside(said: float | None, ours: float | None, shown: Any) -> tuple[str, str, str]:
    if said is None or ours is None:
        return ("–" if said is None else shown(said), "–" if ours is None else shown(ours), "–")
    return shown(said), shown(ours), f"{ours / said:.2f}"


def main() -> None:
    """Forecast every one, print the table, write the results."""
    rows = [compared(run) for run in RUNS]
    lines = [
        (
            row["what"],
            *_beside(row["published"]["memory"], row["forecast"]["memory"], lambda size: format_bytes(round(size))),
            *_beside(row["published"]["speed"], row["forecast"]["speed"], lambda speed: f"{speed:,.0f}"),
        )
        for row in rows
    ]
    columns = ("run", "published", "forecast", "ratio", "tokens/s a GPU", "forecast", "ratio")
    notes = tuple(f"{row['what']}: {row['source']}; {row['assumed']}." for row in rows)
    table = Table(title="Published runs beside the forecast", columns=columns, rows=lines, notes=notes)
    print(table.text())
    write_results("published", table.title, {**about(), "runs": rows}, table.text())


if __name__ == "__main__":
    main()
