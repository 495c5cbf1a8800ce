"""What CUDA takes of a GPU besides the allocator's peak: the context, communication buffers, fragmentation.

The figures are those of runs that ended out of memory: PyTorch's message tells what the process held, what the allocator held
of it, and what of that was free. No run of the toolkit's own on a GPU has confirmed them; `calibrate` takes a run's instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.core.units import MiB
from toolkit.engines.job import Job

CONTEXT, COMMUNICATION, FRAGMENTATION = "CUDA context", "communication buffers", "fragmentation"

CONTEXTS = {7: 200 * MiB, 8: 520 * MiB, 9: 700 * MiB}
"""Major compute capability → bytes of a context with the kernels that a training step loads; the last one for later ones.

7: T4, at most 218 MiB, cache included (benchmarks/published_t4.json). 8: RTX 4090, 520 MiB (github.com/huggingface/lora-fast/
issues/1); RTX 6000 Ada, 426 MiB before a kernel runs (github.com/unslothai/unsloth-zoo/pull/1053). 9: H100, from the 1.06 GB of
github.com/NVIDIA/nccl/issues/1685, less one communicator.
"""

CHANNEL, CHANNELS = 12 * MiB, {"nvlink": 24, "pcie": 4}
"""Bytes of one of NCCL's channels, and their number. One communicator over NVLink is 288 MiB.

github.com/NVIDIA/nccl/issues/1685: buffers of 10 and 2 MiB a channel, and 1.06 GB on each of 8 H100 before an all-to-all, which
is context and one communicator. The number of communicators multiplies them (issue 864).
"""

SHARE = 0.03
"""Of the peak, what lies free in the allocator's segments and fits no request.

benchmarks/published_oom.json: 1.1% in the median of thirteen messages, below 3% in ten of them. Before it fails, the allocator
frees its cache (c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`): a process with room to spare tells nothing.
"""


SOURCES = {
    CONTEXT: "others' out-of-memory messages (huggingface/lora-fast#1, NVIDIA/nccl#1685)",
    COMMUNICATION: "NCCL's buffers a channel (NVIDIA/nccl#1685)",
    FRAGMENTATION: f"{SHARE:.0%} of the peak (benchmarks/published_oom.json)",
}
"""Term → where its figure is from."""


def context_memory(job: Job, peak: int) -> Mapping[str, int]:
    """Return the bytes that a rank takes of its GPU besides the allocator's `peak`, by term; nothing on CPU ranks."""
    if job.device.kind != "cuda":
        return {}
    major = (job.device.capability or (9, 0))[0]
    terms = {CONTEXT: CONTEXTS[max(min(major, max(CONTEXTS)), min(CONTEXTS))]}
    if job.ranks > 1:
        sizes = job.parallelism
        groups = sum(size > 1 for size in (sizes.dp_replicate, sizes.shard_size, sizes.tp))
        card = job.device.card
        link = "nvlink" if card is None or card.peer > card.host else "pcie"
        # The dimensions' own groups, and the one of all ranks where these are several.
        terms[COMMUNICATION] = (groups + (groups > 1)) * CHANNELS[link] * CHANNEL
    return {**terms, FRAGMENTATION: round(SHARE * peak)}
