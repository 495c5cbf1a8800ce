"""Traces: cached on disk, read in a millisecond without torch and transformers, and repeated over the depth of the whole model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit.core.cache import cache_file, keep, recall
from toolkit.core.errors import ModelError, StrategyError, value_or
from toolkit.core.units import round_up
from toolkit.engines.traces import LOGITS, WHOLE, Event, LayerStack, Segment, Trace, TraceConfig
from toolkit.models import ModelSpec
from toolkit.models.files import first_line

EXACT = 3
"""Batches up to this one are traced; larger ones follow from two traces, since sizes are linear in the batch."""


def trace_of(
    spec: ModelSpec, config: TraceConfig, *, batch: int, seq_len: int, others: Sequence[TraceConfig] = ()
) -> Trace:
    """Return one forward and backward of the shallow model, from the cache if possible.

    Args:
        spec: the model.
        config: how it computes.
        batch, seq_len: samples of a micro-batch, tokens of a sample.
        others: configurations to trace and cache, too, if this one is not cached.

    Raises:
        ModelError: for a model that cannot be traced.

    A batch of one takes other code paths than a larger one (contiguity, broadcasting), so it has a trace of its own.
    """
    configs = (config, *others)
    if batch > EXACT:
        two, three = _trace_with_cache(spec, configs, batches_to_trace(batch), seq_len)
        trace = two.scaled(three, batch - EXACT + 1)
        if trace is not None:
            return trace
    return _trace_with_cache(spec, configs, (batch,), seq_len)[0]


def batches_to_trace(batch: int) -> tuple[int, ...]:
    """Return the batches with the traces from which that of `batch` follows."""
    return (batch,) if batch <= EXACT else (EXACT - 1, EXACT)


def trace_ahead(spec: ModelSpec, configs: Iterable[TraceConfig], *, batches: Iterable[int], seq_len: int) -> None:
    """Trace and cache the configurations that need a child process, with one child for each core.

    A configuration that cannot be traced is left out: its first use raises the error.
    """
    needed = sorted({number for batch in batches for number in batches_to_trace(batch)})
    missing = [
        config
        for config in dict.fromkeys(configs)
        if _needs_child(config)
        and any(_read_cached(_cache_path(spec, config, batch, seq_len)) is None for batch in needed)
    ]
    if not missing:
        return
    children = min(len(os.sched_getaffinity(0)), len(missing))

    def trace_share(share: Sequence[TraceConfig]) -> None:
        with contextlib.suppress(Exception):
            _keep_traces(spec, share, needed, seq_len, _trace_in_child(spec, share, needed, seq_len, strict=False))

    with ThreadPoolExecutor(children) as pool:
        list(pool.map(trace_share, [missing[number::children] for number in range(children)]))


def _trace_with_cache(
    spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int
) -> list[Trace]:
    """Return the first configuration's trace of each batch. Missing ones are traced together for all configurations."""
    stored = {
        batch: trace
        for batch in batches
        if (trace := _read_cached(_cache_path(spec, configs[0], batch, seq_len))) is not None
    }
    missing = [batch for batch in batches if batch not in stored]
    if missing:
        if configs[0].tp > 1:  # starting a child costs more than tracing the other batches of a plan, too
            missing = sorted({*missing, *range(1, EXACT + 1)})
        traced = _trace_batches(spec, configs, missing, seq_len)
        _keep_traces(spec, configs, missing, seq_len, traced)
        stored |= dict(zip(missing, traced[0], strict=True))
    return [stored[batch] for batch in batches]


def _keep_traces(
    spec: ModelSpec,
    configs: Sequence[TraceConfig],
    batches: Sequence[int],
    seq_len: int,
    traced: Sequence[Sequence[Trace]],
) -> None:
    """Cache each configuration's traces."""
    for config, traces in zip(configs, traced, strict=True):
        for batch, trace in zip(batches, traces, strict=False):  # none where it could not be traced
            keep(_cache_path(spec, config, batch, seq_len), dataclasses.asdict(trace))


def _cache_path(spec: ModelSpec, config: TraceConfig, batch: int, seq_len: int) -> Path:
    versions = [package.version for name in _libraries(config) for package in metadata.distributions(name=name)]
    fields = [getattr(config, field.name) for field in dataclasses.fields(config) if field.compare]
    made_from = [spec.architecture, spec.config, fields, batch, seq_len, versions]
    return cache_file("traces", json.dumps(made_from, sort_keys=True, default=repr).encode())


def _libraries(config: TraceConfig) -> Iterator[str]:
    """Yield the packages of the configuration's transforms."""
    for transform in config.job.transforms if config.job is not None else ():
        yield from transform.libraries


def _read_cached(path: Path) -> Trace | None:
    return value_or(None, _read_file, path)


@lru_cache(maxsize=64)
def _read_file(path: Path) -> Trace:
    if (trace := recall(path, _decode_trace)) is None:
        raise LookupError(path)  # a miss is not cached
    return trace


def _trace_batches(
    spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int
) -> list[list[Trace]]:
    """Trace each batch under each configuration."""
    try:
        if any(map(_needs_child, configs)):
            return _trace_in_child(spec, configs, batches, seq_len)
        from toolkit.forecasting.tracing import trace_all

        return trace_all(spec, configs, batches, seq_len)
    except StrategyError:
        raise
    except Exception as error:  # a model's own code fails in its own way
        raise ModelError(
            f"model {spec.name!r} cannot be traced, so its memory is unknown: {first_line(error).rstrip('.')}. "
            "Train it for three steps: memory.json then has the measured memory."
        ) from error


def _needs_child(config: TraceConfig) -> bool:
    """Return whether a trace runs in a child: peft's bitsandbytes opens the GPU, and tensor parallelism needs a process group."""
    return config.tp > 1 or any(name not in sys.modules and find_spec(name) for name in _libraries(config))


def _trace_in_child(
    spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int, *, strict: bool = True
) -> list[list[Trace]]:
    """Trace in a child process, which sees no GPU; `strict`: as in `trace_all`."""
    request = pickle.dumps((spec, configs, batches, seq_len, strict))
    command = [sys.executable, "-P", "-m", "toolkit.forecasting.tracing"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, input=request, capture_output=True, check=False, env=environ)
    if process.returncode:
        kind, _, message = process.stderr.decode(errors="replace").strip().rpartition("\n")[2].partition(": ")
        raise (StrategyError if kind.endswith(StrategyError.__name__) else RuntimeError)(message or kind)
    return [[_decode_trace(values) for values in traces] for traces in json.loads(process.stdout)]


def _decode_trace(values: Mapping[str, Any]) -> Trace:
    """Decode JSON, which has lists for tuples."""
    stacks = [
        {**stack, "kinds": tuple(stack["kinds"]), "indices": tuple(stack["indices"])} for stack in values["stacks"]
    ]
    embedding, norm, head = values["ends"]
    return Trace(
        stacks=tuple(LayerStack(**stack) for stack in stacks),
        events=tuple((what, size, name) for what, size, name in values["events"]),
        ends=(embedding, norm, head),
    )


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
