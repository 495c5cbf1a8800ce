"""DeepSpeed ZeRO stage 3: parameters are partitioned while they are read, and gathered for the module that needs them.

Source: deepspeed/runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left

from toolkit.config.strategy import Strategy
from toolkit.config.tables import PRECISIONS
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job
from toolkit.engines.simulation import Buffers, Simulation, joined_experts
from toolkit.engines.states import can_stream, parameters_of

SUB_GROUP = 10**9
"""Elements of a rank's shard that are stepped at once (`sub_group_size`, at its default)."""


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

    Every rank reads the whole model at once where weights are packed, unless they are streamed.
    """
    job, ledger = simulation.job, simulation.ledger
    assert job.spec is not None
    states, ranks, parameters = parameters_of(job), job.parallelism.shard_size, simulation.state.parameters
    elements = {state.name: state.elements for state in states}
    # Tied weights have a shard for each of their names, until they are tied.
    twins = sum(ceil_div(elements.get(group[0], 0), ranks) for group in job.spec.tied for _ in group[1:])
    twins *= BYTES_OF[job.compute_dtype]
    if job.strategy.quantized and not can_stream(job):
        read = sum(state.bytes for state in states)
        simulation.hold_loaded(read)
        ledger.hold("parameters", -read)
        simulation.hold("parameters", parameters)
    elif job.strategy.quantized:
        ledger.enter("load")
        simulation.stream_weights(lambda state: ceil_div(state.bytes, ranks))
        ledger.enter("prepare")
        base = (state for state in states if not state.trainable)
        simulation.hold("parameters", parameters - sum(ceil_div(state.bytes, ranks) for state in base))
    else:
        ledger.enter("load")
        simulation.hold("parameters", parameters)
        whole, files = 2 * BYTES_OF[job.compute_dtype], BYTES_OF.get(job.spec.config.get("dtype") or "float32", 4)
        # Experts that are joined as they are read are there once more, in the files' dtype; those of a GPU on the host.
        joined = (whole + files) * joined_experts(job) if job.device.kind == "cpu" else 0
        ledger.touch("workspace", twins + max(joined, whole * max(state.elements for state in states)))
        ledger.enter("prepare")
    if job.strategy.offload == "cpu" and job.strategy.adapter == "none":
        simulation.hold("parameters", twins)  # measured: it stays where the flat buffer takes the first


class GradientBucket(Buffers):
    """Gradients that wait until a bucket of them is full (`reduce_independent_p_g_buckets_and_remove_grads`)."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._room = self.job.settings["zero_optimization"]["reduce_bucket_size"]
        self._size = BYTES_OF[self.job.compute_dtype]
        self._staged = self._size
        """Bytes of an element that waits."""
        self._elements = {state.name: state.elements for state in parameters_of(self.job)}
        self._bucket: list[str] = []
        self._filled = 0

    def add(self, name: str) -> None:
        """Copy a gradient into the bucket, and reduce it when it is full. One that is larger is reduced where it lies."""
        elements = self._elements[name]
        if self._filled and self._filled + elements > self._room:
            self.reduce()
        if elements <= self._room:
            self.ledger.hold("gradients", -elements * self._staged)
        self._filled += elements
        self._bucket.append(name)

    def reduce(self) -> None:
        """Reduce the gradients that wait, and empty the bucket."""
        self._bucket, self._filled = [], 0


