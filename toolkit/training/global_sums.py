"""Numbers of all ranks, gathered while a step is computed: tokens, memory, loss, and the requests to stop or save."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from toolkit.engines.records import Prepared
from toolkit.measurement import live_bytes

if TYPE_CHECKING:
    import torch


class StepRequest(IntFlag):
    """A stop or save request that all ranks agree on during a step. They act on it when the step is done."""

    NOTHING = 0
    SAVE = 1
    """Write a checkpoint."""
    STOP = 2
    """Make this step the last one."""


class HostCopy:
    """A tensor's values on the host. On CUDA the copy is queued at once, so that reading waits for nothing that is queued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        import torch

        self._values = tensor.to("cpu", non_blocking=tensor.is_cuda)  # pinned memory (TensorConversions.cpp `pin_out`)
        self._copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def read(self) -> Any:
        """Return the values as Python numbers. The host waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class Gather:
    """An all-gather of one row of named numbers from each rank. It runs during the step's computation."""

    def __init__(self, row: Mapping[Any, Any], ranks: int, device: torch.device) -> None:
        import torch
        import torch.distributed as dist

        self._names = list(row)
        values = torch.zeros(len(row), dtype=torch.float64, device=device)
        for index, value in enumerate(row.values()):
            values[index] = value
        self._rows = values.repeat(ranks, 1)
        # On gloo a gather takes half of an all-reduce's time.
        self._work = dist.all_gather(list(self._rows.unbind()), values, async_op=True) if ranks > 1 else None

    def column(self, name: str) -> torch.Tensor:
        """Return one number of every rank [ranks]. On CUDA the device waits for them, and the host does not."""
        return self._finished[0][:, self._names.index(name)]

    @functools.cached_property
    def rows(self) -> list[dict[Any, float]]:
        """The row of every rank. The host waits for them, but for no work that follows the first call of `column`."""
        return [dict(zip(self._names, row, strict=True)) for row in self._finished[1].read()]

    @functools.cached_property
    def _finished(self) -> tuple[torch.Tensor, HostCopy]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows, HostCopy(self._rows)


class GlobalSums:
    """Numbers of all ranks, sent during the step's computation: tokens and memory before it, loss and requests at its end.

    The host does not wait for the first before the first backward, nor for the second before the last backward.
    """

    def __init__(
        self, prepared: Prepared, tokens: int, request: Callable[[], StepRequest], seconds: float = math.inf
    ) -> None:
        """Send this rank's trained tokens, its memory and the seconds of its last step; `request` is called by `send_loss`."""
        self._device = prepared.accelerator.device
        self._parallelism, self._request = prepared.job.parallelism, request
        ranks = self._parallelism.loss_ranks()
        self._loss_ranks = slice(ranks.start, ranks.stop, ranks.step)  # indexing by a list would wait for the device
        """One rank of each group that has the same rows."""
        memory = {name: -1 if size is None else size for name, size in live_bytes(self._device).items()}
        self._before = self._send({"tokens": tokens, "seconds": seconds, **memory})

    def _send(self, row: Mapping[Any, Any]) -> Gather:
        return Gather(row, self._parallelism.ranks, self._device)

    def loss_weight(self) -> torch.Tensor:
        """Return the factor of a loss sum in the mean over the global batch's tokens, times the ranks that engines divide by.

        Engines average gradients over ranks. With weights by tokens the sum over ranks and micro-batches is the gradient of
        the mean over all tokens (transformers#34191).
        """
        return (self._parallelism.loss_size / self._before.column("tokens")[self._loss_ranks].sum()).float()

    def send_loss(self, losses: Sequence[torch.Tensor]) -> None:
        """Send this rank's loss and its requests while the last backward runs."""
        request = self._request()
        self._after = self._send({"loss": sum(losses)} | {flag: flag in request for flag in StepRequest})

    def tokens(self) -> int:
        """Return the trained tokens of the global batch."""
        return int(sum(row["tokens"] for row in self._before.rows[self._loss_ranks]))

    def slowest(self) -> float:
        """Return the most seconds that a rank sent."""
        return max(row["seconds"] for row in self._before.rows)

    def not_finite(self) -> torch.Tensor:
        """Return 1 on the device where the loss sum of the global batch is not finite, else 0."""
        return (~self._after.column("loss")[self._loss_ranks].sum().isfinite()).float()

    def loss(self) -> float:
        """Return the loss sum of the global batch. Waits for the last backward."""
        return sum(row["loss"] for row in self._after.rows[self._loss_ranks])

    def requests(self) -> StepRequest:
        """Return the requests of all ranks together."""
        flags = (flag for flag in StepRequest if any(row[flag] for row in self._after.rows))
        return functools.reduce(operator.or_, flags, StepRequest.NOTHING)

    def memory(self) -> tuple[dict[str, int | None], ...]:
        """Return each rank's memory when the step began."""
        others = ("tokens", "seconds")
        rows = [{name: int(size) for name, size in row.items() if name not in others} for row in self._before.rows]
        return tuple({name: None if size < 0 else size for name, size in row.items()} for row in rows)
