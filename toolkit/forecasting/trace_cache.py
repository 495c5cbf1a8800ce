"""Traces from the cache on disk, read in a millisecond without torch and transformers, or made here or in a child process."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit.core import background
from toolkit.core.cache import cache_file, keep, recall
from toolkit.core.errors import ModelError, StrategyError, value_or
from toolkit.engines.traces import LayerStack, Trace, TraceConfig
from toolkit.forecasting.lengths import TRACED_LENGTHS, interpolated
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
        others: configurations to trace and cache, too, if this one is not cached; in the background where there is one.

    Raises:
        ModelError: for a model that cannot be traced.

    A batch of one takes other code paths than a larger one (contiguity, broadcasting), so it has a trace of its own.
    """
    if batch > EXACT:
        two, three = _trace_with_cache(spec, config, batches_to_trace(batch), seq_len, others)
        trace = two.scaled(three, batch - EXACT + 1)
        if trace is not None:
            return trace
    return _trace_with_cache(spec, config, (batch,), seq_len, others)[0]


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
        if _needs_child(config) and any(recall_trace(spec, config, batch, seq_len) is None for batch in needed)
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
    spec: ModelSpec, config: TraceConfig, batches: Sequence[int], seq_len: int, others: Sequence[TraceConfig]
) -> list[Trace]:
    """Return the configuration's trace of each batch. Missing ones are traced together."""

    def stored_traces() -> dict[int, Trace]:
        traces = {batch: recall_trace(spec, config, batch, seq_len) for batch in batches}
        return {batch: trace for batch, trace in traces.items() if trace is not None}

    stored = background.wait_for(_topic(spec, config), stored_traces, lambda traces: len(traces) == len(set(batches)))
    missing = [batch for batch in batches if batch not in stored]
    if missing:
        configs = (config, *others)
        if background.enabled():
            _add_background_work(spec, configs, batches, seq_len)
            configs = (config,)
        if config.ranks > 1:  # starting a child costs more than tracing the other batches of a plan, too
            missing = sorted({*missing, *range(1, EXACT + 1)})
        traced = _trace_batches(spec, configs, missing, seq_len)
        _keep_traces(spec, configs, missing, seq_len, traced)
        stored |= dict(zip(missing, traced[0], strict=True))
    return [stored[batch] for batch in batches]


def recall_trace(spec: ModelSpec, config: TraceConfig, batch: int, seq_len: int) -> Trace | None:
    """Return a trace from the cache, or what the cached traces of other lengths give for it."""
    exact = _read_cached(_cache_path(spec, config, batch, seq_len))
    if exact is not None:
        return exact
    return interpolated(lambda length: _read_cached(_cache_path(spec, config, batch, length)), seq_len)


def _add_background_work(spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int) -> None:
    """Let the background trace other lengths and batches, in the order in which the next question is likely."""
    longest = spec.max_positions or TRACED_LENGTHS[-1]
    lengths = [length for length in TRACED_LENGTHS if length <= longest and length != seq_len]
    lengths = [seq_len, *sorted(lengths, key=lambda length: abs(math.log(length / seq_len)))]
    others = [batch for batch in range(1, EXACT + 1) if batch not in batches]
    wishes = [
        *itertools.product(configs[:1], others, lengths[:1]),
        *itertools.product(configs[1:], (*batches, *others), lengths[:1]),
        *((config, batch, length) for length in lengths[1:] for config in configs for batch in batches),
        *((config, batch, length) for length in lengths[1:] for config in configs for batch in others),
    ]
    topics = {config: _topic(spec, config) for config in configs}
    for config, batch, length in wishes:
        background.add(topics[config], [partial(_trace_and_keep, spec, config, batch, length)])


def _topic(spec: ModelSpec, config: TraceConfig) -> str:
    return str(_cache_path(spec, config, 0, 0))


def _trace_and_keep(spec: ModelSpec, config: TraceConfig, batch: int, seq_len: int) -> None:
    """Trace in this process, which sees no GPU, unless the cache has it. What cannot be traced is left out."""
    if _read_cached(_cache_path(spec, config, batch, seq_len)) is not None:
        return
    from toolkit.forecasting.tracing import trace_all

    _keep_traces(spec, [config], [batch], seq_len, trace_all(spec, [config], [batch], seq_len, strict=False))


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
    plan = dict(spec.tp_plan) if config.tp > 1 else {}
    made_from = [spec.architecture, spec.config, plan, fields, batch, seq_len, versions]
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
    return config.ranks > 1 or any(name not in sys.modules and find_spec(name) for name in _libraries(config))


_idle: list[subprocess.Popen[bytes]] = []
"""Children that have answered: the next request needs no import. They end with this process, or a minute after an answer."""

os.register_at_fork(after_in_child=_idle.clear)


def _trace_in_child(
    spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int, *, strict: bool = True
) -> list[list[Trace]]:
    """Trace in a child process, which sees no GPU; `strict`: as in `trace_all`."""
    request = spec, configs, batches, seq_len, strict
    # An idle child may end while it is asked.
    line = _answer(_idle_child(), request) or _answer(_start_child(), request)
    answer = json.loads(line or '{"kind": "", "message": "the tracing process was ended"}')
    if isinstance(answer, dict):
        raise (StrategyError if answer["kind"] == StrategyError.__name__ else RuntimeError)(answer["message"])
    return [[_decode_trace(values) for values in traces] for traces in answer]


def _answer(child: subprocess.Popen[bytes] | None, request: Any) -> bytes:
    """Return a child's line of JSON; nothing without a child, or from one that has ended."""
    line = b""
    if child is not None and child.stdin is not None and child.stdout is not None:
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(request, child.stdin)
            child.stdin.flush()
            line = child.stdout.readline()
    if child is not None and line:
        _idle.append(child)
    elif child is not None:
        with contextlib.suppress(BrokenPipeError), child:  # closes its pipes
            pass
    return line


def _idle_child() -> subprocess.Popen[bytes] | None:
    """Return a child that waits for a request, if one does."""
    with contextlib.suppress(IndexError):
        while (child := _idle.pop()).poll() is not None:
            child.communicate()  # closes its pipes
        return child
    return None


@atexit.register
def _end_children() -> None:
    for child in _idle:
        child.kill()
        child.communicate()


def _start_child() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "toolkit.forecasting.tracing"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environ)


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
