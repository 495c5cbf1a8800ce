"""DeepSpeed ZeRO: buckets that gradients pass through, and partitions that they end in. Stage 3 is `zero3`.

Source: deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from toolkit.core.units import BYTES_OF, ceil_div, round_up
from toolkit.engines.base import Engine
from toolkit.engines.deepspeed.zero3 import Fetches, accumulation_dtype, copies, partitioned, stage_of
from toolkit.engines.job import Job
from toolkit.engines.records import StateMemory, Transfer
from toolkit.engines.simulation import Simulation, gathers, host_transfers
from toolkit.engines.states import optimizer_bytes, optimizer_dtypes, parameters_of, trained_elements
from toolkit.engines.traces import TraceConfig

ALIGNMENT = 2
"""Elements per rank to which stages 1 and 2 pad their flat partition (`nccl_start_alignment_factor`)."""


class ZeroForecast(Engine):
    """The forecast's half of the engine: states, events of a step, transfers."""

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return ZeRO's states (Rajbhandari et al. 2020, section 5), and the second fp32 copy that fp32 training keeps.

        Stages 1 and 2: all parameters, and a shard of masters and moments. Stage 3: shards of all, and small parameters whole.
        """
        states, ranks = list(parameters_of(job)), job.parallelism.shard_size
        compute, weight = BYTES_OF[job.compute_dtype], BYTES_OF[job.weight_dtype]
        trained = [state.elements for state in states if state.trainable]
        if stage_of(job.strategy) < 3:
            flat = round_up(sum(trained), ALIGNMENT * ranks)
            shard = flat // ranks
            trainable, frozen = flat * compute, sum(state.bytes for state in states if not state.trainable)
        else:
            shard = sum(ceil_div(elements, ranks) for elements in trained)
            limit = job.settings["zero_optimization"]["stage3_param_persistence_threshold"]
            small = [state for state in states if copies(job) and state.elements <= limit]
            trainable = shard * compute + sum(state.elements * compute for state in small if state.trainable)
            frozen = sum(state.bytes for state in small if not state.trainable) + sum(
                ceil_div(state.elements, ranks) * BYTES_OF[state.dtype] for state in states if not state.trainable
            )
        return StateMemory(
            trainable=trainable,
            frozen=frozen,
            master=shard * weight,
            optimizer=optimizer_bytes(job, shard),
            dtypes={
                "trainable": job.compute_dtype,
                "master": job.weight_dtype,
                "gradients": accumulation_dtype(job),
                "reduce": "float32" if "communication_data_type" in job.settings else job.compute_dtype,
                "optimizer": optimizer_dtypes(job),
            },
        )

    def simulated_ranks(self, job: Job) -> Sequence[int]:
        """Return the rank that makes its partition of gradients first, and the one that has most whole parameters in it.

        Stage 1 reduces parameters in their order. Stage 2 reduces in the order of the backward, so the last rank is first.
        """
        stage, ranks = stage_of(job.strategy), job.parallelism.shard_size
        if stage == 3:
            return (0,)
        first = ranks - 1 if stage == 2 else 0
        elements = {state.name: state.elements for state in parameters_of(job) if state.trainable}
        return tuple(dict.fromkeys((first, _fullest_rank(_partition(elements, ranks)[1], elements, ranks))))

    def trace_config(self, job: Job, *, masked: bool, rank: int = 0) -> TraceConfig:
        """Return the trace's configuration. `zero.Init`, which packed weights do not enter, replaces torch's linear product."""
        saves = stage_of(job.strategy) == 3 and job.strategy.adapter in ("lora", "dora")
        return replace(super().trace_config(job, masked=masked), saves_inputs=saves)

    def simulate_load(self, simulation: Simulation) -> None:
        """Load and prepare, until the parameters are partitioned or flattened."""
        job, ledger, state = simulation.job, simulation.ledger, simulation.state
        if stage_of(job.strategy) == 3:
            partitioned(simulation)
            return
        simulation.hold_loaded(state.parameters)
        # The trained weights are copied into one tensor: on the device if they fit twice, else on the host.
        if job.device.kind == "cpu" or state.parameters + state.trainable <= job.device.free_bytes:
            ledger.touch("parameters", state.trainable)
        else:
            ledger.touch_host("parameters", 2 * state.trainable)

    def simulate_training(self, simulation: Simulation) -> None:
        """Enter the masters, the moments, the buckets of gradients and the partitions that they end in."""
        simulation.keep("master", simulation.state.master)
        _restore_masters(simulation)
        strategy = simulation.job.strategy
        if stage_of(strategy) < 3 and strategy.offload == "none":  # zeros, for a moment (`initialize_optimizer_states`)
            simulation.ledger.touch("gradients", simulation.state.master)
        moves = Fetches(simulation) if stage_of(strategy) == 3 else _Buckets(simulation)
        simulation.hold_moments()
        simulation.walk(moves)
        moves.step()

    def communication(self, job: Job) -> list[Transfer]:
        """Return reduce-scatters and all-gathers: each sends (N - 1)/N of the tensors (Rajbhandari et al. 2020, section 7)."""
        ranks, micro = job.parallelism.shard_size, job.train_config.accumulation
        share, stage = (ranks - 1) / ranks, stage_of(job.strategy)
        trained = trained_elements(job)
        reduced, updated = (share * trained * BYTES_OF[word] for word in (job.precision.reduce, job.compute_dtype))
        if stage < 3:
            during = "backward" if job.settings["zero_optimization"]["overlap_comm"] else "nothing"
            transfers = [
                Transfer(reduced, 1 if stage == 1 else micro, during, "ring", "gradients, reduce-scattered"),
                Transfer(updated, 1, "nothing", "ring", "updated parameters, all-gathered"),
                through_buckets(job),
            ]
        else:
            transfers = gathers(job)
            transfers.append(Transfer(reduced, micro, "backward", "ring", "gradients, reduce-scattered"))
        return [*transfers, *host_transfers(job, gradients_to_host(job))]


def _restore_masters(simulation: Simulation) -> None:
    """Enter the reading of exact masters: the fp32 tensor that is written, and the next (`training/preparation.py`).

    On a CPU fp32 tensors lie in the mapped file, and each is rounded once more to be compared.
    """
    job = simulation.job
    assert job.spec is not None
    stored = job.spec.config.get("dtype") or "float32"
    if job.precision.mixed and stored != job.compute_dtype and job.strategy.adapter == "none":
        exact = BYTES_OF["float32"]
        read = exact + (0 if stored == "float32" else BYTES_OF.get(stored, exact))
        if job.device.kind == "cpu":
            exact = read = BYTES_OF[job.compute_dtype] if stored == "float32" else exact
        sizes = [0, *(state.elements for state in parameters_of(job) if state.trainable)]
        largest = max((last * exact + size * read for last, size in itertools.pairwise(sizes)), default=0)
        simulation.ledger.touch("workspace", largest)


def _adds_on_device(job: Job) -> bool:
    """Return whether an fp32 sum of the partition lies on the device (`_use_compact_grad_partition_buffer`)."""
    return stage_of(job.strategy) < 3 and job.compute_dtype != "float32" and accumulation_dtype(job) == "float32"


def gradients_to_host(job: Job) -> list[Transfer]:
    """Return an offload's transfers of gradients: once to the fp32 ones that are stepped, and before that to their sum.

    Where the sum lies on the host, each micro-batch after the first fetches it, adds on the device, and writes it back
    (`async_accumulate_grad_in_cpu_via_gpu`; stage3.py `partition_grads`). Without `overlap_comm` copies run on the stream that
    computes.
    """
    zero, micro = job.settings["zero_optimization"], job.train_config.accumulation
    trained = trained_elements(job) / job.parallelism.shard_size
    during = "backward" if zero["overlap_comm"] else "nothing"
    transfers = [Transfer(trained * BYTES_OF[job.weight_dtype], 1, during, "host", "gradients, to the host")]
    if zero["stage"] > 1 and not _adds_on_device(job) and (micro > 1 or zero["stage"] == 3):
        size = trained * BYTES_OF[accumulation_dtype(job)]
        transfers.append(Transfer(size, 2 * micro - 1, during, "host", "sums of gradients, to the host and back"))
    return transfers


def through_buckets(job: Job) -> Transfer:
    """Return the device memory traffic of stages 1 and 2 to reduce every gradient, on the stream that computes.

    Each is copied into the bucket, divided, cast, cast back, copied out, and added to the sum (`average_tensor`,
    `allreduce_and_copy`): eleven passes in the compute dtype, and two in the dtype that is sent.
    """
    trained = trained_elements(job)
    size = trained * (11 * BYTES_OF[job.compute_dtype] + 2 * BYTES_OF[job.precision.reduce])
    micro = 1 if stage_of(job.strategy) == 1 else job.train_config.accumulation
    return Transfer(size, micro, "nothing", "memory", "gradients, through the buckets")


class _Buckets:
    """Stages 1 and 2."""

    grows = True

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._ledger, self._job = simulation, simulation.ledger, simulation.job
        job, ledger = self._job, self._ledger
        self._early = stage_of(job.strategy) == 2
        """Whether gradients are reduced as they come; else when the backward has ended."""
        zero = job.settings["zero_optimization"]
        self._room = zero["reduce_bucket_size"]
        self._buffers = 2 if zero["overlap_comm"] else 1
        """A second one is filled while the first is reduced (`setup_buckets`)."""
        self._size = BYTES_OF[job.compute_dtype]
        self._fp32 = _adds_on_device(job)
        self._staged = self._size if self._early or not self._fp32 else BYTES_OF["float32"]
        """Bytes of an element on its way to the partition: stage 1 adds up whole gradients in fp32 (`grad_accum`)."""
        casts = "communication_data_type" in job.settings and self._staged == self._size
        self._cast = BYTES_OF["float32"] if casts else 0
        """Bytes of an element of the copy that is sent."""
        self._elements = {state.name: state.elements for state in parameters_of(job) if state.trainable}
        self._shard, self._ranges = _partition(self._elements, job.parallelism.shard_size)
        self._own = simulation.rank
        self._bucket: list[str] = []
        self._filled = self._held = 0
        self._partition = 0
        """Bytes of the gradients of this rank's partition."""
        self._parts = 0
        """Partitions that are held: one, and while a later micro-batch fills its own, two, but for an fp32 sum."""
        self._begun, self._micro_batches = 0, min(job.train_config.accumulation, 2)
        self._offload = job.strategy.offload != "none"
        if self._offload:
            # The fp32 gradients of the partition, its parameters on their way back, and a buffer on each side.
            largest = max(self._elements.values(), default=0) * self._size
            ledger.offload("gradients", self._shard * BYTES_OF[job.weight_dtype])
            ledger.offload("buffers", self._shard * self._size + largest)
            ledger.hold("buffers", largest)
        self._kept = ledger.held["gradients"]

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """Handle the begin of a micro-batch, a gradient, or the end of the backward. Stage 1 reduces in the last one only."""
        if what == "forward":
            self._begun += 1
        elif what == "gradient":
            self._hold_buckets(self._buffers)
            staged = size * self._staged // self._size
            self._ledger.touch("gradients", size + staged if staged != size else 0)
            if self._early or self._begun == 1:  # else it is added to the first micro-batch's
                self._ledger.hold("gradients", staged)
            if self._early:
                self._on_gradient(name)
        elif what == "end" and (self._early or self._begun == self._micro_batches):
            for name in () if self._early else self._elements:
                self._on_gradient(name)
            self._flush()
            self._hold_buckets(0)
            self._add_partition()
            if self._early or (self._staged == self._size and self._begun == self._micro_batches):
                self._drop()  # else whole sums stay for the norm

    def _hold_buckets(self, count: int) -> None:
        self._ledger.hold("buffers", (count - self._held) * self._room * self._staged)
        self._held = count

    def _drop(self) -> None:
        """Drop what the backward left but this rank's partition, such as sums in fp32 (`grad_accum`)."""
        self._ledger.hold("gradients", self._kept + self._partition - self._ledger.held["gradients"])

    def _on_gradient(self, name: str) -> None:
        """Follow `reduce_independent_p_g_buckets_and_remove_grads`: fill the bucket, and reduce it when it is full."""
        elements = self._elements[name]
        if self._filled + elements > self._room:
            self._flush()
        if elements <= self._room:
            self._ledger.hold("gradients", -elements * self._staged)
        self._filled += elements
        self._bucket.append(name)

    def _flush(self) -> None:
        """Follow `reduce_ipg_grads`: join slices and send them; keep this rank's part in its partition."""
        if self._fp32 and any(self._own in self._ranges[name] for name in self._bucket):
            self._hold_partition()  # `_build_compact_grad_partition_buffer`, before anything is sent
        for slices in self._reductions():
            joined = sum(slices) * self._staged if len(slices) > 1 else 0
            self._ledger.touch("buffers", joined + sum(slices) * self._cast)
        for name in self._bucket:
            mine = self._own in self._ranges[name]
            if mine and self._offload:  # the norm of what goes to the host
                self._hold_sum(name)
                self._ledger.touch("gradients", self._ranges[name][self._own] * BYTES_OF["float64"])
            elif mine:
                self._hold_partition()
            # With an fp32 sum those of this rank's partition stay to the end, but for offloaded ones (`copy_grads_in_partition`).
            stays = mine and self._fp32 and self._early and not (self._offload and self._begun == self._micro_batches)
            if self._elements[name] > self._room and (mine or self._early) and not stays:
                self._ledger.hold("gradients", -self._elements[name] * self._staged)
        self._bucket, self._filled = [], 0

    def _hold_partition(self) -> None:
        """Hold the gradients of this rank's partition: an fp32 sum of its elements, else each of its parameters whole."""
        if self._parts < (1 if self._fp32 or not self._early else self._begun):
            whole = sum(self._elements[name] for name, ranks in self._ranges.items() if self._own in ranks)
            self._partition = self._shard * BYTES_OF["float32"] if self._fp32 else whole * self._size
            self._ledger.hold("gradients", self._partition)
            self._parts += 1

    def _hold_sum(self, name: str) -> None:
        """Hold the host's sum of a parameter's gradients, once, if more micro-batches follow (`accumulated_grads_in_cpu`)."""
        if self._begun < self._micro_batches and not self._fp32:
            before = self._ledger.held["gradients"]
            self._ledger.offload("gradients", self._elements[name] * self._size)
            self._kept += self._ledger.held["gradients"] - before

    def _add_partition(self) -> None:
        """Add this micro-batch's partition to the first one's, and free it (`independent_gradient_partition_epilogue`)."""
        if self._parts > 1:
            self._ledger.hold("gradients", -self._partition)
            self._parts = 1

    def _reductions(self) -> Iterator[list[int]]:
        """Yield the elements of the slices that are sent together (`average_tensor`, `allreduce_and_scatter`).

        Neighbours of one rank are one slice, but not where each is added to this rank's fp32 sum.
        """
        slices: list[int] = []
        last = None
        for name in self._bucket:
            for rank, elements in self._ranges[name].items():
                if rank == last and not (self._fp32 and rank == self._own):
                    slices[-1] += elements
                else:
                    if sum(slices) > self._room:
                        yield slices
                        slices = []
                    slices.append(elements)
                last = rank
        yield slices

    def step(self) -> None:
        """Take the norm, in fp64 one gradient at a time. Join the partition's gradients and cast them to the masters' dtype.

        An fp32 sum is one tensor already.
        """
        if not self._offload:
            # Any rank may have the largest slice.
            slices = [
                count
                for ranks in self._ranges.values()
                for rank, count in ranks.items()
                if self._fp32 or rank == self._own
            ]
            self._ledger.touch("gradients", max(slices, default=0) * BYTES_OF["float64"])
            self._drop()
            if not self._fp32:
                stepped = BYTES_OF[self._job.weight_dtype]
                self._ledger.touch("gradients", self._shard * (stepped + (self._size if self._size != stepped else 0)))
        self._partition = 0
        self._drop()
        if self._job.device.kind == "cpu" and self._job.ranks > 1:  # gloo gathers the updated parameters into a copy
            self._ledger.touch("workspace", sum(self._elements.values()) * self._size)


def _partition(elements: dict[str, int], ranks: int) -> tuple[int, dict[str, dict[int, int]]]:
    """Return the elements of a rank's partition, and for each parameter how many lie in which rank's."""
    shard = round_up(sum(elements.values()), ALIGNMENT * ranks) // ranks
    ends = itertools.accumulate(elements.values())
    parts = {}
    for (name, size), end in zip(elements.items(), ends, strict=True):
        inside = {rank: min(end, (rank + 1) * shard) - max(end - size, rank * shard) for rank in range(ranks)}
        parts[name] = {rank: count for rank, count in inside.items() if count > 0}
    return shard, parts


def _fullest_rank(ranges: dict[str, dict[int, int]], elements: dict[str, int], ranks: int) -> int:
    """Return the rank with most elements in its partition: a parameter that two ranks share is whole on both."""
    return max(range(ranks), key=lambda rank: sum(elements[name] for name, inside in ranges.items() if rank in inside))
