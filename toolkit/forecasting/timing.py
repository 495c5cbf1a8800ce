"""How long a step takes: a roofline over the traced operators, and what of the communication nothing hides.

Known error: most published runs lie within a quarter, those of small products on a T4 and over slow PCIe do not
(`benchmarks/results/published.md`); no run of the toolkit's own on a GPU has calibrated it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.cards import Card
from toolkit.devices import Hardware
from toolkit.engines.job import Job, engine_of
from toolkit.engines.states import parameters_of
from toolkit.forecasting.timeline import Stretch
from toolkit.units import BYTES_OF

FASTEST, MEMORY, LINK = 0.8, 0.75, 0.8
"""Shares of a data sheet's peak: what the fastest product reaches where nobody measured it, what memory reaches, and links.

Round numbers, chosen beside published runs on A100s."""

HOST = 150
"""GB/s that an optimizer on the host reads and writes, all ranks of a node together: a third of two sockets' peak."""

CALL = 8e-6
"""Seconds that the host takes to start one operator; what is shorter on the device takes as long."""

ADAMW = 9
"""Times that a step of AdamW and clipping reads or writes each element."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A step's seconds and bytes, of one rank."""

    step_seconds: float
    tokens_per_second: float
    """Of all ranks."""
    mfu: float | None
    """Operations of forward and backward without recomputation, over what the device could (Chowdhery et al. 2022, appendix B).

    None for a device whose peak nobody knows.
    """


def operations(job: Job, step: Sequence[Stretch]) -> int:
    """Of a step of one rank, as torch's `FlopCounterMode` counts: recomputation included, attention as if it were not causal."""
    return job.loop.accumulation * sum(size for one in step for _, size in one.flops)


def communication(job: Job) -> int:
    """Bytes that a rank sends to others in a step."""
    return round(sum(one.size * one.times for one in collectives(job)))


def step_time(job: Job, machine: Hardware, step: Sequence[Stretch]) -> Timing | None:
    """The time of a step; None for a device whose speed nobody knows.

    Args:
        job: what runs.
        machine: where.
        step: one micro-batch, forward and backward.
    """
    card = job.device.card
    if card is None:
        return None
    middle = next(index for index, one in enumerate(step) if one.what == "backward")
    forward, backward = _seconds(step[: middle + 1], card), _seconds(step[middle + 1 :], card)
    held = engine_of(job.strategy).account(job)
    moved = ADAMW * (held.optimizer or 0) // 2
    if job.strategy.offload == "none":
        optimizer = moved / (card.memory * 1e9 * MEMORY)
    else:
        optimizer = moved * min(job.ranks, machine.count) / (HOST * 1e9)
    took = dict.fromkeys(("forward", "backward", "nothing"), 0.0)
    for one in (*collectives(job), *offloads(job)):
        took[one.hidden] += one.size * one.times / _bandwidth(one.way, job, machine, card)
    micro = job.loop.accumulation
    reduced = 1 if job.strategy.sharding == "ddp" else micro
    room = {"forward": micro * forward, "backward": reduced * backward, "nothing": 0.0}
    exposed = sum(max(0.0, took[phase] - room[phase]) for phase in took)
    seconds = micro * (forward + backward) + exposed + optimizer
    tokens = job.global_batch * job.loop.seq_len
    # A backward computes two products for each of the forward's; of frozen weights no gradient, so one. What attention and
    # the adapter itself compute is two all the same: with an adapter MFU is a little low, the more the longer the sequence.
    products = 3 if job.strategy.adapter == "none" else 2
    useful = products * micro * sum(size for one in step[: middle + 1] for _, size in one.flops)
    return Timing(
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=useful / (seconds * _peak(card, job.compute_dtype)),
    )


def _seconds(stretches: Sequence[Stretch], card: Card) -> float:
    """Products at what the device sustains, all else at its memory's speed; never faster than the host can say it."""
    total = 0.0
    for one in stretches:
        if one.calls:
            done = (*one.flops, *((dtype, -size) for dtype, size in one.skipped))
            products = sum(size / _sustained(card, dtype) for dtype, size in done)
            total += max(products + one.moved / (card.memory * 1e9 * MEMORY), one.calls * CALL)
    return total


