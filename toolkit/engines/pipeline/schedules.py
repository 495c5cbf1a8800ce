"""The schedules of a pipeline: what each takes, by arithmetic, and torch's class of each."""

from __future__ import annotations

from typing import Any

from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job

TORCH = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
"""Class of `torch.distributed.pipelining`."""

SUPPORTED: dict[str, tuple[str, ...]] = {
    "sharding": ("none",),
    "adapter": ("none",),
    "offload": ("none",),
    "precision": ("bf16", "fp32", "bf16_pure"),
}
"""The values of `Strategy` that run with a pipeline."""


def stages_per_rank(job: Job) -> int:
    """Return the stages that each rank holds: 2 with `interleaved`, otherwise 1, where the number is open."""
    given = job.strategy.pp_stages_per_rank
    return given or (2 if job.strategy.pp_schedule == "interleaved" else 1)


def refuse(job: Job) -> None:
    """Refuse what a pipeline cannot do.

    Raises:
        StrategyError: naming the value, what is expected, and a fix.
    """
    strategy, pp = job.strategy, job.parallelism.pp
    for name, choices in SUPPORTED.items():
        value = getattr(strategy, name)
        if value not in choices:
            raise StrategyError(
                f"{name} {value!r} does not run with pp {pp} yet. Choose {name} {' or '.join(choices)}, or --pp 1."
            )
    for name in ("tp", "cp", "ep"):
        if getattr(strategy, name) > 1:
            raise StrategyError(f"--{name} does not run with pp {pp} yet. Leave it out, or choose --pp 1.")
    if strategy.compile:
        raise StrategyError(f"--compile does not run with pp {pp} yet. Leave it out, or choose --pp 1.")
    each = stages_per_rank(job)
    if strategy.pp_schedule == "interleaved" and each < 2:
        raise StrategyError(
            f"pp_stages_per_rank {each}: schedule 'interleaved' needs at least 2. Choose --pp-stages-per-rank 2, or --pp-schedule "
            "1f1b."
        )
    if strategy.pp_schedule != "interleaved" and each > 1:
        raise StrategyError(
            f"pp_stages_per_rank {each}: schedule {strategy.pp_schedule!r} runs one stage on each rank. Choose --pp-schedule "
            "interleaved, or --pp-stages-per-rank 1."
        )
    accumulation, nearest = job.train_config.accumulation, nearest_accumulation(job)
    if nearest != accumulation:
        other = "" if strategy.pp_schedule == "gpipe" else ", or --pp-schedule gpipe, which takes any number"
        rule = f"at least pp {pp}" if accumulation < pp else f"a multiple of {max(1, accumulation // pp)}"
        raise StrategyError(
            f"accumulation {accumulation}: schedule {strategy.pp_schedule!r} needs {rule} micro-batches a step, which are its "
            f"accumulation. Choose --accumulation {nearest}{other}."
        )
    if job.spec is not None and job.spec.config.get("output_router_logits"):
        raise StrategyError(
            f"{job.spec.architecture} adds a loss of its routers, and each stage has some of them. Set output_router_logits to "
            "false in config.json, or choose --pp 1."
        )


def nearest_accumulation(job: Job) -> int:
    """Return the number of micro-batches nearest to the job's that its schedule takes; of two the larger.

    1F1B needs one for each rank. Interleaved schedules run in equally long rounds of at least `pp` micro-batches each
    (`ScheduleInterleaved1F1B`).
    """
    pp, wanted, schedule = job.parallelism.pp, job.train_config.accumulation, job.strategy.pp_schedule
    if schedule == "gpipe":
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

    return getattr(pipelining, TORCH[job.strategy.pp_schedule])
