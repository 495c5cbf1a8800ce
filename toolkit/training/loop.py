"""`train()`: the loop. Its loss is weighted by tokens, its order by nothing, and numbers that are not finite end it."""

from __future__ import annotations

import itertools
import math
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
from toolkit.training.setup import on_any_rank

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    Batch = Mapping[str, torch.Tensor]

SKIPS = 20
"""fp16: steps in a row that the scaler may skip before the run is stopped."""


class StepRequest(IntFlag):
    """What a rank asks of all of them; they agree on it in the middle of a step, and act when it is done."""

    NOTHING = 0
    SAVE = 1
    """Write a checkpoint."""
    STOP = 2
    """Make this step the last one."""


def no_request() -> StepRequest:
    """The wish of a rank that has none."""
    return StepRequest.NOTHING


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, the same on every rank but for `seconds`."""

    step: int
    """From 1."""
    loss: float
    """Mean cross-entropy in nats over the global batch's trained tokens."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    """That this step used."""
    tokens: int
    """Trained tokens of the global batch."""
    seconds: float
    skipped: bool
    """fp16: the scaler found an overflow and left the weights alone."""
    gradients: str
    """The gradients' dtypes, for the audit."""
    bytes: tuple[Mapping[str, int | None], ...]
    """Memory of each rank as the step began."""
    request: StepRequest
    """What any rank asked for when its last forward was done."""


def make_optimizer(model: torch.nn.Module, train_config: TrainConfig) -> torch.optim.Optimizer:
    """Return the loop's optimizer over the trained parameters, with torch's defaults."""
    import torch

    assert train_config.lr is not None, "a resolved loop has a learning rate"
    groups = by_mesh(parameter for parameter in model.parameters() if parameter.requires_grad)
    made = getattr(torch.optim, OPTIMIZERS[train_config.optimizer].torch)
    optimizer: torch.optim.Optimizer = made([{"params": group} for group in groups], lr=train_config.lr)
    return optimizer


def warmup_cosine(optimizer: torch.optim.Optimizer, train_config: TrainConfig) -> LambdaLR:
    """A linear rise over `warmup` steps to `lr`, then a cosine that would reach 0 one step after the last."""
    from torch.optim.lr_scheduler import LambdaLR

    def factor(done: int) -> float:
        if done < train_config.warmup:
            return (done + 1) / train_config.warmup
        return 0.5 * (
            1 + math.cos(math.pi * (done - train_config.warmup) / max(1, train_config.steps - train_config.warmup))
        )

    return LambdaLR(optimizer, factor)


def train(
    prepared: Prepared,
    loader: Iterable[Batch],
    schedule: Any,
    *,
    start: int = 0,
    begin: Callable[[int], object] = lambda step: None,
    samples: Callable[[int], str] = lambda step: "not recorded",
    request: Callable[[], StepRequest] = no_request,
) -> Iterator[Step]:
    """Train, yielding each step when it is done.

    Args:
        prepared: model and optimizer after `prepare`.
        loader: this rank's micro-batches in order, `accumulation` of them a step: `input_ids`, `labels`, … [b, s].
        schedule: stepped once an optimizer step, whatever the number of ranks. fp16's skipped steps do not count.
        start: steps that were done before.
        begin: told each step as it begins.
        samples: says which samples a step took, for messages.
        wish: what this rank asks of all, asked once a step; after a step with `StepRequest.STOP` there is no other.

    Raises:
        DataError: for a loader that ends before the steps do, and for a step without a trained label.
        NotFinite: at the first loss, norm or step that is not finite; weights are those of the step before. fp16 goes
            on over steps that its scaler skips, until 20 in a row or the scale is at its smallest.
    """
    job, engine = prepared.job, engine_of(prepared.job.strategy)
    skips, batches = 0, iter(loader)
    for step in range(start + 1, job.train_config.steps + 1):
        began, lr = time.perf_counter(), schedule.get_last_lr()[0]
        begin(step)
        micro = [_shifted(batch, prepared) for batch in itertools.islice(batches, job.train_config.accumulation)]
        _check_data(micro, job, step)
        sums = _StepSums(prepared, sum(map(trained_tokens, micro)), request)
        engine.forward_backward(prepared, micro, sums.weight, sums.send_loss)
        loss, tokens, requested = sums.result()
        _check_loss(loss, tokens, job, step, samples)
        done = engine.step(prepared)
        skips = skips + 1 if done.skipped else 0
        _check(job, done, skips, step, samples)
        schedule.step()
        yield Step(
            step=step,
            loss=loss / tokens,
            grad_norm=done.norm,
            lr=lr,
            tokens=tokens,
            seconds=time.perf_counter() - began,
            skipped=done.skipped,
            gradients=done.gradients,
            bytes=sums.memory(),
            request=requested,
        )
        if StepRequest.STOP in requested:
            return


