"""A rank's bytes through one step, by part and phase: the traced activations, and how the engine moves the rest."""

from __future__ import annotations

import importlib
from typing import Any

from toolkit.engines.job import Job
from toolkit.errors import StrategyError
from toolkit.forecasting.ledger import Ledger
from toolkit.forecasting.traces import trace_of
from toolkit.forecasting.ways import way_of

REPLAYED = ("ddp", "deepspeed", "fsdp")
"""Engines whose movements are written down in `replays/`."""


def replay(job: Job, *, masked: bool) -> Ledger:
    """What the fullest rank holds, from its start to the saved result.

    Args:
        job: with a spec.
        masked: whether attention gets a mask: rows that hold several documents, or padding.

    Raises:
        StrategyError: for an engine or an adapter whose bytes cannot be forecast yet.
    """
    strategy = job.strategy
    assert job.spec is not None, "a forecast needs a model"
    if strategy.engine not in REPLAYED:
        raise StrategyError(f"sharding {strategy.sharding!r} cannot be forecast yet.")
    if strategy.adapter != "none":
        raise StrategyError(f"adapter {strategy.adapter!r} cannot be forecast yet.")
    way = way_of(job, masked=masked)
    trace = trace_of(job.spec, way, batch=job.loop.micro_batch, seq_len=job.loop.seq_len)
    ledger = Ledger()
    engine: Any = importlib.import_module(f"toolkit.forecasting.replays.{strategy.engine}")
    engine.replay(job, trace, ledger)
    return ledger
