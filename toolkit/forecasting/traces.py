"""Traces on disk: a cached trace is read in a millisecond, without torch and transformers."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.core.cache import cache_file, keep
from toolkit.core.errors import ModelError, StrategyError
from toolkit.engines.traces import LayerStack, Trace, TraceConfig
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
        two, three = _trace_with_cache(spec, configs, (EXACT - 1, EXACT), seq_len)
        trace = two.scaled(three, batch - EXACT + 1)
        if trace is not None:
            return trace
    return _trace_with_cache(spec, configs, (batch,), seq_len)[0]


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
        for config, traces in zip(configs, traced, strict=True):
            for batch, trace in zip(missing, traces, strict=False):  # none where it could not be traced
                text = json.dumps(dataclasses.asdict(trace), separators=(",", ":"))
                keep(_cache_path(spec, config, batch, seq_len), text)
        stored |= dict(zip(missing, traced[0], strict=True))
    return [stored[batch] for batch in batches]


def _cache_path(spec: ModelSpec, config: TraceConfig, batch: int, seq_len: int) -> Path:
    adapting = [metadata.version(name) for name in ("peft", "bitsandbytes")] if config.adapter else []
    made_from = [spec.architecture, spec.config, dataclasses.asdict(config), batch, seq_len, adapting]
    return cache_file("traces", json.dumps(made_from, sort_keys=True, default=str).encode())


def _read_cached(path: Path) -> Trace | None:
    try:
        return _read_file(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=64)
def _read_file(path: Path) -> Trace:
    return _decode_trace(json.loads(path.read_bytes()))


def _trace_batches(
    spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int
) -> list[list[Trace]]:
    """Trace each batch under each configuration."""
    try:
        if any(config.tp > 1 for config in configs) or (configs[0].adapter is not None and "peft" not in sys.modules):
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


def _trace_in_child(
    spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int
) -> list[list[Trace]]:
    """Trace in a child process: peft's bitsandbytes opens the GPU, and tensor parallelism needs a process group."""
    request = pickle.dumps((spec, configs, batches, seq_len))
    command = [sys.executable, "-P", "-m", "toolkit.forecasting.tracing"]
    process = subprocess.run(command, input=request, capture_output=True, check=False)
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
