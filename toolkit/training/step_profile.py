"""`profile_steps()` → `StepProfile`: a few steps in this process, compared with the forecast. One rank only."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO

from toolkit import measurement
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.drawing import Bar, bars
from toolkit.core.errors import RunError, StrategyError
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import hardware
from toolkit.engines.ledger import PARTS
from toolkit.engines.records import on_device
from toolkit.forecasting import Forecast
from toolkit.measurement import Memory
from toolkit.measurement.window import STEPS
from toolkit.training.loading import load
from toolkit.training.loop import Step, make_optimizer, make_schedule, train
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
    def phases(self) -> Mapping[str, int]:
        """Return the highest total within each phase. A profile has no save phase.

        Raises:
            RunError: where nothing could be measured, with the reason.
        """
        if self.memory.measured is None:
            raise RunError(f"nothing was measured: {self.memory.reason}.")
        measured: Mapping[str, int] = self.memory.measured["phases"]
        return measured

    @property
    def peak_bytes(self) -> int:
        """The highest total of all phases, in bytes."""
        return max(self.phases.values())

    @property
    def parts(self) -> Mapping[str, int]:
        """The measured peak by part: the audit's parts, and `transient` for the rest."""
        assert self.memory.measured is not None, "`phases` has said so"
        measured: Mapping[str, int] = self.memory.measured["parts"]
        return measured

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
        """Of the median step behind the memory window, which slows what lies in it; of all where none lies behind it."""
        took = [step.seconds for step in self.steps]
        return statistics.median(took[STEPS:] or took)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step, in nats a token."""
        return tuple(step.loss for step in self.steps)

    def pictures(self) -> Sequence[str]:
        """Return a picture of the forecast and the measured peak, by part."""
        expected = {part: size for part in PARTS if (size := self.forecast.parts.get(part, 0))}
        rows = [Bar(label="forecast", parts=expected), Bar(label="measured", parts=self.parts)]
        return (bars(rows, title=f"The peak, in {self.forecast.peak_phase}"),)

    def tables(self) -> list[Table]:
        """Return each phase's highest total and its forecast."""
        phases = {name: (self.forecast.phases.get(name), self.phases[name]) for name in PHASES if name in self.phases}
        rows = [
            (name, *_with_ratio(expected, measured))
            for name, (expected, measured) in {"peak": (self.forecast_bytes, self.peak_bytes), **phases}.items()
        ]
        notes = (f"A step took {format_step_seconds(self.seconds)}. x: forecast / measured.",)
        title = f"Highest memory, sharding {self.forecast.strategy.label}, precision {self.forecast.strategy.precision}"
        return [Table(title=title, columns=("phase", "forecast", "measured", "x"), rows=rows, notes=notes)]


@dataclass(frozen=True, kw_only=True)
class StepProfiles(Result):
    """The same training under several settings."""

    title: str
    trials: Mapping[str, StepProfile]
    """The first one's speed forecasts the others' seconds where the catalog does not know the device's."""

    def forecast_seconds(self, name: str) -> float | None:
        """A step's, by the roofline; without one by the first trial's operations a second, as `calibrate` does, and not its own."""
        first, forecast = next(iter(self.trials.values())), self.trials[name].forecast
        if forecast.timing is not None:
            return forecast.timing.step_seconds
        return None if forecast is first.forecast else first.seconds * forecast.operations / first.forecast.operations

    def pictures(self) -> Sequence[str]:
        """Return a picture of every peak by part, forecast and measured."""
        rows = []
        for name, trial in self.trials.items():
            expected = {part: size for part in PARTS if (size := trial.forecast.parts.get(part, 0))}
            rows += [Bar(label=f"{name}, forecast", parts=expected), Bar(label="measured", parts=trial.parts)]
        return (bars(rows, title=self.title),)

    def tables(self) -> list[Table]:
        """Return the peak and the seconds of each setting, forecast and measured."""
        rows = []
        for name, trial in self.trials.items():
            expected = self.forecast_seconds(name)
            took = ("–", format_step_seconds(trial.seconds), "–")
            if expected is not None:
                took = (format_step_seconds(expected), took[1], f"{expected / trial.seconds:.2f}")
            rows.append((name, *_with_ratio(trial.forecast_bytes, trial.peak_bytes), *took))
        notes = ["x: forecast / measured."]
        if all(trial.forecast.timing is None for trial in self.trials.values()):
            first = next(iter(self.trials))
            notes.append(
                f"How fast this device is, the catalog does not know: the seconds of {first} forecast the others', by operations."
            )
        columns = ("setting", "peak, forecast", "measured", "x", "a step, forecast", "measured", "x")
        return [Table(title=self.title, columns=columns, rows=rows, notes=notes)]


