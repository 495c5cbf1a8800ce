"""The order of a schedule's actions on each rank, as torch runs them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace

from toolkit.engines.job import Job
from toolkit.engines.pipeline.schedules import schedule_class, stages_per_rank
from toolkit.engines.played import BACKWARD, FORWARD, Action


def orders(job: Job) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank of a pipeline in the order of torch's schedule."""
    word, pp, micro = job.strategy.pp_schedule, job.parallelism.pp, job.train_config.accumulation
    if word == "gpipe":
        return tuple((*_all(FORWARD, rank, range(micro)), *_all(BACKWARD, rank, range(micro))) for rank in range(pp))
    if word == "1f1b":
        return tuple(tuple(_1f1b(rank, pp - rank, micro)) for rank in range(pp))
    return _torch_orders(schedule_class(job), pp, stages_per_rank(job), micro)


def _all(kind: str, stage: int, micros: range) -> Iterator[Action]:
    return (Action(kind, stage, micro) for micro in micros)


def _1f1b(stage: int, first: int, micro: int) -> Iterator[Action]:
    """Yield `first` forwards, then a backward and a forward in turn, then the other backwards (`Schedule1F1B`)."""
    first = min(first, micro)
    yield from _all(FORWARD, stage, range(first))
    for number in range(micro):
        yield Action(BACKWARD, stage, number)
        if first + number < micro:
            yield Action(FORWARD, stage, first + number)


@lru_cache(maxsize=16)
def _torch_orders(kind: type, pp: int, each: int, micro: int) -> tuple[tuple[Action, ...], ...]:
    """Return the orders of a schedule over several stages a rank, which torch's class makes for all ranks."""
    numbers = {"num_stages": pp * each, "group_size": pp, "group_rank": 0}
    stages = [SimpleNamespace(stage_index=pp * place, submod=None, **numbers) for place in range(each)]
    made = kind(stages, micro).pipeline_order
    return tuple(
        tuple(
            Action(step.computation_type.value, step.stage_index, step.microbatch_index)
            for step in made[rank]
            if step is not None and step.microbatch_index is not None
        )
        for rank in range(pp)
    )
