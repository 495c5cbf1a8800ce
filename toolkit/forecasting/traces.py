"""A shallow model's trace, repeated over the depth of the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from toolkit.core.units import round_up
from toolkit.engines.traces import LOGITS, WHOLE, Event, LayerStack, Segment, Trace


@dataclass(frozen=True)
class _Span:
    """Events of a layer's forward or backward, or those outside of the layers."""

    backward: bool
    layer: str
    events: tuple[Event, ...]


def split_segments(
    trace: Trace, block: int = 1, is_boundary: Callable[[str, str], bool] = lambda what, name: True
) -> list[Segment]:
    """Return the whole model's step in order; the last event is `end`.

    Args:
        trace: of a shallow model.
        block: bytes that the allocator rounds every storage up to.
        is_boundary: takes an event and its module's name, and returns whether a segment ends there. Fewer segments replay faster.
    """
    layers = {f"{stack.name}.{place}" for stack in trace.stacks for place in range(len(stack.indices))}
    rounded = [(what, round_up(size, block) if what in ("+", "-") else size, name) for what, size, name in trace.events]
    segments: list[Segment] = []
    for stack, members in _group_layers(trace.stacks, _split_at_layers(rounded, layers)):
        if stack is not None:
            segments += _repeat_layers(stack, members, is_boundary)
        else:
            times = _times(trace.stacks, members)
            segments += (segment for member in members for segment in _condense(member.events, times, is_boundary))
    return segments


def _times(stacks: Sequence[LayerStack], outside: Sequence[_Span]) -> dict[tuple[str, int], int]:
    """Return how often a layer's storage of a size counts where it is freed outside the layers.

    A storage that every layer leaves behind counts once a layer. A storage of the repeated layer alone counts once, such as an
    output that a loop's variable holds. The first layer leaves only storages of the former kind.
    """
    freed = {(name, size) for span in outside for what, size, name in span.events if what == "-" and name}
    return {
        (name, size): count
        for stack in stacks
        for name, first, count in stack.repeated_layers()
        for other, size in freed
        if other == name and (first, size) in freed
    }


def _split_at_layers(events: Sequence[Event], layers: Set[str]) -> Iterator[_Span]:
    """Split the shallow model's trace at its layers."""
    backward, layer = False, ""
    inside: list[Event] = []
    for event in events:
        what, _, name = event
        # Within the backward a layer's `in` and `out` are its recomputation.
        starts = name in layers and what == ("back in" if backward else "in")
        ends = name in layers and name == layer and what == ("back out" if backward else "out")
        if starts:
            yield _Span(backward, layer, tuple(inside))
            inside, layer = [], name
        inside.append(event)
        if ends or what in ("backward", "end"):
            yield _Span(backward, layer, tuple(inside))
            inside, layer = [], ""
            backward = backward or what == "backward"


def _group_layers(
    stacks: Sequence[LayerStack], shallow: Iterable[_Span]
) -> Iterator[tuple[LayerStack | None, list[_Span]]]:
    """Group consecutive segments of one stack and direction, and consecutive segments of none."""

    def key(span: _Span) -> tuple[LayerStack, bool] | None:
        stack = next((candidate for candidate in stacks if span.layer.startswith(f"{candidate.name}.")), None)
        return None if stack is None else (stack, span.backward)

    spans: list[_Span] = []
    for span in shallow:
        if len(spans) > 1 and key(spans[-1]) is None and key(span) == key(spans[-2]) is not None:
            # Events between two layers belong to the first.
            between = spans.pop()
            spans[-1] = replace(spans[-1], events=spans[-1].events + between.events)
        spans.append(span)
    for group, members in itertools.groupby(spans, key):
        yield (group or (None,))[0], list(members)


def _repeat_layers(
    stack: LayerStack, members: Sequence[_Span], is_boundary: Callable[[str, str], bool]
) -> Iterator[Segment]:
    """Repeat the kept layers so that each layer of the whole stack has one."""
    segments = {}
    for span in members:
        times = _late_times(stack, span) if span.backward else {}
        segments[_place(span.layer)] = list(_condense(span.events, times, is_boundary))
    order = range(len(stack.kinds))
    for index in reversed(order) if members[0].backward else order:
        source = stack.source(index)
        old, new = f"{stack.name}.{source}", f"{stack.name}.{index}"
        for segment in segments[source]:
            inside = segment.name == old or segment.name.startswith(f"{old}.")
            yield segment._replace(name=new + segment.name[len(old) :]) if inside else segment


def _late_times(stack: LayerStack, span: _Span) -> dict[tuple[str, int], int]:
    """Return how often a later layer's storage counts that an earlier layer's backward frees.

    As where the graph ends with the first layer's backward and frees what nodes keep as attributes (bitsandbytes' 8 bits).
    """
    counts = {name: count for name, _, count in stack.repeated_layers() if _place(name) > _place(span.layer)}
    return {(name, size): counts[name] for what, size, name in span.events if what == "-" and name in counts}


def _place(layer: str) -> int:
    return int(layer.rpartition(".")[2])


def _condense(
    events: Sequence[Event], times: Mapping[tuple[str, int], int], is_boundary: Callable[[str, str], bool]
) -> Iterator[Segment]:
    """Merge segments between boundaries; `times`: how often a layer's freed storage counts."""
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
        elif what in WHOLE or is_boundary(what, name):
            yield Segment(rise, net, logits_rise, logits, what, size, name, tuple(flops), tuple(skipped), moved, calls)
            rise = net = moved = calls = logits_rise = logits = 0
            flops, skipped = [], []
    yield Segment(rise, net, logits_rise, logits, "", 0, "", tuple(flops), tuple(skipped), moved, calls)
