"""`train()`: the loop. Its loss is weighted by tokens, its order by nothing, and numbers that are not finite end it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from toolkit.engines.job import Job, Prepared, Update, engine_of
from toolkit.errors import DataError, NotFinite
from toolkit.measuring import live_bytes
from toolkit.phases import phase
from toolkit.runtime import on_any_rank
from toolkit.strategy import Loop

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    Batch = Mapping[str, torch.Tensor]

SKIPS = 20
"""fp16: steps in a row that the scaler may skip before the run is stopped."""


class Wish(IntFlag):
    """What a rank asks of all of them; they agree on it in the middle of a step, and act when it is done."""

    NOTHING = 0
    SAVE = 1
    """Write a checkpoint."""
    STOP = 2
    """Make this step the last one."""


def nothing() -> Wish:
    """The wish of a rank that has none."""
    return Wish.NOTHING


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
    wish: Wish
    """What any rank asked for when its last forward was done."""


def adamw(model: torch.nn.Module, loop: Loop) -> torch.optim.Optimizer:
    """torch's AdamW over what is trained, with torch's defaults."""
    import torch

    assert loop.lr is not None, "a resolved loop has a learning rate"
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=loop.lr)


def warmup_cosine(optimizer: torch.optim.Optimizer, loop: Loop) -> LambdaLR:
    """A linear rise over `warmup` steps to `lr`, then a cosine that would reach 0 one step after the last."""
    from torch.optim.lr_scheduler import LambdaLR

    def factor(done: int) -> float:
        if done < loop.warmup:
            return (done + 1) / loop.warmup
        return 0.5 * (1 + math.cos(math.pi * (done - loop.warmup) / max(1, loop.steps - loop.warmup)))

    return LambdaLR(optimizer, factor)


def train(
    prepared: Prepared,
    loader: Iterable[Batch],
    schedule: Any,
    *,
    start: int = 0,
    begin: Callable[[int], object] = lambda step: None,
    samples: Callable[[int], str] = lambda step: "not recorded",
    wish: Callable[[], Wish] = nothing,
) -> Iterator[Step]:
    """Train, yielding each step when it is done.

    Args:
        prepared: model and optimizer after `prepare`.
        loader: this rank's micro-batches in order, `accumulation` of them a step: `input_ids`, `labels`, … [b, s].
        schedule: stepped once an optimizer step, whatever the number of ranks. fp16's skipped steps do not count.
        start: steps that were done before.
        begin: told each step as it begins.
        samples: says which samples a step took, for messages.
        wish: what this rank asks of all, asked once a step; after a step with `Wish.STOP` there is no other.

    Raises:
        DataError: for a loader that ends before the steps do, and for a step without a trained label.
        NotFinite: at the first loss, norm or step that is not finite; weights are those of the step before. fp16 goes
            on over steps that its scaler skips, until 20 in a row or the scale is at its smallest.
    """
    import torch

    job, accelerator, engine = prepared.job, prepared.accelerator, engine_of(prepared.job.strategy)
    skips, batches = 0, iter(loader)
    for step in range(start + 1, job.loop.steps + 1):
        began, lr = time.perf_counter(), schedule.get_last_lr()[0]
        begin(step)
        micro = list(itertools.islice(batches, job.loop.accumulation))
        _check_data(micro, job, step)
        counts = [trained_tokens(batch, job) for batch in micro]
        said = _Said(prepared, sum(counts))
        sums = torch.zeros(1 + len(Wish), device=accelerator.device)
        for index, (batch, count) in enumerate(zip(micro, counts, strict=True)):
            last = index == len(micro) - 1
            with phase("forward"):
                mean = mean_loss(prepared, _to(batch, accelerator.device))
            if count:  # the mean over no token is not a number, and its gradient is zero
                sums[0] += mean.detach() * count
            if last:
                heard = _Gathered(_with_wishes(sums, wish()), job.ranks)
            # Engines average gradients over ranks; weighting by tokens instead makes the sum over ranks and
            # micro-batches the gradient of the mean over all tokens (transformers#34191).
            engine.backward(prepared, mean * said.weight(count), last)
            del mean
        total, *wishes = map(sum, zip(*heard.rows().tolist(), strict=True))
        tokens, memory = said.everything()
        _check_loss(total, tokens, job, step, samples)
        done = engine.update(prepared)
        skips = skips + 1 if done.skipped else 0
        _check(job, done, skips, step, samples)
        schedule.step()
        wished = Wish(sum(one for one, count in zip(Wish, wishes, strict=True) if count))
        yield Step(
            step=step,
            loss=total / tokens,
            grad_norm=done.norm,
            lr=lr,
            tokens=tokens,
            seconds=time.perf_counter() - began,
            skipped=done.skipped,
            gradients=done.gradients,
            bytes=memory,
            wish=wished,
        )
        if Wish.STOP in wished:
            return


def evaluate(prepared: Prepared, loader: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> float | None:
    """Mean cross-entropy in nats over all trained tokens of all ranks' batches; None where a rank asked to stop. A collective.

    Every rank has equally many batches. `stop` is asked before each of them.
    """
    import torch

    job, accelerator = prepared.job, prepared.accelerator
    sums, stopped = torch.zeros(2, dtype=torch.float64, device=accelerator.device), False
    prepared.model.eval()
    with torch.no_grad():
        for batch in loader:
            if stopped := on_any_rank(accelerator, stop()):
                break
            count = trained_tokens(batch, job)
            mean = mean_loss(prepared, _to(batch, accelerator.device))
            if count:
                sums += torch.tensor([float(mean) * count, count], dtype=torch.float64, device=accelerator.device)
    prepared.model.train()
    if stopped:
        return None
    total, tokens = accelerator.reduce(sums, reduction="sum").tolist()
    return float(total / tokens) if tokens else math.nan


def mean_loss(prepared: Prepared, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the trained tokens of a batch on this rank, in fp32 whatever the precision.

    transformers' causal models compute it so; sequence-to-sequence ones (T5) do on logits in the compute dtype.
    """
    from torch.nn.functional import cross_entropy

    found = prepared.model(**batch, use_cache=False)
    if prepared.job.spec is None or prepared.job.spec.kind == "causal":
        loss: torch.Tensor = found.loss
        return loss
    return cross_entropy(found.logits.float().flatten(0, 1), batch["labels"].flatten())