def _with_ratio(expected: int | None, measured: int) -> tuple[str, str, str]:
    if expected is None:
        return "–", format_bytes(measured), "–"
    return format_bytes(expected), format_bytes(measured), f"{expected / measured:.2f}" if measured else "–"


def profile_steps(
    strategy: Strategy | None = None, train_config: TrainConfig | None = None, run_config: RunConfig | None = None
) -> StepProfile:
    """Train for `train_config.steps` steps in this process and free everything. It writes no run folder.

    Use it to see bytes and seconds of a setting at once; use `launch` for a run that counts. Three steps are measured for
    memory, and later ones for time.

    Args:
        strategy: for one rank, so sharding `none`.
        train_config: the step, and the number of steps.
        run_config: model and data; by default the embedded ones.

    Raises:
        StrategyError: for a sharding that needs several processes, or a setting without a forecast.
        ToolkitError: for other errors in strategy, model or data.
    """
    request, train_config, run_config = (
        strategy or Strategy(),
        train_config or TrainConfig(steps=5),
        run_config or RunConfig(),
    )
    if not request.single_process:
        raise StrategyError(
            f"sharding {request.sharding!r} needs several processes, and this is one. Launch it, or choose sharding 'none'."
        )
    machine = hardware()
    run_config = replace(
        run_config, save_every=0, save_seconds=0.0
    )  # without checkpoints the moments come with the first step
    preflight = with_forecast(run_preflight(run_config, request, train_config, 1, machine.device), run_config, machine)
    if preflight.forecast is None:
        raise StrategyError(f"{preflight.unforecast}")
    output = StringIO()
    with _separate_accelerate_state(), redirect_stdout(output):
        steps, state, memory = _run(preflight, run_config, measurement.start(machine.device.kind))
    return StepProfile(
        forecast=preflight.forecast,
        memory=memory,
        audit=state,
        steps=steps,
        notes=tuple(output.getvalue().splitlines()),
    )


def _run(
    preflight: Preflight, run_config: RunConfig, window: measurement.Window
) -> tuple[tuple[Step, ...], Audit, Memory]:
    """Run the steps as a rank of `finetune` does, without a run folder."""
    job = preflight.job
    rank = accelerator(job.strategy, job.train_config, job.spec)
    seed_everything(rank)
    model, _ = load(rank, allow_unquantized=run_config.allow_unquantized)
    optimizer = make_optimizer(model, job.train_config)
    schedule = make_schedule(optimizer, job.train_config)
    loader = preflight.batches(0, workers=run_config.workers)
    model, optimizer, loader, schedule = prepare(rank, model, optimizer, loader, schedule)
    ready = prepared(rank, (model, optimizer))
    steps: list[Step] = []
    first_audit = None
    try:
        for step in train(ready, loader, schedule):
            window.step_done(step.step)
            if first_audit is None and not step.skipped:
                first_audit = audit(ready, gradients=step.gradients)
            steps.append(step)
    finally:
        window.close()
    result = first_audit or audit(ready)
    memory = measurement.collect(window.result(), on_device(job, result.measured), lambda rows: rows)
    return tuple(steps), result, memory


@contextmanager
def _separate_accelerate_state() -> Iterator[None]:
    """Set Accelerate's process-wide state aside meanwhile: it refuses a second precision."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    owners = (PartialState, AcceleratorState, GradientState)
    before = [dict(owner._shared_state) for owner in owners]
    gc.collect()  # only what is allocated within the window may be freed in it
    for owner in owners:
        owner._shared_state.clear()
    try:
        yield
    finally:
        for owner, state in zip(owners, before, strict=True):
            owner._shared_state.clear()
            owner._shared_state.update(state)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