def evaluate(prepared: Prepared, loader: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> float | None:
    """Mean cross-entropy in nats over all trained tokens of all ranks' batches; None where a rank asked to stop. A collective.

    Every rank has equally many batches. `stop` is asked before each of them.
    """
    import torch

    job, accelerator, engine = prepared.job, prepared.accelerator, engine_of(prepared.job.strategy)
    sums, stopped = torch.zeros(2, dtype=torch.float64, device=accelerator.device), False
    prepared.model.eval()
    for batch in loader:
        if stopped := on_any_rank(accelerator, stop()):
            break
        batch = _shifted(batch, prepared)
        sums[0] += sum(engine.evaluate(prepared, [batch]))
        sums[1] += trained_tokens(batch)
    prepared.model.train()
    if stopped:
        return None
    place = job.coordinates(accelerator.process_index)
    if place.tp or place.pp:  # another rank of its group has the same rows
        sums.zero_()
    total, tokens = accelerator.reduce(sums, reduction="sum").tolist()
    return float(total / tokens) if tokens else math.nan


def trained_tokens(batch: Batch) -> int:
    """Labels that count in the loss; they are shifted already."""
    return int((batch["labels"] != -100).sum())


def _shifted(batch: Batch, prepared: Prepared) -> Batch:
    """The batch with each label where the logits that predict it stand."""
    return {**batch, "labels": shift_labels(batch["labels"], loss_kind(prepared.job, prepared.model))}


class _Gathered:
    """A row of each rank, under way to all of them while the rest of the step goes on."""

    def __init__(self, row: torch.Tensor, ranks: int) -> None:
        import torch.distributed as dist

        self._rows = row.repeat(ranks, 1) if ranks > 1 else row[None]
        # On gloo a gather takes half of what an all-reduce does.
        self._work = dist.all_gather(list(self._rows.unbind()), row, async_op=True) if ranks > 1 else None

    def rows(self) -> torch.Tensor:
        """All of them [ranks, …], in the order of the ranks. On CUDA the device waits for them, and the host does not."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows


class _StepSums:
    """Sums over all ranks that a step sends beside its computation: tokens and memory first, then losses and requests.

    Nobody waits for the first before the first backward, nor for the second before the last one has ended.
    """

    def __init__(self, prepared: Prepared, tokens: int, request: Callable[[], StepRequest]) -> None:
        import torch

        self._device = prepared.accelerator.device
        self._parallelism, self._wish = prepared.job.parallelism, request
        held = live_bytes(self._device)
        self._names = tuple(held)
        row = [tokens, *(-1 if size is None else size for size in held.values())]
        mine = torch.tensor(row, pin_memory=self._device.type == "cuda").to(self._device, non_blocking=True)
        self._first = _Gathered(mine, self._parallelism.ranks)
        counted = self._parallelism.loss_ranks()
        self._counted = slice(counted.start, counted.stop, counted.step)  # an index by a list would wait for the device
        """Ranks of one `tp` and `pp` group have the same rows: each is counted once."""
        self._weight: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        """Return what a loss sum counts in the mean over the global batch's tokens, times the ranks that engines divide by.

        Engines average gradients over ranks; weighting by tokens makes the sum over ranks and micro-batches the gradient of
        the mean over all tokens (transformers#34191).
        """
        if self._weight is None:
            tokens = self._first.rows()[self._counted, 0].sum().double()
            self._weight = (self._parallelism.loss_size / tokens).float()
        return self._weight

    def send_loss(self, losses: Sequence[torch.Tensor]) -> None:
        """Send this rank's loss, and 1 for each of its requests, while the last backward runs."""
        import torch

        row = torch.zeros(1 + len(StepRequest), device=self._device)
        row[0] = sum(losses)
        request = self._wish()
        for index, one in enumerate(StepRequest, start=1):
            if one in request:
                row[index] = 1
        self._last = _Gathered(row, self._parallelism.ranks)

    def result(self) -> tuple[float, int, StepRequest]:
        """Return the loss sum and the tokens of the global batch, and the requests of all ranks."""
        rows = self._last.rows().tolist()
        counts = [sum(column) for column in zip(*rows, strict=True)][1:]
        requested = StepRequest(sum(one for one, count in zip(StepRequest, counts, strict=True) if count))
        tokens = int(self._first.rows()[self._counted, 0].sum())
        return sum(row[0] for row in rows[self._counted]), tokens, requested

    def memory(self) -> tuple[dict[str, int | None], ...]:
        """Return what each rank held as the step began."""
        return tuple(
            dict(zip(self._names, (None if size < 0 else size for size in sizes), strict=True))
            for _, *sizes in self._first.rows().tolist()
        )


def _check_data(micro: Sequence[Batch], job: Job, step: int) -> None:
    if len(micro) < job.train_config.accumulation:
        raise DataError(
            f"step {step}: the loader gave {len(micro)} of {job.train_config.accumulation} micro-batches. "
            f"{job.train_config.steps} steps need {job.train_config.steps * job.train_config.accumulation}. "
            "Give more data, or lower --steps."
        )


def _check_loss(total: float, tokens: int, job: Job, step: int, samples: Callable[[int], str]) -> None:
    """Every rank sees the same sum, before the weights could be touched."""
    if not tokens:
        raise DataError(f"step {step}: none of its labels is trained. Samples: {samples(step)}. Give data with labels.")
    if not job.precision.scaled and not math.isfinite(total):
        raise NotFinite(
            f"step {step}: the loss is {total}. Weights are those of step {step - 1}. Samples: {samples(step)}. "
            "Look at these samples, or lower --lr."
        )


def _check(job: Job, done: StepResult, skips: int, step: int, samples: Callable[[int], str]) -> None:
    if not job.precision.scaled:
        if done.skipped:
            raise NotFinite(
                f"step {step}: the gradient norm is {done.norm}, and the step was not taken. Weights are those of step "
                f"{step - 1}. Samples: {samples(step)}. Look at these samples, or lower --lr."
            )
    elif skips >= SKIPS or (done.skipped and done.scale <= 1):
        raise NotFinite(
            f"step {step}: fp16 overflowed in {skips} steps in a row, at loss scale {done.scale:g}. Weights are those of "
            f"step {step - skips}. Samples: {samples(step)}. Use --precision bf16 or fp32."
        )
