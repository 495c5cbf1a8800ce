"""`profile_steps()` → `StepProfile`: a few steps in this process, compared with the forecast. One rank only."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any, cast

from toolkit import measurement
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.charts import Bar, bars
from toolkit.core.display import Result, Table
from toolkit.core.errors import RunError, StrategyError
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import hardware
from toolkit.engines.ledger import PARTS
from toolkit.engines.records import Prepared, on_device
from toolkit.engines.upstream import patched
from toolkit.forecasting import Forecast
from toolkit.measurement import Memory
from toolkit.measurement.window import MEASURED_STEPS
from toolkit.training.loading import load
from toolkit.training.loop import Step, train
from toolkit.training.optimizers import make_optimizer, make_schedule
from toolkit.training.preflight import Preflight, run_preflight, with_forecast
from toolkit.training.preparation import Audit, audit, prepare, prepared
from toolkit.training.setup import accelerator, seed_everything


@dataclass(frozen=True, kw_only=True)
class StepProfile(Result):
    """A few steps of one rank, forecast and measured."""

    forecast: Forecast
    """The forecast, made before any weight was loaded."""
    memory: Memory
    audit: Audit
    """The audit after the first step."""
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    """The notes of `load`."""

    @property
    def _measured(self) -> Mapping[str, Any]:
        if self.memory.measured is None:
            raise RunError(f"nothing was measured: {self.memory.reason}.")
        return self.memory.measured

    @property
    def phases(self) -> Mapping[str, int]:
        """Return the highest total within each phase. A profile has no save phase.

        Raises:
            RunError: where nothing could be measured, with the reason.
        """
        return cast("Mapping[str, int]", self._measured["phases"])

    @property
    def peak_bytes(self) -> int:
        """The highest total of all phases, in bytes."""
        return int(self._measured["peak_bytes"])

    @property
    def parts(self) -> Mapping[str, int]:
        """The measured peak by part: the audit's parts, and `transient` for the rest."""
        return cast("Mapping[str, int]", self._measured["parts"])

    @property
    def forecast_bytes(self) -> int:
        """The highest forecast of the phases that were run, in bytes."""
        return max(size for name, size in self.forecast.phases.items() if name in self.phases)

    @property
    def ratio(self) -> float:
        """The forecast peak divided by the measured one."""
        return self.forecast_bytes / self.peak_bytes

    @property
    def seconds(self) -> float:
        """The median step after the memory window, which slows its own steps; of all steps in a shorter profile."""
        seconds = [step.seconds for step in self.steps]
        return statistics.median(seconds[MEASURED_STEPS:] or seconds)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step, in nats a token."""
        return tuple(step.loss for step in self.steps)

    def pictures(self) -> Sequence[str]:
        """Return a picture of the forecast and the measured peak, by part."""
        return (bars(self.bars("forecast"), title=f"The peak, in {self.forecast.peak_phase}"),)

    def bars(self, label: str) -> list[Bar]:
        """Return the forecast peak under a label, and the measured one."""
        expected = {part: size for part in PARTS if (size := self.forecast.parts.get(part, 0))}
        return [Bar(label=label, parts=expected), Bar(label="measured", parts=self.parts)]

    def tables(self) -> list[Table]:
        """Return each phase's highest total and its forecast."""
        rows = [("peak", *_compared(self.forecast_bytes, self.peak_bytes, format_bytes))]
        for name in sorted(self.phases, key=PHASES.index):
            rows.append((name, *_compared(self.forecast.phases.get(name), self.phases[name], format_bytes)))
        notes = (f"A step took {format_step_seconds(self.seconds)}. x: forecast / measured.",)
        title = f"Highest memory, sharding {self.forecast.strategy.label}, precision {self.forecast.strategy.precision}"
        return [Table(title=title, columns=("phase", "forecast", "measured", "x"), rows=rows, notes=notes)]


