"""CPU support over gloo. Accelerate silently ignores sharding plugins on a CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta


def set_deepspeed_cpu() -> None:
    """Tell DeepSpeed that there is no accelerator, before transformers imports it: it would warn in every process."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def shard_with_fsdp(timeout: timedelta | None = None) -> None:
    """Let Accelerate take an FSDP plugin on CPU ranks. Called before `Accelerator(fsdp_plugin=…)`.

    accelerate 1.15's `AcceleratorState` reads the plugin only where `PartialState.distributed_type` is one of a device's
    (state.py, `elif self.distributed_type in [MULTI_GPU, …]`), and `MULTI_CPU` is none. FSDP2 itself runs on gloo.

    Raises:
        RuntimeError: where upstream no longer keeps the type in `PartialState._shared_state`.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True, **({} if timeout is None else {"timeout": timeout}))
    shared = PartialState._shared_state
    if shared.get("distributed_type") != state.distributed_type:
        raise RuntimeError("accelerate no longer keeps distributed_type in PartialState._shared_state")
    shared["distributed_type"] = DistributedType.MULTI_GPU
