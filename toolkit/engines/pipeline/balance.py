"""The layers of each stage: stages of equal time, within the memory of a rank. By arithmetic, without a trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF
from toolkit.engines.job import Job
from toolkit.engines.pipeline.anatomy import Anatomy, anatomy_of
from toolkit.engines.pipeline.schedules import stages_per_rank
from toolkit.engines.roofline import other_seconds, product_seconds
from toolkit.models import ModelSpec

MOVED, LOGIT_MOVED, SCORE_MOVED, CALLS = 760, 54, 53, 140
"""Bytes that operators other than products read and write in forward and backward, and the layer's operators.

For each token and hidden unit of a layer, each token and row of the head, and each attention score of eager attention. By traces
of a Llama and a BLOOM in bf16 (hidden 1,024, 2,048 tokens).
"""

KEPT_BYTES = 34
"""Bytes that a layer keeps for each token and hidden unit of a micro-batch in half precision (Korthikanti et al. 2022, equation 2,
without the attention scores)."""

EVENNESS = 8
"""Power of the mean of the stages' times that is made small: with a high one the slowest counts most, and the others even out."""


TIE = 1e-6
"""Weight of memory beside time: of cuts that are as fast, the one with the smallest stages."""


def balanced(job: Job) -> list[tuple[int, int]]:
    """Return the layers (first, end) of each stage: the slowest stage is as fast as can be, of those within a rank's memory.

    Raises:
        StrategyError: for more stages than layers.
    """
    spec, stages = job.spec, stages_per_rank(job) * job.parallelism.pp
    assert spec is not None
    count = anatomy_of(spec).count
    if stages > count:
        raise StrategyError(
            f"{stages} stages: {spec.architecture} has {count} layers, and each stage holds at least one. "
            f"Choose --pp times --pp-stages-per-rank of at most {count}."
        )
    costs, tail = times(job)
    sums, total = [0.0, *itertools.accumulate(costs)], sum(costs) + tail
    sizes = _Sizes(job, stages)

    def penalty(number: int, start: int, end: int) -> float:
        time = sums[end] - sums[start] + (tail if end == count else 0)
        return float((time / total) ** EVENNESS + TIE * (sizes.stage(number, start, end) / sizes.most) ** EVENNESS)

    def within(number: int, start: int, end: int) -> float:
        return penalty(number, start, end) if sizes.stage(number, start, end) <= sizes.limit else math.inf

    # Where no cut fits, the forecast says so; these stages are still of equal time.
    return _cut(count, stages, within) or _cut(count, stages, penalty) or []


def _cut(count: int, stages: int, penalty: Callable[[int, int, int], float]) -> list[tuple[int, int]] | None:
    """Return the cut with the smallest sum of its stages' penalties; None where all are infinite.

    Args:
        count: of the layers.
        stages: of at least one layer each.
        penalty: of a stage's number, its first layer, and the one after its last.
    """
    # (penalty of layers from `start` on, end of their first stage), for so many stages as were added.
    level = [(penalty(stages - 1, start, count), count) for start in range(count)]
    levels = [level]
    for number in reversed(range(stages - 1)):
        rest, most = level, count - (stages - number) + 2
        level = [
            min(
                ((penalty(number, start, end) + rest[end][0], end) for end in range(start + 1, most)),
                default=(math.inf, count),
            )
            for start in range(count)
        ]
        levels.append(level)
    if levels[-1][0][0] == math.inf:
        return None
    result, start = [], 0
    for level in reversed(levels):
        result.append((start, level[start][1]))
        start = level[start][1]
    return result


def times(job: Job) -> tuple[list[float], float]:
    """Return the time of each layer's forward and backward, and that of the head with the loss; a lookup costs nothing.

    In seconds by the card's roofline; in operations where the speed of the device is unknown.
    """
    spec, config, card = job.spec, job.train_config, job.device.card
    assert spec is not None
    parts, tokens = anatomy_of(spec), config.micro_batch * config.seq_len
    active = spec.moe.active / spec.moe.experts if spec.moe else 1.0
    products, head = [0.0] * parts.count, 0.0
    for parameter in spec.parameters:
        share = active if parameter.role == "expert" else 1.0
        for place in parts.places(parameter.name) if len(parameter.shape) > 1 else ():
            if 0 <= place < parts.count:
                products[place] += share * parameter.elements
    head = float(_head_elements(spec, parts))
    # Forward and backward, and the forward of what is computed again. Half of the scores are masked.
    passes = 3 + job.strategy.recomputed_share
    scores = tokens * config.seq_len if spec.heads else 0
    work = [passes * 2 * (tokens * each + scores * spec.hidden) for each in products]
    if card is None:
        return work, 6 * tokens * head
    eager = SCORE_MOVED * scores * spec.heads if job.strategy.attention == "eager" else 0
    other = passes / 3 * other_seconds(card, MOVED * tokens * spec.hidden + eager, CALLS)
    logits = other_seconds(card, LOGIT_MOVED * tokens * spec.vocab, 0)
    dtype = job.compute_dtype
    layers = [product_seconds(card, {dtype: each}) + other for each in work]
    return layers, product_seconds(card, {dtype: 6 * tokens * head}) + logits


