"""The events of a shallow model's step, spread over the depth of the whole one. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from toolkit.units import round_up

WHOLE = ("forward", "backward", "end")
"""Events of the whole step."""

LOGITS = "logits"
"""Names what is made between the head's forward and its backward: logits, their copies, the loss, and their gradient."""

Event = tuple[str, int, str]
"""What, how much, whose.

`+`, `-`: bytes of a storage that is made or gone; a `-` outside of the layers names the layer that made it, and both name
`LOGITS` where it is theirs. `gradient`: bytes
and name of a parameter whose gradient is complete. `in`, `out`: a module's forward begins or ends, recomputation included;
`back in`, `back out`: its backward. Modules are the layers, and all that own a parameter. `forward`, `backward`, `end`: of the
whole. `flops`: operations in a dtype, as torch counts them; `skipped`: those of them that a causal attention kernel leaves
out; `moved`: bytes read and written by what is no matrix product; `calls`: operators."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A module list of layers: which of them were kept, and what kind each layer of the whole model is of."""

    name: str
    kinds: tuple[int, ...]
    """Of every layer of the whole model, in order."""
    kept: tuple[int, ...]
    """Indices of the layers that were kept: the first two and the last of each kind."""

    def source(self, layer: int) -> int:
        """The kept layer, by its place among the kept ones, that stands for a layer of the whole model.

        The first and the last of a kind stand for themselves, the second for all between: what is made once in a
        forward belongs to the first layer, what is made once in a backward to the last.
        """
        same = [index for index in self.kept if self.kinds[index] == self.kinds[layer]]
        return self.kept.index(layer if layer in same else same[1])

    def left_behind(self) -> Iterator[tuple[str, str, int]]:
        """Of each kept layer that stands for several: its name, that of the first of its kind, and how many."""
        counts = Counter(self.source(layer) for layer in range(len(self.kinds)))
        for place, count in counts.items():
            first = self.source(self.kinds.index(self.kinds[self.kept[place]]))
            if count > 1:
                yield f"{self.name}.{place}", f"{self.name}.{first}", count


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward and backward of a shallow model."""

    stacks: tuple[Stack, ...]
    events: tuple[Event, ...]
    ends: tuple[str | None, str | None, str | None]
    """Names of the input embedding, of the norm behind the last layer, and of the head."""

    def scaled(self, other: Trace, times: int) -> Trace | None:
        """This trace with `times` the difference from here to `other`'s sizes added; None where the two differ in more."""
        same = len(self.events) == len(other.events) and all(
            one[0] == two[0] and one[2] == two[2] for one, two in zip(self.events, other.events, strict=True)
        )
        if not same:
            return None
        events = tuple(
            (what, size + times * (two - size), name)
            for (what, size, name), (_, two, _) in zip(self.events, other.events, strict=True)
        )
        return replace(self, events=events)


class Stretch(NamedTuple):
    """What lies between two events: activations alone, in bytes."""

    rise: int
    """The highest total above the one at its beginning; at least 0."""
    net: int
    """The total at its end above the one at its beginning. A gradient that is complete is in it no longer."""
    logits_rise: int
    """What of `rise` the logits are, and all that the loss makes of them."""
    logits_net: int
    """What of `net` they are."""
    what: str
    """The event at its end."""
    size: int
    name: str
    flops: tuple[tuple[str, int], ...] = ()
    """Operations, by torch's name of the dtype, as torch counts them."""
    skipped: tuple[tuple[str, int], ...] = ()
    """Those of them that a kernel leaves out where attention is causal."""
    moved: int = 0
    """Bytes read and written by what is no matrix product."""
    calls: int = 0
    """Operators that do more than name a part of a tensor."""


@dataclass(frozen=True)
class _Segment:
    """A layer's forward or backward, or what lies outside of the layers."""

    backward: bool
    layer: str
    events: tuple[Event, ...]


def stretches(
    trace: Trace, block: int = 1, heeds: Callable[[str, str], bool] = lambda what, name: True
) -> list[Stretch]:
    """The whole model's step, in its order; the last event is `end`.

    Args:
        trace: of a shallow model.
        block: bytes that the allocator rounds every storage up to.
        heeds: says of an event, and of whom it tells, whether stretches have to end there: the fewer, the faster a replay.
    """
    layers = {f"{stack.name}.{place}" for stack in trace.stacks for place in range(len(stack.kept))}
    rounded = [(what, round_up(size, block) if what in ("+", "-") else size, name) for what, size, name in trace.events]
    found: list[Stretch] = []
    for stack, members in _grouped(trace.stacks, list(_cut(rounded, layers))):
        if stack is not None:
            found += _spread(stack, members, heeds)
        else:
            times = _times(trace.stacks, members)
            found += (one for member in members for one in _condensed(member.events, times, heeds))
    return found


