"""One process, or DDP: whole gradients, and buckets of the same size beside them."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.engines.job import Job, engine_of
from toolkit.engines.states import parameters_of
from toolkit.forecasting.ledger import Ledger
from toolkit.forecasting.replays.walking import adamw, loaded, moments, walk
from toolkit.forecasting.timeline import Stretch, Trace
from toolkit.units import MiB

BROADCAST = 250 * MiB
"""What DDP joins of the parameters to send them from rank 0 (torch/nn/parallel/distributed.py `broadcast_bucket_size`)."""


def heeds(trace: Trace, what: str, name: str) -> bool:
    """Gradients alone."""
    return what == "gradient"


def replay(job: Job, trace: Trace, step: Sequence[Stretch], ledger: Ledger, *, checkpoints: bool) -> None:
    """Load, prepare, one step of all micro-batches."""
    held = engine_of(job.strategy).account(job)
    loaded(ledger, job, held.parameters)
    if job.strategy.sharding == "ddp":
        ledger.touch("buffers", min(held.parameters, BROADCAST))
        ledger.hold("buffers", held.trainable)
    moments(ledger, job, held, checkpoints)
    walk(ledger, job, step, _Moves(ledger))
    ledger.enter("step")
    adamw(ledger, job, (state.elements for state in parameters_of(job) if state.trainable))
    ledger.hold("gradients", -ledger.held["gradients"])


def gathering(job: Job) -> int:
    """Nothing: every rank has each parameter whole."""
    return 0


class _Moves:
    """Gradients stay until the step has ended; those of later micro-batches are added in place."""

    grows = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._grown: set[str] = set()

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        if what == "gradient" and name not in self._grown:
            self._ledger.hold("gradients", size)
            self._grown.add(name)
