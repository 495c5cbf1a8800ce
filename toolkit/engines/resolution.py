"""A request → its `Job`: what is open is resolved, and what no rank could do is refused before one starts."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from toolkit.config.parallelism import resolve_parallelism
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import SHARDINGS, Strategy
from toolkit.config.tables import ATTENTIONS, OPTIMIZERS, PRECISIONS
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError
from toolkit.core.units import ceil_div
from toolkit.devices.machine import Device, Hardware
from toolkit.engines.job import Job
from toolkit.engines.registry import all_transforms, engine_for
from toolkit.models import NF4, ModelSpec
from toolkit.models.varlen import DROPOUTS, separates_documents


def resolve(strategy: Strategy, train_config: TrainConfig, spec: ModelSpec | None, ranks: int, device: Device) -> Job:
    """Resolve a request completely: precision, attention, learning rate, the engine's settings.

    Raises:
        StrategyError: for what this device, model or number of ranks cannot do, before any process starts.
    """
    precision = resolve_precision(strategy.precision, device)
    attention = resolve_attention(strategy.attention, precision, spec, device, divided=strategy.cp > 1)
    if device.kind == "cuda" and PRECISIONS[precision].accelerate == "bf16" and "bf16" not in device.dtypes:
        raise StrategyError(
            f"precision {precision!r}: {device.name} does not compute bf16. Choose precision 'fp16', or 'fp32'."
        )
    checkpointing = strategy.activation_checkpointing
    if checkpointing == "auto":
        able = (spec is None or spec.checkpointed) and strategy.pp_schedule != "zero_bubble"
        checkpointing = "full" if able else "none"
    fields: dict[str, Any] = {"precision": precision, "attention": attention, "activation_checkpointing": checkpointing}
    fields["loss"] = "whole" if strategy.loss == "auto" else strategy.loss
    if (
        strategy.mlp_tiles == "auto" and spec is not None
    ):  # pieces of the hidden size (Bekman et al. 2025, arXiv:2506.13996)
        tiles = ceil_div(train_config.seq_len, strategy.cp * spec.hidden)
        fields["mlp_tiles"] = "none" if tiles == 1 else tiles
    strategy = dataclasses.replace(strategy, **fields)
    if train_config.lr is None:
        kind = "adapter" if strategy.adapter != "none" else "all"
        kind = "embedded" if spec is not None and spec.name == EMBEDDED else kind
        train_config = dataclasses.replace(train_config, lr=OPTIMIZERS[train_config.optimizer].default_lr[kind])
    check_optimizer(strategy, train_config)
    check_model(strategy, train_config, spec)
    job = Job(
        strategy=strategy,
        train_config=train_config,
        spec=spec,
        parallelism=resolve_parallelism(strategy, ranks),
        device=device,
        engine=engine_for(strategy.sharding, strategy.tp, strategy.ep, strategy.pp),
    )
    transforms = tuple(transform for transform in all_transforms() if transform.settings(job) is not None)
    for transform in transforms:
        transform.refuse(job)
    job = dataclasses.replace(job, settings=job.engine.settings(job), transforms=transforms)
    check_scaling(job)
    return job


def accelerate_config(strategy: Strategy, ranks: int, nodes: int = 1) -> dict[str, Any]:
    """Return Accelerate's config file for a strategy: its keys and values."""
    return engine_for(strategy.sharding, strategy.tp, strategy.ep, strategy.pp).to_yaml(strategy, ranks, nodes)


def default_ranks(strategy: Strategy, hardware: Hardware) -> int:
    """Return the default number of ranks: one a device; on a CPU at least `Strategy.least_ranks`.

    Without data parallelism it follows from the strategy: 1 for `none`, `tp` for `none` with tensor parallelism.
    """
    if SHARDINGS[strategy.sharding].data_parallel == "none":
        return strategy.least_ranks
    return max(strategy.least_ranks, hardware.ranks) if hardware.device.kind == "cpu" else hardware.ranks


