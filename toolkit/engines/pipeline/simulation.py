"""The forecast of a pipeline: a trace of each stage, played through a rank's step in the order of the schedule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from toolkit.core.units import BYTES_OF
from toolkit.engines.base import Engine
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.pipeline.actions import orders
from toolkit.engines.pipeline.anatomy import Anatomy, anatomy_of, held, name_in_spec, places_of
from toolkit.engines.pipeline.sharding import sharded
from toolkit.engines.played import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Played, play
from toolkit.engines.records import SCHEDULE, Transfer
from toolkit.engines.simulation import Simulation, blas_workspaces
from toolkit.engines.states import optimizer_bytes, parameters_of
from toolkit.engines.traces import Segment, Trace, TraceConfig


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
        walk = _Walk(ledger, job, {stage: simulation.steps[stage] for stage in stages})
        if sharded(job):
            # Whole in the compute dtype, from the first forward to the last backward of a stage.
            size, state = job.parallelism.shard_size, simulation.state
            whole = (
                state.trainable * size * BYTES_OF[job.compute_dtype] // BYTES_OF[job.weight_dtype],
                state.frozen * size,
            )
            gathered = sum(whole)
            ledger.hold("parameters", gathered)
            highest, last_one = _gather_shares(inside, places_of(job, rank))
            ledger.touch("buffers", int(max(highest * gathered, last_one * gathered + walk.forward_rise)))
            for stage, shares in _shares_by_stage(inside, job.settings["stages"], stages).items():
                freed = sum(int(share * each) for share, each in zip(shares, whole, strict=True))
                walk.sharded[stage] = freed, int(shares[0] * state.trainable)
        walk.run(orders(job)[_place(job, rank)])
        ledger.enter("step")
        trained = (state for state in parameters_of(local.job) if state.trainable)
        local.optimizer_step(self.inner.rank_elements(local.job, state) for state in trained)
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
            parts = {FORWARD: forward, BACKWARD: backward, INPUT: half, WEIGHT: backward - half}
            named |= {(kind, stage): seconds for kind, seconds in parts.items()}
        return play(orders(job), named, send, after)


def hidden_bytes(job: Job) -> int:
    """Return the bytes of what two stages exchange for a micro-batch."""
    assert job.spec is not None
    config, whole = job.train_config, job.strategy.adapter == "none" and not sharded(job)
    each = BYTES_OF[job.weight_dtype if whole else job.compute_dtype]
    return config.micro_batch * config.seq_len * job.spec.hidden * each


def _kept_for_weights(job: Job, first: int, end: int) -> int:
    """Return the bytes of the gradients of the outputs of a stage's modules with weights: torch keeps them between I and W."""
    assert job.spec is not None
    parts, rows, outputs = anatomy_of(job.spec), hidden_bytes(job) // job.spec.hidden, 0
    for parameter in job.spec.parameters:
        places = {place for name in job.spec.names_of(parameter.name) for place in parts.places(name)}
        if parameter.name.endswith(".weight") and any(
            first <= each < end or each == end == parts.count for each in places
        ):
            outputs += parameter.shape[0]
    return rows * outputs


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
        key = place, "" if 0 <= place < parts.count else name_in_spec(state.name).rpartition(".")[0]
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


