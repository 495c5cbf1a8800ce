"""`rehearse()`: the code of one rank of any number, alone. Its memory is real, its values mean nothing.

A child takes four steps over torch's fake process group, where what is sent goes nowhere. Weights are zeros in a file without
content, of which only what the rank reads comes into memory: one rank of a model of any size can be rehearsed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import differing, from_dict
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig, pipeline_rows
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines.job import Job
from toolkit.engines.resolution import resolve
from toolkit.forecasting import Forecast
from toolkit.forecasting.prediction import forecast_job
from toolkit.models import ModelSpec, describe
from toolkit.training.small_run import ENV_NAMES, SAID

NO_REHEARSAL = {
    "ddp": "torch's DDP waits for the sums that other ranks send",
    **dict.fromkeys(("zero1", "zero2", "zero3"), "DeepSpeed needs the other ranks"),
}
"""Shardings without a rehearsal, and why. Under `--tp` and `--pp` gradients are averaged without torch's DDP."""


SENT = "sent in a step"


@dataclass(frozen=True, kw_only=True)
class Rehearsal(Result):
    """One rank's memory as it was measured, beside the forecast."""

    json_fields = "* ratio"

    model: str
    strategy: Mapping[str, Any]
    """The fields that are not the default."""
    ranks: int
    rank: int
    phases: Mapping[str, int]
    """The allocator's highest total of each phase, in bytes."""
    peak_bytes: int
    forecast_phases: Mapping[str, int]
    forecast_peak_bytes: int
    """Of the fullest rank; of a pipeline, of this rank's stages."""
    sent_bytes: int
    """What the rank would send in a step, counted at its collectives."""
    forecast_sent_bytes: int
    """Of the rank of a pipeline that sends most."""
    step_seconds: float
    """Of the third step, without any communication, on this machine."""

    @property
    def ratio(self) -> float:
        """The forecast peak as a multiple of the measured one."""
        return self.forecast_peak_bytes / self.peak_bytes

    def tables(self) -> list[Table]:
        """Return measured and forecast bytes by phase."""
        words = ", ".join(f"{name} {value}" for name, value in self.strategy.items()) or "none"
        sizes = [
            *((name, self.phases[name], self.forecast_phases.get(name, 0)) for name in PHASES if name in self.phases),
            ("peak", self.peak_bytes, self.forecast_peak_bytes),
            (SENT, self.sent_bytes, self.forecast_sent_bytes),
        ]
        rows = [
            (
                name,
                format_bytes(measured),
                format_bytes(expected),
                f"{expected / measured - 1:+.1%}" if measured and not (name == SENT and "pp" in self.strategy) else "–",
            )
            for name, measured, expected in sizes
        ]
        notes = [
            f"A step computes for {format_step_seconds(self.step_seconds)} here. Values mean nothing: what other ranks send is "
            "not there.",
            *(["Of a pipeline, what the rank sends that sends most is forecast."] if "pp" in self.strategy else []),
        ]
        title = f"{self.model}, {words}: rank {self.rank} of {self.ranks}"
        subject = "its stages" if "pp" in self.strategy else "fullest rank"
        columns = ("", "measured", f"forecast, {subject}", "difference")
        return [Table(title=title, columns=columns, rows=rows, notes=notes)]


def rehearse(
    model: str | Path | ModelSpec,
    strategy: Strategy | None = None,
    train_config: TrainConfig | None = None,
    *,
    ranks: int,
    rank: int = 0,
) -> Rehearsal:
    """Run the code of one rank of `ranks` on this machine, with real tensors and without the other ranks.

    Args:
        model: a Hub id, a folder, or what `describe` returned. No weights are read.
        strategy: with `none` or of the FSDP family, with `tp`, `cp`, `ep` or `pp`; `ddp` with `tp` or `pp`.
        train_config: batch and lengths.
        ranks: of the planned run.
        rank: which of them, from 0.

    Raises:
        StrategyError: for a rank that does not exist, and for what cannot run without the other ranks.
        ToolkitError: where the rank fails, as it does out of memory.
    """
    spec, machine = model if isinstance(model, ModelSpec) else describe(str(model)), hardware()
    strategy = strategy or Strategy()
    train_config = train_config or from_dict(TrainConfig, pipeline_rows(strategy.pp))
    job = resolve(strategy, train_config, spec, ranks, machine.device)
    _refuse(job, rank)
    forecast = forecast_rank(job, machine, rank)
    values = {
        "strategy": differing(job.strategy),
        "train_config": asdict(job.train_config),
        "ranks": ranks,
        "rank": rank,
    }
    measured = _run_child({**values, "config": spec.config, "tp_plan": dict(spec.tp_plan)})
    return _joined(job, rank, measured, forecast)


def forecast_rank(job: Job, machine: Hardware, rank: int) -> Forecast:
    """Forecast what a rehearsal measures: rows of one document, and neither a checkpoint nor an export."""
    return forecast_job(job, machine, one_document=True, save=False, num_checkpoints=0, rank=rank)


def _refuse(job: Job, rank: int) -> None:
    strategy, why = job.strategy, NO_REHEARSAL.get(job.strategy.sharding, "")
    if not 0 <= rank < job.ranks:
        raise StrategyError(f"rank {rank}: expected 0 to {job.ranks - 1}.")
    if job.ranks == 1:
        raise StrategyError("rehearse: one rank has no others to leave out. Train it: `toolkit train --steps 3`.")
    if why and not (strategy.sharding == "ddp" and max(strategy.tp, strategy.pp) > 1):
        raise StrategyError(f"rehearse: sharding {strategy.sharding!r} has no rehearsal: {why}. Choose fsdp.")
    if strategy.quantized:
        raise StrategyError(f"rehearse: adapter {strategy.adapter!r} packs real weights. Choose --adapter lora.")


def _joined(job: Job, rank: int, measured: Mapping[str, Any], forecast: Forecast) -> Rehearsal:
    assert job.spec is not None, "a rehearsal has a description"
    return Rehearsal(
        model=job.spec.name,
        strategy=differing(job.strategy),
        ranks=job.ranks,
        rank=rank,
        forecast_phases={name: forecast.phases[name] for name in PHASES if name in forecast.phases},
        forecast_peak_bytes=forecast.peak_bytes,
        forecast_sent_bytes=forecast.communication_bytes,
        **measured,
    )


def _run_child(request: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", f"from toolkit.training.rehearsed_rank import main; main({os.getpid()})"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_NAMES)}
    place = {"RANK": request["rank"], "WORLD_SIZE": request["ranks"], "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environ)
    if ended.returncode:
        lines = ended.stderr.splitlines() or ["its process was ended, perhaps for lack of memory"]
        why = next((line.removeprefix(SAID) for line in lines if line.startswith(SAID)), lines[-1]).rstrip(". ")
        if ended.returncode < 0:
            why = f"its process was ended by {signal.Signals(-ended.returncode).name}, perhaps for lack of memory"
        raise ToolkitError(f"rehearse: rank {request['rank']} of {request['ranks']} did not run: {why}.")
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer
