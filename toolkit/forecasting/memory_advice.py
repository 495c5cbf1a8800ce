"""Changes of a strategy and its batch that reduce memory, the smallest change first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.fields import from_dict
from toolkit.config.strategy import OFFLOADS, SHARDINGS, Strategy, sharding_word
from toolkit.config.train_config import TrainConfig

SHORTEST = 128
"""Tokens of the shortest sequence that is suggested."""

NEW_RUN = {"adapter", "precision", "seq_len"}
"""Fields that a run cannot resume with."""


def changes(
    strategy: Strategy, train_config: TrainConfig, *, in_a_step: bool, on_cpu: bool = False
) -> Iterator[dict[str, Any]]:
    """Return single changes that reduce memory, the smallest first.

    Args:
        strategy: that did not fit.
        train_config: that did not fit.
        in_a_step: whether the peak contains activations, so that micro-batch and activation checkpointing matter.
        on_cpu: whether ranks run on the CPU, where an offload saves nothing.
    """
    half = halved(train_config) if in_a_step else {}
    while half:
        yield half
        half = halved(
            dataclasses.replace(train_config, micro_batch=half["micro_batch"], accumulation=half["accumulation"])
        )
    if in_a_step and strategy.loss == "whole":
        yield {"loss": "chunked"}
    if in_a_step and strategy.activation_checkpointing not in ("auto", "full"):  # a job without a choice takes full
        yield {"activation_checkpointing": "full"}
    yield from ({"sharding": word} for word in SHARDINGS[strategy.sharding].smaller)
    for offload in OFFLOADS[OFFLOADS.index(strategy.offload) + 1 :]:
        if offload in SHARDINGS[strategy.sharding].offload and not on_cpu:
            yield {"offload": offload}
    yield from training_changes(strategy, train_config, on_cpu=on_cpu)


def training_changes(
    strategy: Strategy, train_config: TrainConfig, *, on_cpu: bool = False
) -> Iterator[dict[str, Any]]:
    """Return the changes of adapter, precision and sequence length. A run cannot resume with them."""
    if strategy.adapter in ("none", "lora"):
        yield {"adapter": "lora" if strategy.adapter == "none" else "qlora"}
    if strategy.adapter == "none":
        yield {"adapter": "qlora"}
        if strategy.precision in ("auto", "bf16") and strategy.offload == "none" and not on_cpu:
            yield {"precision": "bf16_pure"}
    seq_len = train_config.seq_len // 2
    while seq_len >= SHORTEST:
        yield {"seq_len": seq_len}
        seq_len //= 2


def halved(train_config: TrainConfig) -> dict[str, int]:
    """Return half the micro-batch (or the next divisor of a rank's share) with the same global batch; empty at 1."""
    share = train_config.micro_batch * train_config.accumulation
    micro = max((size for size in range(1, train_config.micro_batch // 2 + 1) if share % size == 0), default=0)
    return {"micro_batch": micro, "accumulation": share // micro} if micro else {}


def changed(strategy: Strategy, train_config: TrainConfig, change: Mapping[str, Any]) -> tuple[Strategy, TrainConfig]:
    """Apply a change to both; `dp_replicate` is dropped if the new sharding has none.

    Raises:
        StrategyError: for a word that is unknown, and for what no engine can do.
    """
    changed_fields = {**dataclasses.asdict(strategy), **change}
    if not SHARDINGS[sharding_word(changed_fields["sharding"])].hybrid:
        changed_fields["dp_replicate"] = 1
    train_fields = {
        **dataclasses.asdict(train_config),
        **{name: value for name, value in change.items() if hasattr(train_config, name)},
    }
    strategy_fields = {name: value for name, value in changed_fields.items() if hasattr(strategy, name)}
    return from_dict(Strategy, strategy_fields), from_dict(TrainConfig, train_fields)
