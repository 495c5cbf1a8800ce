"""`train()`: the training loop. Its loss is the mean over tokens; a number that is not finite ends it."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.randomness import read_generators, write_generators
from toolkit.config.unknown_names import by_name
from toolkit.core.errors import DataError, NotFinite
from toolkit.engines.losses import loss_kind, shift_labels
from toolkit.engines.records import Prepared, StepResult
from toolkit.training.expert_load import ExpertLoad
from toolkit.training.global_sums import GlobalSums, HostCopy, StepRequest
from toolkit.training.own_loop import check_rates
from toolkit.training.run_log import count_step

if TYPE_CHECKING:
    import torch

    Batch = Mapping[str, torch.Tensor]

MAX_SKIPS = 20
"""fp16: steps in a row that the scaler may skip before the run ends."""

LATE_SECONDS = 2.0
"""The longest step that is read late: a stop may take four of them, of the 30 s that are promised."""


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
    experts: Mapping[str, Any] = field(default_factory=dict)
    """The load of fused experts, as `ExpertLoad.read` returns it."""

    @property
    def stops(self) -> bool:
        """Whether the run ends after this step."""
        return StepRequest.STOP in self.request


@by_name
def train(
    prepared: Prepared,
    loader: Iterable[Batch],
    schedule: Any,
    *,
    start: int = 0,
    on_begin: Callable[[int], object] = lambda step: None,
    samples: Callable[[int], str] = lambda step: "not recorded",
    request: Callable[[], StepRequest] = lambda: StepRequest.NOTHING,
    read_late: Callable[[int], bool] = lambda step: False,
) -> Iterator[Step]:
    """Train, and yield each step when it is done.

    Args:
        prepared: model and optimizer after `prepare`.
        loader: this rank's micro-batches in order, `accumulation` of them a step: `input_ids`, `labels`, … [b, s].
        schedule: prepared or not, stepped once an optimizer step on any number of ranks. Steps that fp16 skips do not count.
        start: steps that were done before.
        on_begin: called with each step's number as it begins.
        samples: returns a step's samples as text, for messages.
        request: returns this rank's request, once a step. After a step with `StepRequest.STOP` the loop ends.
        read_late: returns, equally on every rank, whether the numbers of a step may be read when the next one runs. The step
            is yielded then: nothing may depend on the weights as they are after it. Engines that wait anyway ignore it.

    Raises:
        DataError: for a loader that ends before the steps do, and for a step without a trained label.
        NotFinite: at the first loss, norm or step that is not finite. The weights are those of the step before. fp16
            continues after skipped steps, until 20 in a row or until the scale is at its smallest.
    """
    job, batches = prepared.job, iter(loader)
    running: _RunningStep | None = None
    with contextlib.closing(_Loop(prepared, schedule, samples)) as loop:
        for number in range(start + 1, job.train_config.total_steps + 1):
            on_begin(number)
            late = number < job.train_config.total_steps and loop.may_read_late() and read_late(number)
            try:
                step = loop.run(number, _next_micro_batches(batches, prepared, number), request)
            except Exception:
                if running is not None:
                    yield loop.finish(running, StepRequest.NOTHING)  # it is done, whatever ends the next
                raise
            requests = StepRequest.NOTHING
            if running is not None:
                requests = running.sums.requests()  # this step is the first that can act on them
                yield loop.finish(running, StepRequest.NOTHING)
            running = step if late and not requests else None
            if running is None:
                requests |= step.sums.requests()
                yield loop.finish(step, requests)
                if StepRequest.STOP in requests:
                    return


@dataclass(kw_only=True)
class _StateBefore:
    """What a step changes besides weights and moments, as it was before the step."""

    schedule: Mapping[str, Any]
    generators: Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class _RunningStep:
    """A step that was computed, or that the device still computes."""

    number: int
    lr: float
    began: float
    sums: GlobalSums
    before: _StateBefore
    result: StepResult
    norm: HostCopy
    """`result.norm`."""
    experts: HostCopy | None
    """From `ExpertLoad.send`."""


class _Loop:
    """Runs steps and reads their numbers. After one that is not finite, no later step changes anything."""

    def __init__(self, prepared: Prepared, schedule: Any, samples: Callable[[int], str]) -> None:
        import torch

        # A prepared one steps once for every rank.
        self._prepared, self._schedule, self._samples = prepared, getattr(schedule, "scheduler", schedule), samples
        check_rates(prepared.optimizer, self._schedule)
        self._experts = ExpertLoad(prepared)
        self.close = self._experts.close
        self._engine, self._job = prepared.job.engine, prepared.job
        self.on_device = self._engine.steps_on_device(prepared)
        self._found_inf = torch.zeros((), device=prepared.accelerator.device)
        """1 after a step that was not finite."""
        self._skips, self._finished = 0, 0.0
        self._seconds = self._slowest = math.inf

    def may_read_late(self) -> bool:
        """Return, equally on every rank, whether the device decides on a step, and steps are short enough to stop in time."""
        return self.on_device and self._slowest <= LATE_SECONDS

    def run(self, number: int, micro_batches: Sequence[Batch], request: Callable[[], StepRequest]) -> _RunningStep:
        """Compute a step. Where its kernels can leave it out themselves, the host does not wait for its numbers."""
        import torch

        began, lr = time.perf_counter(), self._schedule.get_last_lr()[0]
        before = _StateBefore(schedule=self._schedule.state_dict(), generators=read_generators())
        sums = GlobalSums(self._prepared, sum(map(trained_tokens, micro_batches)), request, self._seconds)
        self._engine.forward_backward(self._prepared, micro_batches, sums.loss_weight, sums.send_loss)
        if self.on_device:
            self._found_inf.copy_(self._found_inf.maximum(sums.not_finite()))
            result = self._engine.step(self._prepared, self._found_inf)
        else:
            with self._restored_after_failure(before):
                self._check_loss(number, sums)
            result = self._engine.step(self._prepared)
        if not result.skipped:
            self._schedule.step()
        norm = HostCopy(torch.as_tensor(result.norm, dtype=torch.float64))
        parts = {"sums": sums, "before": before, "result": result, "norm": norm, "experts": self._experts.send()}
        return _RunningStep(number=number, lr=lr, began=began, **parts)  # type: ignore[arg-type]

    def finish(self, step: _RunningStep, requests: StepRequest) -> Step:
        """Read the numbers of a step and check them."""
        with self._restored_after_failure(step.before):
            self._check_loss(step.number, step.sums)
            self._check_step(step.number, step.result, step.norm.read())
        # A step that is read late began while the one before was computed.
        began, self._finished = max(step.began, self._finished), time.perf_counter()
        self._seconds, self._slowest = self._finished - began, step.sums.slowest()
        if self._prepared.accelerator.own_loop:
            count_step()
        return Step(
            step=step.number,
            loss=step.sums.loss() / step.sums.tokens(),
            grad_norm=step.norm.read(),
            lr=step.lr,
            tokens=step.sums.tokens(),
            seconds=self._seconds,
            skipped=step.result.skipped,
            gradients=step.result.gradients,
            bytes=step.sums.memory(),
            request=requests,
            experts=self._experts.read(step.experts),
        )

    @contextlib.contextmanager
    def _restored_after_failure(self, before: _StateBefore) -> Iterator[None]:
        """Restore schedule and generators after a failed check: a checkpoint of the step before holds both."""
        try:
            yield
        except (DataError, NotFinite):
            write_generators(before.generators)
            self._schedule.load_state_dict(before.schedule)
            for group, lr in zip(self._prepared.optimizer.param_groups, self._schedule.get_last_lr(), strict=True):
                group["lr"] = lr
            raise

    def _check_loss(self, step: int, sums: GlobalSums) -> None:
        """Check the loss sum, which is the same on every rank."""
        loss = sums.loss()
        if not sums.tokens():
            samples = self._samples(step)
            raise DataError(f"step {step}: none of its labels is trained. Samples: {samples}. Give data with labels.")
        if not self._job.precision.scaled and not math.isfinite(loss):
            raise self._not_finite(step, f"the loss is {loss}")

    def _check_step(self, step: int, result: StepResult, norm: float) -> None:
        """Check the norm; under fp16 count the steps that the scaler has skipped."""
        self._skips = self._skips + 1 if result.skipped else 0
        if not self._job.precision.scaled:
            if result.skipped or not math.isfinite(norm):
                raise self._not_finite(step, f"the gradient norm is {norm}, and the step was not taken")
        elif self._skips >= MAX_SKIPS or (result.skipped and result.scale <= 1):
            event = f"fp16 overflowed in {self._skips} steps in a row, at loss scale {result.scale:g}"
            raise self._not_finite(step, event, skipped=self._skips, advice="Use --precision bf16 or fp32.")

    def _not_finite(
        self, step: int, event: str, *, skipped: int = 1, advice: str = "Look at these samples, or lower --lr."
    ) -> NotFinite:
        last, samples = step - skipped, self._samples(step)
        return NotFinite(f"step {step}: {event}. Weights are those of step {last}. Samples: {samples}. {advice}")


def trained_tokens(batch: Batch) -> int:
    """Return the number of labels that count in the loss; they are shifted already."""
    return int((batch["labels"] != -100).sum())


def shifted(batch: Batch, prepared: Prepared) -> Batch:
    """Return this rank's part of the batch, with each label at the position of the logits that predict it."""
    labels = shift_labels(batch["labels"], loss_kind(prepared.job, prepared.model))
    return prepared.job.split({**batch, "labels": labels}, prepared.accelerator.process_index)


def _next_micro_batches(batches: Iterator[Batch], prepared: Prepared, step: int) -> list[Batch]:
    train_config = prepared.job.train_config
    micro_batches = [shifted(batch, prepared) for batch in itertools.islice(batches, train_config.accumulation)]
    if len(micro_batches) < train_config.accumulation:
        raise DataError(
            f"step {step}: the loader returned {len(micro_batches)} of {train_config.accumulation} micro-batches. "
            f"{train_config.total_steps} steps need {train_config.total_steps * train_config.accumulation}. "
            "Give more data, or lower --steps."
        )
    return micro_batches