def trained_tokens(batch: Batch, job: Job) -> int:
    """Labels that count in the loss. A causal model predicts none for the first position of a row."""
    labels = batch["labels"]
    causal = job.spec is None or job.spec.kind == "causal"
    return int(((labels[:, 1:] if causal else labels) != -100).sum())


def _to(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


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


class _Said:
    """What every rank says as a step begins: its tokens and what it holds. Nobody waits for it before the first backward."""

    def __init__(self, prepared: Prepared, tokens: int) -> None:
        import torch

        device = prepared.accelerator.device
        held = live_bytes(device)
        self._names, self._ranks = tuple(held), prepared.job.ranks
        row = [tokens, *(-1 if size is None else size for size in held.values())]
        mine = torch.tensor(row, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self._gathered = _Gathered(mine, self._ranks)
        self._count: torch.Tensor | None = None

    def weight(self, tokens: int) -> torch.Tensor:
        """What a mean over `tokens` of this rank counts in the global batch's, times the ranks that engines divide by."""
        if self._count is None:
            self._count = self._gathered.rows()[:, 0].sum().double()
        return (tokens * self._ranks / self._count).float()

    def everything(self) -> tuple[int, tuple[dict[str, int | None], ...]]:
        """Tokens of the global batch, and what each rank held."""
        rows = self._gathered.rows().tolist()
        memory = tuple(
            dict(zip(self._names, (None if size < 0 else size for size in sizes), strict=True)) for _, *sizes in rows
        )
        return sum(row[0] for row in rows), memory


def _with_wishes(sums: torch.Tensor, wish: Wish) -> torch.Tensor:
    """This rank's loss, and 1 for each of its wishes."""
    for index, one in enumerate(Wish, start=1):
        if one in wish:
            sums[index] += 1
    return sums


def _check_data(micro: Sequence[Batch], job: Job, step: int) -> None:
    if len(micro) < job.loop.accumulation:
        raise DataError(
            f"step {step}: the loader gave {len(micro)} of {job.loop.accumulation} micro-batches. {job.loop.steps} steps "
            f"need {job.loop.steps * job.loop.accumulation}. Give more data, or lower --steps."
        )


def _check_loss(total: float, tokens: int, job: Job, step: int, samples: Callable[[int], str]) -> None:
    """Every rank sees the same sum, before the weights could be touched."""
    if not tokens:
        raise DataError(f"step {step}: none of its labels is trained. Samples: {samples(step)}. Give data with labels.")
    if job.strategy.precision != "fp16" and not math.isfinite(total):
        raise NotFinite(
            f"step {step}: the loss is {total}. Weights are those of step {step - 1}. Samples: {samples(step)}. "
            "Look at these samples, or lower --lr."
        )


def _check(job: Job, done: Update, skips: int, step: int, samples: Callable[[int], str]) -> None:
    if job.strategy.precision != "fp16":
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
