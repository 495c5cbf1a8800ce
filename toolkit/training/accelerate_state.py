"""`reset_state()`: Accelerate keeps one state a process; a second Accelerator of this process gets a new one."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

from toolkit.core.errors import RunError
from toolkit.engines.job import Job

_count = 0
"""Accelerators of this process; equally many on every rank."""


def reset_state(job: Job, timeout: timedelta | None) -> None:
    """Forget Accelerate's state of an Accelerator that was ended or dropped.

    Accelerators of one process each share a state where sharding, precision and accumulation are equal.

    Raises:
        RunError: where the last Accelerator is still in use.
    """
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    global _count
    if (owners := AcceleratorState._shared_state.get("owners")) is not None:
        if any(not owner.ended for owner in owners):
            gc.collect()  # a dropped Accelerator is part of reference cycles
        if used := [owner for owner in owners if not owner.ended]:
            other = _state(used[0].job)
            if _state(job) == other and job.strategy.single_process:
                return
            raise RunError(
                f"this process already has an Accelerator, with sharding {other[0]!r}, precision {other[1]!r} and "
                f"accumulation {other[2]}, and Accelerate keeps one state a process. Call its end_training() first."
            )
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
    if _count and not job.strategy.single_process and "RANK" in os.environ and not dist.is_initialized():
        _init_group(job, timeout)
    _count += 1


def _state(job: Job) -> tuple[str, str, int]:
    """Return the values that Accelerate keeps for the whole process."""
    return job.strategy.sharding, job.strategy.precision, job.train_config.accumulation


def _init_group(job: Job, timeout: timedelta | None) -> None:
    """Make this process's next process group; Accelerate and DeepSpeed use it as it is.

    The launcher's store still has the addresses of ended groups, and torch gives every group the same name, which
    DTensor's caches need. A prefix keeps their keys apart.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo" if job.device.kind == "cpu" else "nccl" if job.strategy.offload == "none" else "cuda:nccl,cpu:gloo"
    store, rank, size = next(iter(rendezvous("env://")))
    dist.init_process_group(
        backend, store=PrefixStore(f"accelerator-{_count}", store), rank=rank, world_size=size, timeout=timeout
    )
