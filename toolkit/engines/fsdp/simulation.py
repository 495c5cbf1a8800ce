"""FSDP2: parameters are gathered before a module and freed after it; gradients are reduce-scattered.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py; which modules make a group:
accelerate/utils/fsdp_utils.py `fsdp2_prepare_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.base import Engine
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.records import StateMemory, Transfer
from toolkit.engines.simulation import (
    expert_copies,
    hold_moments,
    host_transfers,
    optimizer_step,
    quantization_constants,
    stream_weights,
    streams,
    walk,
)
from toolkit.engines.states import State, optimizer_bytes, optimizer_dtypes, parameters_of
from toolkit.engines.traces import Segment, Trace


def shard_elements(state: State, ranks: int) -> int:
    """Return the elements of a parameter that each of `ranks` holds: equally many rows, the last padded."""
    rows = state.shape[0] if state.shape else 1
    return ceil_div(rows, ranks) * (state.elements // rows)


def reduce_dtype(job: Job) -> str:
    """Return torch's name of the dtype in which gradients are summed over the ranks."""
    return str(job.settings["reduce_dtype"] or job.weight_dtype)


class FSDPForecast(Engine):
    """The forecast's half of the engine: states, events of a step, transfers."""

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return a shard of everything: each parameter is split along its first dimension, padded to equal parts.

        torch `_fully_shard/_fsdp_param.py`: the padded shard stays allocated. The parameters are the masters.
        """
        states, ranks = list(parameters_of(job)), job.parallelism.shard_size
        trained = sum(shard_elements(state, ranks) for state in states if state.trainable)
        return StateMemory(
            trainable=trained * BYTES_OF[job.weight_dtype],
            frozen=sum(shard_elements(state, ranks) * BYTES_OF[state.dtype] for state in states if not state.trainable),
            optimizer=optimizer_bytes(job, trained),
            dtypes={
                **dict.fromkeys(("trainable", "gradients"), job.weight_dtype),
                "optimizer": optimizer_dtypes(job),
                "reduce": reduce_dtype(job),
            },
        )

    def is_boundary(self, trace: Trace, what: str, name: str) -> bool:
        """Return whether the event is a gradient, the end of the forward, or a gathered module."""
        if what == "gradient" or not name or name in trace.ends:
            return True
        return any(stack.name == name.rpartition(".")[0] for stack in trace.stacks)

    def simulate_load(self, job: Job, ledger: Ledger, *, rank: int) -> None:
        """Load and prepare. Where weights cannot be streamed, rank 0 reads the whole model and shares it out.

        Packed weights are then read by every rank, and `fsdp2_prepare_model` keeps them all until the last is sharded.
        """
        if streams(job):
            _simulate_stream(job, ledger)
            return
        states = parameters_of(job)
        ledger.enter("load")
        # A GPU's are read into the host's memory, unless they are packed.
        whole, beside = sum(state.bytes for state in states), expert_copies(job)
        read = whole if job.device.kind == "cpu" or job.strategy.quantized else 0
        ledger.hold("parameters", read)
        if read:
            ledger.touch("workspace", beside)
        else:
            ledger.rank0_host(whole + beside)
        ledger.hold("buffers", quantization_constants(job))
        ledger.enter("prepare")
        keep = ledger.offload if job.strategy.offload != "none" else ledger.hold
        if job.strategy.quantized:
            keep("parameters", self.expected_state(job, rank).parameters)
        else:
            _scatter_full_state(job, ledger, keep)
        ledger.hold("parameters", -read)
        ledger.rank0_host(-ledger.alone)

    def simulate_training(
        self, job: Job, trace: Trace, step: Sequence[Segment], ledger: Ledger, *, rank: int, checkpoints: bool
    ) -> None:
        """Simulate the moments, and one step of all micro-batches."""
        hold_moments(ledger, job, self.expected_state(job, rank), checkpoints, offload=job.strategy.offload != "none")
        walk(ledger, job, step, _Groups(job, trace, ledger))
        ledger.enter("step")
        trained = (state for state in parameters_of(job) if state.trainable)
        optimizer_step(ledger, job, (shard_elements(state, job.parallelism.shard_size) for state in trained))
        ledger.hold("gradients", -ledger.held["gradients"])

    def communication(self, job: Job) -> list[Transfer]:
        """Return all-gathers, reduce-scatters and, between groups, all-reduces: each (N - 1)/N of the tensors.

        Source: Rajbhandari et al. 2020, section 7.
        """
        states, ranks, micro = parameters_of(job), job.parallelism.shard_size, job.train_config.accumulation
        share = (ranks - 1) / ranks
        compute = BYTES_OF[job.compute_dtype]
        whole = sum(state.elements * (compute if state.trainable else BYTES_OF[state.dtype]) for state in states)
        reduced = sum(state.elements for state in states if state.trainable) * BYTES_OF[reduce_dtype(job)]
        sent = [Transfer(share * whole, micro, "forward", "ring", "parameters, all-gathered for the forward")]
        if job.settings["reshard_after_forward"]:
            gathered = "parameters, all-gathered for the backward"
            sent.append(Transfer(share * whole, micro, "backward", "ring", gathered))
        sent.append(Transfer(share * reduced, micro, "backward", "ring", "gradients, reduce-scattered"))
        if (groups := job.parallelism.dp_replicate) > 1:
            size = 2 * (groups - 1) / groups * reduced / ranks
            sent.append(Transfer(size, micro, "backward", "replicas", "gradients, all-reduced between the groups"))
        return [*sent, *host_transfers(job)]


def _simulate_stream(job: Job, ledger: Ledger) -> None:
    """Follow `loading`: only an adapter is there before `prepare`, whole until all of it is sharded."""
    assert job.spec is not None
    states = parameters_of(job)
    trained = sum(shard_bytes(job, state) for state in states if state.trainable)
    drawn = sum(state.bytes for state in states if state.trainable) if job.strategy.adapter != "none" else 0
    keep = ledger.offload if job.strategy.offload != "none" else ledger.hold
    ledger.enter("load")
    # torch makes each parameter before Accelerate moves it to the meta device.
    largest = max(parameter.elements for parameter in job.spec.parameters)
    ledger.touch_host("workspace", largest * BYTES_OF[job.compute_dtype if drawn else job.weight_dtype])
    ledger.offload("parameters", drawn)
    ledger.enter("prepare")
    if drawn:
        keep("parameters", trained)
    if job.strategy.quantized:
        ledger.offload("parameters", -drawn)
    for state in stream_weights(job, ledger):
        keep("parameters", shard_bytes(job, state))
    if not job.strategy.quantized:
        ledger.offload("parameters", -drawn)


def _scatter_full_state(job: Job, ledger: Ledger, keep: Callable[[str, int], None]) -> None:
    """Follow `fsdp2_load_full_state_dict`: for each name the whole tensor, and a shard of it, which stays.

    Tied weights have a shard for each of their names, until they are tied again. The fullest rank is one that receives:
    it makes the next whole tensor while it has the last one. On a CPU it is rank 0, if that has the whole model.
    """
    assert job.spec is not None
    by_name = {state.name: state for state in parameters_of(job)}
    twins = [by_name[group[0]] for group in job.spec.tied for _ in group[1:]]
    last = 0
    for state in (*by_name.values(), *twins):
        ledger.touch("workspace", last + state.bytes)
        keep("parameters", shard_bytes(job, state))
        ledger.touch("workspace", state.bytes)
        last = state.bytes if job.device.kind == "cuda" and job.ranks > 1 else 0
    keep("parameters", -sum(shard_bytes(job, state) for state in twins))


def shard_bytes(job: Job, state: State) -> int:
    """Return the bytes of a parameter that each rank holds."""
    return shard_elements(state, job.parallelism.shard_size) * BYTES_OF[state.dtype]


@dataclass
class _Group:
    """Parameters that are gathered together: a layer, the embedding, the last norm and head, or the rest."""

    elements: int = 0
    """Padded so that each rank holds equally many rows of each parameter."""
    trained: int = 0
    """The trained ones."""
    cast: int = 0
    """Those that are stored in another dtype than the compute dtype."""
    resharded: bool = True
    """Whether it is let go behind its forward."""
    first: str = ""
    """The module whose forward begins the group's."""
    last: str = ""
    """The module whose forward ends it."""
    gradients: dict[str, int] = field(default_factory=dict)
    """Bytes of whole gradients that wait to be reduced."""
    names: list[str] = field(default_factory=list)
    """The parameters, in the order of the modules."""


