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
from toolkit.engines.played import Played
from toolkit.engines.records import SCHEDULE, Transfer
from toolkit.engines.roofline import MEMORY_SHARE, other_seconds, peak_speed, product_seconds
from toolkit.engines.states import snapshot_bytes
from toolkit.engines.traces import Segment

LINK = 0.8
"""Share of a data sheet's peak of the links: a round number, chosen by published runs on A100s."""

HOST = 150
"""GB/s that a node without a known card copies in its memory, as `GPUSpec.host_memory` of two sockets."""

DISK = 3
"""GB/s that a node writes to its disk: the sequential writes of one NVMe disk, behind what the page cache takes."""

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


def operations(job: Job, step: Sequence[Segment], others: Sequence[Sequence[Segment]] = ()) -> int:
    """Return a rank's operations in a step as `FlopCounterMode` counts them: with recomputation, not causal.

    Of a pipeline's ranks, the most; `others`: the micro-batch of the stages after the first.
    """
    sizes = [sum(size for segment in each for _, size in segment.flops) for each in (step, *others)]
    ranks = job.parallelism.pp
    return job.train_config.accumulation * max(sum(sizes[rank::ranks]) for rank in range(ranks))


def play(job: Job, machine: Hardware, steps: Sequence[Sequence[Segment]], after: float = 0.0) -> Played | None:
    """Return a pipeline's schedule with the forecast times of its stages, in seconds; None without stages.

    Args:
        job: what runs.
        machine: where.
        steps: a micro-batch of each stage.
        after: seconds of the optimizer.

    Where the speed of the device is unknown, operations stand for seconds, and sending takes none.
    """
    if job.parallelism.pp == 1:
        return None
    card = job.device.card
    sent = next(transfer for transfer in job.communication() if transfer.overlaps == SCHEDULE)
    send = sent.size / _bandwidth(sent.link, job, machine, card) if card else 0.0
    times = []
    for step in steps:
        middle = _middle(step)
        times.append((_seconds(job, step[:middle], card), _seconds(job, step[middle:], card)))
    return job.engine.play(job, times, send, after)


def _middle(step: Sequence[Segment]) -> int:
    """Return where the backward begins."""
    return 1 + next(index for index, segment in enumerate(step) if segment.what == "backward")


def communication(job: Job) -> int:
    """Return the bytes that a rank sends to others in a step."""
    return round(sum(transfer.size * transfer.times for transfer in collectives(job)))


def step_time(
    job: Job, machine: Hardware, step: Sequence[Segment], others: Sequence[Sequence[Segment]] = ()
) -> Timing | None:
    """Return the time of a step; None for a device with unknown speed.

    Args:
        job: what runs.
        machine: where.
        step: one micro-batch, forward and backward.
        others: of a pipeline, that of the stages after the first.
    """
    card = job.device.card
    if card is None:
        return None
    card = replace(card, sustained=card.alone or card.sustained) if job.ranks == 1 else card
    middle = _middle(step)
    forward, backward = _seconds(job, step[:middle], card), _seconds(job, step[middle:], card)
    engine = job.engine
    states = max(engine.expected_state(job, rank).optimizer or 0 for rank in engine.simulated_ranks(job))
    moved = job.optimizer.passes * states // len(job.optimizer.states)
    if job.strategy.offload == "none":
        optimizer = moved / (card.memory * 1e9 * MEMORY_SHARE)
    else:
        optimizer = moved * min(job.ranks, machine.count) / (card.host_memory * 1e9)
    took = dict.fromkeys(("forward", "backward", "nothing"), 0.0)
    for transfer in job.communication():
        if transfer.overlaps == SCHEDULE:
            continue
        took[transfer.overlaps] += transfer.size * transfer.times / _bandwidth(transfer.link, job, machine, card)
    micro = job.train_config.accumulation
    reduced = micro if engine.hides_every_backward else 1
    room = {"forward": micro * forward, "backward": reduced * backward, "nothing": 0.0}
    exposed = sum(max(0.0, took[phase] - room[phase]) for phase in took)
    played = play(job, machine, (step, *others), optimizer)
    seconds = (played.length if played else micro * (forward + backward) + optimizer) + exposed
    tokens = job.global_batch * job.train_config.seq_len
    # A backward computes two products for each of the forward's, and one for frozen weights. Attention and the adapter
    # always have two, so MFU with an adapter is a little low, most with long sequences.
    products = 3 if job.strategy.adapter == "none" else 2
    forwards = (segment for each in (step, *others) for segment in each[: _middle(each)])
    useful = products * micro * sum(size for segment in forwards for _, size in segment.flops) / job.parallelism.pp
    return Timing(
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=useful / (seconds * peak_speed(card, job.compute_dtype)),
    )


def _seconds(job: Job, segments: Sequence[Segment], card: GPUSpec | None) -> float:
    """Return the seconds of products, of memory traffic, and of all starts of kernels, or the host's if it is slower.

    Without a card, the operations.
    """
    work: Counter[str] = Counter()
    for segment in segments:
        for kernel, size in (*segment.flops, *((kernel, -size) for kernel, size in segment.skipped)):
            work[kernel] += size
    if card is None:
        return float(work.total())
    seconds = product_seconds(card, work)
    calls = sum(segment.calls for segment in segments)
    other = other_seconds(card, sum(segment.moved for segment in segments), calls)
    if job.strategy.compile:
        return seconds + COMPILED * other
    asks = job.strategy.activation_checkpointing in ("attention", "selective")
    return max(seconds + other, asks * calls * ASKED)


def _bandwidth(link: str, job: Job, machine: Hardware, card: GPUSpec) -> float:
    """Return the bytes a second of a rank.

    A ring over several nodes crosses the network once a node, over all of its adapters at once; replicas meet there rank by rank.
    """
    sizes = job.parallelism
    if link == "memory":
        return card.memory * 1e9 * MEMORY_SHARE
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
