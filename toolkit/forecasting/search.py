"""A plan's search: every strategy and micro-batch that a request leaves open, and changed requests that fit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.config.strategy import SHARDINGS, Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import ceil_div
from toolkit.devices.machine import Hardware
from toolkit.engines.adapters import check_quantized
from toolkit.engines.job import resolve
from toolkit.forecasting.candidates import Candidate, rank_key, rejection
from toolkit.forecasting.memory_advice import changed, training_changes
from toolkit.forecasting.prediction import forecast_job, permanent_bytes
from toolkit.models import ModelSpec

FIELDS = ("adapter", "precision", "seq_len", "hardware")
"""The fields that an alternative changes, in this order."""

MOST_DEVICES, DEVICES_OF_A_NODE = 512, 8
"""Devices of the largest machine that is suggested, and of the nodes that it is made of."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A question for a plan: a model, a machine, a global batch, and the fields that stay as they are."""

    spec: ModelSpec
    strategy: Strategy
    train_config: TrainConfig
    machine: Hardware
    global_batch: int
    one_document: bool = False
    tokens: float | None = None
    """Of the whole training, as in `Candidate`."""
    price: float | None = None

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
        return sorted(ranked, key=rank_key), rejected

    def fastest_smallest(self) -> Candidate | None:
        """Return the fastest that fits of those with the smallest micro-batch and activation checkpointing, if one does."""
        train_config = next(_micro_batches(self.train_config, self.global_batch // self.data_ranks))
        ranked = []
        for strategy in self._strategies(("full",) if self.spec.checkpointed else ("none",)):
            candidate = self._candidate(strategy, train_config, quick=True)
            if not candidate.reason:
                ranked.append(candidate)
        return min(ranked, key=rank_key, default=None)

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
                reason = rejection(forecast)
        except ToolkitError as error:
            reason = str(error)
        return Candidate(
            strategy=forecast.strategy if forecast else strategy,
            train_config=forecast.train_config if forecast else train_config,
            forecast=forecast,
            reason=reason,
            tokens=self.tokens,
            price=self.price,
        )


def _micro_batches(train_config: TrainConfig, share: int) -> Iterator[TrainConfig]:
    """Yield micro-batches that divide a rank's share, the smallest first."""
    for micro in (size for size in range(1, share + 1) if share % size == 0):
        yield dataclasses.replace(train_config, micro_batch=micro, accumulation=share // micro)


def find_alternatives(search: Search, fields: Collection[str] = FIELDS) -> Iterator[Candidate]:
    """Yield, for each value of these fields, the fastest candidate that fits. Sequences and machines: the first that does."""
    finished: set[str] = set()
    for field, change, request in _requests(search):
        candidate = request.fastest_smallest() if field in fields and field not in finished else None
        if candidate is not None:
            yield dataclasses.replace(candidate, change=change)
            if field in ("seq_len", "hardware"):
                finished.add(field)


def _requests(search: Search) -> Iterator[tuple[str, dict[str, Any], Search]]:
    """Yield the changed field, the whole change, and the search with it; not what no engine or model can do."""
    machine, on_cpu = search.machine, search.machine.device.kind == "cpu"
    possible = list(training_changes(search.strategy, search.train_config, on_cpu=on_cpu))
    for field in FIELDS:
        for change in (change for change in possible if field in change):
            with contextlib.suppress(ToolkitError):
                strategy, train_config = changed(search.strategy, search.train_config, change)
                if strategy.quantized:
                    check_quantized(search.spec, strategy.adapter, allow_unquantized=False)
                yield field, change, dataclasses.replace(search, strategy=strategy, train_config=train_config)
    while machine.device.key is not None and 2 * machine.ranks <= MOST_DEVICES:
        machine = _twice(machine)
        request = dataclasses.replace(search, machine=machine)
        batch = ceil_div(search.global_batch, request.data_ranks) * request.data_ranks
        change = {"hardware": machine.label} | ({"global_batch": batch} if batch != search.global_batch else {})
        yield "hardware", change, dataclasses.replace(request, global_batch=batch)


def _twice(machine: Hardware) -> Hardware:
    """Return a machine with twice the devices: in a node up to eight, with as much more host memory; then twice the nodes."""
    if machine.count >= DEVICES_OF_A_NODE:
        return dataclasses.replace(machine, nodes=2 * machine.nodes)
    return dataclasses.replace(
        machine,
        count=2 * machine.count,
        host_bytes=2 * machine.host_bytes,
        host_free_bytes=2 * machine.host_free_bytes,
    )
