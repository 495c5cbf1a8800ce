"""A rank's bytes through one step: traced activations, the engine's states, and CUDA's memory outside the allocator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeVar

from toolkit.config.strategy import usual_shardings
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF, MiB
from toolkit.engines.base import Engine
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.resolution import resolve
from toolkit.engines.simulation import Simulation
from toolkit.engines.states import SEND_CHUNK, parameters_of
from toolkit.engines.traces import Segment, Trace, TraceConfig
from toolkit.forecasting.trace_cache import trace_of
from toolkit.forecasting.traces import split_segments
from toolkit.transforms.adapters import require_adapter

L = TypeVar("L", bound=Ledger)

ALLOCATION_UNIT = {"cpu": 1, "cuda": 512}
"""Bytes that an allocator rounds up to (c10/cuda/CUDACachingAllocator.cpp, `kMinBlockSize`)."""


def traced(job: Job, *, masked: bool, others: bool = False) -> Trace:
    """Return the trace of a micro-batch of the job's model, with as few layers as possible.

    Args:
        job: with a spec.
        masked: whether attention gets a mask: rows that hold several documents, or padding.
        others: trace the other engines' configurations too, if this one is not cached: users compare engines.

    Raises:
        MissingLibrary: for an adapter that cannot be traced without its library.
        StrategyError: for an engine without a forecast.
    """
    check_forecast(job.engine)
    strategy = job.strategy
    assert job.spec is not None, "a forecast needs a model"
    require_adapter(strategy)
    train_config = job.train_config
    configs = trace_configs(job, masked=masked)
    other_configs = tuple(_other_configs(job, configs[0], masked)) if others else ()
    first, *rest = dict.fromkeys(configs)  # ranks of one kind share a configuration
    batch, length = train_config.micro_batch, train_config.seq_len
    first_trace = trace_of(job.spec, first, batch=batch, seq_len=length, others=(*rest, *other_configs))
    if not rest:
        return first_trace
    traces = {
        first: first_trace,
        **{config: trace_of(job.spec, config, batch=batch, seq_len=length) for config in rest},
    }
    return dataclasses.replace(first_trace, others=tuple(traces[config] for config in configs[1:]))


def check_forecast(engine: Engine) -> None:
    """Refuse an engine without a forecast.

    Raises:
        StrategyError: with its reason.
    """
    if engine.no_forecast:
        raise StrategyError(f"no forecast: {engine.no_forecast}")


def trace_configs(job: Job, *, masked: bool) -> list[TraceConfig]:
    """Return the configuration of each trace, of ranks or stages."""
    return job.engine.trace_configs(job, masked=masked)


def _other_configs(job: Job, own: TraceConfig, masked: bool) -> Iterator[TraceConfig]:
    """Yield the different configurations of the same job under the other engines."""
    for word in usual_shardings():
        with contextlib.suppress(StrategyError):
            strategy = dataclasses.replace(job.strategy, sharding=word, offload="none", dp_replicate=1)
            other_job = resolve(strategy, job.train_config, job.spec, strategy.least_ranks, job.device)
            if (config := other_job.engine.trace_config(other_job, masked=masked)) != own:
                yield config


def all_steps(job: Job, trace: Trace) -> list[list[Segment]]:
    """Return `whole_step` of a trace and of all others that come with it."""
    return [whole_step(job, each) for each in (trace, *trace.others)]


def whole_step(job: Job, trace: Trace) -> list[Segment]:
    """Repeat the trace over the whole depth, split at the engine's boundaries."""
    return _spread(trace, ALLOCATION_UNIT[job.device.kind], job.engine)


@lru_cache(maxsize=16)
def _spread(trace: Trace, block: int, engine: Engine) -> list[Segment]:
    """Return the repeated trace; strategies of one engine share it."""
    return split_segments(trace, block, partial(engine.is_boundary, trace))


def replay(
    job: Job,
    trace: Trace,
    step: Sequence[Segment],
    *,
    save: bool = True,
    num_checkpoints: int,
    kind: type[L] = Ledger,  # type: ignore[assignment]
) -> L:
    """Simulate the memory of the fullest rank, from its start to the saved result: the first of `replay_ranks`' highest."""
    ledgers = replay_ranks(job, trace, step, save=save, num_checkpoints=num_checkpoints, kind=kind)
    return max(ledgers, key=lambda ledger: ledger.peak)


