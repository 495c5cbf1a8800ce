"""`train()`: the training loop. Its loss is the mean over tokens; a number that is not finite ends it."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from toolkit.config.tables import OPTIMIZERS
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import DataError, NotFinite
from toolkit.engines.base import engine_of
from toolkit.engines.job import Job
from toolkit.engines.losses import loss_kind, shift_labels
from toolkit.engines.optimizer_step import by_mesh
from toolkit.engines.records import Prepared, StepResult
from toolkit.measurement import live_bytes

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    Batch = Mapping[str, torch.Tensor]

MAX_SKIPS = 20
"""fp16: steps in a row that the scaler may skip before the run ends."""


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
    """Return the optimizer of the trained parameters, with torch's defaults."""
    import torch

    assert train_config.lr is not None, "a resolved TrainConfig has a learning rate"
    groups = by_mesh(parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer_class = getattr(torch.optim, OPTIMIZERS[train_config.optimizer].torch)
    optimizer: torch.optim.Optimizer = optimizer_class([{"params": group} for group in groups], lr=train_config.lr)
    return optimizer


def warmup_cosine(optimizer: torch.optim.Optimizer, train_config: TrainConfig) -> LambdaLR:
    """Return a linear rise over `warmup` steps to `lr`, then a cosine that would reach 0 one step after the last."""
    from torch.optim.lr_scheduler import LambdaLR

    warmup, steps = train_config.warmup, train_config.steps

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (done - warmup) / max(1, steps - warmup)))

    return LambdaLR(optimizer, factor)


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
        micro_batches = _next_micro_batches(batches, prepared, step)
        sums = _GlobalSums(prepared, sum(map(trained_tokens, micro_batches)), request)
        engine.forward_backward(prepared, micro_batches, sums.loss_weight, sums.send_loss)
        loss, tokens = sums.loss(), sums.tokens()
        _check_loss(loss, tokens, job, step, samples)
        result = engine.step(prepared)
        skips = skips + 1 if result.skipped else 0
        _check_step(result, skips, job, step, samples)
        schedule.step()
        yield Step(
            step=step,
            loss=loss / tokens,
            grad_norm=result.norm,
            lr=lr,
            tokens=tokens,
            seconds=time.perf_counter() - began,
            skipped=result.skipped,
            gradients=result.gradients,
            bytes=sums.memory(),
            request=sums.requests(),
        )
        if StepRequest.STOP in sums.requests():
            return


def trained_tokens(batch: Batch) -> int:
    """Return the number of labels that count in the loss; they are shifted already."""
    return int((batch["labels"] != -100).sum())


def shifted(batch: Batch, prepared: Prepared) -> Batch:
    """Return the batch with each label at the position of the logits that predict it."""
    return {**batch, "labels": shift_labels(batch["labels"], loss_kind(prepared.job, prepared.model))}


def _next_micro_batches(batches: Iterator[Batch], prepared: Prepared, step: int) -> list[Batch]:
    train_config = prepared.job.train_config
    micro_batches = [shifted(batch, prepared) for batch in itertools.islice(batches, train_config.accumulation)]
    if len(micro_batches) < train_config.accumulation:
        raise DataError(
            f"step {step}: the loader returned {len(micro_batches)} of {train_config.accumulation} micro-batches. "
            f"{train_config.steps} steps need {train_config.steps * train_config.accumulation}. "
            "Give more data, or lower --steps."
        )
    return micro_batches


class _Gather:
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
        return self._finished()[:, self._names.index(name)]

    @functools.cached_property
    def rows(self) -> list[dict[Any, float]]:
        """The row of every rank. The host waits for them."""
        return [dict(zip(self._names, row, strict=True)) for row in self._finished().tolist()]

    def _finished(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows


class _GlobalSums:
    """Numbers of all ranks, sent during the step's computation: tokens and memory before it, loss and requests at its end.

    The host does not wait for the first before the first backward, nor for the second before the last backward.
    """

    def __init__(self, prepared: Prepared, tokens: int, request: Callable[[], StepRequest]) -> None:
        """Send this rank's trained tokens and its memory; `request` is called by `send_loss`."""
        self._device = prepared.accelerator.device
        self._parallelism, self._request = prepared.job.parallelism, request
        ranks = self._parallelism.loss_ranks()
        self._loss_ranks = slice(ranks.start, ranks.stop, ranks.step)  # indexing by a list would wait for the device
        """One rank of each group that has the same rows."""
        memory = {name: -1 if size is None else size for name, size in live_bytes(self._device).items()}
        self._before = self._send({"tokens": tokens, **memory})

    def _send(self, row: Mapping[Any, Any]) -> _Gather:
        return _Gather(row, self._parallelism.ranks, self._device)

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

    def loss(self) -> float:
        """Return the loss sum of the global batch. Waits for the last backward."""
        return sum(row["loss"] for row in self._after.rows[self._loss_ranks])

    def requests(self) -> StepRequest:
        """Return the requests of all ranks together."""
        flags = (flag for flag in StepRequest if any(row[flag] for row in self._after.rows))
        return functools.reduce(operator.or_, flags, StepRequest.NOTHING)

    def memory(self) -> tuple[dict[str, int | None], ...]:
        """Return each rank's memory when the step began."""
        rows = [{name: int(size) for name, size in row.items() if name != "tokens"} for row in self._before.rows]
        return tuple({name: None if size < 0 else size for name, size in row.items()} for row in rows)


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
