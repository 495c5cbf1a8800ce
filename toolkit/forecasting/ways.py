"""How a job's forward computes, as far as its activations go. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.engines.job import Job
from toolkit.errors import StrategyError


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What an adapter computes with."""

    kind: str
    """`lora`, `dora`, `qlora` or `qlora8`."""
    rank: int
    targets: str
    """As `Strategy.lora_targets`."""
    dtype: str
    """torch's name of the dtype that its weights have in the forward."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """All that activations depend on, beside the model, the batch and the sequence. Many strategies share one."""

    weights: str
    """torch's name of the dtype that the weights have in the forward; with an adapter the frozen ones."""
    autocast: str | None
    """The dtype of autocast, or None. Under it the model's outputs are cast to fp32."""
    attention: str
    checkpointing: bool
    masked: bool
    """Whether attention gets a mask: where a row holds several documents, or padding."""
    device: str
    """`cpu` or `cuda`: kernels differ."""
    flash: bool = True
    """Whether the device runs `scaled_dot_product_attention`'s flash kernel: compute capability 8.0 or more."""
    adapter: Adapter | None = None
    """What stands on frozen weights, or None."""


def way_of(job: Job, *, masked: bool) -> Way:
    """Autocast where the engine computes on fp32 weights (one process, DDP), else weights in the compute dtype.

    Accelerate casts what a forward under autocast returns to fp32; the other engines leave it.
    """
    strategy = job.strategy
    half = strategy.precision in ("bf16", "fp16")
    autocast = half and strategy.engine == "ddp"
    trained = job.weight_dtype if autocast else job.compute_dtype
    adapter = Adapter(kind=strategy.adapter, rank=strategy.lora_rank, targets=strategy.lora_targets, dtype=trained)
    return Way(
        weights=trained if strategy.adapter == "none" else job.compute_dtype,
        autocast=job.compute_dtype if autocast else None,
        attention=strategy.attention,
        checkpointing=strategy.activation_checkpointing == "full",
        masked=masked and not strategy.attention.startswith("flash"),
        device=job.device.kind,
        flash=(job.device.capability or (8, 0)) >= (8, 0),
        adapter=None if strategy.adapter == "none" else adapter,
    )


def other_ways(job: Job, *, masked: bool) -> Iterator[Way]:
    """How the same job would compute under the other engines, as far as they differ."""
    own = way_of(job, masked=masked)
    for word in ("ddp", "zero3", "fsdp"):
        try:
            strategy = dataclasses.replace(job.strategy, sharding=word, offload="none", replicate=1)
        except StrategyError:
            continue
        if (way := way_of(dataclasses.replace(job, strategy=strategy), masked=masked)) != own:
            yield way