class Fetches(GradientBucket):
    """The parameters that the coordinator gathers for the next module and ahead of later ones, and those it keeps.

    As from the second step on, when the coordinator knows the order of the modules. It fetches a bucket ahead of each module, so
    that soon as much is gathered as may be.
    """

    grows = False  # gradients are added to shards that are there before the first

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        job, ledger = simulation.job, simulation.ledger
        assert job.spec is not None
        zero, states = job.settings["zero_optimization"], parameters_of(job)
        self._ranks = job.parallelism.shard_size
        self._reduced = BYTES_OF["float32"] if "communication_data_type" in job.settings else self._size
        self._live, self._reuse = zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]
        limit = zero["stage3_param_persistence_threshold"] if copies(job) else math.inf
        self._persistent = {name for name, elements in self._elements.items() if elements <= limit}
        """Where no rank has another part, a shard is the parameter (`NoGatherHandle`)."""
        self._own: dict[str, list[str]] = {}
        """Module → its parameters, tied ones by their first name."""
        tied = {other: names[0] for names in job.spec.tied for other in names[1:]}
        for name in (*self._elements, *tied):
            self._own.setdefault(name.rpartition(".")[0], []).append(tied.get(name, name))
        entered = (segment.name for segment in simulation.step if segment.what in ("in", "back in"))
        self._order = [name for name in entered if name in self._own]
        sizes = {module: sum(self._elements[name] for name in names) for module, names in self._own.items()}
        self._passed = [0, *itertools.accumulate(sizes[module] for module in self._order)]
        """Elements that are used before each place in the order."""
        self._uses: dict[str, list[int]] = {name: [] for name in self._elements}
        for at, module in enumerate(self._order):
            for name in self._own[module]:
                self._uses[name].append(at)
        shards = [ceil_div(state.elements, self._ranks) for state in states if state.trainable]
        self._shard = sum(shards)
        self._offload = job.strategy.offload != "none"
        simulation.hold("gradients", self._shard * BYTES_OF[accumulation_dtype(job)])
        if self._offload:
            ledger.offload("gradients", self._shard * BYTES_OF[job.weight_dtype])
        ledger.hold("buffers", self._room * self._reduced)
        # `create_reduce_and_remove_grad_hooks` gathers one at a time.
        ledger.touch("buffers", max(shards, default=0) * self._ranks * self._size)
        self._available = 0
        """Elements that are gathered (`__n_available_params`)."""

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """Handle the begin and end of modules, gradients, and the end of the backward."""
        if what == "forward":
            self._at = self._ahead = 0
        elif what in ("in", "back in") and name in self._own:
            self._fetch(name)
        elif what in ("out", "back out") and name in self._own:
            self._release(name)
        elif what == "gradient":
            self.ledger.hold("gradients", size)
            self.add(name)
        elif what == "end":
            self.reduce()
            for gathered in self._elements:
                self._free(gathered)

    def _fetch(self, module: str) -> None:
        """Follow `_fetch_sub_module_impl`: gather the module's parameters, then those of later ones."""
        for name in self._own[module]:
            self._gather(name)
        self._at += 1
        self._ahead = max(self._ahead, self._at)
        while self._ahead < len(self._order) and self._available < self._live:
            for name in self._own[self._order[self._ahead]]:
                self._gather(name)
            self._ahead += 1

    def _gather(self, name: str) -> None:
        """Gather a parameter, unless it is whole."""
        if name not in self._persistent and not self.held(name):
            self._available += self._elements[name]
            padded = ceil_div(self._elements[name], self._ranks) * self._ranks
            self.keep(name, padded * self._size)
            self.collective(padded * self._size)

    def _release(self, module: str) -> None:
        """Follow `__params_to_release`: keep what has been fetched for a later use, or what the next `_reuse` elements use."""
        for name in self._own[module]:
            uses = self._uses[name]
            following = bisect_left(uses, self._at)
            if following == len(uses) or not (
                uses[following] < self._ahead or self._passed[uses[following]] - self._passed[self._at] < self._reuse
            ):
                self._free(name)

    def _free(self, name: str) -> None:
        self._available -= self._elements[name] if self.held(name) else 0
        self.drop(name)

    def reduce(self) -> None:
        """Follow `__avg_scatter_grads`: cast, join several gradients in one buffer, then cut it into shards."""
        size = self._filled * self._reduced
        joined = size if len(self._bucket) > 1 else 0
        self.collective(size - joined, more=joined + (size if self._reduced != self._size else 0))
        if self._filled > self._room:
            self.ledger.hold("gradients", -self._filled * self._size)
        super().reduce()

    def step(self) -> None:
        """Join a sub-group's masters in one tensor, its gradients in another (`_prepare_fp32_grad_for_sub_group`)."""
        if not self._offload:
            self.ledger.touch("gradients", min(self._shard, SUB_GROUP) * BYTES_OF[self.job.weight_dtype])