def resolve_precision(precision: str, device: Device) -> str:
    """Resolve `auto`: bf16 where the device has it natively, else fp16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    if device.kind == "cpu":
        return "fp32"
    return "bf16" if "bf16" in device.dtypes else "fp16"


def check_scaling(job: Job) -> None:
    """Refuse fp16 on a device that does not compute it, and on a CPU unless the engine scales the loss there.

    Raises:
        StrategyError: with a precision that runs.
    """
    computes, on_cpu = "fp16" in job.device.dtypes, job.engine.scales_on_cpu
    if job.precision.scaled and not (computes and (on_cpu or job.device.kind != "cpu")):
        reason = "there is no loss scaling"
        if on_cpu:
            reason = "the device does not compute it (a CPU needs avx512_fp16)"
        other = ", or sharding 'zero2'" if computes else ""
        raise StrategyError(
            f"sharding {job.strategy.sharding!r} cannot train in precision {job.strategy.precision!r} on {job.device.name}: "
            f"{reason}. Choose precision 'bf16'{other}."
        )


def resolve_attention(
    attention: str, precision: str, spec: ModelSpec | None, device: Device, *, divided: bool = False
) -> str:
    """Resolve `auto`: the device's first kernel that takes this dtype and that the model's class supports.

    `divided`: ranks share each row.

    Raises:
        StrategyError: for a named kernel that is not there or does not take this dtype, with those that do.
    """

    def able(kernel: str) -> bool:
        if precision == "fp32" and ATTENTIONS[kernel].half_only:
            return False
        return spec is None or (kernel in spec.attentions and _takes_rows(kernel, attention, spec))

    if attention == "auto":
        automatic = (word for word in device.attentions if ATTENTIONS[word].automatic)
        return next(
            (word for word in automatic if able(word) and (ATTENTIONS[word].divides_rows or not divided)), "eager"
        )
    if attention in device.attentions and able(attention):
        return attention
    if attention not in device.attentions:
        why = "is not installed or does not run on this device"
        fix = f" {ATTENTIONS[attention].install}".rstrip()
    elif spec is not None and (attention not in spec.attentions or not _takes_rows(attention, attention, spec)):
        why, fix = f"is not supported by {spec.architecture}", ""
    else:
        why, fix = f"computes in half precision only, and precision is {precision!r}", " Or choose precision 'bf16'."
    raise StrategyError(
        f"attention {attention!r} {why}.{fix} Works here: {', '.join(filter(able, device.attentions))}."
    )


FLASH_HEAD = 256
"""The largest attention head of torch's flash kernel; its size is a multiple of 8."""


def _takes_rows(kernel: str, attention: str, spec: ModelSpec) -> bool:
    """Return whether a kernel keeps joined documents apart; else only padded rows are left, and a mask may do better."""
    if kernel == "varlen":
        size = spec.config.get("head_dim") or spec.hidden // max(1, spec.heads)
        if size > FLASH_HEAD or size % 8 or any(spec.config.get(name) for name in DROPOUTS):
            return False
    if not ATTENTIONS[kernel].joins_rows or separates_documents(spec, joined=True):
        return True
    return kernel != "varlen" and (attention == kernel or not separates_documents(spec, joined=False))


def check_optimizer(strategy: Strategy, train_config: TrainConfig) -> None:
    """Refuse an optimizer that the engine does not run.

    Raises:
        StrategyError: with the shardings that do.
    """
    engines = OPTIMIZERS[train_config.optimizer].engines
    if engines and SHARDINGS[strategy.sharding].engine not in engines:
        able = [word for word, row in SHARDINGS.items() if row.engine in engines]
        raise StrategyError(
            f"optimizer {train_config.optimizer!r} does not run with sharding {strategy.sharding!r}. "
            f"Choose sharding {', '.join(able)}."
        )


TRAINED_OVER = {NF4: ("qlora",), **dict.fromkeys(("fp8", "mxfp4"), ("none", "lora", "dora"))}
"""`ModelSpec.quantization` → adapters that train over such files: packed as they are, or dequantized as they are read."""


def check_model(strategy: Strategy, train_config: TrainConfig, spec: ModelSpec | None) -> None:
    """Refuse values that the model does not support on any engine.

    Raises:
        StrategyError: for files that are quantized already, and a sequence over the model's limit.
    """
    if spec is None:
        return
    able = TRAINED_OVER.get(method, ()) if (method := spec.quantization) else (strategy.adapter,)
    if strategy.adapter not in able:
        choice = f"Choose adapter {' or '.join(map(repr, able))}, or give" if able else "Give"
        base = re.sub(r"(-unsloth)?-(bnb-4bit|4bit|8bit|fp8|gptq|awq)([-.].*)?$", "", spec.name, flags=re.IGNORECASE)
        raise StrategyError(
            f"{spec.name} holds weights that are quantized already ({method}), and adapter {strategy.adapter!r} needs "
            f"unquantized ones. {choice} its unquantized base{f', {base}' if base != spec.name else ''}."
        )
    if spec.max_positions is not None and train_config.seq_len > spec.max_positions:
        rope = spec.config.get("rope_parameters")
        # Others scale them already, or by kinds of layers; Phi-3 reads yarn as its own longrope.
        plain = (
            isinstance(rope, dict) and rope.get("rope_type") == "default" and spec.config.get("model_type") != "phi3"
        )
        raise StrategyError(
            f"seq_len {train_config.seq_len} is over the limit of {spec.name}: {spec.max_positions} positions. "
            f"Choose --seq-len {spec.max_positions} or less{_longer(train_config.seq_len, spec) if plain else ''}."
        )


def _longer(seq_len: int, spec: ModelSpec) -> str:
    """Return the setting with which rotary positions reach `seq_len` (Peng et al. 2023, arXiv:2309.00071)."""
    positions = spec.max_positions or seq_len
    scaling = f'"rope_type": "yarn", "factor": {float(f"{seq_len / positions:.6g}")}'
    return (
        f', or set max_position_embeddings {seq_len} and add {scaling}, "original_max_position_embeddings": {positions} to '
        "rope_parameters in its config.json"
    )