@dataclass(frozen=True, kw_only=True)
class StepProfiles(Result):
    """The same training under several settings."""

    title: str
    trials: Mapping[str, StepProfile]

    def forecast_seconds(self, name: str) -> float | None:
        """Return the seconds of a step by the roofline; None where the catalog does not know the device's speed."""
        timing = self.trials[name].forecast.timing
        return None if timing is None else timing.step_seconds

    def pictures(self) -> Sequence[str]:
        """Return a picture of every peak by part, forecast and measured."""
        rows = [bar for name, trial in self.trials.items() for bar in trial.bars(f"{name}, forecast")]
        return (bars(rows, title=self.title),)

    def tables(self) -> list[Table]:
        """Return the peak and the seconds of each setting, forecast and measured."""
        rows = []
        for name, trial in self.trials.items():
            peak = _compared(trial.forecast_bytes, trial.peak_bytes, format_bytes)
            rows.append((name, *peak, *_compared(self.forecast_seconds(name), trial.seconds, format_step_seconds)))
        notes = ["x: forecast / measured."]
        if all(trial.forecast.timing is None for trial in self.trials.values()):
            notes.append("This device's speed is unknown: seconds are measured alone.")
        columns = ("setting", "peak, forecast", "measured", "x", "a step, forecast", "measured", "x")
        return [Table(title=self.title, columns=columns, rows=rows, notes=notes)]


def _compared(expected: float | None, measured: float, spell: Callable[[float], str]) -> tuple[str, str, str]:
    if expected is None:
        return "–", spell(measured), "–"
    return spell(expected), spell(measured), f"{expected / measured:.2f}" if measured else "–"


def profile_steps(
    strategy: Strategy | None = None, train_config: TrainConfig | None = None, run_config: RunConfig | None = None
) -> StepProfile:
    """Train for `train_config.steps` steps in this process and free everything. It writes no run folder.

    Use it to see bytes and seconds of a setting at once; use `launch` for a run that counts. Three steps are measured for
    memory, and later ones for time.

    Args:
        strategy: for one rank, so sharding `none`.
        train_config: the step, and the number of steps; by default five steps.
        run_config: model and data; by default the embedded ones.

    Raises:
        StrategyError: for a sharding that needs several processes, or a setting without a forecast.
        ToolkitError: for other errors in strategy, model or data.
    """
    request, train_config = strategy or Strategy(), train_config or TrainConfig(steps=5)
    # Without checkpoints the moments come with the first step.
    run_config = replace(run_config or RunConfig(), save_every=0, save_seconds=0.0)
    if not request.single_process:
        raise StrategyError(
            f"sharding {request.sharding!r} needs several processes, and this is one. Launch it, or choose sharding 'none'."
        )
    machine = hardware()
    preflight = with_forecast(run_preflight(run_config, request, train_config, 1, machine.device), run_config, machine)
    if preflight.forecast is None:
        raise StrategyError(f"{preflight.unforecast}")
    output = StringIO()
    audits: list[Audit] = []
    steps: list[Step] = []
    with _separate_accelerate_state(), redirect_stdout(output):
        window = measurement.start(machine.device.kind)
        ready, loader, schedule = _prepare(preflight, run_config)
        try:
            for step in train(ready, loader, schedule):
                window.step_done(step.step)
                if not audits and not step.skipped:
                    audits.append(audit(ready, gradients=step.gradients))
                steps.append(step)
        finally:
            window.close()
        state = audits[0] if audits else audit(ready)
        memory = measurement.collect(window.result(), on_device(ready.job, state.measured), lambda rows: rows)
        del ready, loader, schedule
    notes = tuple(output.getvalue().splitlines())
    return StepProfile(forecast=preflight.forecast, memory=memory, audit=state, steps=tuple(steps), notes=notes)


def _prepare(preflight: Preflight, run_config: RunConfig) -> tuple[Prepared, Any, Any]:
    """Return what a rank of `finetune` trains with, without a run folder: model with optimizer, loader, schedule."""
    job = preflight.job
    rank = accelerator(job.strategy, job.train_config, job.spec)
    seed_everything(rank)
    model, _ = load(rank, allow_unquantized=run_config.allow_unquantized)
    optimizer = make_optimizer(model, job.train_config, fused=rank.scaler is None)
    schedule = make_schedule(optimizer, job.train_config)
    loader = preflight.batches(0, workers=run_config.workers)
    model, optimizer, loader = prepare(rank, model, optimizer, loader)
    return prepared(rank, (model, optimizer)), loader, schedule


@contextmanager
def _separate_accelerate_state() -> Iterator[None]:
    """Set Accelerate's process-wide state aside meanwhile: it refuses a second precision."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    gc.collect()  # only what is allocated within the window may be freed in it
    try:
        with ExitStack() as states:
            for owner in (PartialState, AcceleratorState, GradientState):
                states.enter_context(patched(owner, _shared_state={}))
            yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
