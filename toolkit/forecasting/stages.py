"""The stages of a pipeline in a forecast: layers, times, memory, and how long each rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.core.display import JsonRecord, Table
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import Hardware
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.pipeline.balance import half_bytes, slots, unbalanced
from toolkit.engines.pipeline.orders import orders
from toolkit.engines.pipeline.schedules import idle_share
from toolkit.engines.played import FORWARD, Played, in_flight
from toolkit.engines.traces import Segment
from toolkit.forecasting.timing import play


@dataclass(frozen=True, kw_only=True)
class Stage(JsonRecord):
    """A stage, and the rank that holds it."""

    rank: int
    layers: tuple[int, int]
    """The first, and the one after the last."""
    weight_bytes: int
    """Bytes of its weights in half precision, as files hold them."""
    unbalanced_bytes: int
    """The same, if each stage had equally many slots."""
    forward: float
    """Seconds of a micro-batch's forward; operations where the device's speed is unknown."""
    backward: float
    peak_bytes: int
    """The allocator's peak of its rank, whose other stages count in it."""
    in_flight: int
    """The most micro-batches that the rank holds at once, each of its stages counted."""
    idle: float
    """The share of a step in which its rank waits."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(JsonRecord):
    """The forecast of a pipeline's stages and schedule."""

    json_fields = "schedule stages fullest_rank idle_share equal_stages_idle_share slowest_over_mean"

    schedule: str
    stages: tuple[Stage, ...]
    equal_stages_idle_share: float
    """The idle share with equal stages: (p - 1) / (v m + p - 1)."""
    slots: str
    """The blocks, the embedding and the head, with their sizes."""
    timed: bool
    """Whether times are seconds."""
    played: Played = field(repr=False)

    @property
    def idle_share(self) -> float:
        """The mean share of a step in which a rank waits, by the played schedule."""
        return self.played.idle_share

    @property
    def fullest_rank(self) -> int:
        """The rank with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes).rank

    @property
    def slowest_over_mean(self) -> float:
        """The time of the slowest stage over the mean of all."""
        times = [stage.forward + stage.backward for stage in self.stages]
        return max(times) * len(times) / sum(times)

    def table(self) -> Table:
        """Return a row for each stage."""
        rows = [
            (
                number,
                stage.rank,
                f"{stage.layers[0]}–{stage.layers[1] - 1}",
                format_gigabytes(stage.weight_bytes),
                format_gigabytes(stage.unbalanced_bytes),
                self._time(stage.forward),
                self._time(stage.backward),
                stage.in_flight,
                format_bytes(stage.peak_bytes) + (", the fullest" if stage.rank == self.fullest_rank else ""),
                f"{stage.idle:.1%}",
            )
            for number, stage in enumerate(self.stages)
        ]
        columns = (
            "stage",
            "rank",
            "layers",
            "weights",
            "equal slots",
            "forward",
            "backward",
            "in flight",
            "peak",
            "idle",
        )
        notes = (
            f"{self.slots} Weights are in half precision. equal slots: of as many slots on each stage, without balancing.",
            f"Ranks wait {self.idle_share:.1%} of a step on average, by the played schedule {self.schedule}; with equal stages "
            f"{self.equal_stages_idle_share:.1%}. The slowest stage takes {self.slowest_over_mean:.2f} of the mean.",
        )
        return Table(title="Stages", columns=columns, rows=rows, notes=notes)

    def _time(self, size: float) -> str:
        return format_step_seconds(size) if self.timed else f"{size:.3g} operations"


def format_gigabytes(size: int) -> str:
    """Return a size in units of 10^9 bytes, as files and cards are sold."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def build_pipeline(
    job: Job, machine: Hardware, steps: Sequence[Sequence[Segment]], ledgers: Sequence[Ledger]
) -> Pipeline | None:
    """Return the stages of a forecast; None where there are none.

    Args:
        job, machine: of the run.
        steps: a micro-batch of each stage.
        ledgers: of each rank along the pipeline.
    """
    played = play(job, machine, steps)
    if played is None:
        return None
    assert job.spec is not None
    cuts, pp = job.settings["stages"], job.parallelism.pp
    times = {(timed.action.stage, timed.action.kind == FORWARD): 0.0 for timed in played.actions}
    for timed in played.actions:
        if timed.action.micro == 0:  # a backward may come in two parts
            times[timed.action.stage, timed.action.kind == FORWARD] += timed.end - timed.begin
    held, bare, own = half_bytes(job.spec, cuts), half_bytes(job.spec, unbalanced(job.spec, len(cuts))), orders(job)
    stages = tuple(
        Stage(
            rank=number % pp * (job.ranks // pp),
            layers=tuple(cut),
            weight_bytes=held[number],
            unbalanced_bytes=bare[number],
            forward=times[number, True],
            backward=times[number, False],
            peak_bytes=ledgers[number % pp].peak,
            in_flight=in_flight(own[number % pp]),
            idle=played.idle[number % pp],
        )
        for number, cut in enumerate(cuts)
    )
    blocks, embedding, head = slots(job.spec)
    return Pipeline(
        schedule=job.strategy.pp_schedule,
        stages=stages,
        equal_stages_idle_share=idle_share(job),
        slots=f"{len(blocks) + 2} slots: {len(blocks)} blocks of {format_gigabytes(max(blocks))}, the embedding with "
        f"{format_gigabytes(embedding)}, the head with {format_gigabytes(head)}.",
        timed=job.device.card is not None,
        played=played,
    )
