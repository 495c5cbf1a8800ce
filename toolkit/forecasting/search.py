"""A plan's search: candidates with their forecast or the reason for a rejection, and changed requests that fit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from toolkit.config.flags import spell
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import SHARDINGS, Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import JsonRecord, progress_bar
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import ceil_div, format_bytes, format_step_seconds
from toolkit.devices.machine import Hardware
from toolkit.engines.job import Job
from toolkit.engines.resolution import resolve
from toolkit.engines.traces import TraceConfig
from toolkit.forecasting.memory import trace_configs
from toolkit.forecasting.memory_advice import changed, training_changes
from toolkit.forecasting.prediction import forecast_job, permanent_bytes
from toolkit.forecasting.result import MARGIN, Forecast
from toolkit.forecasting.trace_cache import trace_ahead
from toolkit.models import ModelSpec
from toolkit.transforms.adapters import check_quantized, require_adapter


@dataclass(frozen=True, kw_only=True)
class Candidate(JsonRecord):
    """A strategy with its batch and its forecast, or the reason for its rejection."""

    json_fields = "change global_batch=forecast.job.global_batch strategy train_config forecast hours cost checkpoint_share reason"

    strategy: Strategy
    train_config: TrainConfig
    forecast: Forecast | None
    reason: str = ""
    """Why it is rejected, in a sentence; else empty."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the plan's request that it changes, and their new values; `hardware`: the machine's name."""
    tokens: float | None = None
    """Tokens of the whole training, for hours."""
    price: float | None = None
    """Of a device for an hour, for costs."""

    @property
    def flags(self) -> str:
        """The change as flags."""
        return shlex.join(spell(self.change))

    @property
    def speed(self) -> float:
        """Tokens a second; 0 without a known speed."""
        return (self.forecast.tokens_per_second if self.forecast else None) or 0.0

    @property
    def checkpoint_share(self) -> float:
        """The share of the time in which steps wait for checkpoints."""
        if self.forecast is None:
            return 0.0
        return self.forecast.checkpoint_stall_seconds / RunConfig().save_seconds

    @property
    def hours(self) -> float | None:
        """Hours of a training on `tokens`, with its checkpoints; None without tokens or a known speed."""
        return self.tokens / self.speed / 3600 * (1 + self.checkpoint_share) if self.tokens and self.speed else None

    @property
    def cost(self) -> float | None:
        """The price of these hours on all devices; None where either is not known."""
        return self.hours * self.price * self.forecast.ranks if self.forecast and self.hours and self.price else None

    @property
    def kind(self) -> str:
        """The kind of a rejection, in a sentence without figures of this candidate: of a refused request the first one."""
        forecast = self.forecast
        if forecast is None:
            return self.reason.split(". ")[0]
        limit, host = format_bytes(forecast.limit_bytes), format_bytes(forecast.hardware.host_free_bytes)
        lacks = [f"a rank has {limit} and needs more"] if forecast.device_lacks else []
        lacks += [f"a node's host has {host} and its ranks need more"] if forecast.host_lacks else []
        text = ", and ".join(lacks) or f"less than {MARGIN:.0%} of the {limit} of a rank are left"
        return text[0].upper() + text[1:]

    @property
    def shortfall(self) -> tuple[float, float]:
        """The needs of a rank and of a node's host, each as a share of its limit, the larger first; infinite without a forecast."""
        shares = [share for share, _ in self._needs] or [math.inf]
        return shares[0], shares[-1]

    @property
    def least_need(self) -> str:
        """The need that is the largest share of its limit, as text."""
        return self._needs[0][1]

    @property
    def _needs(self) -> list[tuple[float, str]]:
        """The need of a rank, and of a node's host where it lacks memory: share of the limit and text, the largest first."""
        forecast = self.forecast
        if forecast is None:
            return []
        needs = [(forecast.needed_bytes, forecast.limit_bytes, "")]
        if forecast.host_lacks:
            needs.append((forecast.host_bytes, forecast.hardware.host_free_bytes, " of host memory"))
        return sorted(
            ((need / max(1, limit), format_bytes(need) + where) for need, limit, where in needs), reverse=True
        )

    @property
    def cells(self) -> dict[str, str]:
        """Column of a table → text."""
        strategy, train_config, forecast = self.strategy, self.train_config, self.forecast
        seconds = forecast.step_seconds if forecast else None
        return {
            "change": self.flags,
            "sharding": strategy.sharding,
            "offload": strategy.offload,
            "recompute": strategy.activation_checkpointing,
            "batch": f"{train_config.micro_batch} x {train_config.accumulation}",
            "tokens/s": f"{self.speed:,.0f}" if self.speed else "–",
            "step": format_step_seconds(seconds) if seconds else "–",
            "hours": f"{self.hours:,.1f}" if self.hours else "–",
            "cost": f"{self.cost:,.{0 if self.cost >= 1000 else 2}f}" if self.cost else "–",
            "saving": f"{self.checkpoint_share:.1%}",
            "need": format_bytes(forecast.needed_bytes) if forecast else "–",
            "why": f"needs {self.least_need}" if forecast else self.reason,
        }


