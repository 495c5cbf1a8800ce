"""Time limits of process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs


def pg_timeout(seconds: float) -> timedelta:
    """Return a timeout for a process group.

    A millisecond more than asked: Accelerate leaves out what equals its own default for NCCL (600 s), and torch's for
    gloo, 1800 s, would come in its place.
    """
    return timedelta(seconds=seconds, milliseconds=1)


def handlers(timeout: timedelta | None, backend: str | None = None) -> list[InitProcessGroupKwargs]:
    """Return Accelerate's handlers for a timeout and a backend; none for torch's and Accelerate's own defaults."""
    from accelerate.utils import InitProcessGroupKwargs

    return [InitProcessGroupKwargs(backend=backend, timeout=timeout)] if timeout or backend else []


def limit_all(timeout: timedelta) -> None:
    """Give every process group of this rank the same timeout: those that an engine made for itself have torch's default."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if dist.is_initialized():
        for group in c10d._world.pg_map:
            c10d._set_pg_timeout(timeout, group)


def limit_of(accelerator: Accelerator) -> float:
    """Return the seconds that a collective may take."""
    import torch.distributed as dist

    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(accelerator.device)
    limit: timedelta = backend.options._timeout
    return limit.total_seconds()
