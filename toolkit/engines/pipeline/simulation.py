"""The forecast of a pipeline: a trace of each stage, played through a rank's step in the order of the schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from toolkit.core.units import BYTES_OF
from toolkit.engines.base import Engine
from toolkit.engines.job import Job
from toolkit.engines.pipeline.actions import orders
from toolkit.engines.pipeline.anatomy import anatomy_of, held, name_in_spec, places_of
from toolkit.engines.pipeline.sharding import sharded
from toolkit.engines.pipeline.walk import Walk, group_of, hidden_bytes
from toolkit.engines.played import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Played, play
from toolkit.engines.records import SCHEDULE, Transfer
from toolkit.engines.simulation import Simulation, blas_workspaces
from toolkit.engines.states import optimizer_bytes, parameters_of
from toolkit.engines.traces import Trace, TraceConfig


class SimulatedPipeline(Engine):
    """What `Pipeline` forecasts. A rank's stages are traced apart, and its micro-batches in flight add up."""

    inner: Engine

    def simulated_ranks(self, job: Job) -> Sequence[int]:
        """Return the first rank of each stage: all stages differ, by their layers or their micro-batches in flight."""
        pp = job.parallelism.pp
        return range(0, job.ranks, job.ranks // pp)

    def inside(self, job: Job, rank: int | None = None) -> tuple[Job, int]:
        """Return the job that the inner engine answers for, and a rank of it (`Pipeline`)."""
        raise NotImplementedError

    def snapshot_bytes(self, job: Job, rank: int) -> int:
        """Return the bytes of the rank's own states. Two ranks write a tied weight's, a half each."""
        local, _ = self.inside(job, rank)
        states = [state for state in parameters_of(local) if state.trainable]
        twice = self._on_two_stages(job)
        elements = sum(state.elements // (2 if state.name in twice else 1) for state in states)
        return (elements * BYTES_OF[job.weight_dtype] + optimizer_bytes(job, elements)) // local.ranks

    def _on_two_stages(self, job: Job) -> frozenset[str]:
        """Return the names of the weights that the first and the last stage both hold."""
        return held(job, 0) & held(job, self.simulated_ranks(job)[-1])

    def trace_config(self, job: Job, *, masked: bool, rank: int = 0) -> TraceConfig:
        """Return the configuration of the first stage of a rank."""
        return self.trace_configs(job, masked=masked)[job.coordinates(rank).pp]

    def trace_configs(self, job: Job, *, masked: bool) -> list[TraceConfig]:
        """Return the configuration of each stage; stages of the same layers share one."""
        assert job.spec is not None
        config = self.inner.trace_config(self.inside(job)[0], masked=masked)
        kinds = layer_kinds(job)
        return [dataclasses.replace(config, stage=_first_alike(kinds, *stage)) for stage in job.settings["stages"]]

    def is_boundary(self, trace: Trace, what: str, name: str) -> bool:
        """Return whether the event is a gradient."""
        return what == "gradient"

    def simulate_load(self, simulation: Simulation) -> None:
        """Simulate reading a rank's own part into host memory."""
        job, ledger, own = simulation.job, simulation.ledger, simulation.state.parameters
        if sharded(job) and job.strategy.adapter != "none":
            own *= job.parallelism.shard_size  # in `prepare` it is sharded
        ledger.enter("load")
        ledger.offload("parameters", own)
        if not ledger.shared:  # on a CPU it is copied from the mapped file
            largest = max(state.bytes for state in parameters_of(self.inside(job, simulation.rank)[0]))
            ledger.touch_host("workspace", largest)
        ledger.enter("prepare")
        ledger.offload("parameters", -own)
        ledger.hold("parameters", own)
        ledger.hold("parameters", simulation.state.parameters - own)

    def simulate_training(self, simulation: Simulation) -> None:
        """Simulate a step: buffers for all that is received, and every action of the rank."""
        job, ledger, rank = simulation.job, simulation.ledger, simulation.rank
        inside, place = self.inside(job, rank)
        local = dataclasses.replace(simulation, job=inside, rank=place)
        local.hold_moments()
        ledger.enter("forward")
        ledger.hold("workspace", blas_workspaces(job) + local.kept_snapshot)
        stages = _stages_of(job, rank)
        last, size = len(job.settings["stages"]) - 1, hidden_bytes(job)
        sides = sum((stage > 0) + (stage < last) for stage in stages)
        ledger.hold("buffers", sides * job.train_config.accumulation * size)
        walk = Walk(ledger, job, {stage: simulation.steps[stage] for stage in stages})
        if sharded(job):
            # Whole in the compute dtype, from the first forward to the last backward of a stage.
            ranks, state = job.parallelism.shard_size, simulation.state
            trained = state.trainable * ranks * BYTES_OF[job.compute_dtype] // BYTES_OF[job.weight_dtype]
            whole = trained, state.frozen * ranks
            gathered = sum(whole)
            ledger.hold("parameters", gathered)
            highest, last_one = _gather_shares(inside, places_of(job, rank))
            ledger.touch("buffers", int(max(highest * gathered, last_one * gathered + walk.forward_rise)))
            for stage, shares in _shares_by_stage(inside, job.settings["stages"], stages).items():
                freed = sum(int(share * each) for share, each in zip(shares, whole, strict=True))
                walk.sharded[stage] = freed, int(shares[0] * state.trainable)
        walk.run(orders(job)[_place(job, rank)])
        ledger.enter("step")
        own = (state for state in parameters_of(local.job) if state.trainable)
        local.optimizer_step(self.inner.rank_elements(local.job, state) for state in own)
        ledger.hold("gradients", -ledger.held["gradients"])

    def communication(self, job: Job) -> list[Transfer]:
        """Return hidden states and their gradients, of a rank that sends most, and the sum of a tied weight's gradients."""
        assert job.spec is not None
        micro, last, pp = job.train_config.accumulation, len(job.settings["stages"]) - 1, job.parallelism.pp
        held_by = [range(place, last + 1, pp) for place in range(pp)]
        stages = max(held_by, key=lambda own: sum((stage < last) + (stage > 0) for stage in own))
        size = hidden_bytes(job)
        sent = [
            Transfer(
                size, micro * (len(stages) - (last in stages)), SCHEDULE, "pp", "hidden states, to the next stage"
            ),
            Transfer(
                size, micro * (len(stages) - (0 in stages)), SCHEDULE, "pp", "their gradients, to the stage before"
            ),
        ]
        sent = [each for each in sent if each.times]
        twice = self._on_two_stages(job)
        tied = sum(state.bytes for state in parameters_of(job) if state.name in twice)
        own = [Transfer(tied, 1, "nothing", "pp", "gradients of a tied weight, all-reduced by its two stages")]
        inside, _ = self.inside(job, 0)
        once = dataclasses.replace(inside, train_config=dataclasses.replace(inside.train_config, accumulation=1))
        # Over data-parallel ranks once a step, before the first forward or after the last backward; within tp in each micro-batch.
        over_data = [each for each in self.inner.communication(once) if each.link in ("ring", "replicas")]
        within = [each for each in self.inner.communication(inside) if each.link not in ("ring", "replicas")]
        return [*sent, *(own if tied else []), *(each._replace(overlaps="nothing") for each in over_data), *within]

    def play(self, job: Job, times: Sequence[tuple[float, float]], send: float = 0.0, after: float = 0.0) -> Played:
        """Play the schedule with the times of each stage's forward and backward, as `played.play`."""
        named: dict[tuple[str, int], float] = {}
        for stage, (forward, backward) in enumerate(times):
            # The first stage runs its backward whole, in the second part.
            half = backward / 2 if stage else 0.0
            parts = {FORWARD: forward, BACKWARD: backward, BACKWARD_INPUT: half, BACKWARD_WEIGHT: backward - half}
            named |= {(kind, stage): seconds for kind, seconds in parts.items()}
        return play(orders(job), named, send, after)


def _gather_shares(inside: Job, mine: Collection[int]) -> tuple[float, float]:
    """Return what gathering a stage's modules in turn holds in addition to the whole stage, as shares of it.

    The first is the most, the second what is left until the stage's forward ends: the output of an all-gather is kept until the
    next module's has come (`torch.distributed.fsdp`), and gloo gathers into a buffer of its own.
    """
    assert inside.spec is not None
    parts, sizes = anatomy_of(inside.spec), dict[tuple[int, str], int]()
    for state in parameters_of(inside):
        place = next(
            place for name in inside.spec.names_of(state.name) for place in parts.places(name) if place in mine
        )
        key = group_of(state.name, parts, place)
        sizes[key] = sizes.get(key, 0) + state.elements
    whole = before = highest = 0
    for _, size in sorted(sizes.items(), key=lambda item: item[0][0]):
        highest = max(highest, whole + before + size * (2 if inside.device.kind == "cpu" else 1))
        whole, before = whole + size, size
    return max(0.0, highest / whole - 1), before / whole


def _place(job: Job, rank: int) -> int:
    """Return the rank's place in its pipeline."""
    return int(job.coordinates(rank).pp)


def _stages_of(job: Job, rank: int) -> range:
    """Return the numbers of a rank's stages."""
    return range(_place(job, rank), len(job.settings["stages"]), job.parallelism.pp)


def layer_kinds(job: Job) -> tuple[Any, ...]:
    """Return what layers differ in, of each: shapes of parameters, the config's values by layer, the checkpointing's turn."""
    assert job.spec is not None
    parts = anatomy_of(job.spec)
    shapes: list[list[Any]] = [[] for _ in range(parts.count)]
    for parameter in job.spec.parameters:
        for place in parts.places(parameter.name):
            if 0 <= place < parts.count:
                shapes[place].append((parameter.name.removeprefix(f"{parts.layers}.{place}."), parameter.shape))
    lists = [each for each in job.spec.config.values() if isinstance(each, list) and len(each) == parts.count]
    _, _, every = job.strategy.activation_checkpointing.partition(":")
    return tuple(
        (tuple(own), *(str(each[index]) for each in lists), index % int(every or 1)) for index, own in enumerate(shapes)
    )


def _first_alike(kinds: Sequence[Any], first: int, end: int) -> tuple[int, int]:
    """Return the first stage with the same layers, so that stages share traces. Ends of the model are stages of their own."""
    if first == 0 or end == len(kinds):
        return first, end
    count = end - first
    starts = range(1, first + 1)
    start = next(start for start in starts if kinds[start : start + count] == kinds[first:end])
    return start, start + count


def _shares_by_stage(
    inside: Job, cuts: Sequence[Sequence[int]], stages: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Return each stage's shares of the rank's trained parameters and of its frozen ones."""
    assert inside.spec is not None
    parts, sums = anatomy_of(inside.spec), {stage: [0, 0] for stage in stages}
    ends = {-1: 0, parts.count: len(cuts) - 1}
    for state in parameters_of(inside):
        places = [place for name in inside.spec.names_of(name_in_spec(state.name)) for place in parts.places(name)]
        on = next(
            stage
            for place in places
            for stage in stages
            if cuts[stage][0] <= place < cuts[stage][1] or ends.get(place) == stage
        )
        sums[on][not state.trainable] += state.elements
    whole = [max(1, sum(each[part] for each in sums.values())) for part in (0, 1)]
    return {stage: (trained / whole[0], frozen / whole[1]) for stage, (trained, frozen) in sums.items()}