def _head_elements(spec: ModelSpec, parts: Anatomy) -> int:
    """Return the elements of the matrices that are used after the layers, tied ones too."""
    shapes = {parameter.name: parameter for parameter in spec.parameters}
    names = (f"{module}.weight" for module in parts.after)
    matrices = (shapes.get(spec.names_of(name)[0]) for name in names)
    return sum(each.elements for each in matrices if each is not None and len(each.shape) > 1)


def slots(spec: ModelSpec) -> tuple[list[int], int, int]:
    """Return the bytes, in half precision, of each block, of what comes before them, and of what comes after."""
    parts = anatomy_of(spec)
    sizes = [0] * (parts.count + 2)
    for parameter in spec.parameters:
        for place in {place for name in spec.names_of(parameter.name) for place in parts.places(name)}:
            sizes[place + 1] += 2 * parameter.elements
    return sizes[1:-1], sizes[0], sizes[-1]


def unbalanced(spec: ModelSpec, stages: int) -> list[tuple[int, int]]:
    """Return the layers (first, end) of stages with equally many slots: blocks, the embedding, the head; one more on the first."""
    count = anatomy_of(spec).count
    each, more = divmod(count + 2, stages)
    ends = list(itertools.accumulate(each + (number < more) for number in range(stages)))
    # The embedding is the first slot, the head the last.
    bounds = [0, *(max(0, min(count, end - 1)) for end in ends)]
    return list(itertools.pairwise(bounds))


def half_bytes(spec: ModelSpec, cuts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the bytes of each stage's weights in half precision."""
    blocks, before, after = slots(spec)
    sizes = [sum(blocks[first:end]) for first, end in cuts]
    sizes[0] += before
    sizes[-1] += after
    return sizes


class _Sizes:
    """An estimate of a stage's memory: its states, and what its micro-batches in flight keep."""

    def __init__(self, job: Job, stages: int) -> None:
        assert job.spec is not None
        blocks, before, after = slots(job.spec)
        elements = [0, *itertools.accumulate(size // 2 for size in blocks)]
        self._elements, self._ends = elements, (before // 2, after // 2)
        weight, config = BYTES_OF[job.weight_dtype], job.train_config
        moments = sum(BYTES_OF[state.dtype or job.weight_dtype] for state in job.optimizer.states)
        own = 2 * weight + moments if job.strategy.adapter == "none" else BYTES_OF[job.compute_dtype]
        self._of_element = own / job.parallelism.tp  # weight, gradient and moments; frozen ones have the first alone
        tokens, half = config.micro_batch * config.seq_len, BYTES_OF[job.compute_dtype]
        kept = 1 + (KEPT_BYTES / 2 - 1) * (1 - job.strategy.recomputed_share)
        self._of_layer = kept * half * tokens * job.spec.hidden
        self._stages, self._job = stages, job
        flight = max(config.accumulation, stages)
        self.most = job.spec.elements * self._of_element + flight * len(blocks) * self._of_layer
        """More than any stage has."""
        self.limit = job.device.total_bytes / stages_per_rank(job) if job.device.kind == "cuda" else math.inf
        """What a stage has of a rank's memory."""

    def stage(self, number: int, start: int, end: int) -> float:
        """Return the bytes of a stage."""
        elements = self._elements[end] - self._elements[start]
        elements += (number == 0) * self._ends[0] + (number == self._stages - 1) * self._ends[1]
        micro = self._job.train_config.accumulation
        flight = micro if self._job.strategy.pp_schedule == "gpipe" else min(micro, self._stages - number)
        return elements * self._of_element + flight * (end - start) * self._of_layer
