"""`Forecast`: memory and speed of a run before its launch, as text, HTML and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from toolkit.config.flags import spell
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.charts import Bar, bars
from toolkit.core.display import Result, Table
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import Hardware
from toolkit.engines.job import Job
from toolkit.engines.ledger import PARTS
from toolkit.forecasting.expert_placement import Placement, placements_table
from toolkit.forecasting.finished_run import read_correction
from toolkit.forecasting.memory import COMMUNICATION, CONTEXT, FRAGMENTATION
from toolkit.forecasting.mesh_picture import draw_mesh
from toolkit.forecasting.stages import Pipeline, schedule_picture, stages_table
from toolkit.forecasting.timing import Timing

MARGIN = 0.05
"""The share of a rank's memory that a plan leaves for what no forecast knows."""


@dataclass(frozen=True, kw_only=True)
class Forecast(Result):
    """Memory and speed of a run. Bytes are the allocator's on the fullest rank; `needed_bytes` adds CUDA's own memory."""

    json_fields = (
        "model strategy train_config hardware ranks fits reason change device.peak_bytes device.peak_phase device.needed_bytes "
        "device.context_bytes device.context device.limit_bytes device.reserved_bytes device.parts device.phases "
        "host.peak_bytes=host_bytes host.checkpoint_bytes=host_checkpoint_bytes nvme.peak_bytes=nvme_bytes step_seconds "
        "tokens_per_second mfu checkpoint_bytes checkpoint_stall_seconds operations communication_bytes pipeline placements unknown"
    )
    nvme_bytes: ClassVar[int] = 0
    """No engine offloads to NVMe."""

    job: Job = field(repr=False)
    """The resolved request."""
    hardware: Hardware
    limit_bytes: int
    """The memory of a rank: the device's free bytes; on CPU ranks the host's, divided by the ranks of a node, less Python's own."""
    peak_bytes: int
    peak_phase: str
    parts: Mapping[str, int]
    """At the instant of the peak; they add up to it."""
    context: Mapping[str, int] = field(default_factory=dict)
    """GPU memory outside the allocator, by term (`memory.context_memory`); empty on CPU ranks."""
    phases: Mapping[str, int]
    """The highest total within each phase."""
    host_bytes: int
    """The highest need of the host of rank 0's node at one moment: of all its ranks, and of rank 0's additional memory."""
    host_checkpoint_bytes: int = 0
    """Of `host_bytes`, what checkpoints alone need; 0 where the host has enough."""
    checkpoint_bytes: int
    checkpoint_stall_seconds: float
    """The time in which steps wait for a checkpoint; with offloaded states, its whole write."""
    operations: int
    """Floating-point operations of a rank in a step, recomputation included."""
    communication_bytes: int
    """Bytes that a rank sends in a step."""
    timing: Timing | None
    """None for a device with unknown speed."""
    reserved_bytes: int | None = None
    """Bytes that CUDA's caching allocator reserves for the peak; None without a measured run."""
    pipeline: Pipeline | None = None
    """The stages of a pipeline; None without."""
    placements: tuple[Placement, ...] = ()
    """Ways to place experts where one rank gets more tokens than the others; empty where all are alike."""
    unknown: tuple[str, ...] = ()
    """Sources of error that these figures do not include, a sentence each."""
    change: Mapping[str, Any] | None = None
    """The smallest change that fits, if the forecast does not fit; None if no change helps."""
    changed_bytes: int | None = None
    """The bytes needed with that change."""

    @property
    def model(self) -> str:
        """The model's name as the user gave it."""
        assert self.job.spec is not None, "a forecast needs a model"
        return self.job.spec.name

    @property
    def strategy(self) -> Strategy:
        """The resolved strategy, without an `auto`."""
        return self.job.strategy

    @property
    def train_config(self) -> TrainConfig:
        """The resolved training settings, without an open value."""
        return self.job.train_config

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.job.ranks

    @property
    def step_seconds(self) -> float | None:
        """The time of a step; None for a device with unknown speed."""
        return self.timing.step_seconds if self.timing else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second of all ranks; None for a device with unknown speed."""
        return self.timing.tokens_per_second if self.timing else None

    @property
    def mfu(self) -> float | None:
        """The share of the device's peak speed that the model's own operations use; None for a device with unknown speed."""
        return self.timing.mfu if self.timing else None

    @property
    def context_bytes(self) -> int:
        """GPU memory outside the allocator's peak; 0 on CPU ranks."""
        return sum(self.context.values())

    @property
    def needed_bytes(self) -> int:
        """The allocator's peak and CUDA's own memory: the bytes that are compared with the limit."""
        return self.peak_bytes + self.context_bytes

    def leaves(self, margin: float) -> bool:
        """Return whether a rank's need leaves this share of its limit, and the host's is within its memory.

        The one judge of what fits: a plan and the choices of `auto` give `MARGIN`, `fits` (and advice by it) gives none. It is a
        method of its own because `fits` is an attribute and a key of the JSON: a method `forecast.fits` would always be true.
        """
        return self.needed_bytes <= (1 - margin) * self.limit_bytes and not self.host_lacks

    @property
    def fits(self) -> bool:
        """Whether it fits without a margin."""
        return self.leaves(0)

    @property
    def device_lacks(self) -> bool:
        """Whether a rank needs more than it has."""
        return self.needed_bytes > self.limit_bytes

    @property
    def host_lacks(self) -> bool:
        """Whether a node's host lacks memory to read, offload and write. CPU ranks have `limit_bytes` for it."""
        return self.hardware.device.kind != "cpu" and self.host_bytes > self.hardware.host_free_bytes

    @property
    def reason(self) -> str:
        """Why it fits or does not, in a sentence."""
        need, limit = format_bytes(self.needed_bytes), format_bytes(self.limit_bytes)
        if self.context:
            need += f" ({format_bytes(self.context_bytes)} of it outside the allocator)"
        if self.fits:
            return f"The highest need, {need} in {self.peak_phase}, is within the {limit} that a rank has."
        if not self.device_lacks:
            host, free = format_bytes(self.host_bytes), format_bytes(self.hardware.host_free_bytes)
            reason = f"A node's host has {free}, and its ranks need {host} of it to read, offload and write."
            if not self.host_checkpoint_bytes:
                return reason
            copies = format_bytes(self.host_checkpoint_bytes)
            fits = self.host_bytes - self.host_checkpoint_bytes <= self.hardware.host_free_bytes
            without = "it fits" if fits else "it does not fit either"
            return (
                f"{reason} Checkpoints are {copies} of that: without them (--save-every 0 --save-seconds 0) {without}."
            )
        largest = max(self.parts, key=lambda part: self.parts[part])
        lacks = f"A rank has {limit} and needs {need} in {self.peak_phase}, {format_bytes(self.parts[largest])} of it {largest}."
        if self.change is None or self.changed_bytes is None:
            return lacks
        flags = " ".join(spell(self.change))
        return f"{lacks} The smallest change that fits: {flags}, which needs {format_bytes(self.changed_bytes)}."

    def calibrate(self, run: str | Path) -> Forecast:
        """Correct the forecast by a finished run that has a forecast of its own.

        - Bytes: the difference between the run's measured and forecast peak is added.
        - Reserve: the ratio of reserved to allocated bytes is the run's (fragmentation).
        - Time: the step is as much slower as the run's was. On a device without known speed, the run's operations a second count.

        A run with layers and batches of similar size corrects best.

        Args:
            run: folder of a run on the same kind of device.

        Raises:
            RunError: for a folder without a finished run, for one that measured nothing or was not forecast, and for one on
                another kind of device.
        """
        found = read_correction(Path(run), self.hardware.device)
        peak, context, timing = self.peak_bytes + found.more, dict(self.context), self.timing
        if found.fragmentation:
            context[FRAGMENTATION] = round(peak * (found.fragmentation - 1))
        if found.outside is not None and self.ranks > 1:
            context[COMMUNICATION] = max(0, found.outside - context[CONTEXT])
        elif found.outside is not None:
            context[CONTEXT] = found.outside
        part = "workspace" if found.more > 0 else max(self.parts, key=lambda name: self.parts[name])
        seconds = timing.step_seconds * found.slower if timing and found.slower else self.operations / found.speed
        mfu = timing.mfu * timing.step_seconds / seconds if timing and timing.mfu is not None else None
        tokens = self.job.global_batch * self.train_config.seq_len
        return dataclasses.replace(
            self,
            peak_bytes=peak,
            parts={**self.parts, part: self.parts[part] + found.more},
            phases={phase: max(0, size + found.more) for phase, size in self.phases.items()},
            context=context,
            reserved_bytes=peak + context[FRAGMENTATION] if found.fragmentation else None,
            timing=Timing(step_seconds=seconds, tokens_per_second=tokens / seconds, mfu=mfu),
            placements=(),
            change=None,
            changed_bytes=None,
            unknown=(f"Corrected by {run}: {found.more:+,} bytes, {found.speed:.3g} operations/s a rank.",),
        )

    def pictures(self) -> Sequence[str]:
        """Return pictures of the peak by part, and of each phase's highest total, with the limit."""
        parts = {**{part: self.parts.get(part, 0) for part in PARTS}, "outside the allocator": self.context_bytes}
        peak = Bar(label=self.peak_phase, parts=parts)
        title = f"Highest need of a rank: {format_bytes(self.needed_bytes)} in {self.peak_phase}"
        limit: dict[str, Any] = {"limit": self.limit_bytes, "limit_label": "a rank has"}
        phases = [
            Bar(label=phase, parts={"highest total": self.phases[phase]}) for phase in PHASES if phase in self.phases
        ]
        pictures = [bars([peak], title=title, **limit), bars(phases, title="Highest total of each phase", **limit)]
        pipeline = self.pipeline.to_dict() if self.pipeline else None
        shared = (draw_mesh(self.job.parallelism, pipeline), schedule_picture(pipeline) if pipeline else "")
        return [*pictures, *filter(None, shared)]

    def headline(self) -> str:
        """Return whether it fits, and why."""
        return f"{'It fits.' if self.fits else 'It does not fit.'} {self.reason}"

    def tables(self) -> list[Table]:
        """Return the peak by part, the highest total of each phase, and a step's figures."""
        parts = {**{part: self.parts.get(part, 0) for part in PARTS}, **self.context, "all": self.needed_bytes}
        phases = [(phase, format_bytes(self.phases[phase])) for phase in PHASES if phase in self.phases]
        where = f"{self.ranks} x {self.hardware.device.name}"
        title = f"{self.model}, sharding {self.strategy.label}, {where}: highest need of a rank"
        strategy, train_config = self.strategy, self.train_config
        request = {name: value for name in ("offload", "adapter") if (value := getattr(strategy, name)) != "none"}
        request |= {
            name: getattr(strategy, name) for name in ("precision", "attention", "activation_checkpointing", "loss")
        }
        request |= {name: getattr(train_config, name) for name in ("micro_batch", "seq_len", "accumulation")}
        figures = {
            "time": self.step_seconds and format_step_seconds(self.step_seconds),
            "tokens/s": self.tokens_per_second and f"{self.tokens_per_second:,.0f}",
            "idle share of a rank": self.pipeline and f"{self.pipeline.idle_share:.1%}",
            "MFU": self.mfu and f"{self.mfu:.0%}",
            "host memory of a node": format_bytes(self.host_bytes),
            "operations of a rank": f"{self.operations:.3g}",
            "sent by a rank": format_bytes(self.communication_bytes),
            "a checkpoint": format_bytes(self.checkpoint_bytes),
            "steps wait for it": format_step_seconds(self.checkpoint_stall_seconds),
        }
        rows = [(name, figure) for name, figure in figures.items() if figure]
        return [
            Table(
                title=title,
                columns=("part", "bytes"),
                rows=[(part, format_bytes(size)) for part, size in parts.items() if size],
                notes=(f"With {', '.join(f'{name} {value}' for name, value in request.items())}.",),
            ),
            Table(title="By phase", columns=("phase", "bytes"), rows=phases),
            *([stages_table(self.pipeline.to_dict())] if self.pipeline else []),
            *([placements_table(self.placements)] if self.placements else []),
            Table(title="A step", columns=("figure", "value"), rows=rows, notes=self.unknown),
        ]
