"""`plan()` → `Plan`: every strategy that a model, a machine and a global batch allow, the fastest that fits first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.config.flags import differing, spell
from toolkit.config.strategy import SHARDINGS, Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines.adapters import check_quantized
from toolkit.engines.base import engine_of
from toolkit.engines.job import resolve
from toolkit.forecasting.prediction import forecast_job
from toolkit.forecasting.result import Forecast
from toolkit.models import ModelSpec, describe

MARGIN = 0.95
"""The largest share of a rank's memory for a plan: fragmentation and unknowns take the rest."""

UNCERTAIN = 3
"""The number of best candidates whose uncertainties are printed."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its batch and its forecast, or the reason for its rejection."""

    strategy: Strategy
    train_config: TrainConfig
    forecast: Forecast | None
    reason: str
    """Why it is rejected, in a sentence; empty where it is not."""

    @property
    def short_reason(self) -> str:
        """The rank's need, where that is the reason; else the whole reason."""
        forecast = self.forecast
        if forecast is None or forecast.peak_bytes <= forecast.limit_bytes:
            return self.reason
        return f"needs {format_bytes(forecast.peak_bytes)} in {forecast.peak_phase}"


@dataclass(frozen=True, kw_only=True)
class Plan(Result):
    """Candidates for one model, machine and global batch."""

    model: str
    hardware: Hardware
    global_batch: int
    ranked: tuple[Candidate, ...]
    """Those that fit with a margin, by tokens/s, then by memory."""
    rejected: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The first of the ranked.

        Raises:
            StrategyError: where none fits.
        """
        if not self.ranked:
            raise StrategyError(
                f"nothing fits {self.model} on {self.hardware.device.name} x {self.hardware.ranks} with a global batch of "
                f"{self.global_batch}. Take more or larger devices, a shorter --seq-len, or an adapter."
            )
        return self.ranked[0]

    def config(self) -> dict[str, Any]:
        """Return the best candidate's Accelerate config file."""
        strategy = self.best.strategy
        return engine_of(strategy).to_yaml(strategy, self.hardware.ranks, self.hardware.nodes)

    def command(self, model: str, config: str = "accelerate.yaml") -> str:
        """Return the command that launches the best candidate."""
        best = self.best
        left_out = ("sharding", "offload", "dp_replicate")  # the file binds them
        strategy = {name: value for name, value in differing(best.strategy).items() if name not in left_out}
        flags = " ".join(spell({"model": model, **strategy, **differing(best.train_config)}))
        return f"accelerate launch --config_file {config} -m toolkit.finetune {flags}"

    def to_dict(self) -> dict[str, Any]:
        """Return both lists, each candidate with its forecast's JSON."""
        return {
            "model": self.model,
            "hardware": dataclasses.asdict(self.hardware),
            "global_batch": self.global_batch,
            "ranked": [_candidate_dict(candidate) for candidate in self.ranked],
            "rejected": [_candidate_dict(candidate) for candidate in self.rejected],
        }

    def headline(self) -> str:
        """Return the best strategy, or that nothing fits."""
        if not self.ranked:
            return f"Nothing fits a global batch of {self.global_batch} on {self.hardware.ranks} ranks."
        best = self.best
        assert best.forecast is not None, "what is ranked has a forecast"
        sharding, offload, recompute, batch = _cells(best)
        timing = best.forecast.timing
        speed = f" at {timing.tokens_per_second:,.0f} tokens/s" if timing else ""
        peak, limit = format_bytes(best.forecast.peak_bytes), format_bytes(best.forecast.limit_bytes)
        words = f"{sharding}, offload {offload}, recompute {recompute}, batch {batch}"
        return f"Best: {words}{speed}. A rank needs {peak} of {limit}."

    def tables(self) -> list[Table]:
        """Return the ranked candidates, and the rejected ones."""
        rows = []
        for place, candidate in enumerate(self.ranked, start=1):
            assert candidate.forecast is not None, "what is ranked has a forecast"
            timing = candidate.forecast.timing
            speed = f"{timing.tokens_per_second:,.0f}" if timing else "–"
            seconds = format_step_seconds(timing.step_seconds) if timing else "–"
            rows.append((place, *_cells(candidate), speed, seconds, format_bytes(candidate.forecast.peak_bytes)))
        notes = [note for best in self.ranked[:UNCERTAIN] if best.forecast for note in best.forecast.unknown]
        title = f"{self.model} on {self.hardware.ranks} x {self.hardware.device.name}, global batch {self.global_batch}"
        names = ("sharding", "offload", "recompute", "batch")
        notes.append("recompute: activation checkpointing. batch: micro-batch x accumulation. peak: of a rank.")
        columns = ("", *names, "tokens/s", "step", "peak")
        tables = [Table(title=title, columns=columns, rows=rows, notes=tuple(dict.fromkeys(notes)))] if rows else []
        # The smallest batch that a forecast rejects stands for the larger ones.
        rejected = {_cells(candidate)[:3]: candidate for candidate in reversed(self.rejected)}
        reasons = [(*_cells(candidate), candidate.short_reason) for candidate in reversed(rejected.values())]
        return [*tables, Table(title="Rejected", columns=(*names, "why"), rows=reasons)] if reasons else tables


