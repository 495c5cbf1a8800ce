"""Workarounds for gaps and faults of libraries. A private name is checked before it is replaced.

Gloo at the end of a rank: a worker thread drops the tensors of a collective after the caller has its result, and needs the GIL
for it (`AsyncWork` → `decref_pyobject`). Two faults of torch 2.13 follow:

- Whatever holds a process group last (DDP's reducer) destroys it with the GIL held, and joins the workers: a deadlock.
- CPython before 3.14 ends a thread that requests the GIL during finalization by unwinding its stack. The destructors
  are `noexcept`: «terminate called without an active exception», SIGABRT.

Waiting for idle workers avoids both. The kernel shows a worker's state, so no time is guessed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.models.hf_loading import first_names, set_tensor

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

made_by_toolkit = False
"""Whether this process's Accelerator is the toolkit's, which distributes over CPU ranks by its engines."""

WORKER = "pt_gloo_runloop"
"""The name of gloo's worker threads: torch, `ProcessGroupGloo::runLoop`."""

IDLE_LIMIT = 5.0
"""Seconds to wait for workers. Idle workers need none; workers in a collective without its peers never become idle."""

BLIND_LIMIT = 0.1
"""Seconds to wait where the kernel does not show system calls (gVisor)."""

_FUTEX_WAIT_BITSET, _FUTEX_COMMANDS = 9, 0x7F  # <linux/futex.h>


@contextlib.contextmanager
def patched(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a library's module, class or object inside a `with` block.

    Raises:
        RuntimeError: for an attribute that the installed version does not have.
    """
    for name in replacements:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"{owner} has no {name!r} in the installed version, and the toolkit replaces it. "
                "Install the versions of constraints.txt."
            )
    upstream = {name: getattr(owner, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in upstream.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def ties_kept(model: Any) -> Iterator[None]:
    """Tie what the model itself ties, by identity, wherever Accelerate ties what its config ties.

    Under FSDP every name gets a tensor of its own when a model moves to the meta device and when it is filled. Accelerate
    calls `tie_weights` after both. It knows neither ties made by hand nor those of PEFT's copies.
    """
    names = first_names(model)

    def tie(*_: Any, **__: Any) -> None:
        for name, first in names.items():
            if name != first:
                source, leaf = first.rpartition(".")[::2]
                set_tensor(model, name, getattr(model.get_submodule(source), leaf))

    model.tie_weights = tie
    try:
        yield
    finally:
        del model.tie_weights


def masks_known_from(batch: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Tell transformers what a batch on the host shows: whether rows hold several documents, or padding.

    It would read that on the device in every micro-batch, and so wait for it (transformers/masking_utils.py
    `_ignore_causal_mask_sdpa`, `find_packed_sequence_indices`). While it traces, it takes masks as they are.
    """
    from transformers import masking_utils

    positions = batch.get("position_ids")
    packed = positions is not None and bool((positions.diff(dim=-1) != 1).any())
    replacements: dict[str, Any] = {"is_tracing": lambda tensor=None: tensor is not None}
    if not packed:
        replacements["find_packed_sequence_indices"] = lambda position_ids: None
    return patched(masking_utils, **replacements)


def without_deepspeed() -> contextlib.AbstractContextManager[None]:
    """Let accelerate unwrap a model without an import of DeepSpeed, which has wrapped none before somebody imports it.

    `extract_model_from_parallel` imports it wherever it is installed, to compare the model with its engine: a tenth of
    what a rank without it computes before its first step.
    """
    if "deepspeed" in sys.modules:
        return contextlib.nullcontext()
    from accelerate.utils import other

    return patched(other, is_deepspeed_available=lambda: False)


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


@functools.cache
def wait_at_exit() -> None:
    """Call `wait_for_workers()` before every `destroy_process_group` (`end_training` included) and before finalization."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def wait_and_destroy(*args: Any, **kwargs: Any) -> None:
        wait_for_workers()
        destroy(*args, **kwargs)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = wait_and_destroy
    atexit.register(wait_for_workers)


def wait_for_workers() -> None:
    """Wait until gloo's workers are idle. If some are not, keep the process groups: nothing joins their workers then."""
    deadline = time.monotonic() + (IDLE_LIMIT if Path("/proc/self/syscall").exists() else BLIND_LIMIT)
    while not all(map(_is_idle, workers())):
        if time.monotonic() > deadline:
            _keep_groups()
            return
        time.sleep(0.001)  # without the GIL, which they need


def workers() -> Iterator[Path]:
    """Return the `/proc` folders of gloo's worker threads; none on other systems than Linux."""
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().rstrip("\n") == WORKER:
                yield task
        except OSError:  # the thread has ended
            continue


def _is_idle(worker: Path) -> bool:
    """Return whether the thread waits for work.

    It is then in `pthread_cond_wait`, the futex call FUTEX_WAIT_BITSET without a timeout. Waits for the GIL and for
    peers have a timeout, and a wait for a mutex is a FUTEX_WAIT. A thread that is not blocked shows «running».
    """
    try:
        fields = (worker / "syscall").read_text().split()
    except OSError:
        return not worker.exists()
    if len(fields) < 5:
        return False
    command, timeout = int(fields[2], 16), int(fields[4], 16)
    return command & _FUTEX_COMMANDS == _FUTEX_WAIT_BITSET and timeout == 0


def _keep_groups() -> None:
    """Keep torch's process groups until the process ends, through finalization too."""
    import ctypes

    dist = sys.modules.get("torch.distributed")
    for group in dist.distributed_c10d._world.pg_map if dist else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
