"""`train()` and `evaluate()`: the training loop. Its loss is the mean over tokens; a non-finite number ends it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.config.tables import OPTIMIZERS
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import DataError, NotFinite
from toolkit.engines.base import engine_of
from toolkit.engines.job import Job
from toolkit.engines.losses import loss_kind, shift_labels
from toolkit.engines.optimizer_step import by_mesh
from toolkit.engines.records import Prepared, StepResult
from toolkit.measurement import live_bytes
from toolkit.training.setup import on_any_rank

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    Batch = Mapping[str, torch.Tensor]

MAX_SKIPS = 20
"""fp16: steps in a row that the scaler may skip before the run ends."""

STOP_EVERY = 4
"""Batches of an evaluation between two looks at the stop signal of all ranks."""


class StepRequest(IntFlag):
    """A stop or save request that all ranks agree on during a step. They act on it when the step is done."""

    NOTHING = 0
    SAVE = 1
    """Write a checkpoint."""
    STOP = 2
    """Make this step the last one."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step; the same on every rank except for `seconds`."""

    step: int
    """From 1."""
    loss: float
    """Mean cross-entropy in nats over the global batch's trained tokens."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    """The learning rate of this step."""
    tokens: int
    """Trained tokens of the global batch."""
    seconds: float
    skipped: bool
    """fp16: the scaler found an overflow and left the weights alone."""
    gradients: str
    """The gradients' dtypes, for the audit."""
    bytes: tuple[Mapping[str, int | None], ...]
    """Memory of each rank when the step began, in bytes by name."""
    request: StepRequest
    """The requests of all ranks together, made when their last forward was done."""


