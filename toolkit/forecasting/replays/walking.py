"""What all replays share: the walk over a micro-batch, the optimizer's step, and what saving holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from toolkit.engines.job import Job
from toolkit.engines.states import parameters_of
from toolkit.forecasting.ledger import Ledger
from toolkit.forecasting.timeline import Stretch
from toolkit.units import BYTES_OF, GiB

RESULT_SHARD = 5 * GiB
"""The most that saving the result holds of the model at once (huggingface_hub's shards)."""


BLOCK = {"cpu": 1, "cuda": 512}
"""Bytes that an allocator rounds up to (c10/cuda/CUDACachingAllocator.cpp, `kMinBlockSize`)."""


class Moves(Protocol):
    """What an engine does where a module begins or ends, and where a gradient is complete."""

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """One of the events that `timeline.Event` names."""


def walk(ledger: Ledger, step: Sequence[Stretch], moves: Moves) -> None:
    """One micro-batch, forward and backward."""
    backward = False
    for stretch in step:
        ledger.touch("activations", stretch.rise)
        ledger.hold("activations", stretch.net)
        if stretch.what == "backward":
            backward = True
            ledger.enter("backward")
        if stretch.what:
            moves.event(stretch.what, stretch.size, stretch.name, backward)


def adamw(ledger: Ledger, job: Job, pieces: Iterable[int]) -> None:
    """torch's AdamW over tensors of these elements, each in the dtype that is trained.

    On CPU it takes them one by one, with the root of the second moment and its quotient beside each
    (`_single_tensor_adam`); on CUDA all at once, with the roots alone (`_multi_tensor_adam`).
    """
    size = BYTES_OF[job.weight_dtype]
    elements = list(pieces)
    work = 2 * max(elements, default=0) if job.device.kind == "cpu" else sum(elements)
    ledger.touch("workspace", work * size)


def saving(ledger: Ledger, job: Job) -> None:
    """The most of a checkpoint's snapshot, of which each rank takes its part, and of the result, which rank 0 writes.

    On a GPU both go to the host, the result tensor by tensor.
    """
    ledger.enter("save")
    sizes = [state.elements * BYTES_OF[job.weight_dtype] for state in parameters_of(job) if state.trainable]
    if job.device.kind == "cpu":
        ledger.touch("workspace", max(min(sum(sizes), RESULT_SHARD), 3 * sum(sizes) // job.ranks))
    else:
        ledger.touch("workspace", max(sizes, default=0))