OFFLOADED = 0.75
"""The share of its forecast speed by which an offloaded candidate is ranked.

A policy: time is forecast within a quarter, and the forecasts of published runs with an offload were 0.87 to 1.39 times as fast
as they ran (published.md). So a strategy that fits without one comes first unless the offload is faster by more than that quarter.
"""


def rank_key(candidate: Candidate) -> tuple[float, tuple[float, float]]:
    """Return the sort key of candidates that fit: by speed, `OFFLOADED` with an offload, then by memory."""
    offloaded = candidate.strategy.offload != "none"
    return -candidate.speed * (OFFLOADED if offloaded else 1), candidate.shortfall


def rejection(forecast: Forecast) -> str:
    """Return why a plan rejects a forecast, in a sentence; else an empty string."""
    if not forecast.fits:
        return forecast.reason
    if not forecast.leaves(MARGIN):
        need, limit = format_bytes(forecast.needed_bytes), format_bytes(forecast.limit_bytes)
        return f"It needs {need} of {limit}: less than {MARGIN:.0%} are left."
    return ""


ALTERNATIVE_FIELDS = ("adapter", "precision", "seq_len", "hardware")
"""The fields that an alternative changes, in this order."""

MOST_DEVICES, DEVICES_OF_A_NODE = 512, 8
"""Devices of the largest suggested machine, and of each of its nodes."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The request of a plan: a model, a machine, a global batch, and the fixed fields."""

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
        """Return those that fit, ordered by `rank_key`, and the rejected ones."""
        ranked: list[Candidate] = []
        rejected: list[Candidate] = []
        smallest, *larger = _micro_batches(self.train_config, self.global_batch // self.data_ranks)
        open_strategies = [*self._strategies()]
        for train_configs in ([smallest], larger):
            requests = [*itertools.product(open_strategies, train_configs)]
            with progress_bar("forecasting", len(requests), "") as bar:
                self._trace_ahead(open_strategies, train_configs)
                for strategy, train_config in requests:
                    if strategy in open_strategies:
                        candidate = self._candidate(strategy, train_config)
                        (rejected if candidate.reason else ranked).append(candidate)
                        if candidate.forecast is not None and candidate.reason:
                            open_strategies.remove(strategy)  # a larger micro-batch needs more
                    bar.update()
        return sorted(ranked, key=rank_key), rejected

    def fastest_smallest(self) -> Candidate | None:
        """Return the fastest candidate that fits with the smallest micro-batch and activation checkpointing, if there is one."""
        train_config = next(_micro_batches(self.train_config, self.global_batch // self.data_ranks))
        strategies = [*self._strategies(("full",) if self.spec.checkpointed else ("none",))]
        self._trace_ahead(strategies, [train_config], quick=True)
        candidates = [self._candidate(strategy, train_config, quick=True) for strategy in strategies]
        return min((one for one in candidates if not one.reason), key=rank_key, default=None)

    def _strategies(self, checkpointings: tuple[str, ...] = ("none", "full")) -> Iterator[Strategy]:
        """Yield every sharding, offload and activation checkpointing that the request leaves open.

        A single rank shards nothing, so there a sharding is a candidate for its offload alone.
        """
        alone = self.data_ranks == 1
        for word, sharding in SHARDINGS.items():
            replicates = sharding.data_parallel in ("replicate", "hybrid")
            if replicates if alone else sharding.data_parallel == "none":
                continue
            for offload, checkpointing in itertools.product(sharding.offload, checkpointings):
                if alone and offload == "none" and sharding.data_parallel != "none":
                    continue
                with contextlib.suppress(StrategyError):  # no engine runs this combination
                    yield dataclasses.replace(
                        self.strategy,
                        sharding=word,
                        offload=offload,
                        activation_checkpointing=checkpointing,
                        dp_replicate=self.machine.nodes if sharding.hybrid else 1,
                    )

    def _trace_ahead(
        self, strategies: Sequence[Strategy], train_configs: Sequence[TrainConfig], quick: bool = False
    ) -> None:
        """Trace together what the candidates need; `quick` as in `_candidate`."""
        configs: list[TraceConfig] = []
        for strategy, train_config in itertools.product(strategies, train_configs):
            with contextlib.suppress(ToolkitError):
                job = resolve(strategy, train_config, self.spec, self.machine.ranks, self.machine.device)
                require_adapter(job.strategy)
                if not (quick and _too_large(job)):
                    configs += trace_configs(job, masked=not self.one_document)
        batches = [train_config.micro_batch for train_config in train_configs]
        trace_ahead(self.spec, configs, batches=batches, seq_len=self.train_config.seq_len)

    def _candidate(self, strategy: Strategy, train_config: TrainConfig, quick: bool = False) -> Candidate:
        """Forecast one candidate. `quick`: skip the trace if parameters and optimizer alone do not fit."""
        candidate = partial(Candidate, tokens=self.tokens, price=self.price)
        try:
            job = resolve(strategy, train_config, self.spec, self.machine.ranks, self.machine.device)
            if quick and _too_large(job):
                raise StrategyError("The parameters and the optimizer's states alone are too large.")
            made = forecast_job(job, self.machine, one_document=self.one_document)
        except ToolkitError as error:
            return candidate(strategy=strategy, train_config=train_config, forecast=None, reason=str(error))
        return candidate(strategy=made.strategy, train_config=made.train_config, forecast=made, reason=rejection(made))


def _too_large(job: Job) -> bool:
    """Return whether what stays on a GPU after the first step alone is too large for it."""
    return job.device.kind == "cuda" and permanent_bytes(job) > job.device.free_bytes


def _micro_batches(train_config: TrainConfig, share: int) -> Iterator[TrainConfig]:
    """Yield micro-batches that divide a rank's share, the smallest first."""
    for micro in (size for size in range(1, share + 1) if share % size == 0):
        yield dataclasses.replace(train_config, micro_batch=micro, accumulation=share // micro)


def find_alternatives(
    search: Search, fields: Collection[str] = ALTERNATIVE_FIELDS, *, machines: bool = False
) -> Iterator[Candidate]:
    """Yield the fastest candidate that fits for each value of these fields; for seq_len and hardware the first value that fits.

    Where no value of one field fits, an adapter is changed together with a shorter sequence or more devices.

    Args:
        search: the request.
        fields: to change.
        machines: search every number of devices up to a node, with every micro-batch.
    """
    finished: set[str] = set()
    fits = False
    for name, change, request in _requests(search):
        if name not in fields or name in finished:
            continue
        whole = machines and name == "hardware"
        candidate = next(iter(request.run()[0]), None) if whole else request.fastest_smallest()
        if candidate is not None:
            fits = True
            yield dataclasses.replace(candidate, change=change)
            if name == "seq_len" or (name == "hardware" and not (whole and request.machine.ranks < DEVICES_OF_A_NODE)):
                finished.add(name)
    if not fits and {"adapter", "hardware"} <= set(fields):
        adapters = [(change, request) for name, change, request in _requests(search) if name == "adapter"]
        together = [*_together(adapters, "hardware")] or _together(adapters[-1:], "seq_len")
        yield from together


def _together(adapters: Sequence[tuple[dict[str, Any], Search]], field: str) -> Iterator[Candidate]:
    """Yield what fits with one of these adapters and another value of the field."""
    for change, request in adapters:
        for candidate in find_alternatives(request, (field,)):
            yield dataclasses.replace(candidate, change={**change, **candidate.change})


def _requests(search: Search) -> Iterator[tuple[str, dict[str, Any], Search]]:
    """Yield the changed field, the whole change, and the search with it, for changes that engine and model support."""
    machine, on_cpu = search.machine, search.machine.device.kind == "cpu"
    possible = list(training_changes(search.strategy, search.train_config, on_cpu=on_cpu))
    for name in ALTERNATIVE_FIELDS:
        for change in (change for change in possible if name in change):
            with contextlib.suppress(ToolkitError):
                strategy, train_config = changed(search.strategy, search.train_config, change)
                if strategy.quantized:
                    check_quantized(search.spec, strategy.adapter, allow_unquantized=False)
                yield name, change, dataclasses.replace(search, strategy=strategy, train_config=train_config)
    while machine.device.key is not None and 2 * machine.ranks <= MOST_DEVICES:
        machine = _twice(machine)
        request = dataclasses.replace(search, machine=machine)
        batch = ceil_div(search.global_batch, request.data_ranks) * request.data_ranks
        change = {"hardware": machine.label} | ({"global_batch": batch} if batch != search.global_batch else {})
        yield "hardware", change, dataclasses.replace(request, global_batch=batch)


def _twice(machine: Hardware) -> Hardware:
    """Return a machine with twice the devices and host memory a node; from eight devices on, with twice the nodes."""
    if machine.count >= DEVICES_OF_A_NODE:
        return dataclasses.replace(machine, nodes=2 * machine.nodes)
    return dataclasses.replace(
        machine,
        count=2 * machine.count,
        host_bytes=2 * machine.host_bytes,
        host_free_bytes=2 * machine.host_free_bytes,
    )
