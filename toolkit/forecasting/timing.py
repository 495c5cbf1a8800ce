"""The time of a step: a roofline over the traced operators, and the communication that no computation hides.

Known error: most published runs lie within a quarter, those of small products on a T4 and over slow PCIe do not
(`benchmarks/results/published.md`). Runs of the toolkit's own on one H200 (`results/gpu-H200-141GB.md`) helped to choose the
figures here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.devices.gpu_catalog import GPUSpec
from toolkit.devices.machine import Hardware
from toolkit.engines.job import Job
from toolkit.engines.records import Transfer
from toolkit.engines.states import snapshot_bytes
from toolkit.engines.traces import Segment

FASTEST, MEMORY, LINK = 0.8, 0.75, 0.8
"""Shares of a data sheet's peak: the fastest product's without a measurement, the memory's, and the links'.

Round numbers, chosen by published runs on A100s.
"""

HOST = 150
"""GB/s that a node without a known card copies in its memory, as `GPUSpec.host_memory` of two sockets."""

DISK = 3
"""GB/s that a node writes to its disk: the sequential writes of one NVMe disk, behind what the page cache takes."""

CALL = 8e-6
"""Seconds for each operator in which its kernels start and end, and products and memory stand still: by the runs on the H200."""

EFFICIENT = ", efficient attention"
"""What follows the dtype of operations of the memory-efficient attention kernel: with a mask, and on cards without flash."""

EFFICIENT_SPEED = 300e12
"""Operations a second of that kernel at most. It does not use the products of Hopper; by the H200's times from 4,096 tokens on."""

COMPILED = 1 / 3
"""Share of memory traffic and calls that is left when blocks are compiled; by the two such runs on the H200."""

ASKED = 52e-6
"""Seconds that the host takes for each operator where selective checkpointing asks whether it is kept; by the runs on the H200.

Each operator of a block then passes through Python, in the forward and in the recomputation. Small models wait for it.
"""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A step's seconds and bytes, of one rank."""

    step_seconds: float
    tokens_per_second: float
    """Of all ranks."""
    mfu: float | None
    """Operations of forward and backward without recomputation, divided by the peak (Chowdhery et al. 2022, appendix B).

    None for a device with unknown peak.
    """


def operations(job: Job, step: Sequence[Segment]) -> int:
    """Return a rank's operations in a step as `FlopCounterMode` counts them: with recomputation, not causal."""
    return job.train_config.accumulation * sum(size for segment in step for _, size in segment.flops)


def communication(job: Job) -> int:
    """Return the bytes that a rank sends to others in a step."""
    return round(sum(transfer.size * transfer.times for transfer in collectives(job)))


def step_time(job: Job, machine: Hardware, step: Sequence[Segment]) -> Timing | None:
    """Return the time of a step; None for a device with unknown speed.

    Args:
        job: what runs.
        machine: where.
        step: one micro-batch, forward and backward.
    """
    card = job.device.card
    if card is None:
        return None
    card = replace(card, sustained=card.alone or card.sustained) if job.ranks == 1 else card
    middle = next(index for index, transfer in enumerate(step) if transfer.what == "backward")
    forward, backward = _seconds(job, step[: middle + 1], card), _seconds(job, step[middle + 1 :], card)
    engine = job.engine
    state = engine.expected_state(job)
    moved = job.optimizer.passes * (state.optimizer or 0) // len(job.optimizer.states)
    if job.strategy.offload == "none":
        optimizer = moved / (card.memory * 1e9 * MEMORY)
    else:
        optimizer = moved * min(job.ranks, machine.count) / (card.host_memory * 1e9)
    took = dict.fromkeys(("forward", "backward", "nothing"), 0.0)
    for transfer in job.communication():
        took[transfer.overlaps] += transfer.size * transfer.times / _bandwidth(transfer.link, job, machine, card)
    micro = job.train_config.accumulation
    reduced = micro if engine.hides_every_backward else 1
    room = {"forward": micro * forward, "backward": reduced * backward, "nothing": 0.0}
    exposed = sum(max(0.0, took[phase] - room[phase]) for phase in took)
    seconds = micro * (forward + backward) + exposed + optimizer
    tokens = job.global_batch * job.train_config.seq_len
    # A backward computes two products for each of the forward's, and one for frozen weights. Attention and the adapter
    # always have two, so MFU with an adapter is a little low, most with long sequences.
    products = 3 if job.strategy.adapter == "none" else 2
    useful = products * micro * sum(size for transfer in step[: middle + 1] for _, size in transfer.flops)
    return Timing(
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=useful / (seconds * _peak(card, job.compute_dtype)),
    )


