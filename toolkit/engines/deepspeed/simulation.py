"""DeepSpeed ZeRO: buckets that gradients pass through, and partitions that they end in. Stage 3 is `zero3`.

Source: deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from toolkit.core.units import BYTES_OF, ceil_div, round_up
from toolkit.engines.base import Engine
from toolkit.engines.deepspeed.zero3 import Fetches, GradientBucket, accumulation_dtype, copies, partitioned, stage_of
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
        job, ledger = simulation.job, simulation.ledger
        simulation.hold("master", simulation.state.master)
        if job.device.kind != "cpu" and job.precision.mixed and job.strategy.adapter == "none":
            # Each exact master is read in fp32, beside the one before (`training/preparation.py`).
            ledger.touch("workspace", 2 * BYTES_OF["float32"] * max(each.elements for each in parameters_of(job)))
        moves = Fetches(simulation) if stage_of(job.strategy) == 3 else _Buckets(simulation)
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


class _Buckets(GradientBucket):
    """Stages 1 and 2."""

    grows = True

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        job, ledger = self.job, self.ledger
        self._elements = {state.name: state.elements for state in parameters_of(job) if state.trainable}
        self._early = stage_of(job.strategy) == 2
        """Whether gradients are reduced as they come; else when the backward has ended."""
        self._buffers = 2 if job.settings["zero_optimization"]["overlap_comm"] else 1
        """A second one is filled while the first is reduced (`setup_buckets`)."""
        self._fp32 = _adds_on_device(job)
        if not self._early and self._fp32:
            self._staged = BYTES_OF["float32"]  # whole gradients are added up in fp32 (`grad_accum`)
        casts = "communication_data_type" in job.settings and self._staged == self._size
        self._cast = BYTES_OF["float32"] if casts else 0
        """Bytes of an element of the copy that is sent."""
        self._shard, ranges = _partition(self._elements, job.parallelism.shard_size)
        self._own = {name: inside[simulation.rank] for name, inside in ranges.items() if simulation.rank in inside}
        """Elements of each parameter in this rank's partition."""
        whole = sum(self._elements[name] for name in self._own) * self._size
        self._partition = self._shard * BYTES_OF["float32"] if self._fp32 else whole
        """Bytes of the partition's gradients: an fp32 sum of its elements, else each of its parameters whole."""
        self._begun, self._micro_batches = 0, min(job.train_config.accumulation, 2)
        self._offload = job.strategy.offload != "none"
        if self._offload:
            # The fp32 gradients of the partition, its parameters on their way back, and a buffer on each side.
            largest = max(self._elements.values(), default=0) * self._size
            ledger.offload("gradients", self._shard * BYTES_OF[job.weight_dtype])
            ledger.offload("buffers", self._shard * self._size + largest)
            ledger.hold("buffers", largest)
            if self._early and self._micro_batches > 1 and not self._fp32:  # `accumulated_grads_in_cpu`
                ledger.offload("gradients", whole)
        self._before = ledger.held["gradients"]

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """Handle the begin of a micro-batch, a gradient, or the end of the backward. Stage 1 reduces in the last one only."""
        last = self._begun == self._micro_batches
        if what == "forward":
            self._begun += 1
        elif what == "gradient":
            self.keep("buckets", self._buffers * self._room * self._staged)
            staged = size * self._staged // self._size
            self.ledger.touch("gradients", size + staged if staged != size else 0)
            if self._early or self._begun == 1:  # else it is added to the first micro-batch's
                self.ledger.hold("gradients", staged)
            if self._early:
                self.add(name)
        elif what == "end" and (self._early or last):
            for each in () if self._early else self._elements:
                self.add(each)
            self.reduce()
            self.drop("buckets", "later partition")
            if self._early or self._staged == self._size:
                self._drop_gradients()  # else whole sums stay for the norm

    def _drop_gradients(self) -> None:
        """Drop what the backward left but this rank's partition, such as sums in fp32 (`grad_accum`)."""
        self.ledger.hold("gradients", self._before + self.held("partition") - self.ledger.held["gradients"])

    def reduce(self) -> None:
        """Follow `reduce_ipg_grads`: join slices and send them; keep this rank's part in its partition.

        Later micro-batches of stage 2 fill a partition of their own, which is added to the first one's; not an fp32 sum.
        """
        own = [self._own[name] for name in self._bucket if name in self._own]
        sent = self._filled * ((self._staged if len(self._bucket) > 1 else 0) + self._cast)
        if not self._fp32:  # an fp32 sum is there before anything is sent (`_build_compact_grad_partition_buffer`)
            self.ledger.touch("buffers", sent)
        if own and (self._fp32 or not self._offload):
            later = self._begun > 1 and self._early and not self._fp32
            self.keep("later partition" if later else "partition", self._partition, "gradients")
        self.ledger.touch("buffers", sent if self._fp32 else 0)
        if own and self._offload:  # the norm of what goes to the host
            self.ledger.touch("gradients", max(own) * BYTES_OF["float64"])
        # With an fp32 sum those of this rank's partition stay to the end, but for offloaded ones (`copy_grads_in_partition`).
        stays = own and self._fp32 and self._early and not (self._offload and self._begun == self._micro_batches)
        if self._filled > self._room and (own or self._early) and not stays:
            self.ledger.hold("gradients", -self._filled * self._staged)
        super().reduce()

    def step(self) -> None:
        """Take the norm, in fp64 one gradient at a time. Join the partition's gradients and cast them to the masters' dtype.

        An fp32 sum is one tensor already. Any rank may have the largest slice.
        """
        if not self._offload:
            largest = min(self._shard, max(self._elements.values(), default=0))
            self.ledger.touch("gradients", largest * BYTES_OF["float64"])
            self._drop_gradients()
            if not self._fp32:
                stepped = BYTES_OF[self.job.weight_dtype]
                self.ledger.touch("gradients", self._shard * (stepped + (self._size if self._size != stepped else 0)))
        self.drop("partition")
        self._drop_gradients()
        self.collective(sum(self._elements.values()) * self._size if self.job.ranks > 1 else 0)


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
