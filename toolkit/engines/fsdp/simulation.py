"""FSDP2: parameters are gathered before a module and freed after it; gradients are reduce-scattered.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py; which modules make a group:
accelerate/utils/fsdp_utils.py `fsdp2_prepare_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.base import Engine
from toolkit.engines.job import Job
from toolkit.engines.records import StateMemory, Transfer
from toolkit.engines.simulation import Buffers, Simulation, expert_copies, gathers, host_transfers
from toolkit.engines.states import State, optimizer_bytes, parameters_of
from toolkit.engines.traces import Trace
from toolkit.models import generic_name


def shard_elements(state: State, ranks: int, place: int = 0) -> int:
    """Return the elements of a parameter in one of `ranks` parts of its rows. Others are padded to the first."""
    rows = state.shape[0] if state.shape else 1
    most = ceil_div(rows, ranks)
    return max(0, min(most, rows - place * most)) * (state.elements // rows)


def ranks_apart(job: Job, module: str) -> int:
    """Return how many ranks shard a module that has a number of its own; 0 for all others."""
    apart: Mapping[str, int] = job.settings["apart"]
    return apart.get(generic_name(module), 0) if apart else 0


def shard_ranks(job: Job, name: str) -> int:
    """Return how many ranks share a parameter."""
    return ranks_apart(job, name.rpartition(".")[0]) or job.parallelism.shard_size


class FSDPForecast(Engine):
    """The forecast's half of the engine: states, events of a step, transfers."""

    def rank_elements(self, job: Job, state: State) -> int:
        """Return a shard: each parameter is split along its first dimension, padded to equal parts.

        torch `_fully_shard/_fsdp_param.py`: the padded shard stays allocated.
        """
        return shard_elements(state, shard_ranks(job, state.name))

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return the bytes of states that a rank holds. Parameters are padded to equal parts, moments are not."""
        own, trained = job.coordinates(rank), [state for state in parameters_of(job) if state.trainable]
        place = own.dp_shard * job.parallelism.cp + own.cp
        elements = sum(shard_elements(state, shard_ranks(job, state.name), place) for state in trained)
        return replace(super().expected_state(job, rank), optimizer=optimizer_bytes(job, elements))

    def reduce_dtype(self, job: Job) -> str:
        """Return the dtype of the mixed-precision policy, else the parameters'."""
        return str(job.settings["reduce_dtype"] or job.weight_dtype)

    def is_boundary(self, trace: Trace, what: str, name: str) -> bool:
        """Return whether the event is a gradient, the end of the forward, or a gathered module."""
        if what == "gradient" or not name or name in trace.ends:
            return True
        return any(stack.name == name.rpartition(".")[0] for stack in trace.stacks)

    def simulate_load(self, simulation: Simulation) -> None:
        """Load and prepare. Where weights cannot be streamed, rank 0 reads the whole model and shares out one after the other.

        Packed weights are then read by every rank, and `fsdp2_prepare_model` keeps them all until the last is sharded.
        """
        job, ledger = simulation.job, simulation.ledger
        if self.streams(job):
            _simulate_stream(simulation)
            return
        whole = sum(state.bytes for state in parameters_of(job))
        read = whole if job.device.kind == "cpu" or job.strategy.quantized else 0
        if read:
            simulation.hold_loaded(whole)
        else:  # into the host's memory
            ledger.enter("load")
            ledger.rank0_host(whole + expert_copies(job))
            ledger.enter("prepare")
        if job.strategy.quantized:
            simulation.hold("parameters", simulation.state.parameters)
            ledger.hold("parameters", -read)
            return
        for state in parameters_of(job):
            ledger.touch("workspace", 0 if read else state.bytes)
            simulation.hold("parameters", shard_bytes(job, state))
            ledger.hold("parameters", -state.bytes if read else 0)
        ledger.rank0_host(-ledger.rank0_bytes)

    def simulate_training(self, simulation: Simulation) -> None:
        """Simulate the moments, and one step of all micro-batches."""
        simulation.train(_Groups(simulation, BYTES_OF[self.reduce_dtype(simulation.job)]))

    def communication(self, job: Job) -> list[Transfer]:
        """Return all-gathers, reduce-scatters and, between groups, all-reduces: each (N - 1)/N of the tensors.

        Source: Rajbhandari et al. 2020, section 7.
        """
        width, micro = BYTES_OF[self.reduce_dtype(job)], job.train_config.accumulation
        share, trained = partial(_sent_share, job), [state for state in parameters_of(job) if state.trainable]
        size = width * sum(share(state) * state.elements for state in trained)
        transfers = gathers(job, backward=False, share=share)
        if job.settings["reshard_after_forward"]:
            kept = _kept_names(job)
            transfers += gathers(job, share=lambda state: 0.0 if state.name in kept else share(state))[1:]
        transfers.append(Transfer(size, micro, "backward", "ring", "gradients, reduce-scattered"))
        if (groups := job.parallelism.dp_replicate) > 1:
            elements = sum(shard_elements(each, shard_ranks(job, each.name)) for each in trained)
            size = 2 * (groups - 1) / groups * width * elements
            transfers.append(Transfer(size, micro, "backward", "replicas", "gradients, all-reduced between the groups"))
        return [*transfers, *host_transfers(job)]