def _times(stacks: Sequence[Stack], outside: Sequence[_Segment]) -> dict[tuple[str, int], int]:
    """How often a layer's storage of a size counts where it is let go outside of the layers.

    What every layer leaves behind is as much as there are layers; what only the last but one does, as its output that a loop's
    variable keeps, is there once. The first layer tells the two apart.
    """
    gone = {(name, size) for segment in outside for what, size, name in segment.events if what == "-" and name}
    return {
        (name, size): count
        for stack in stacks
        for name, first, count in stack.left_behind()
        for other, size in gone
        if other == name and (first, size) in gone
    }


def _cut(events: Sequence[Event], layers: Set[str]) -> Iterator[_Segment]:
    """The shallow model's own segments."""
    backward, layer = False, ""
    inside: list[Event] = []
    for event in events:
        what, _, name = event
        # Within the backward a layer's `in` and `out` are its recomputation.
        starts = name in layers and what == ("back in" if backward else "in")
        ends = name in layers and name == layer and what == ("back out" if backward else "out")
        if starts:
            yield _Segment(backward, layer, tuple(inside))
            inside, layer = [], name
        inside.append(event)
        if ends or what in ("backward", "end"):
            yield _Segment(backward, layer, tuple(inside))
            inside, layer = [], ""
            backward = backward or what == "backward"


def _grouped(stacks: Sequence[Stack], shallow: Sequence[_Segment]) -> Iterator[tuple[Stack | None, list[_Segment]]]:
    """Runs of segments of one stack and direction, and runs of those that belong to none."""

    def key(segment: _Segment) -> tuple[Stack, bool] | None:
        stack = next((one for one in stacks if segment.layer.startswith(f"{one.name}.")), None)
        return None if stack is None else (stack, segment.backward)

    run: list[_Segment] = []
    for index, segment in enumerate(shallow):
        following = key(shallow[index + 1]) if index + 1 < len(shallow) else None
        if run and key(segment) is None and following is not None and following == key(run[-1]):
            # What lies between two layers belongs to the one before.
            run[-1] = replace(run[-1], events=run[-1].events + segment.events)
            continue
        if run and key(segment) != key(run[-1]):
            yield (key(run[-1]) or (None,))[0], run
            run = []
        run.append(segment)
    if run:
        yield (key(run[-1]) or (None,))[0], run


def _spread(stack: Stack, members: Sequence[_Segment], heeds: Callable[[str, str], bool]) -> Iterator[Stretch]:
    """Every layer of the whole stack, each as the kept one that stands for it."""
    shown = {int(segment.layer.rpartition(".")[2]): list(_condensed(segment.events, {}, heeds)) for segment in members}
    order = range(len(stack.kinds))
    for index in reversed(order) if members[0].backward else order:
        source = stack.source(index)
        old, new = f"{stack.name}.{source}", f"{stack.name}.{index}"
        for one in shown[source]:
            inside = one.name == old or one.name.startswith(f"{old}.")
            yield one._replace(name=new + one.name[len(old) :]) if inside else one


def _condensed(
    events: Sequence[Event], times: Mapping[tuple[str, int], int], heeds: Callable[[str, str], bool]
) -> Iterator[Stretch]:
    """From event to event; what a layer made counts as often as `times` says where it is let go."""
    rise = net = moved = calls = logits_rise = logits = 0
    flops: list[tuple[str, int]] = []
    skipped: list[tuple[str, int]] = []
    for what, size, name in events:
        if what in ("+", "-"):
            change = size if what == "+" else -size * times.get((name, size), 1)
            net += change
            logits += change if name == LOGITS else 0
            if net > rise:
                rise, logits_rise = net, logits
        elif what == "flops":
            flops.append((name, size))
        elif what == "skipped":
            skipped.append((name, size))
        elif what == "moved":
            moved += size
        elif what == "calls":
            calls += size
        elif what in WHOLE or heeds(what, name):
            yield Stretch(rise, net, logits_rise, logits, what, size, name, tuple(flops), tuple(skipped), moved, calls)
            rise = net = moved = calls = logits_rise = logits = 0
            flops, skipped = [], []
    yield Stretch(rise, net, logits_rise, logits, "", 0, "", tuple(flops), tuple(skipped), moved, calls)
