"""What other places of experts would change where one rank gets more tokens than the others: imbalance and time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.core.display import Table
from toolkit.core.errors import StrategyError
from toolkit.core.units import ceil_div, format_step_seconds
from toolkit.engines.job import Job


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One way to place the experts of each layer on the ranks."""

    name: str
    imbalance: float
    """The tokens of the rank with most, divided by the mean of the ranks."""
    step_seconds: float | None
    """None for a device with unknown speed."""


def check_imbalance(job: Job, imbalance: float) -> None:
    """Refuse an imbalance that no router can have.

    Raises:
        StrategyError: naming the value, what is expected, and a fix.
    """
    ep = job.parallelism.ep
    if ep == 1 and imbalance != 1:
        raise StrategyError(
            f"expert_imbalance {imbalance:g} needs expert parallelism: without it each rank computes the experts of its own "
            "tokens. Give --ep N, or leave it out."
        )
    if not 1 <= imbalance <= ep:
        raise StrategyError(
            f"expert_imbalance {imbalance:g}: expected 1, all ranks alike, to {ep}, all tokens on one of the {ep} ranks."
        )


def placements(job: Job, given: float | None, even: float | None) -> tuple[Placement, ...]:
    """Return the placement of a job's experts and others. A step's time lies on the line through two forecasts.

    Args:
        job: with an imbalance above 1.
        given: seconds of its step; None for a device with unknown speed.
        even: the same with an imbalance of 1.
    """
    imbalance = job.expert_imbalance
    assert job.spec is not None
    assert job.spec.moe is not None, "experts were checked"

    def seconds(other: float) -> float | None:
        return None if given is None or even is None else even + (given - even) * (other - 1) / (imbalance - 1)

    found = _other_places(job.spec.moe.experts, job.parallelism.ep, imbalance)
    ways = {"as given": imbalance, **dict(found), "all ranks alike": 1.0}
    return tuple(Placement(name=name, imbalance=each, step_seconds=seconds(each)) for name, each in ways.items())


def _other_places(experts: int, ranks: int, imbalance: float) -> Iterator[tuple[str, float]]:
    """Yield other placements of a layer's experts and their imbalance, where one expert makes it and all others are alike."""
    each = experts // ranks
    other = (ranks - imbalance) / (experts - each)
    hottest = imbalance - (each - 1) * other
    for copies in sorted({min(2, ranks), min(4, ranks), ranks}):
        yield f"its hottest expert on {copies} ranks", hottest / copies + each * other
    if each > 1:
        moves = range(1, each)
        moved = (max(imbalance - n * other, (each + ceil_div(n, ranks - 1)) * other) for n in moves)
        best, count = min(zip(moved, moves, strict=True))
        yield f"{count} of its other experts moved", best


def placements_table(ways: tuple[Placement, ...]) -> Table:
    """Return the placements as a table."""
    rows = [
        (way.name, f"{way.imbalance:.2f}", "–" if way.step_seconds is None else format_step_seconds(way.step_seconds))
        for way in ways
    ]
    note = "One expert has the additional tokens, all others are alike. Copies' gradients and moves are not counted."
    return Table(
        title="The rank with most tokens", columns=("experts", "tokens / mean", "a step"), rows=rows, notes=(note,)
    )
