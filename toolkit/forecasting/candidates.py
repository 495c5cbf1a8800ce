"""A plan's candidates: every strategy and micro-batch that a machine and a global batch allow, each with its forecast."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.config.strategy import SHARDINGS, Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import format_bytes
from toolkit.devices.machine import Hardware
from toolkit.engines.job import resolve
from toolkit.forecasting.prediction import forecast_job, permanent_bytes
from toolkit.forecasting.result import Forecast
from toolkit.models import ModelSpec

MARGIN = 0.95
"""The largest share of a rank's memory for a plan: fragmentation and unknowns take the rest."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its batch and its forecast, or the reason for its rejection."""

    strategy: Strategy
    train_config: TrainConfig
    forecast: Forecast | None
    reason: str
    """Why it is rejected, in a sentence; empty where it is not."""

    @property
    def reason_group(self) -> str:
        """The reason without the figures of this candidate: those with an equal one are rejected together."""
        forecast = self.forecast
        if forecast is None:
            return re.sub(r"\b(accumulation|got|than|micro_batch) \d+", r"\1 n", self.reason)
        if forecast.peak_bytes > forecast.limit_bytes:
            return f"A rank has {format_bytes(forecast.limit_bytes)} and needs more."
        if forecast.host_lacks:
            return f"A node's host has {format_bytes(forecast.hardware.host_free_bytes)} and its ranks need more."
        return f"Less than 5% of the {format_bytes(forecast.limit_bytes)} of a rank are left."

    @property
    def need(self) -> int:
        """The bytes that decide: of the host where that is the reason, else of a rank; 0 without a forecast."""
        forecast = self.forecast
        if forecast is None:
            return 0
        host_decides = forecast.host_lacks and forecast.peak_bytes <= forecast.limit_bytes
        return forecast.host_bytes if host_decides else forecast.peak_bytes

    @property
    def shortfall(self) -> float:
        """The largest need of what there is, on a rank and on a node's host; infinite without a forecast."""
        forecast = self.forecast
        if forecast is None:
            return math.inf
        device = forecast.peak_bytes / max(1, forecast.limit_bytes)
        host = forecast.host_bytes / max(1, forecast.hardware.host_free_bytes)
        return max(device, host) if forecast.host_lacks else device

    @property
    def cells(self) -> tuple[str, ...]:
        """Sharding, offload, activation checkpointing and batch, for a table."""
        strategy, train_config = self.strategy, self.train_config
        batch = f"{train_config.micro_batch} x {train_config.accumulation}"
        return strategy.sharding, strategy.offload, strategy.activation_checkpointing, batch


@dataclass(frozen=True, kw_only=True)
class Search:
    """A question for a plan: a model, a machine, a global batch, and the fields that stay as they are."""

    spec: ModelSpec
    strategy: Strategy
    train_config: TrainConfig
    machine: Hardware
    global_batch: int
    one_document: bool = False

    @property
    def data_ranks(self) -> int:
        """The ranks that read different rows."""
        return max(1, self.machine.ranks // (self.strategy.tp * self.strategy.cp * self.strategy.pp))

    def run(self) -> tuple[list[Candidate], list[Candidate]]:
        """Return those that fit, ranked by tokens/s and then by memory, and the rejected ones."""
        ranked: list[Candidate] = []
        rejected: list[Candidate] = []
        share = self.global_batch // self.data_ranks
        for strategy in self._strategies():
            for train_config in _micro_batches(self.train_config, share):
                candidate = self._candidate(strategy, train_config)
                (rejected if candidate.reason else ranked).append(candidate)
                if candidate.forecast is not None and candidate.reason:
                    break  # a larger micro-batch takes more still
        return sorted(ranked, key=_rank_key), rejected

    def fastest_smallest(self) -> Candidate | None:
        """Return the fastest that fits of those with the smallest micro-batch and activation checkpointing, if one does."""
        train_config = next(_micro_batches(self.train_config, self.global_batch // self.data_ranks))
        ranked = []
        for strategy in self._strategies(("full",) if self.spec.checkpointed else ("none",)):
            candidate = self._candidate(strategy, train_config, quick=True)
            if not candidate.reason:
                ranked.append(candidate)
        return min(ranked, key=_rank_key, default=None)

    def _strategies(self, checkpointings: tuple[str, ...] = ("none", "full")) -> Iterator[Strategy]:
        """Yield every sharding, offload and activation checkpointing that the request leaves open.

        A single rank shards nothing, so there a sharding is a candidate for its offload alone.
        """
        alone = self.data_ranks == 1
        for word, sharding in SHARDINGS.items():
            replicates = sharding.data_parallel in ("replicate", "hybrid")
            if replicates if alone else sharding.data_parallel == "none":
                continue
            for offload in sharding.offload:
                if alone and offload == "none" and sharding.data_parallel != "none":
                    continue
                for checkpointing in checkpointings:
                    try:
                        yield dataclasses.replace(
                            self.strategy,
                            sharding=word,
                            offload=offload,
                            activation_checkpointing=checkpointing,
                            dp_replicate=self.machine.nodes if sharding.hybrid else 1,
                        )
                    except StrategyError:
                        continue  # no engine can do it, whatever the model: it is no candidate

    def _candidate(self, strategy: Strategy, train_config: TrainConfig, quick: bool = False) -> Candidate:
        """Forecast one. `quick`: without a trace where what stays on the device is too much already."""
        forecast, machine = None, self.machine
        try:
            job = resolve(strategy, train_config, self.spec, machine.ranks, machine.device)
            if quick and job.device.kind == "cuda" and permanent_bytes(job) > job.device.free_bytes:
                reason = "The parameters and the optimizer's states alone are too large."
            else:
                forecast = forecast_job(job, machine, one_document=self.one_document)
                reason = _rejection(forecast)
        except ToolkitError as error:
            reason = str(error)
        return Candidate(
            strategy=forecast.strategy if forecast else strategy,
            train_config=forecast.train_config if forecast else train_config,
            forecast=forecast,
            reason=reason,
        )


def _rejection(forecast: Forecast) -> str:
    if not forecast.fits:
        return forecast.reason
    if forecast.peak_bytes > MARGIN * forecast.limit_bytes:
        need, limit = format_bytes(forecast.peak_bytes), format_bytes(forecast.limit_bytes)
        return f"It needs {need} of {limit}: less than 5% are left."
    return ""


def _micro_batches(train_config: TrainConfig, share: int) -> Iterator[TrainConfig]:
    """Yield micro-batches that divide a rank's share, the smallest first."""
    for micro in (size for size in range(1, share + 1) if share % size == 0):
        yield dataclasses.replace(train_config, micro_batch=micro, accumulation=share // micro)


def _rank_key(candidate: Candidate) -> tuple[float, int]:
    assert candidate.forecast is not None
    timing = candidate.forecast.timing
    return (-timing.tokens_per_second if timing else 0.0, candidate.forecast.peak_bytes)