def make_optimizer(model: torch.nn.Module, train_config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters."""
    import torch

    assert train_config.lr is not None, "a resolved TrainConfig has a learning rate"
    groups = by_mesh(parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer_class = getattr(torch.optim, OPTIMIZERS[train_config.optimizer].torch)
    optimizer: torch.optim.Optimizer = optimizer_class(
        [{"params": group} for group in groups],
        lr=train_config.lr,
        betas=(train_config.beta1, train_config.beta2),
        eps=train_config.eps,
        weight_decay=train_config.weight_decay,
    )
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, train_config: TrainConfig) -> LambdaLR:
    """Return the scheduler of `TrainConfig`: a rise over `warmup` steps to `lr`, then its curve, down to `min_lr`."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, train_config.rate_factor)


def train(
    prepared: Prepared,
    loader: Iterable[Batch],
    schedule: Any,
    *,
    start: int = 0,
    on_begin: Callable[[int], object] = lambda step: None,
    samples: Callable[[int], str] = lambda step: "not recorded",
    request: Callable[[], StepRequest] = lambda: StepRequest.NOTHING,
) -> Iterator[Step]:
    """Train, and yield each step when it is done.

    Args:
        prepared: model and optimizer after `prepare`.
        loader: this rank's micro-batches in order, `accumulation` of them a step: `input_ids`, `labels`, … [b, s].
        schedule: stepped once an optimizer step on any number of ranks. Steps that fp16 skips do not count.
        start: steps that were done before.
        on_begin: called with each step's number as it begins.
        samples: returns a step's samples as text, for messages.
        request: returns this rank's request, once a step. After a step with `StepRequest.STOP` the loop ends.

    Raises:
        DataError: for a loader that ends before the steps do, and for a step without a trained label.
        NotFinite: at the first loss, norm or step that is not finite. The weights are those of the step before. fp16
            continues after skipped steps, until 20 in a row or until the scale is at its smallest.
    """
    job, engine = prepared.job, engine_of(prepared.job.strategy)
    skips, batches = 0, iter(loader)
    for step in range(start + 1, job.train_config.steps + 1):
        began, lr = time.perf_counter(), schedule.get_last_lr()[0]
        on_begin(step)
        micro = [_shifted(batch, prepared) for batch in itertools.islice(batches, job.train_config.accumulation)]
        _check_count(micro, job, step)
        sums = _GlobalSums(prepared, sum(map(trained_tokens, micro)), request)
        engine.forward_backward(prepared, micro, sums.loss_weight, sums.send_loss)
        loss, requests = sums.loss_and_requests()
        _check_loss(loss, sums.tokens, job, step, samples)
        result = engine.step(prepared)
        skips = skips + 1 if result.skipped else 0
        _check_step(result, skips, job, step, samples)
        schedule.step()
        yield Step(
            step=step,
            loss=loss / sums.tokens,
            grad_norm=result.norm,
            lr=lr,
            tokens=sums.tokens,
            seconds=time.perf_counter() - began,
            skipped=result.skipped,
            gradients=result.gradients,
            bytes=sums.memory(),
            request=requests,
        )
        if StepRequest.STOP in requests:
            return


def evaluate(prepared: Prepared, loader: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> float | None:
    """Return the mean cross-entropy in nats over all trained tokens of all ranks' batches. A collective.

    Args:
        prepared: model and optimizer after `prepare`.
        loader: this rank's batches; every rank has equally many.
        stop: called before every fourth batch, where the host waits for the device. Where any rank's returns true, the
            result is None.
    """
    import torch

    job, accelerator, engine = prepared.job, prepared.accelerator, engine_of(prepared.job.strategy)
    sums, stopped = torch.zeros(2, dtype=torch.float64, device=accelerator.device), False
    prepared.model.eval()
    for number, batch in enumerate(loader):
        if number % STOP_EVERY == 0 and (stopped := on_any_rank(accelerator, stop())):
            break
        batch = _shifted(batch, prepared)
        sums[0] += sum(engine.evaluate(prepared, [batch]))
        sums[1] += trained_tokens(batch)
    prepared.model.train()
    if stopped:
        return None
    coordinates = job.coordinates(accelerator.process_index)
    if coordinates.tp or coordinates.pp:  # another rank of the group counts the same rows
        sums.zero_()
    total, tokens = accelerator.reduce(sums, reduction="sum").tolist()
    return float(total / tokens) if tokens else math.nan


def trained_tokens(batch: Batch) -> int:
    """Return the number of labels that count in the loss; they are shifted already."""
    return int((batch["labels"] != -100).sum())


def _shifted(batch: Batch, prepared: Prepared) -> Batch:
    """Return the batch with each label at the position of the logits that predict it."""
    return {**batch, "labels": shift_labels(batch["labels"], loss_kind(prepared.job, prepared.model))}


class _AsyncGather:
    """An all-gather of one row a rank that runs during the step's computation."""

    def __init__(self, row: torch.Tensor, ranks: int) -> None:
        import torch.distributed as dist

        self._rows = row.repeat(ranks, 1) if ranks > 1 else row[None]
        # On gloo a gather takes half of an all-reduce's time.
        self._work = dist.all_gather(list(self._rows.unbind()), row, async_op=True) if ranks > 1 else None

    def rows(self) -> torch.Tensor:
        """Return the rows [ranks, …]. On CUDA the device waits for them, and the host does not."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows


class _StepMessage(NamedTuple):
    """The message of a rank to all ranks after its last forward."""

    loss: float
    """Sum over its trained tokens."""
    request: StepRequest

    @staticmethod
    def to_row(loss: torch.Tensor | float, request: StepRequest, device: torch.device) -> torch.Tensor:
        """Return the loss, and a 0 or 1 for each request."""
        import torch

        row = torch.zeros(1 + len(StepRequest), device=device)
        row[0] = loss
        for index, flag in enumerate(StepRequest, start=1):
            if flag in request:
                row[index] = 1
        return row

    @classmethod
    def from_row(cls, row: Sequence[float]) -> _StepMessage:
        flags = (flag for flag, value in zip(StepRequest, row[1:], strict=True) if value)
        return cls(row[0], StepRequest(sum(flags)))


class _GlobalSums:
    """Sums over all ranks, sent during the step's computation: tokens and memory before it, loss and requests at its end.

    The host does not wait for the first before the first backward, nor for the second before the last backward.
    """

    def __init__(self, prepared: Prepared, tokens: int, request: Callable[[], StepRequest]) -> None:
        """Send this rank's trained tokens and its memory; `request` is called by `send_loss`."""
        import torch

        self._device = prepared.accelerator.device
        self._parallelism, self._request = prepared.job.parallelism, request
        memory = live_bytes(self._device)
        self._memory_names = tuple(memory)
        row = [tokens, *(-1 if size is None else size for size in memory.values())]
        pinned = torch.tensor(row, pin_memory=self._device.type == "cuda")
        self._first = _AsyncGather(pinned.to(self._device, non_blocking=True), self._parallelism.ranks)
        ranks = self._parallelism.loss_ranks()
        self._loss_ranks = slice(ranks.start, ranks.stop, ranks.step)  # indexing by a list would wait for the device
        """One rank of each group that has the same rows."""
        self._weight: torch.Tensor | None = None

    def loss_weight(self) -> torch.Tensor:
        """Return the factor of a loss sum in the mean over the global batch's tokens, times the ranks that engines divide by.

        Engines average gradients over ranks. With weights by tokens the sum over ranks and micro-batches is the gradient of
        the mean over all tokens (transformers#34191).
        """
        if self._weight is None:
            tokens = self._first.rows()[self._loss_ranks, 0].sum().double()
            self._weight = (self._parallelism.loss_size / tokens).float()
        return self._weight

    def send_loss(self, losses: Sequence[torch.Tensor]) -> None:
        """Send this rank's loss and its requests while the last backward runs."""
        row = _StepMessage.to_row(sum(losses), self._request(), self._device)
        self._last = _AsyncGather(row, self._parallelism.ranks)

    def loss_and_requests(self) -> tuple[float, StepRequest]:
        """Return the loss sum of the global batch, and the requests of all ranks. Waits for the last backward."""
        messages = [_StepMessage.from_row(row) for row in self._last.rows().tolist()]
        requests = StepRequest.NOTHING
        for message in messages:
            requests |= message.request
        return sum(message.loss for message in messages[self._loss_ranks]), requests

    @cached_property
    def tokens(self) -> int:
        """Trained tokens of the global batch."""
        return int(self._first.rows()[self._loss_ranks, 0].sum())

    def memory(self) -> tuple[dict[str, int | None], ...]:
        """Return each rank's memory when the step began."""
        return tuple(
            dict(zip(self._memory_names, (None if size < 0 else size for size in sizes), strict=True))
            for _, *sizes in self._first.rows().tolist()
        )


def _check_count(micro: Sequence[Batch], job: Job, step: int) -> None:
    if len(micro) < job.train_config.accumulation:
        raise DataError(
            f"step {step}: the loader returned {len(micro)} of {job.train_config.accumulation} micro-batches. "
            f"{job.train_config.steps} steps need {job.train_config.steps * job.train_config.accumulation}. "
            "Give more data, or lower --steps."
        )


def _check_loss(total: float, tokens: int, job: Job, step: int, samples: Callable[[int], str]) -> None:
    """Check the sum, which is the same on every rank, before the weights change."""
    if not tokens:
        raise DataError(f"step {step}: none of its labels is trained. Samples: {samples(step)}. Give data with labels.")
    if not job.precision.scaled and not math.isfinite(total):
        raise NotFinite(
            f"step {step}: the loss is {total}. Weights are those of step {step - 1}. Samples: {samples(step)}. "
            "Look at these samples, or lower --lr."
        )


def _check_step(result: StepResult, skips: int, job: Job, step: int, samples: Callable[[int], str]) -> None:
    if not job.precision.scaled:
        if result.skipped:
            raise NotFinite(
                f"step {step}: the gradient norm is {result.norm}, and the step was not taken. Weights are those of step "
                f"{step - 1}. Samples: {samples(step)}. Look at these samples, or lower --lr."
            )
    elif skips >= MAX_SKIPS or (result.skipped and result.scale <= 1):
        raise NotFinite(
            f"step {step}: fp16 overflowed in {skips} steps in a row, at loss scale {result.scale:g}. Weights are those of "
            f"step {step - skips}. Samples: {samples(step)}. Use --precision bf16 or fp32."
        )
