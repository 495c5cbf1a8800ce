"""The schedules of a pipeline: what each takes, by arithmetic, and torch's class of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.config.strategy import PP_SCHEDULES
from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job
from toolkit.engines.pipeline.anatomy import Anatomy
from toolkit.engines.states import adapted

SEVERAL = ("interleaved", "looped_bfs", "zero_bubble")
"""Schedules of several stages on each rank."""

DATA_PARALLEL = ("none", "ddp", "fsdp", "hsdp")
"""Shardings that run with a pipeline."""

NOT_SHARDED: dict[str, str] = {
    "fsdp_grad_op": "within a step a pipeline keeps a stage's parameters whole in any case, as --sharding fsdp does with it",
    "zero1": "DeepSpeed's engine runs the backward itself, and torch's schedules do; --sharding fsdp shards the same between steps",
    "zero2": "it would reduce the gradients of every micro-batch, not once a step",
    "zero3": "it would gather every parameter again for each micro-batch, forward and backward",
}
"""Why others do not."""

PIPELINE_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "adapter": (("none", "lora", "dora"), "packed weights are no parts of a stage yet"),
    "offload": (("none",), "a stage's states would have to come back between two micro-batches"),
    "precision": (("bf16", "fp32", "bf16_pure"), "the stages would have to agree on a loss scale"),
}
"""The values of other fields that run, and why the others do not."""


def stages_per_rank(job: Job) -> int:
    """Return the stages that each rank holds: where the number is open 2 with schedules of several, otherwise 1."""
    return job.strategy.pp_stages_per_rank or (2 if job.strategy.pp_schedule in SEVERAL else 1)


def refuse(job: Job) -> None:
    """Refuse what a pipeline cannot do.

    Raises:
        StrategyError: naming the value, what is expected, and a fix.
    """
    strategy, pp = job.strategy, job.parallelism.pp
    if why := NOT_SHARDED.get(strategy.sharding):
        raise StrategyError(
            f"sharding {strategy.sharding!r} does not run with pp {pp}: {why}. Choose sharding {' or '.join(DATA_PARALLEL)}, or "
            "--pp 1."
        )
    for name, (choices, why) in PIPELINE_VALUES.items():
        value = getattr(strategy, name)
        if value not in choices:
            raise StrategyError(
                f"{name} {value!r} does not run with pp {pp}: {why}. Choose {name} {' or '.join(choices)}, or --pp 1."
            )
    for name, given in (("cp", strategy.cp > 1), ("compile", strategy.compile)):
        if given:
            raise StrategyError(f"--{name} does not run with pp {pp} yet. Leave --{name} out, or choose --pp 1.")
    if strategy.sharding != "none" and job.parallelism.dp_size < 2:
        raise StrategyError(
            f"{strategy.label} needs at least {2 * job.ranks} ranks, two for each part of the model; got {job.ranks}. Choose "
            f"{2 * job.ranks} processes, or sharding 'none'."
        )
    _refuse_schedule(job)
    if job.spec is not None and job.spec.config.get("output_router_logits"):
        raise StrategyError(
            f"{job.spec.architecture} adds a loss of its routers, and each stage has some of them. Set output_router_logits to "
            "false in config.json, or choose --pp 1."
        )


def _refuse_schedule(job: Job) -> None:
    """Refuse numbers of stages and of micro-batches that torch's class would."""
    strategy, pp, each = job.strategy, job.parallelism.pp, stages_per_rank(job)
    if strategy.pp_schedule in SEVERAL and each < 2:
        raise StrategyError(
            f"pp_stages_per_rank {each}: schedule {strategy.pp_schedule!r} needs at least 2. Choose --pp-stages-per-rank 2, or "
            "--pp-schedule 1f1b."
        )
    if strategy.pp_schedule not in SEVERAL and each > 1:
        raise StrategyError(
            f"pp_stages_per_rank {each}: schedule {strategy.pp_schedule!r} runs one stage on each rank. Choose --pp-schedule "
            "interleaved, or --pp-stages-per-rank 1."
        )
    for name, value, other in (
        ("loss", "chunked", "--loss whole"),
        ("activation_offload", True, "--no-activation-offload"),
    ):
        if strategy.pp_schedule == "zero_bubble" and getattr(strategy, name) == value:
            raise StrategyError(
                f"{name} {value!r} has one backward, and pp_schedule 'zero_bubble' has two: of hidden states, then of weights. "
                f"Choose {other}, or --pp-schedule interleaved."
            )
    if strategy.pp_schedule == "zero_bubble" and strategy.activation_checkpointing != "none":
        raise StrategyError(
            f"activation_checkpointing {strategy.activation_checkpointing!r}: 'zero_bubble' would recompute a layer for "
            "each of its weights. Choose --activation-checkpointing none, or --pp-schedule interleaved."
        )
    accumulation, nearest = job.train_config.accumulation, nearest_accumulation(job)
    if nearest != accumulation:
        other = "" if strategy.pp_schedule == "gpipe" else ", or --pp-schedule gpipe, which takes any number"
        rule = f"at least pp {pp}" if accumulation < pp else f"a multiple of {max(1, accumulation // pp)}"
        raise StrategyError(
            f"accumulation {accumulation}: schedule {strategy.pp_schedule!r} needs {rule} micro-batches a step, which are its "
            f"accumulation. Choose --accumulation {nearest}{other}."
        )


def check_adapted(job: Job, parts: Anatomy, stages: Sequence[tuple[int, int]]) -> None:
    """Refuse an adapter that trains nothing on a stage: there is no backward there.

    Raises:
        StrategyError: with the stage's layers.
    """
    strategy = job.strategy
    if strategy.adapter == "none" or job.spec is None:
        return
    trained = {place for name in adapted(job.spec, strategy.lora_targets) for place in parts.places(f"{name}.weight")}
    for first, end in stages:
        if not trained.intersection(range(first, end)):
            raise StrategyError(
                f"lora_targets {strategy.lora_targets!r} adapts nothing in layers {first} to {end - 1}, which are a stage of pp "
                f"{strategy.pp}. Choose lora_targets 'all-linear', or a smaller --pp."
            )


def nearest_accumulation(job: Job) -> int:
    """Return the number of micro-batches nearest to the job's that its schedule takes; of two the larger.

    1F1B needs one for each rank. Interleaved schedules run in equally long rounds of at least `pp` micro-batches each
    (`ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`).
    """
    pp, wanted, schedule = job.parallelism.pp, job.train_config.accumulation, job.strategy.pp_schedule
    if schedule in ("gpipe", "looped_bfs"):
        return wanted
    if schedule == "1f1b":
        return max(wanted, pp)
    able = [number for number in range(pp, 2 * wanted + 2 * pp) if number % (number // pp) == 0]
    return min(able, key=lambda number: (abs(number - wanted), -number))


def idle_share(job: Job) -> float:
    """Return the share of a step in which a rank waits, with equal stages: (p - 1) / (v m + p - 1) (Narayanan et al. 2021)."""
    pp, micro = job.parallelism.pp, job.train_config.accumulation
    return (pp - 1) / (stages_per_rank(job) * micro + pp - 1)


def schedule_class(job: Job) -> Any:
    """Return torch's class."""
    import torch.distributed.pipelining as pipelining

    return getattr(pipelining, f"Schedule{PP_SCHEDULES[job.strategy.pp_schedule]}")
