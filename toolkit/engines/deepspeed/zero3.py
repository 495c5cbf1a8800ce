"""DeepSpeed ZeRO stage 3: parameters are partitioned while they are read, and gathered for the module that needs them.

Source: deepspeed/runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.config.strategy import Strategy
from toolkit.config.tables import PRECISIONS
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job
from toolkit.engines.simulation import Simulation, joined_experts, stream_weights
from toolkit.engines.states import can_stream, parameters_of

SUB_GROUP = 10**9
"""Elements of a rank's shard that are stepped at once (`sub_group_size`, at its default)."""

GLOO_THREADS = 2
"""Collectives that gloo works on at once (torch/csrc/distributed/c10d/ProcessGroupGloo.hpp `threads`)."""


def stage_of(strategy: Strategy) -> int:
    """Return the ZeRO stage."""
    return int(strategy.sharding.removeprefix("zero"))


def copies(job: Job) -> bool:
    """Return whether a whole parameter and its shard are two tensors; on one rank only with parameters on the host.

    Source: deepspeed/runtime/zero/partition_parameters.py `NoGatherHandle`.
    """
    return job.parallelism.shard_size > 1 or (job.strategy.offload == "cpu" and job.device.kind == "cuda")


def accumulation_dtype(job: Job) -> str:
    """Return torch's name of the dtype that gradients are added up in over micro-batches."""
    word = job.settings["data_types"]["grad_accum_dtype"] if job.precision.mixed else job.strategy.precision
    return PRECISIONS[word].compute


def partitioned(simulation: Simulation) -> None:
    """Simulate reading and partitioning: under `zero.Init` rank 0 reads each parameter whole and broadcasts it.

    Every rank reads packed weights whole, unless they are streamed.
    """
    job, ledger, keep = simulation.job, simulation.ledger, simulation.keep
    assert job.spec is not None
    states, ranks = parameters_of(job), job.parallelism.shard_size
    base = [state for state in states if not (state.trainable and job.strategy.adapter != "none")]
    if job.strategy.quantized and not can_stream(job):
        read = sum(state.bytes for state in states)
        simulation.hold_loaded(read)
        ledger.touch("parameters", max(ceil_div(state.bytes, ranks) for state in states))
        ledger.hold("parameters", -read)
        keep("parameters", simulation.state.parameters)
        return
    ledger.enter("load")
    twins = 0
    if job.strategy.quantized:
        adapter_bytes = sum(state.bytes for state in states if state.trainable)
        read = sum(ceil_div(state.bytes, ranks) for state in base)
        for state in stream_weights(simulation):
            keep("parameters", ceil_div(state.bytes, ranks))
    else:
        adapter_bytes, size = 0, BYTES_OF[job.compute_dtype]
        read = sum(ceil_div(state.elements, ranks) for state in base) * size
        by_name = {state.name: ceil_div(state.elements, ranks) * size for state in states}
        twins = sum(by_name.get(group[0], 0) for group in job.spec.tied for _ in group[1:])  # until they are tied
        keep("parameters", read + twins)
        # Experts that are joined as they are read are there once more, in the files' dtype, in rank 0's host memory.
        joined = joined_experts(job)
        files = joined * BYTES_OF.get(job.spec.config.get("dtype") or "float32", 4)
        ledger.touch("workspace", 2 * size * max(state.elements for state in base))
        if job.device.kind == "cpu":
            ledger.touch("workspace", 2 * size * joined + files)
        else:
            ledger.rank0_host(files)
            ledger.rank0_host(-files)
        keep("parameters", -twins)
    ledger.hold("parameters", adapter_bytes)
    ledger.enter("prepare")
    keep("parameters", -read)
    ledger.hold("parameters", -adapter_bytes)
    keep("parameters", simulation.state.parameters)
    if job.strategy.offload == "cpu" and job.strategy.adapter == "none":
        keep("parameters", twins)  # measured: a tied weight's second shard stays where the flat buffer takes the first


@dataclass(eq=False)
class _Gather:
    """Parameters of one gather. Its buffer lives until the last of them is used."""

    names: set[str]
    flat: int
    done: bool = False