def _seconds(job: Job, segments: Sequence[Segment], card: GPUSpec) -> float:
    """Return the seconds of products, of memory traffic, and of all starts of kernels, or the host's if it is slower."""
    work: Counter[str] = Counter()
    for segment in segments:
        for kernel, size in (*segment.flops, *((kernel, -size) for kernel, size in segment.skipped)):
            work[kernel] += size
    seconds = sum(size / _sustained(card, kernel) for kernel, size in work.items())
    calls = sum(segment.calls for segment in segments)
    other = sum(segment.moved for segment in segments) / (card.memory * 1e9 * MEMORY) + calls * CALL
    if job.strategy.compile:
        return seconds + COMPILED * other
    asks = job.strategy.activation_checkpointing in ("attention", "selective")
    return max(seconds + other, asks * calls * ASKED)


def _peak(card: GPUSpec, dtype: str) -> float:
    """Return the peak operations a second."""
    return (card.tflops_fp32 if dtype == "float32" else card.tflops_half) * 1e12


def _sustained(card: GPUSpec, kernel: str) -> float:
    """Return the operations a second that a training step's products sustain, in the dtype that `kernel` begins with."""
    if kernel.startswith("float32"):
        return _peak(card, "float32") * FASTEST
    speed = (card.measured_half or card.tflops_half * FASTEST) * 1e12 * card.sustained
    return min(speed, EFFICIENT_SPEED) if kernel.endswith(EFFICIENT) else speed


def _bandwidth(link: str, job: Job, machine: Hardware, card: GPUSpec) -> float:
    """Return the bytes a second of a rank.

    A ring over several nodes crosses the network once a node, over all of its adapters at once; replicas meet there rank by rank.
    """
    sizes = job.parallelism
    if link == "memory":
        return card.memory * 1e9 * MEMORY
    if link == "host":
        host_link = card.host
    elif link == "ring":
        group = (sizes.shard_size if sizes.shard_size > 1 else sizes.loss_size) * sizes.tp
        host_link = min(card.peer, card.network * machine.count) if group > machine.count else card.peer
    else:
        group = {"tp": sizes.tp, "cp": sizes.cp * sizes.tp, "ep": sizes.ep}.get(link, job.ranks)
        host_link = card.network if group > machine.count else card.peer
    return host_link * 1e9 * LINK


def checkpoint_stall(job: Job, machine: Hardware) -> float:
    """Return the seconds in which steps wait for a checkpoint: its copy into host memory, which a thread then writes.

    On a GPU machine offloaded states are not copied: steps wait until all ranks of a node have written them.
    """
    share = snapshot_bytes(job)
    if job.strategy.offload != "none" or job.device.card is None:
        rate = HOST if job.device.kind == "cpu" else DISK
        return share * min(job.ranks, machine.count) / (rate * 1e9)
    return share / (job.device.card.host * 1e9 * LINK)


def collectives(job: Job) -> list[Transfer]:
    """Return the collectives of a step, in order."""
    return [transfer for transfer in job.communication() if transfer.link not in ("host", "memory")]


def offloads(job: Job) -> list[Transfer]:
    """Return the transfers between device and host."""
    return [transfer for transfer in job.communication() if transfer.link == "host"]
