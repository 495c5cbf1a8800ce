"""A pipeline's schedule, played without ranks: the time of every action, and how long each rank waits. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""torch's names of an action: a forward, a whole backward, and its two parts in zero-bubble schedules."""


class Action(NamedTuple):
    """A micro-batch's forward or backward on a stage."""

    kind: str
    stage: int
    micro: int


class Timed(NamedTuple):
    """An action of a rank, with its begin and end in the unit of the stages' times."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Played:
    """A step of all ranks."""

    actions: tuple[Timed, ...]
    length: float
    """Until the last rank's last action, in the unit of the stages' times."""
    idle: tuple[float, ...]
    """Share of the step in which each rank waits."""

    @property
    def idle_share(self) -> float:
        """The mean of the ranks' idle shares."""
        return sum(self.idle) / len(self.idle)


def measured(ranks: Sequence[Sequence[Sequence[tuple[Action, float, float]]]]) -> Played:
    """Return a step as the ranks of a pipeline have run it: of those that they kept, the one of median length.

    Args:
        ranks: for each rank its last steps: actions with their begin and end, by one clock.
    """
    steps = []
    count = min(map(len, ranks))
    for own in zip(*(kept[len(kept) - count :] for kept in ranks), strict=True):
        start = min(begin for step in own for _, begin, _ in step)
        length = max(end for step in own for _, _, end in step) - start
        actions = tuple(
            Timed(rank, action, begin - start, end - start)
            for rank, step in enumerate(own)
            for action, begin, end in step
        )
        busy = [sum(end - begin for _, begin, end in step) for step in own]
        steps.append(Played(actions=actions, length=length, idle=tuple(1 - each / length for each in busy)))
    return sorted(steps, key=lambda step: step.length)[len(steps) // 2]


def play(
    order: Sequence[Sequence[Action]], times: Mapping[tuple[str, int], float], send: float = 0.0, sent: float = 0.0
) -> Played:
    """Give every action its time: a rank runs its own in order, each as soon as the other stages' part has arrived.

    Args:
        order: each rank's actions.
        times: of each kind of action on each stage.
        send: the time of hidden states, or their gradient, between two ranks.
        sent: the time that each rank's step takes after its last action.
    """
    ended: dict[Action, float] = {}
    actions: list[Timed] = []
    stages = 1 + max(action.stage for own in order for action in own)
    place, clock, busy = [0] * len(order), [0.0] * len(order), [0.0] * len(order)
    while any(place[rank] < len(own) for rank, own in enumerate(order)):
        before = len(actions)
        for rank, own in enumerate(order):
            while place[rank] < len(own):
                action = own[place[rank]]
                source = _source(action, stages)
                if source is not None and not (ready := [each for each in source if each in ended]):
                    break
                arrived = 0.0 if source is None else ended[ready[0]] + send
                begin = max(clock[rank], arrived)
                clock[rank] = ended[action] = begin + times[action.kind, action.stage]
                busy[rank] += clock[rank] - begin
                actions.append(Timed(rank, action, begin, clock[rank]))
                place[rank] += 1
        assert len(actions) > before, "a schedule of torch's waits for itself"
    length = max(clock) + sent
    return Played(
        actions=tuple(actions), length=length, idle=tuple(1 - (own + sent) / length for own in busy) if length else ()
    )


def _source(action: Action, stages: int) -> tuple[Action, ...] | None:
    """Return the actions of another stage of which one has to have ended; None where a stage needs no other."""
    if action.kind == FORWARD and action.stage:
        return (action._replace(stage=action.stage - 1),)
    if action.kind in (BACKWARD, BACKWARD_INPUT) and action.stage < stages - 1:
        return tuple(Action(kind, action.stage + 1, action.micro) for kind in (BACKWARD, BACKWARD_INPUT))
    return None


def in_flight(order: Sequence[Action]) -> int:
    """Return the most micro-batches that the stages of a rank hold together, each stage's counted."""
    held = most = 0
    for action in order:
        held += {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        most = max(most, held)
    return most
