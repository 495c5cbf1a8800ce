"""The stages of a pipeline in a forecast: layers, times, memory, and how long each rank waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.core.display import JsonRecord, Table
from toolkit.core.gantt import SHADES, Span, spans, waits
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import Hardware
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.pipeline.actions import orders
from toolkit.engines.pipeline.balance import half_bytes, slots, unbalanced
from toolkit.engines.played import FORWARD, Played, in_flight
from toolkit.engines.traces import Segment
from toolkit.forecasting.timing import play

MOST_DRAWN = 4000
"""Actions of the longest schedule that is drawn, and written as JSON."""


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
    """The allocator's peak of its rank, with the rank's other stages."""
    in_flight: int
    """The most micro-batches that the rank holds at once, each of its stages counted."""
    idle: float
    """The share of a step in which its rank waits."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(JsonRecord):
    """The forecast of a pipeline's stages and schedule."""

    json_fields = (
        "schedule stages fullest_rank idle_share equal_stages_idle_share slowest_over_mean slots within_step timed length "
        "actions"
    )

    schedule: str
    stages: tuple[Stage, ...]
    equal_stages_idle_share: float
    """The idle share with equal stages: (p - 1) / (v m + p - 1)."""
    slots: str
    """The blocks, the embedding and the head, with their sizes."""
    within_step: str
    """What is whole within a step though ranks share it between steps; empty where nothing is."""
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

    @property
    def length(self) -> float:
        """The time from the first forward to the last backward."""
        return self.played.length

    @property
    def actions(self) -> list[tuple[int, str, int, int, float, float]]:
        """Place of the rank, kind (F, B; I and W for a backward in two parts), stage, micro-batch, begin and end of each action.

        Empty for a schedule of more than `MOST_DRAWN`.
        """
        return actions_of(self.played)


def actions_of(played: Played) -> list[tuple[int, str, int, int, float, float]]:
    """Return the actions of a schedule as `Pipeline.actions`."""
    if len(played.actions) > MOST_DRAWN:
        return []
    return [(timed.rank, *timed.action, timed.begin, timed.end) for timed in played.actions]


def schedule_record(played: Played) -> dict[str, Any]:
    """Return a schedule as it ran, for `memory.json`: its length, the ranks' idle shares, and its actions."""
    return {"length": played.length, "idle": list(played.idle), "actions": actions_of(played)}


STAGE_COLUMNS = "stage rank layers weights equal_slots forward backward in_flight peak idle"


def stages_table(pipeline: Mapping[str, Any], picture: str = "", ran: Mapping[str, Any] | None = None) -> Table:
    """Return a row for each stage of a pipeline's JSON; `ran`: the schedule as measured (`schedule_record`)."""
    timed, rows = pipeline["timed"], []
    for number, stage in enumerate(pipeline["stages"]):
        first, end = stage["layers"]
        sizes = (format_gigabytes(stage[f"{name}_bytes"]) for name in ("weight", "unbalanced"))
        times = (format_time(stage[name], timed) for name in ("forward", "backward"))
        peak = format_bytes(stage["peak_bytes"]) + ", the fullest" * (stage["rank"] == pipeline["fullest_rank"])
        shares = [stage["idle"], *([ran["idle"][number % len(ran["idle"])]] if ran else [])]
        cells = (*sizes, *times, stage["in_flight"], peak, *(f"{share:.1%}" for share in shares))
        rows.append((number, stage["rank"], str(first) if end == first + 1 else f"{first}–{end - 1}", *cells))
    notes = [
        f"{pipeline['slots']} Weights are in half precision. equal slots: as many on each stage, without balancing.",
        f"Ranks wait {pipeline['idle_share']:.1%} of a step on average, by the schedule {pipeline['schedule']} as played; with "
        f"equal stages {pipeline['equal_stages_idle_share']:.1%}. The slowest stage takes {pipeline['slowest_over_mean']:.2f} of "
        "the stages' mean time.",
    ]
    if pipeline["within_step"]:
        notes.append(f"Ranks share states between steps: {pipeline['within_step']}.")
    columns = [name.replace("_", " ") for name in STAGE_COLUMNS.split()]
    if ran:
        columns, share = [*columns, "idle, measured"], sum(ran["idle"]) / len(ran["idle"])
        notes.append(f"Measured: ranks spent {share:.1%} of the median step outside forward and backward.")
    return Table(title="Stages, as forecast", columns=columns, rows=rows, notes=notes, picture=picture)


def schedule_picture(pipeline: Mapping[str, Any], ran: Mapping[str, Any] | None = None) -> str:
    """Draw the schedule of a pipeline's JSON: a row for each rank, idle time by its cause. Empty for one that is too long.

    Args:
        pipeline: of a forecast.
        ran: the schedule as measured (`schedule_record`): its rows stand below the forecast's. A forecast without seconds is
            drawn as long as the measured step.
    """
    if not pipeline["actions"] or (ran and not ran["actions"]):
        return ""
    timed, ranks = pipeline["timed"], [stage["rank"] for stage in pipeline["stages"]]
    count = 1 + max(rank for rank, *_ in pipeline["actions"])
    scale = 1.0 if timed or not ran else ran["length"] / pipeline["length"]
    times, labels = _spans(pipeline, scale, 2 if ran else 1), [f"rank {rank}" for rank in ranks[:count]]
    idle = [f"{label} {stage['idle']:.1%}" for label, stage in zip(labels, pipeline["stages"], strict=False)]
    title = f"Schedule {pipeline['schedule']}: ranks wait {pipeline['idle_share']:.1%} of a step"
    if ran:
        times += [span._replace(row=span.row + 1) for span in _spans(ran, 1.0, 2)]
        labels = [f"{label}, {kind}" for label in labels for kind in ("forecast", "measured")]
        idle = [f"{words}, measured {share:.1%}" for words, share in zip(idle, ran["idle"], strict=True)]
        title += f", {sum(ran['idle']) / count:.1%} measured"
    kinds = list(SHADES)
    return spans(
        labels,
        sorted(times, key=lambda span: kinds.index(span.kind)),
        title=title,
        description="A row for each rank; numbers are of micro-batches. Idle: " + ", ".join(idle),
        spell=lambda size: format_time(size, timed or ran is not None),
    )


def _spans(schedule: Mapping[str, Any], scale: float, step: int) -> list[Span]:
    """Return the spans of a schedule's JSON, with idle time: those of the first rank in row 0, of the next in row `step`."""
    rows: dict[int, list[Span]] = {}
    for rank, kind, _, micro, begin, end in schedule["actions"]:
        name = "forward" if kind == FORWARD else "backward"
        rows.setdefault(rank, []).append(Span(step * rank, scale * begin, scale * end, name, str(micro)))
    end = scale * schedule["length"]
    return [span for rank, busy in rows.items() for span in (*busy, *waits(step * rank, busy, end))]


def format_time(size: float, timed: bool) -> str:
    """Return seconds, or operations where the device's speed is unknown."""
    return format_step_seconds(size) if timed else f"{size:.3g} operations"


def format_gigabytes(size: int) -> str:
    """Return a size in units of 10^9 bytes, as files and cards are sold."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


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
    equal = job.engine.play(job, [(1.0, 2.0)] * len(cuts))
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
        equal_stages_idle_share=equal.idle_share if equal is not None else 0.0,
        slots=f"{len(blocks) + 2} slots: {len(blocks)} blocks of {format_gigabytes(max(blocks))}, the embedding with "
        f"{format_gigabytes(embedding)}, the head with {format_gigabytes(head)}.",
        within_step=job.engine.within_step(job),
        timed=job.device.card is not None,
        played=played,
    )