def plan(
    model: ModelSpec | str,
    on: Hardware | str | None = None,
    *,
    global_batch: int,
    seq_len: int | None = None,
    strategy: Strategy | None = None,
    train_config: TrainConfig | None = None,
    one_document: bool = False,
    allow_unquantized: bool = False,
) -> Plan:
    """Rank all candidates, the fastest that fits first. No launch, no device.

    Args:
        model: a spec, or what `describe` takes.
        on: the machine, or its name; by default this one.
        global_batch: samples of a step, over all ranks.
        seq_len: tokens of a sample; by default that of `train_config`.
        strategy: adapter, precision and attention; sharding, offload and activation checkpointing are chosen.
        train_config: the step; micro-batch and accumulation are chosen.
        one_document, allow_unquantized: as in `forecast`.

    Raises:
        StrategyError: for a global batch that the ranks cannot share evenly.
        ModelError: for a model that a run would refuse.
        ToolkitError: for an unknown model or machine.
    """
    spec = model if isinstance(model, ModelSpec) else describe(model)
    machine = on if isinstance(on, Hardware) else hardware(on)
    base, request = strategy or Strategy(), train_config or TrainConfig()
    data = machine.ranks // (base.tp * base.cp * base.pp)
    if not data or global_batch < 1 or global_batch % data:
        data = max(1, data)
        raise StrategyError(
            f"global_batch {global_batch}: expected a multiple of {data}, so that each rank has as many samples. "
            f"Choose {max(1, round(global_batch / data)) * data}."
        )
    if base.quantized:
        check_quantized(spec, allow_unquantized)
    request = dataclasses.replace(request, seq_len=seq_len or request.seq_len)
    ranked: list[Candidate] = []
    rejected: list[Candidate] = []
    for strategy_ in _strategies(base, machine):
        for sized in _micro_batches(request, global_batch // data):
            candidate = _forecast_candidate(spec, strategy_, sized, machine, one_document)
            (rejected if candidate.reason else ranked).append(candidate)
            if candidate.forecast is not None and candidate.reason:
                break  # a larger micro-batch takes more still
    ranked.sort(key=_rank_key)
    return Plan(
        model=spec.name, hardware=machine, global_batch=global_batch, ranked=tuple(ranked), rejected=tuple(rejected)
    )


def _strategies(base: Strategy, machine: Hardware) -> Iterator[Strategy]:
    """Yield every sharding, offload and activation checkpointing that the request leaves open."""
    for word, sharding in SHARDINGS.items():
        if (sharding.data_parallel == "none") != (machine.ranks == base.tp * base.cp * base.pp):
            continue
        for offload in sharding.offload:
            for checkpointing in ("none", "full"):
                try:
                    yield dataclasses.replace(
                        base,
                        sharding=word,
                        offload=offload,
                        activation_checkpointing=checkpointing,
                        dp_replicate=machine.nodes if sharding.hybrid else 1,
                    )
                except StrategyError:
                    continue  # no engine can do it, whatever the model: it is no candidate


def _micro_batches(train_config: TrainConfig, share: int) -> Iterator[TrainConfig]:
    """Yield micro-batches that divide a rank's share, the smallest first."""
    for micro in (size for size in range(1, share + 1) if share % size == 0):
        yield dataclasses.replace(train_config, micro_batch=micro, accumulation=share // micro)


def _forecast_candidate(
    spec: ModelSpec, strategy: Strategy, train_config: TrainConfig, machine: Hardware, one_document: bool
) -> Candidate:
    try:
        job = resolve(strategy, train_config, spec, machine.ranks, machine.device)
        forecast = forecast_job(job, machine, one_document=one_document)
    except ToolkitError as error:
        return Candidate(strategy=strategy, train_config=train_config, forecast=None, reason=str(error))
    reason = "" if forecast.fits else forecast.reason
    if forecast.fits and forecast.peak_bytes > MARGIN * forecast.limit_bytes:
        reason = f"It needs {format_bytes(forecast.peak_bytes)} of {format_bytes(forecast.limit_bytes)}: less than 5% are left."
    return Candidate(strategy=forecast.strategy, train_config=forecast.train_config, forecast=forecast, reason=reason)


def _rank_key(candidate: Candidate) -> tuple[float, int]:
    assert candidate.forecast is not None
    timing = candidate.forecast.timing
    return (-timing.tokens_per_second if timing else 0.0, candidate.forecast.peak_bytes)


def _cells(candidate: Candidate) -> tuple[str, ...]:
    strategy, train_config = candidate.strategy, candidate.train_config
    batch = f"{train_config.micro_batch} x {train_config.accumulation}"
    return strategy.sharding, strategy.offload, strategy.activation_checkpointing, batch


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": dataclasses.asdict(candidate.strategy),
        "train_config": dataclasses.asdict(candidate.train_config),
        "forecast": candidate.forecast.to_dict() if candidate.forecast else None,
        "reason": candidate.reason,
    }