def _peak(card: Card, dtype: str) -> float:
    """Operations a second."""
    return (card.tflops_fp32 if dtype == "float32" else card.tflops_half) * 1e12


def _sustained(card: Card, dtype: str) -> float:
    """Operations a second of a training step's products."""
    if dtype == "float32":
        return _peak(card, dtype) * FASTEST
    return (card.measured_half or card.tflops_half * FASTEST) * 1e12 * card.sustained


class Sent(NamedTuple):
    """What a rank sends, in bytes, how often in a step, and what hides it."""

    size: float
    times: int
    hidden: str
    """`forward`, `backward` or `nothing`."""
    way: str
    """`ring`, among the ranks of a shard; `replicas`, of the same shard in other groups; `host`."""
    what: str
    """In words: what is sent, and by which collective."""


def _bandwidth(way: str, job: Job, machine: Hardware, card: Card) -> float:
    """Bytes a second of a rank.

    A ring over several nodes crosses the network once a node, over all of its adapters at once; replicas meet there rank by rank.
    """
    if way == "host":
        found = card.host
    elif way == "ring":
        found = min(card.peer, card.network * machine.count) if job.shard_ranks > machine.count else card.peer
    else:
        found = card.network if job.ranks > machine.count else card.peer
    return found * 1e9 * LINK


def collectives(job: Job) -> list[Sent]:
    """The collectives of a step, in its order.

    A ring's gather, and its reduce-scatter, send (N - 1)/N of the tensor, an all-reduce twice that (Rajbhandari et al.
    2020, section 7).
    """
    ranks = job.shard_ranks
    found = parameters_of(job)
    share = (ranks - 1) / ranks
    trained = sum(state.elements for state in found if state.trainable)
    whole = sum(
        state.elements * (BYTES_OF[job.compute_dtype] if state.trainable else BYTES_OF[state.dtype]) for state in found
    )
    reduced = trained * BYTES_OF["bfloat16" if job.strategy.precision == "bf16_pure" else "float32"]
    micro, word = job.loop.accumulation, job.strategy.sharding
    if word == "none":
        return []
    if word == "ddp":
        return [
            Sent(2 * share * reduced, 1, "backward", "ring", "gradients, all-reduced")
        ]  # with the last micro-batch alone
    if word in ("zero1", "zero2"):
        reduce = Sent(
            share * reduced, 1 if word == "zero1" else micro, "nothing", "ring", "gradients, reduce-scattered"
        )
        updated = share * trained * BYTES_OF[job.compute_dtype]
        return [reduce, Sent(updated, 1, "nothing", "ring", "updated parameters, all-gathered")]
    sent = [Sent(share * whole, micro, "forward", "ring", "parameters, all-gathered for the forward")]
    if word != "fsdp_grad_op":
        sent.append(Sent(share * whole, micro, "backward", "ring", "parameters, all-gathered for the backward"))
    sent.append(Sent(share * reduced, micro, "backward", "ring", "gradients, reduce-scattered"))
    if word == "hsdp":
        groups = job.strategy.replicate
        size = 2 * (groups - 1) / groups * reduced / ranks
        sent.append(Sent(size, micro, "backward", "replicas", "gradients, all-reduced between the groups"))
    return sent


def offloads(job: Job) -> list[Sent]:
    """Over PCIe: gradients to the host and weights back, once a step; parameters to the device for every pass."""
    offload = job.strategy.offload
    if offload == "none":
        return []
    found, ranks = parameters_of(job), job.shard_ranks
    trained = sum(state.elements for state in found if state.trainable) / ranks
    back = trained * BYTES_OF[job.compute_dtype]
    sent = [
        Sent(trained * BYTES_OF[job.weight_dtype], 1, "backward", "host", "gradients, to the host"),
        Sent(back, 1, "nothing", "host", "updated parameters, from the host"),
    ]
    if offload == "cpu":
        shard = sum(state.bytes for state in found) / ranks
        for phase in ("forward", "backward"):
            sent.append(Sent(shard, job.loop.accumulation, phase, "host", f"parameters, from the host for the {phase}"))
    return sent
