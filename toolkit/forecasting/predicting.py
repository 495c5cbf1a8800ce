"""`forecast()` → `Forecast`: what a run will take, before it is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.devices import Hardware, hardware
from toolkit.engines.job import Job, resolve
from toolkit.engines.states import parameters_of
from toolkit.errors import StrategyError
from toolkit.forecasting.ledger import PARTS
from toolkit.forecasting.memory import replay, traced, whole_step
from toolkit.forecasting.timing import Timing, step_time
from toolkit.model import ModelSpec, describe
from toolkit.phases import PHASES
from toolkit.show import Shown, Table
from toolkit.strategy import Loop, Strategy
from toolkit.units import BYTES_OF, format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Forecast(Shown):
    """What a run will take. Bytes are the allocator's, of the fullest rank."""

    model: str
    strategy: Strategy
    """Without an `auto`."""
    loop: Loop
    hardware: Hardware
    ranks: int
    limit_bytes: int
    """What a rank may hold: the device's free bytes; on CPU ranks the host's divided by the ranks of a node."""
    peak_bytes: int
    peak_phase: str
    parts: Mapping[str, int]
    """At the instant of the peak; they add up to it."""
    phases: Mapping[str, int]
    """The highest total within each phase."""
    checkpoint_bytes: int
    timing: Timing | None
    """None for a device whose speed is not known."""
    unknown: tuple[str, ...] = ()
    """What is not in these figures, each as one sentence."""

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the limit, with no margin inside."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def reason(self) -> str:
        """Why it fits or does not, in a sentence."""
        peak, limit = format_bytes(self.peak_bytes), format_bytes(self.limit_bytes)
        if self.fits:
            return f"The highest need, {peak} in {self.peak_phase}, is within the {limit} that a rank has."
        largest = max(self.parts, key=lambda part: self.parts[part])
        return f"A rank has {limit} and needs {peak} in {self.peak_phase}, {format_bytes(self.parts[largest])} of it {largest}."

    def to_dict(self) -> dict[str, Any]:
        """As the shell's JSON: sizes in bytes."""
        on_cpu = self.hardware.device.kind == "cpu"
        unknown = dict.fromkeys(field.name for field in dataclasses.fields(Timing))
        return {
            "model": self.model,
            "strategy": dataclasses.asdict(self.strategy),
            "loop": dataclasses.asdict(self.loop),
            "hardware": dataclasses.asdict(self.hardware),
            "ranks": self.ranks,
            "fits": self.fits,
            "reason": self.reason,
            "device": {
                "peak_bytes": self.peak_bytes,
                "peak_phase": self.peak_phase,
                "limit_bytes": self.limit_bytes,
                "reserved_bytes": None,
                "parts": dict(self.parts),
                "phases": dict(self.phases),
            },
            "host": {"peak_bytes": self.peak_bytes * self.ranks if on_cpu else None},
            "nvme": {"peak_bytes": 0},
            **(dataclasses.asdict(self.timing) if self.timing else unknown),
            "checkpoint_bytes": self.checkpoint_bytes,
            "unknown": list(self.unknown),
        }

    def tables(self) -> list[Table]:
        """The peak by part, and the highest total of each phase."""
        verdict = "It fits." if self.fits else "It does not fit."
        parts = [(part, format_bytes(self.parts[part])) for part in PARTS if self.parts.get(part)]
        phases = [(phase, format_bytes(self.phases[phase])) for phase in PHASES if phase in self.phases]
        where = f"{self.ranks} x {self.hardware.device.name}"
        title = f"{self.model}, sharding {self.strategy.sharding}, {where}: highest need of a rank"
        return [
            Table(
                title=title,
                columns=("part", "bytes"),
                rows=[*parts, ("all", format_bytes(self.peak_bytes))],
                notes=(f"{verdict} {self.reason}",),
            ),
            Table(title="By phase", columns=("phase", "bytes"), rows=phases),
            Table(title="A step", columns=("figure", "value"), rows=self._figures(), notes=self.unknown),
        ]

    def _figures(self) -> list[tuple[str, str]]:
        timing = self.timing
        if timing is None:
            return [("a checkpoint", format_bytes(self.checkpoint_bytes))]
        return [
            ("time", format_seconds(timing.step_seconds)),
            ("tokens/s", f"{timing.tokens_per_second:,.0f}"),
            ("MFU", f"{timing.mfu:.0%}"),
            ("sent by a rank", format_bytes(timing.communication_bytes)),
            ("a checkpoint", format_bytes(self.checkpoint_bytes)),
        ]