def _kept_names(job: Job) -> set[str]:
    """Return the head's parameters, which the backward begins with: accelerate leaves them gathered after the forward."""
    assert job.spec is not None
    return {name for group in job.spec.tied for name in group} | {
        parameter.name for parameter in job.spec.parameters if parameter.role == "head"
    }


def _sent_share(job: Job, state: State) -> float:
    """Return (N - 1)/N of the ranks that share a parameter, with the padding of its parts."""
    ranks = shard_ranks(job, state.name)
    return (ranks - 1) * shard_elements(state, ranks) / state.elements


def _simulate_stream(simulation: Simulation) -> None:
    """Follow `streamed_weights`: only an adapter is there before `prepare`."""
    job, ledger = simulation.job, simulation.ledger
    assert job.spec is not None
    trained = [state for state in parameters_of(job) if state.trainable and job.strategy.adapter != "none"]
    adapter_bytes = sum(state.bytes for state in trained)
    ledger.enter("load")
    # torch makes each parameter before Accelerate moves it to the meta device.
    largest = max(parameter.elements for parameter in job.spec.parameters)
    ledger.touch_host("workspace", largest * BYTES_OF[job.compute_dtype if adapter_bytes else job.weight_dtype])
    ledger.offload("parameters", adapter_bytes)
    ledger.enter("prepare")
    simulation.hold("parameters", sum(shard_bytes(job, state) for state in trained))
    ledger.offload("parameters", -adapter_bytes)
    simulation.stream_weights(lambda state: shard_bytes(job, state), ranks=job.parallelism.shard_size)


def shard_bytes(job: Job, state: State) -> int:
    """Return the bytes of a parameter that each rank holds."""
    return shard_elements(state, shard_ranks(job, state.name)) * BYTES_OF[state.dtype]


@dataclass(eq=False)
class _Group:
    """Parameters that are gathered together: a layer, the embedding, the last norm and head, or the rest."""

    resharded: bool = True
    """Whether it is freed after its forward."""
    first: str = ""
    """The module with the first forward of the group."""
    last: str = ""
    """The module with the last forward of the group."""
    ranks: int = 1
    """That share it."""
    elements: int = 0
    """Padded so that each rank holds equally many rows of each parameter."""
    trained: int = 0
    """The trained ones."""
    names: list[str] = field(default_factory=list)
    """The parameters, in the order in which FSDP2 reduces them."""
    gradients: dict[str, int] = field(default_factory=dict)
    """Bytes of unsharded gradients that wait to be reduced."""
    reduced: bool = False
    """Whether an earlier micro-batch left its gradients' shards."""