class _Walk:
    """Enters a rank's actions. Micro-batches in flight add up; the first backward of each stage leaves gradients.

    torch keeps what a rank has sent: with 1F1B the last gradient and the hidden states of the last forward but one before the
    first backward, otherwise all tensors until the step's end (`torch.distributed.pipelining.schedules`, `_step_microbatches`).
    """

    def __init__(self, ledger: Ledger, job: Job, steps: Mapping[int, Sequence[Segment]]) -> None:
        self._ledger, self._size = ledger, hidden_bytes(job)
        self._last, self._keeps = len(job.settings["stages"]) - 1, job.strategy.pp_schedule != "1f1b"
        self._micros = job.train_config.accumulation
        # FSDP2 adds gradients up in the dtype in which it reduces them. A CPU copies an addend of another dtype.
        self._wider = BYTES_OF[job.weight_dtype] // BYTES_OF[job.compute_dtype] if sharded(job) else 1
        self._copied = 1 + self._wider if self._wider > 1 and job.device.kind == "cpu" else 0
        assert job.spec is not None
        parts = anatomy_of(job.spec)
        added = {stage: _added_together(step, parts) if self._wider > 1 else step for stage, step in steps.items()}
        self._halves = {stage: _halves(tuple(step), self._copied) for stage, step in added.items()}
        split = [stage for stage in steps if stage and job.settings["splits_backward"]]
        self._for_weights = {stage: _kept_for_weights(job, *job.settings["stages"][stage]) for stage in split}
        """Of the stages with a backward in two parts."""
        self._backward_done: set[int] = set()
        self._late: dict[int, list[int]] = {}
        """Bytes of the gradients that the last second part of a stage has left, in the dtype of its weights."""
        self._added: set[int] = set()
        """Stages of which FSDP2 has added up some."""
        self.sharded: dict[int, tuple[int, int]] = {}
        """Of stages that FSDP2 shards between steps: bytes of the whole parameters, and of a rank's part of the gradients."""
        self._sums = {stage: _sums_by_group(step, parts) for stage, step in steps.items()}
        self._kept = 0
        self.forward_rise = max(forward[0] for forward, *_ in self._halves.values())
        """The most that activations of one micro-batch rise by in a forward, in bytes."""

    def run(self, order: Sequence[Action]) -> None:
        """Enter a step's actions, and free what was sent."""
        last = {action.stage: number for number, action in enumerate(order)}  # a stage ends with a backward
        for number, action in enumerate(order):
            self._enter(action)
            if number == last[action.stage] and action.stage in self.sharded:
                self._reduce(action.stage)
        self._ledger.hold("buffers", -self._kept)

    def _enter(self, action: Action) -> None:
        forward, backward, folded = self._halves[action.stage]
        if action.kind == FORWARD:
            self._ledger.enter("forward")
            self._ledger.walk(*forward)
            return
        self._ledger.enter("backward")
        if action.stage not in self._for_weights:
            if action.kind != INPUT:  # the first stage runs its backward whole, in the second part
                self._walk_backward(action, backward, folded)
        elif action.kind == INPUT:
            self._walk_inputs(action.stage, forward, folded)
        else:
            self._walk_weights(action.stage, backward, folded)

    def _reduce(self, stage: int) -> None:
        """Free a stage's whole parameters, and reduce its gradients, module by module (`PipelineStage.perform_reduce_grad`)."""
        ledger, sums, (freed, shard) = self._ledger, self._sums[stage], self.sharded[stage]
        late = self._late.pop(stage, []) if self._wider > 1 else []
        if late:
            ledger.touch("workspace", max(late) * max(0, self._copied - 1))
            ledger.hold("gradients", -sum(late))
        # The input of the reduction takes the place of the module's parameters; its output comes before the gradients are freed.
        ledger.touch("workspace", max(sums) * (self._wider - 1) + max(sums) * shard // sum(sums))
        ledger.hold("gradients", shard - sum(sums) * self._wider)
        ledger.hold("parameters", -freed)

    def _walk_inputs(self, stage: int, forward: tuple[int, int, int, int], folded: tuple[int, int, int, int]) -> None:
        """Enter the first part of a backward: what the loss made of the logits is freed, all before the head stays."""
        ledger, kept = self._ledger, self._for_weights[stage]
        sizes = self._late.pop(stage, []) if self._wider > 1 else []
        if sizes and stage in self._added:  # what the second part of an earlier backward left (`post_backward`)
            ledger.touch("workspace", max(sizes) * max(0, self._copied - 1))
        elif sizes:
            ledger.hold("gradients", sum(sizes) * self._wider)
            self._added.add(stage)
        ledger.hold("gradients", -sum(sizes))
        ledger.touch("activations", max(folded[0], kept))
        ledger.hold("activations", kept)
        ledger.hold("logits", -forward[3])
        self._keep_sent(1)

    def _walk_weights(self, stage: int, backward: Sequence[Segment], folded: tuple[int, int, int, int]) -> None:
        """Enter the second part of a backward. Its gradients have the dtype of the weights in the forward."""
        _, net, _, logits = folded
        sizes = [segment.size for segment in backward if segment.what == "gradient"]
        if stage not in self._backward_done or (self._wider > 1 and stage not in self._late):
            self._ledger.hold("gradients", sum(sizes))
            self._late[stage] = sizes
            self._backward_done.add(stage)
        else:
            self._ledger.touch("gradients", max(sizes))
        self._ledger.hold("activations", net - logits - self._for_weights[stage])
        self._keep_sent(stage < self._last)

    def _walk_backward(self, action: Action, backward: Sequence[Segment], folded: tuple[int, int, int, int]) -> None:
        stage = action.stage
        first = stage not in self._backward_done
        if first:
            for segment in backward:
                self._ledger.walk(*segment[:4])
                if segment.what == "gradient":
                    self._ledger.touch("gradients", segment.size * (1 + self._wider) if self._wider > 1 else 0)
                    self._ledger.hold("gradients", segment.size * self._wider)
            self._backward_done.add(stage)
        else:
            self._ledger.walk(*folded)
        if self._keeps:
            kept = (stage > 0) + (stage < self._last)
        else:
            before = min(self._micros, self._last + 1 - stage)
            kept = (first and stage > 0) + (stage < self._last and action.micro == before - 2)
        self._keep_sent(kept)

    def _keep_sent(self, tensors: int) -> None:
        """Keep what was sent until the step's end."""
        self._kept += tensors * self._size
        self._ledger.hold("buffers", tensors * self._size)


def _sums_by_group(step: Sequence[Segment], parts: Anatomy) -> list[int]:
    """Return the bytes of the gradients of each of FSDP2's modules."""
    sums: Counter[tuple[int, str]] = Counter()
    for segment in step:
        if segment.what == "gradient":
            sums[_group_of(segment.name, parts)] += segment.size
    return list(sums.values())


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


def _group_of(name: str, parts: Anatomy) -> tuple[int, str]:
    """Return what FSDP2 gathers a parameter with: its layer, or its module outside of the layers."""
    place = (parts.places(name) or [-1])[0]
    return place, "" if 0 <= place < parts.count else name_in_spec(name).rpartition(".")[0]


def _added_together(step: Sequence[Segment], parts: Anatomy) -> list[Segment]:
    """Return the step with a module's gradients added up where its backward ends: FSDP2 keeps those of another dtype until then."""
    groups: dict[Any, list[Segment]] = {}
    keys = [_group_of(each.name, parts) if each.what == "gradient" else None for each in step]
    result: list[Segment] = []
    for index, (segment, key) in enumerate(zip(step, keys, strict=True)):
        if key is None:
            result.append(segment)
            continue
        net = segment.net + segment.size
        result.append(segment._replace(what="", size=0, net=net, rise=max(segment.rise, net)))
        groups.setdefault(key, []).append(Segment(0, -segment.size, 0, 0, "gradient", segment.size, segment.name))
        if key not in keys[index + 1 :]:
            result += groups.pop(key)
    return result


@lru_cache(maxsize=128)
def _halves(
    step: tuple[Segment, ...], copied: int
) -> tuple[tuple[int, int, int, int], tuple[Segment, ...], tuple[int, int, int, int]]:
    """Return a step's forward as one change, the segments of its backward, and these as one change.

    `copied`: how often a gradient counts while it is added to an earlier one.
    """
    middle = 1 + next(index for index, segment in enumerate(step) if segment.what == "backward")
    return _fold(step[:middle]), step[middle:], _fold(step[middle:], copied)


def _fold(segments: Sequence[Segment], copied: int = 0) -> tuple[int, int, int, int]:
    """Return rise and net of segments in a row, and the logits among them at the highest moment and at the end."""
    rise = net = logits_rise = logits = 0
    for segment in segments:
        if net + segment.rise > rise:
            rise, logits_rise = net + segment.rise, logits + segment.logits_rise
        net, logits = net + segment.net, logits + segment.logits_net
        if segment.what == "gradient" and net + segment.size * copied > rise:
            rise, logits_rise = net + segment.size * copied, logits
    return rise, net, logits_rise, logits
