"""A tensor-parallel plan by arithmetic: its limits, the shapes on a rank, and the transfers. Standard library only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job
from toolkit.engines.records import Transfer
from toolkit.models import ModelSpec, Parameter
from toolkit.models.varlen import DROPOUTS

COLWISE = ("colwise", "colwise_gather_output", "embedding_rowwise")
"""Styles that split the first dimension of a weight, and of a bias."""
ROWWISE = ("rowwise", "rowwise_split_input")
"""Styles that split the second dimension of a weight; a bias stays whole. The second takes a whole input (Phi-3)."""
SUMMED = "replicated_with_grad_allreduce"
"""A weight that each rank holds whole. Its gradient is summed over the ranks."""
GATHERED = "colwise_gather_output"

SUPPORTED = {
    "sharding": ("none", "fsdp", "fsdp_grad_op", "hsdp"),
    "adapter": ("none",),
    "offload": ("none",),
    "precision": ("bf16", "fp32", "bf16_pure"),
}
"""The values of `Strategy` that run with tensor parallelism: fp16's scaler takes no tensors over several meshes."""


def refuse(job: Job) -> None:
    """Refuse what tensor parallelism cannot do yet.

    Raises:
        StrategyError: naming the value, what is expected, and a fix.
    """
    strategy, tp = job.strategy, job.parallelism.tp
    for name, choices in SUPPORTED.items():
        value = getattr(strategy, name)
        if value not in choices:
            raise StrategyError(
                f"{name} {value!r} does not run with tp {tp} yet. Choose {name} {' or '.join(choices)}, or --tp 1."
            )
    if strategy.sharding != "none" and job.parallelism.dp_shard < 2:
        raise StrategyError(
            f"sharding {strategy.sharding!r} with tp {tp} needs at least {2 * tp} ranks; got {job.ranks}. "
            f"Choose {2 * tp} processes, or sharding 'none' for {tp}."
        )
    if job.spec is not None and (reason := next(_unsupported_reasons(job.spec, tp), None)):
        raise StrategyError(f"tp {tp} does not run {job.spec.architecture}: {reason}")


def _unsupported_reasons(spec: ModelSpec, tp: int) -> Iterator[str]:
    """Yield why a model cannot be split, each with a fix."""
    odd = sorted(set(spec.tp_plan.values()) - {*COLWISE, *ROWWISE, SUMMED})
    for refused, reason in (
        (spec.moe is not None, "it has experts, and only dense models run so far"),
        (spec.frozen or spec.kind != "causal", "only causal models of text alone run so far"),
        (not spec.tp_plan, "transformers has no tensor-parallel plan for it"),
        (odd, f"its plan has style {''.join(odd[:1])!r}, and only {', '.join((*COLWISE, *ROWWISE, SUMMED))} are known"),
    ):
        if refused:
            yield f"{reason}. Choose --tp 1 with sharding 'fsdp'."
    keys = spec.config.get("num_key_value_heads")
    for what, count in (("attention heads", spec.heads), ("key-value heads", keys)):
        if isinstance(count, int) and count % tp:
            fits = [size for size in range(2, count + 1) if count % size == 0 and spec.heads % size == 0]
            yield f"{tp} does not divide its {count} {what}. Choose --tp {fits[0] if fits else 1}."
    for name in DROPOUTS:
        if isinstance(rate := spec.config.get(name), int | float) and rate > 0:
            yield (
                f"{name} is {rate:g}, and each rank would draw the same mask for other heads. "
                f"Set {name} to 0 in config.json, or choose --tp 1."
            )


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the plan's style of a parameter, by its own name or its module's; None where it is replicated."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])


def split_dimension(parameter: Parameter, plan: Mapping[str, str]) -> int | None:
    """Return the dimension of a parameter that the ranks share; None where each holds it whole."""
    style = style_of(parameter.name, plan)
    if style in COLWISE:
        return 0
    return 1 if style in ROWWISE and len(parameter.shape) == 2 else None