class _Groups:
    """The groups of one rank, and what of them is whole."""

    grows = True

    def __init__(self, job: Job, trace: Trace, ledger: Ledger) -> None:
        self._ledger, self._ranks = ledger, job.parallelism.shard_size
        self._compute = BYTES_OF[job.compute_dtype]
        self._reduce = BYTES_OF[job.settings["reduce_dtype"] or job.weight_dtype]
        self._gloo = job.device.kind == "cpu"
        self._offload = job.strategy.offload != "none"
        self._replicas = job.parallelism.dp_replicate > 1
        self._waiting = 0
        """Bytes of reduced shards that are still on the device although they are offloaded."""
        self._groups, self._owner = _groups(job, trace)
        self._firsts = {group.first: key for key, group in self._groups.items() if key}
        self._lasts = {group.last: key for key, group in self._groups.items() if key}
        self._whole: set[str] = set()
        self._scattered: set[str] = set()
        self._order: list[str] = []
        """Groups whose forward has ended, the last at the end: the backward prefetches them."""
        self._early: str | None = None
        self._gathered = 0
        """Bytes of the last gather's output, kept until the next one's is copied out."""
        self._reducing = 0
        """Bytes of the input of the last reduce-scatter, kept until the next one begins."""

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """Handle the begin and end of modules, and gradients."""
        if what == "gradient":
            self._ledger.hold("gradients", size)
            self._groups[self._owner[name]].gradients[name] = size
        elif what == "forward":  # what no other group has is gathered, and stays
            self._order = []
            self._gather("")
        elif what == "backward":
            self._prefetch()
        elif what == "end":
            for group in [*self._groups]:
                self._reduce_scatter(group)
            self._ledger.hold("buffers", -self._reducing - self._waiting)
            self._reducing = self._waiting = 0
            if self._early is not None:  # a frozen group's, which no backward used
                self._ledger.hold("buffers", -self._groups[self._early].elements * self._compute)
                self._early = None
        else:
            self._module(what, name, backward)

    def _module(self, what: str, name: str, backward: bool) -> None:
        if not name and what == "out":  # the root's `_post_forward` frees the last all-gather's output
            self._release_gathered()
        begins, ends = self._firsts.get(name), self._lasts.get(name)
        if what == "in" and begins and not backward:
            self._gather(begins)
        elif what == "out" and ends and not backward:
            self._order.append(ends)
            if self._groups[ends].resharded:
                self._free_whole(ends)
        elif what == "back in" and ends:
            self._gather(ends, backward=True)
            self._prefetch()
        elif what == "back out" and begins:
            self._reduce_scatter(begins)

    def _gather(self, key: str, *, backward: bool = False) -> None:
        """Cast this rank's shards, gather them, and copy each parameter out of the result."""
        size = self._groups[key].elements * self._compute
        if not size or key in self._whole:
            return
        if self._early == key:
            self._early = None
        else:
            self._collect(key)
        if not backward:
            self._release_gathered()
        self._ledger.hold("buffers", size)
        if backward:
            self._ledger.hold("buffers", -size)
        else:
            self._gathered = size
        self._whole.add(key)

    def _collect(self, key: str) -> None:
        group = self._groups[key]
        # Offloaded shards are copied to the device; shards of another dtype are cast.
        copied = group.elements if self._offload else group.cast
        size, cast = group.elements * self._compute, copied // self._ranks * self._compute
        self._ledger.hold("buffers", cast)
        self._ledger.hold("buffers", size)
        if self._gloo:
            self._ledger.touch("workspace", size)  # gloo gathers into its own buffer
        self._ledger.hold("buffers", -cast)

    def _release_gathered(self) -> None:
        self._ledger.hold("buffers", -self._gathered)
        self._gathered = 0

    def _prefetch(self) -> None:
        """Follow `_backward_prefetch`: gather the next group before this one computes."""
        if self._order:
            key = self._order.pop()
            if key not in self._whole and self._early is None:
                self._collect(key)
                self._early = key

    def _free_whole(self, key: str) -> None:
        if key in self._whole:
            self._whole.remove(key)
            self._ledger.hold("buffers", -self._groups[key].elements * self._compute)

    def _reduce_scatter(self, key: str) -> None:
        """Let the parameters go; copy the gradients into one buffer, which lives until the next group's; add up and scatter."""
        self._free_whole(key)
        group = self._groups[key]
        if not group.gradients:
            return
        self._ledger.hold("buffers", -self._reducing)
        self._reducing = group.trained * self._reduce
        self._ledger.hold("buffers", self._reducing)
        # A loop's variable keeps the last one until all is done (`foreach_reduce`).
        last = max(group.gradients, key=group.names.index)
        gradient = group.gradients.pop(last)
        self._ledger.hold("gradients", -sum(group.gradients.values()))
        shard = group.trained // self._ranks * self._reduce
        keep = self._ledger.offload if self._offload else self._ledger.hold
        keep("gradients", shard)
        if (
            self._offload and not self._gloo
        ):  # on its way; of replicas until the backward has ended (`_all_reduce_state`)
            if self._replicas:
                self._ledger.hold("buffers", shard)
                self._waiting += shard
            else:
                self._ledger.touch("buffers", shard)
        if self._gloo:
            self._ledger.touch("workspace", self._reducing)  # gloo's reduce-scatter works on a copy
        self._ledger.hold("gradients", -gradient)
        group.gradients = {}
        if key in self._scattered:  # added to what earlier micro-batches left
            keep("gradients", -shard)
        self._scattered.add(key)


