"""A rank's step through a pipeline: micro-batches in flight, gradients that add up, and what torch keeps until the step's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from toolkit.core.units import BYTES_OF
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.pipeline.anatomy import Anatomy, anatomy_of, name_in_spec
from toolkit.engines.pipeline.sharding import sharded
from toolkit.engines.played import BACKWARD_INPUT, FORWARD, Action
from toolkit.engines.traces import Segment


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


class Walk:
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
            if action.kind != BACKWARD_INPUT:  # the first stage runs its backward whole, in the second part
                self._walk_backward(action, backward, folded)
        elif action.kind == BACKWARD_INPUT:
            self._walk_inputs(action.stage, forward, folded)
        else:
            self._walk_weights(action.stage, backward, folded)

    def _reduce(self, stage: int) -> None:
        """Free a stage's whole parameters, and reduce its gradients, module by module (`PipelineStage.perform_reduce_grad`)."""
        ledger, sums, (freed, shard) = self._ledger, self._sums[stage], self.sharded[stage]
        late = self._late.pop(stage, []) if self._wider > 1 else []
        whole = sum(sums) * self._wider
        if late and stage in self._added:
            ledger.touch("workspace", max(late) * max(0, self._copied - 1))
            ledger.hold("gradients", -sum(late))
        elif late:  # nothing was added up: they are reduced as they are
            whole = sum(late)
        # The input of the reduction takes the place of the module's parameters; its output comes before the gradients are freed.
        ledger.touch("workspace", max(sums) * (self._wider - 1) + max(sums) * shard // sum(sums))
        ledger.hold("gradients", shard - whole)
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
            sums[group_of(segment.name, parts)] += segment.size
    return list(sums.values())


def group_of(name: str, parts: Anatomy, place: int | None = None) -> tuple[int, str]:
    """Return what FSDP2 gathers a parameter with: its layer, or its module outside of the layers. `place`: of a tied one."""
    place = (parts.places(name) or [-1])[0] if place is None else place
    return place, "" if 0 <= place < parts.count else name_in_spec(name).rpartition(".")[0]


def _added_together(step: Sequence[Segment], parts: Anatomy) -> list[Segment]:
    """Return the step with a module's gradients added up where its backward ends: FSDP2 keeps those of another dtype until then."""
    groups: dict[Any, list[Segment]] = {}
    keys = [group_of(each.name, parts) if each.what == "gradient" else None for each in step]
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