class _Groups(Buffers):
    """The parameter groups of one rank, and their gathered tensors."""

    grows = True

    def __init__(self, simulation: Simulation, reduce: int) -> None:
        """Begin before the forward. `reduce`: bytes of an element that is summed over the ranks."""
        super().__init__(simulation)
        job = simulation.job
        self._compute, self._reduce = BYTES_OF[job.compute_dtype], reduce
        self._offload, self._replicas = job.strategy.offload != "none", job.parallelism.dp_replicate > 1
        self._groups, self._owner = _groups(job, simulation.trace)
        self._firsts = {group.first: group for group in self._groups if group.first}
        self._lasts = {group.last: group for group in self._groups if group.last}
        self._order: list[_Group] = []
        """Groups after their forward, the last at the end: the backward prefetches them."""
        self._parts = {state.name: state.elements * self._compute for state in parameters_of(job)}
        """Bytes of each gradient, of which tensor parallelism leaves this rank a part."""
        self._early: _Group | None = None
        """The group that was prefetched."""

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """Handle the begin and end of modules, and gradients."""
        first, last = self._firsts.get(name), self._lasts.get(name)
        if what == "gradient":
            self.ledger.hold("gradients", size)
            self._owner[name].gradients[name] = size
        elif what == "forward":  # what no other group has is gathered, and stays
            self._order = []
            self._gather(self._groups[-1])
        elif what == "backward":
            self._prefetch()
        elif what == "end":
            for group in self._groups:
                self._reduce_scatter(group)
            self.drop("reduced", "copied", "waiting", "early")
            self._early = None
        elif what == "out" and not name:  # the root's `_post_forward` frees the last all-gather's output
            self.drop("gathered")
        elif what == "in" and first and not backward:
            self._gather(first)
        elif what == "out" and last and not backward:
            self._order.append(last)
            if last.resharded:
                self.drop(last)
        elif what == "back in" and last:
            self._gather(last, backward=True)
            self.drop("copied")
            self._prefetch()
        elif what == "back in" and first:  # a tied embedding, gathered since the head's backward
            self.drop("copied")
        elif what == "back out" and first:
            self._reduce_scatter(first)

    def _gather(self, group: _Group, *, backward: bool = False) -> None:
        """Gather a group, and copy each parameter out of the result. A forward keeps the result until the next one's has come."""
        if self.held(group):
            return
        size = group.elements * self._compute
        if self._early is group:
            self.drop("early")
            self._early = None
        else:
            self.collective(size, more=size)
        if backward:
            self.ledger.touch("buffers", 2 * size)
        else:
            self.keep("gathered", size)
        self.keep(group, size)

    def _prefetch(self) -> None:
        """Follow `_backward_prefetch`: gather the next group before this one computes."""
        if self._order:
            group = self._order.pop()
            if not self.held(group) and self._early is None:
                self.collective(size := group.elements * self._compute, more=size)
                self.keep("early", size)
                self._early = group

    def _reduce_scatter(self, group: _Group) -> None:
        """Free the parameters. Copy the gradients into one buffer, which lives until the next group's; reduce and scatter it."""
        self._cut_gradients(group)
        self.drop(group)
        if not group.gradients:
            return
        self.drop("copied")
        whole = group.trained * self._reduce
        shard = whole // group.ranks
        self.keep("reduced", whole)
        # A loop's variable keeps the last one until all is done (`foreach_reduce`).
        last = group.gradients[max(group.gradients, key=group.names.index)]
        self.ledger.hold("gradients", last - sum(group.gradients.values()))
        self.simulation.hold("gradients", shard)
        self.collective(whole, more=shard if self._offload else 0)
        if self.job.device.kind == "cpu" and not self._replicas:
            # gloo's thread frees its copy once the next group's backward begins; an all-reduce between groups takes longer.
            self.keep("copied", whole, "workspace")
        self.ledger.hold("gradients", -last)
        group.gradients = {}
        if group.reduced:  # added to what earlier micro-batches left
            self.simulation.hold("gradients", -shard)
        if self._replicas and (group.reduced or self._offload):  # until the backward has ended (`_all_reduce_state`)
            self.keep("waiting", self.held("waiting") + shard)
        group.reduced = True

    def _cut_gradients(self, group: _Group) -> None:
        """Copy this rank's part out of a gradient that DTensor left whole, such as an embedding's (`_get_grad_inner_tensor`)."""
        for name, size in group.gradients.items():
            if size > (part := self._parts[name]):
                self.ledger.touch("gradients", part)
                self.ledger.hold("gradients", part - size)
                group.gradients[name] = part


def _groups(job: Job, trace: Trace) -> tuple[list[_Group], dict[str, _Group]]:
    """Return every group, the root's at the end, and the group of every parameter."""
    assert job.spec is not None
    embedding, norm, head = trace.ends
    resharded = bool(job.settings["reshard_after_forward"])
    layers = [f"{stack.name}.{index}" for stack in trace.stacks for index in range(len(stack.kinds))]
    tied = any(f"{embedding}.weight" in names and f"{head}.weight" in names for names in job.spec.tied)
    modules = dict.fromkeys(parameter.name.rpartition(".")[0] for parameter in parameters_of(job))
    apart = [module for module in modules if ranks_apart(job, module)]
    alone = [*apart, *layers, *([] if embedding is None or tied else [embedding])]
    most = job.parallelism.shard_size
    groups = {
        name: _Group(resharded=resharded, first=name, last=name, ranks=ranks_apart(job, name) or most) for name in alone
    }
    tail = [name for name in (embedding if tied else None, norm, head) if name is not None]
    if tail:
        groups["tail"] = _Group(resharded=False, first=tail[0], last=tail[-1], ranks=most)
    groups[""] = _Group(resharded=False, ranks=most)
    owner = {}
    for parameter in parameters_of(job):
        module = parameter.name.rpartition(".")[0]
        key = "tail" if module in tail else module
        while key not in groups:
            key = key.rpartition(".")[0]
        group = owner[parameter.name] = groups[key]
        elements = shard_elements(parameter, group.ranks) * group.ranks
        # accelerate wraps the last norm before tied weights.
        group.names.insert(0 if module == norm else len(group.names), parameter.name)
        group.elements += elements
        group.trained += elements if parameter.trainable else 0
    return [*groups.values()], owner
