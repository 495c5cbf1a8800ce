"""How long a rank waits in a collective for another before it gives up."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate.utils import InitProcessGroupKwargs


def patience(seconds: float) -> timedelta:
    """A timeout for a process group.

    A millisecond more than asked: Accelerate leaves out what equals its own default for NCCL (600 s), and torch's for
    gloo, 1800 s, would come in its place.
    """
    return timedelta(seconds=seconds, milliseconds=1)


def handlers(timeout: timedelta | None) -> list[InitProcessGroupKwargs]:
    """What tells Accelerate; nothing where torch's own default is meant."""
    from accelerate.utils import InitProcessGroupKwargs

    return [] if timeout is None else [InitProcessGroupKwargs(timeout=timeout)]


def limit_all(timeout: timedelta) -> None:
    """Give every process group of this rank the same timeout: those that an engine made for itself have torch's default."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if dist.is_initialized():
        for group in c10d._world.pg_map:
            c10d._set_pg_timeout(timeout, group)