def local_shape(parameter: Parameter, plan: Mapping[str, str], tp: int, tp_rank: int) -> tuple[int, ...]:
    """Return the shape of the part that a rank of the group holds: equal parts rounded up, the last ones smaller."""
    dim = split_dimension(parameter, plan)
    if dim is None:
        return parameter.shape
    size = parameter.shape[dim]
    each = ceil_div(size, tp)
    part = max(0, min(size, (tp_rank + 1) * each) - tp_rank * each)
    return (*parameter.shape[:dim], part, *parameter.shape[dim + 1 :])


def local_job(job: Job, rank: int = 0) -> Job:
    """Return the job as a rank's data-parallel group sees it: without tensor parallelism, with the rank's local shapes."""
    spec = None if job.spec is None else _local_spec(job.spec, job.parallelism.tp, job.coordinates(rank).tp)
    return dataclasses.replace(
        job,
        strategy=dataclasses.replace(job.strategy, tp=1),
        parallelism=dataclasses.replace(job.parallelism, tp=1),
        spec=spec,
        engine=job.engine.inner,  # type: ignore[attr-defined]
    )


def _local_spec(spec: ModelSpec, tp: int, tp_rank: int) -> ModelSpec:
    # A spec is frozen, and so is what follows from it: it is made once for all jobs of a plan, and lives as long as the spec. A
    # spec holds its model's config, a dictionary, so it can be no key of a cache; `cached_property` writes into `vars()`, too.
    cache: dict[Any, ModelSpec] = vars(spec).setdefault("_local_specs", {})
    if (tp, tp_rank) not in cache:
        shapes = (local_shape(parameter, spec.tp_plan, tp, tp_rank) for parameter in spec.parameters)
        parameters = (
            dataclasses.replace(parameter, shape=shape)
            for parameter, shape in zip(spec.parameters, shapes, strict=True)
        )
        cache[tp, tp_rank] = dataclasses.replace(spec, parameters=tuple(parameters))
    return cache[tp, tp_rank]


def is_even(spec: ModelSpec, tp: int) -> bool:
    """Return whether all ranks of a group hold equally large parts of every parameter."""
    return _local_spec(spec, tp, 0).parameters == _local_spec(spec, tp, tp - 1).parameters


def transfers(job: Job, autocast: str | None) -> list[Transfer]:
    """Return what a rank sends inside its tensor-parallel group in a step. Nothing computes meanwhile.

    An all-reduce sends 2 (N - 1)/N of a tensor, an all-gather (N - 1)/N. Under autocast the embedding's sum and the
    gradients of activations are in fp32. Activation checkpointing repeats the forward of the layers.
    """
    spec, tp = job.spec, job.parallelism.tp
    assert spec is not None
    tokens, compute = job.train_config.micro_batch * job.train_config.seq_len, BYTES_OF[job.compute_dtype]
    widest = BYTES_OF[job.weight_dtype] if autocast else compute
    repeated = 1 + job.strategy.recomputed_share
    summed = gathered = backward = 0.0
    for name, shape in _weights(spec):
        style = style_of(name, spec.tp_plan)
        if style in ROWWISE:
            summed += repeated * tokens * shape[0] * compute
            gathered += tokens * shape[1] * compute if style != ROWWISE[0] else 0  # gradients of the whole input
        elif style == "embedding_rowwise":
            summed += tokens * shape[1] * widest
        elif style in COLWISE:
            backward += tokens * shape[1] * widest
            if style == GATHERED and shape[0] != spec.vocab:
                gathered += repeated * tokens * shape[0] * compute
            elif style == GATHERED and job.strategy.loss == "whole":
                gathered += tokens * shape[0] * compute
    share, micro = (tp - 1) / tp, job.train_config.accumulation
    return [
        Transfer(2 * share * summed, micro, "nothing", "tp", "activations, all-reduced in the tp group"),
        Transfer(share * gathered, micro, "nothing", "tp", "whole outputs, all-gathered in the tp group"),
        Transfer(2 * share * backward, micro, "nothing", "tp", "activations' gradients, all-reduced in the tp group"),
    ]


def _weights(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and whole shape of every matrix, a tied one under each of its names."""
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    shapes |= {name: shapes[group[0]] for group in spec.tied for name in group[1:]}
    return ((name, shape) for name, shape in shapes.items() if len(shape) == 2)