def replay_ranks(
    job: Job,
    trace: Trace,
    step: Sequence[Segment],
    *,
    save: bool = True,
    num_checkpoints: int,
    kind: type[L] = Ledger,  # type: ignore[assignment]
) -> list[L]:
    """Simulate the memory of each rank of `Engine.simulated_ranks`.

    Args:
        job: with a spec.
        trace: of its model.
        step: from `whole_step`.
        save: whether the result is exported.
        num_checkpoints: as in `forecast`.
        kind: the ledger's class: `Ledger` has the peaks, `LedgerHistory` every change.
    """
    engine = job.engine
    ledgers: list[L] = []
    steps = [step, *(whole_step(job, other) for other in trace.others)]
    for index, rank in enumerate(engine.simulated_ranks(job)):
        ledgers.append(kind(shared=job.device.kind == "cpu"))
        if kept := sum(transform.host_bytes(job) for transform in job.transforms):
            ledgers[-1].offload("activations", kept)
        rank_trace, rank_step = trace, step
        if index and trace.others:
            rank_trace = trace.others[index - 1]
            rank_step = steps[index]
        simulation = Simulation(
            job=job,
            trace=rank_trace,
            step=rank_step,
            steps=steps,
            ledger=ledgers[-1],
            rank=rank,
            num_checkpoints=num_checkpoints,
            snapshot=engine.snapshot_bytes(job, rank),
        )
        engine.simulate_step(simulation)
        _simulate_save(simulation, save)
    return ledgers


def _simulate_save(simulation: Simulation, save: bool) -> None:
    """Simulate a checkpoint's snapshot on every rank, and the export on rank 0. On a GPU both go to the host.

    A model is written tensor by tensor, an adapter at once. Another rank's part of a tensor comes in pieces.
    """
    ledger, job = simulation.ledger, simulation.job
    ledger.enter("save")
    sizes = [state.elements * BYTES_OF[job.weight_dtype] for state in parameters_of(job) if state.trainable and save]
    written = sum(sizes) if job.strategy.adapter != "none" else max(sizes, default=0)
    if job.device.kind == "cpu":
        ledger.hold("workspace", -simulation.kept_snapshot)
        shards = job.parallelism.shard_size
        piece = min(SEND_CHUNK, max(sizes, default=0) // shards) if shards > 1 else 0
        ledger.touch("workspace", max(written + piece, simulation.snapshot if simulation.num_checkpoints else 0))
    else:
        ledger.touch("workspace", min(SEND_CHUNK, max(sizes, default=0)))
        ledger.rank0_host(written)
        ledger.rank0_host(-written)


CONTEXT, COMMUNICATION, FRAGMENTATION = "CUDA context", "communication buffers", "fragmentation"

CONTEXTS = {7: 200 * MiB, 8: 520 * MiB, 9: 758 * MiB}
"""Major compute capability → bytes of a context with the kernels that a training step loads; the last one for later ones.

7: T4, at most 218 MiB, cache included (benchmarks/published_t4.json). 8: RTX 4090, 520 MiB (github.com/huggingface/lora-fast/
issues/1); RTX 6000 Ada, 426 MiB before a kernel runs (github.com/unslothai/unsloth-zoo/pull/1053). 9: H200, the same in all runs
of benchmarks/results/gpu-H200-141GB.json.
"""

CHANNEL, CHANNELS = 12 * MiB, {"nvlink": 24, "pcie": 4}
"""Bytes of one of NCCL's channels, and their number. One communicator over NVLink is 288 MiB.

github.com/NVIDIA/nccl/issues/1685: buffers of 10 and 2 MiB a channel, and 1.06 GB on each of 8 H100 before an all-to-all, about
a context and one communicator. The number of communicators multiplies them (issue 864).
"""

SHARE = 0.03
"""Share of the peak that lies free in the allocator's segments and fits no request.

benchmarks/published_oom.json: 1.1% in the median of thirteen messages, below 3% in ten of them. Before it fails, the allocator
frees its cache (c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`), so only processes without free memory show it.
"""


SOURCES = {
    CONTEXT: "runs on an H200, others' on a T4 and an RTX 4090 (huggingface/lora-fast#1)",
    COMMUNICATION: "NCCL's buffers a channel (NVIDIA/nccl#1685)",
    FRAGMENTATION: f"{SHARE:.0%} of the peak (benchmarks/published_oom.json)",
}
"""Term → where its figure is from."""


def context_memory(job: Job, peak: int) -> Mapping[str, int]:
    """Return the GPU memory of a rank outside the allocator's `peak`, by term; nothing on CPU ranks.

    Contexts are measured. NCCL's buffers and fragmentation are those of published runs that ended out of memory: PyTorch's message
    names the bytes of the process and of the allocator. No run of the toolkit has confirmed these; `calibrate` takes a run's.
    """
    if job.device.kind != "cuda":
        return {}
    major = (job.device.capability or (9, 0))[0]
    terms = {CONTEXT: CONTEXTS[max(min(major, max(CONTEXTS)), min(CONTEXTS))]}
    if job.ranks > 1:
        sizes = job.parallelism
        cp = sizes.cp if sizes.cp < job.ranks else 1  # else in the group of all ranks
        groups = sum(size > 1 for size in (sizes.pp, sizes.dp_replicate, sizes.shard_size, cp, sizes.tp, sizes.ep))
        card = job.device.card
        link = "nvlink" if card is None or card.peer > card.host else "pcie"
        # The dimensions' own groups, and the one of all ranks where these are several.
        terms[COMMUNICATION] = (groups + (groups > 1)) * CHANNELS[link] * CHANNEL
    return {**terms, FRAGMENTATION: round(SHARE * peak)}