class Fetches:
    """The parameters that the coordinator gathers for the next module and prefetches for later ones, and those it keeps.

    As from the second step on, when the coordinator knows the order of the modules.
    """

    grows = False  # gradients are added to shards that are there before the first

    def __init__(self, simulation: Simulation) -> None:
        job, ledger = simulation.job, simulation.ledger
        assert job.spec is not None
        zero, states = job.settings["zero_optimization"], parameters_of(job)
        self._simulation, self._ledger, self._job = simulation, ledger, job
        self._size, self._ranks = BYTES_OF[job.compute_dtype], job.parallelism.shard_size
        self._reduced = BYTES_OF["float32"] if "communication_data_type" in job.settings else self._size
        self._room, self._ahead = zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]
        self._elements = {state.name: state.elements for state in states}
        self._live, self._reuse = zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]
        limit = zero["stage3_param_persistence_threshold"]
        self._persistent = {name for name, elements in self._elements.items() if elements <= limit}
        self._own: dict[str, list[str]] = {}
        """Module → its parameters, tied ones by their first name."""
        tied = {other: names[0] for names in job.spec.tied for other in names[1:]}
        for name in (*self._elements, *tied):
            self._own.setdefault(name.rpartition(".")[0], []).append(tied.get(name, name))
        self._around = 1 if job.strategy.adapter == "none" else 3
        """Modules that begin where the whole model does: PEFT puts two around it."""
        entered = (segment.name for segment in simulation.step if segment.what in ("in", "back in"))
        order = [name for name in entered for _ in range(self._repeats(name))]
        sizes = {module: sum(self._elements[name] for name in names) for module, names in self._own.items()}
        self._passed = [0, *itertools.accumulate(sizes.get(module, 0) for module in order)]
        """Elements that are used before each place in the order."""
        self._places = [(name, at) for at, module in enumerate(order) for name in self._own.get(module, ())]
        self._uses: dict[str, list[int]] = {name: [] for name in self._elements}
        for name, at in self._places:
            self._uses[name].append(at)
        shards = [ceil_div(state.elements, self._ranks) for state in states if state.trainable]
        self._shard = sum(shards)
        self._offload = job.strategy.offload != "none"
        simulation.keep("gradients", self._shard * BYTES_OF[accumulation_dtype(job)])
        if self._offload:
            ledger.offload("gradients", self._shard * BYTES_OF[job.weight_dtype])
        ledger.hold("buffers", self._room * self._reduced)
        # `create_reduce_and_remove_grad_hooks` gathers one at a time; gloo gathers into its own buffer.
        copies = 2 if job.device.kind == "cpu" and self._ranks > 1 else 1
        ledger.touch("buffers", max(shards, default=0) * self._ranks * self._size * copies)
        self._available = 0
        """Elements that are gathered or being gathered (`__n_available_params`): `_live` bounds what is fetched ahead."""
        self._whole: dict[str, int] = {}
        """Gathered bytes."""
        self._under_way: dict[str, _Gather] = {}
        self._bucket: list[str] = []
        self._filled = 0
        self._copies: list[int] = []
        """Bytes that gloo's threads gather into while no module computes."""

    def _repeats(self, module: str) -> int:
        return 1 if module else self._around

    def _begin_micro_batch(self) -> None:
        """Start the coordinator's next step: forward and backward of one micro-batch."""
        self._at = 0
        self._queue = deque(self._places)
        self._fetched_for = dict.fromkeys(self._elements, -1)

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """Handle the begin and end of modules, gradients, and the end of the backward."""
        if what == "forward":
            self._begin_micro_batch()
        elif what in ("in", "back in"):
            for _ in range(self._repeats(name)):
                self._fetch(name)
        elif what in ("out", "back out") and name in self._own:
            self._release(name)
        elif what == "gradient":
            self._ledger.hold("gradients", size)
            self._on_gradient(name)
        elif what == "end":
            self._reduce()
            for gathered in [*self._whole]:
                self._free(gathered)

    def _fetch(self, module: str) -> None:
        """Follow `_fetch_sub_module_impl`: gather the module's parameters, then later ones up to the bucket's size."""
        own = self._own.get(module)
        if own is not None:
            self._wait_for(own)
        ahead: set[str] = set()
        count, most = 0, min(self._live - self._available, self._ahead)
        while self._queue and count < most:
            name, at = self._queue.popleft()
            self._fetched_for[name] = max(self._fetched_for[name], at)
            if self._is_missing(name) and name not in ahead:
                ahead.add(name)
                count += self._elements[name]
        if ahead:
            self._gather(ahead, idle=own is None)
        self._at += 1

    def _wait_for(self, own: Sequence[str]) -> None:
        """Gather the missing parameters, and take them off the prefetch queue."""
        if missing := {name for name in own if self._is_missing(name)}:
            self._gather(missing)
        for name in own:
            self._wait(name)
        if not self._persistent.issuperset(own):  # a norm computes for less time than gloo copies
            self._ledger.hold("workspace", -sum(self._copies))
            self._copies = []
        late = sum(self._fetched_for[name] < self._at for name in dict.fromkeys(own))
        for _ in range(min(late, len(self._queue))):
            name, at = self._queue.popleft()
            self._fetched_for[name] = at

    def _is_missing(self, name: str) -> bool:
        return name not in self._persistent and name not in self._whole and name not in self._under_way

    def _gather(self, names: set[str], *, idle: bool = False) -> None:
        """Follow `all_gather_coalesced`: one parameter into its own memory, several into a buffer and copies of it.

        `idle`: the module that begins computes little or nothing (it owns nothing), so gloo's threads are taken as not done
        before one computes that does. How far they are then, no forecast knows: a few per cent of a small batch's forward.
        """
        self._available += sum(self._elements[name] for name in names)
        if not copies(self._job):  # `_no_gather_coalesced`: its shard is the parameter
            self._whole |= dict.fromkeys(names, 0)
            return
        padded = sum(ceil_div(self._elements[name], self._ranks) for name in names) * self._ranks * self._size
        gather = _Gather(set(names), padded if len(names) > 1 else 0)
        if len(names) > 1:
            self._ledger.hold("buffers", padded)
        else:
            (name,) = names
            self._hold_whole(name, padded)
        if self._job.device.kind == "cpu":
            self._ledger.touch("workspace", padded)  # gloo gathers into its own buffer
            if idle and len(self._copies) < GLOO_THREADS:
                self._ledger.hold("workspace", padded)
                self._copies.append(padded)
        self._under_way |= dict.fromkeys(names, gather)

    def _wait(self, name: str) -> None:
        gather = self._under_way.pop(name, None)
        if gather is None:
            return
        if not gather.done and gather.flat:
            for parameter in sorted(gather.names):
                self._hold_whole(parameter, self._elements[parameter] * self._size)
        gather.done = True
        if not any(other is gather for other in self._under_way.values()):
            self._ledger.hold("buffers", -gather.flat)

    def _release(self, module: str) -> None:
        """Follow `__params_to_release`: keep what the next `_reuse` elements use again."""
        for name in dict.fromkeys(self._own[module]):
            if name not in self._whole or self._fetched_for[name] > self._at:
                continue
            uses = self._uses[name]
            following = bisect_left(uses, self._at)
            soon = following < len(uses) and self._passed[uses[following]] - self._passed[self._at] < self._reuse
            if not soon:
                self._free(name)

    def _hold_whole(self, name: str, size: int) -> None:
        self._whole[name] = size
        self._ledger.hold("buffers", size)

    def _free(self, name: str) -> None:
        self._available -= self._elements[name]
        self._ledger.hold("buffers", -self._whole.pop(name))

    def _on_gradient(self, name: str) -> None:
        """Follow `reduce_independent_p_g_buckets_and_remove_grads`."""
        elements = self._elements[name]
        if self._filled and self._filled + elements > self._room:
            self._reduce()
        if self._filled + elements <= self._room:
            self._ledger.hold("gradients", -elements * self._size)
        self._filled += elements
        self._bucket.append(name)

    def _reduce(self) -> None:
        """Follow `__avg_scatter_grads`: cast, join several gradients in one buffer, then cut it into shards."""
        whole = sum(self._elements[name] for name in self._bucket)
        cast = whole * self._reduced if self._reduced != self._size else 0
        alone = len(self._bucket) == 1 and whole % self._ranks == 0
        # Gloo's reduce-scatter works on a copy.
        joined = 0 if alone and self._job.device.kind == "cuda" else whole * self._reduced
        self._ledger.touch("buffers", cast + joined)
        if self._filled > self._room:
            self._ledger.hold("gradients", -self._elements[self._bucket[0]] * self._size)
        self._bucket, self._filled = [], 0

    def step(self) -> None:
        """Join a sub-group's masters in one tensor, its gradients in another (`_prepare_fp32_grad_for_sub_group`)."""
        if not self._offload:
            self._ledger.touch("gradients", min(self._shard, SUB_GROUP) * BYTES_OF[self._job.weight_dtype])