def forecast(
    model: ModelSpec | str,
    strategy: Strategy | None = None,
    on: Hardware | str | None = None,
    loop: Loop | None = None,
    *,
    ranks: int | None = None,
    one_document: bool = False,
) -> Forecast:
    """What a run will take, on the fullest rank: nothing is launched, and no device is touched.

    Args:
        model: a spec, or what `describe` takes.
        strategy: the default one where it is left out.
        on: the machine, or its name; this one where it is left out.
        loop: batch and lengths.
        ranks: processes; one a device where it is left out.
        one_document: every row holds one document and no padding, so attention needs no mask.

    Raises:
        StrategyError: for what this device, model or number of ranks cannot do, and for what cannot be forecast yet.
        ToolkitError: for a model or a machine that is not known.
    """
    spec = model if isinstance(model, ModelSpec) else describe(model)
    machine = on if isinstance(on, Hardware) else hardware(on)
    count = machine.ranks if ranks is None else ranks
    if count < 1:
        raise StrategyError(f"ranks {count}: expected at least 1.")
    job = resolve(strategy or Strategy(), loop or Loop(), spec, count, machine.device)
    return forecast_job(job, machine, one_document=one_document)


def forecast_job(job: Job, machine: Hardware, *, one_document: bool = False, checkpoints: bool = True) -> Forecast:
    """The same of a job, which a worker runs as it is; `checkpoints`: whether it writes any."""
    assert job.spec is not None, "a forecast needs a model"
    trace = traced(job, masked=not one_document)
    step = whole_step(job, trace)
    ledger, timing = replay(job, trace, step, checkpoints=checkpoints), step_time(job, machine, step)
    return Forecast(
        model=job.spec.name,
        strategy=job.strategy,
        loop=job.loop,
        hardware=machine,
        ranks=job.ranks,
        limit_bytes=_limit(job, machine),
        peak_bytes=ledger.peak,
        peak_phase=ledger.peak_phase,
        parts={part: ledger.parts.get(part, 0) for part in PARTS},
        phases=dict(ledger.phases),
        checkpoint_bytes=_checkpoint(job),
        timing=timing,
        unknown=_unknown(job),
    )


def _limit(job: Job, machine: Hardware) -> int:
    if job.device.kind == "cuda":
        return job.device.free_bytes
    return machine.host_free_bytes // -(-job.ranks // machine.nodes)


def _checkpoint(job: Job) -> int:
    """Weights and two moments of what is trained, each in the dtype that it is trained in."""
    trained = sum(state.elements for state in parameters_of(job) if state.trainable)
    return 3 * trained * BYTES_OF[job.weight_dtype]


def _unknown(job: Job) -> tuple[str, ...]:
    found = []
    if job.device.card is None:
        found.append(f"How fast {job.device.name} is: the catalog does not know it, so there is no time.")
    else:
        found.append("Time is a roofline over data-sheet peaks, within about a quarter; it has not been calibrated.")
    if job.device.kind == "cuda":
        found.append(
            "CUDA's context, libraries' workspaces and the allocator's fragmentation are not in it: keep 10% free."
        )
    if job.spec is not None and job.spec.moe is not None:
        found.append("Experts are taken as evenly loaded; how uneven the routing is, only a run shows.")
    return tuple(found)