def _groups(job: Job, trace: Trace) -> tuple[dict[str, _Group], dict[str, str]]:
    """Return every group by name, and the group of every parameter."""
    assert job.spec is not None
    embedding, norm, head = trace.ends
    resharded = bool(job.settings["reshard_after_forward"])
    layers = [f"{stack.name}.{index}" for stack in trace.stacks for index in range(len(stack.kinds))]
    groups = {layer: _Group(resharded=resharded, first=layer, last=layer) for layer in layers}
    tied = any(f"{embedding}.weight" in names and f"{head}.weight" in names for names in job.spec.tied)
    if embedding is not None and not tied:
        groups[embedding] = _Group(resharded=resharded, first=embedding, last=embedding)
    tail = [name for name in (embedding if tied else None, norm, head) if name is not None]
    if tail:
        groups["tail"] = _Group(resharded=False, first=tail[0], last=tail[-1])
    groups[""] = _Group(resharded=False)
    owner = {}
    for parameter in parameters_of(job):
        module = parameter.name.rpartition(".")[0]
        key = "tail" if module in tail else module
        while key not in groups:
            key = key.rpartition(".")[0]
        owner[parameter.name] = key
        groups[key].names.append(parameter.name)
        elements = shard_elements(parameter, job.parallelism.shard_size) * job.parallelism.shard_size
        groups[key].elements += elements
        groups[key].trained += elements if parameter.trainable else 0
        groups[key].cast += elements if parameter.dtype != job.compute_dtype else 0
    return groups, owner
