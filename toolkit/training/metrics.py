"""The numbers of a run: `StepLog`, `evaluate()`, and `should_stop()` for a loop of your own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from toolkit.core.stopping import StopSignal
from toolkit.core.units import format_bytes
from toolkit.data import hash_ids
from toolkit.engines.rank_calls import on_any_rank
from toolkit.engines.records import Prepared
from toolkit.run_folder.run_lock import RUN_DIR
from toolkit.training.loop import Step, shifted, trained_tokens

if TYPE_CHECKING:
    from toolkit.engines.job import Job
    from toolkit.run_folder.folder import Folder
    from toolkit.training.loop import Batch

STOP_EVERY = 4
"""Batches of an evaluation between two looks at the stop signal of all ranks."""

_signals = StopSignal()


class StepLog:
    """Writes each step into the run's `events.jsonl` and on a progress bar, both on the main process."""

    def __init__(
        self, folder: Folder, job: Job, samples: Callable[[int], list[int]], *, attempt: int, start: int, main: bool
    ) -> None:
        """Open the progress bar of an attempt.

        Args:
            folder: of the run.
            job: of the run.
            samples: returns a step's ids.
            attempt: its number.
            start: the last step that an earlier attempt has done.
            main: whether this is the main process.
        """
        from tqdm import tqdm

        self._folder, self._samples, self._attempt = folder, samples, attempt
        self._steps, self._main = job.train_config.total_steps, main
        self._bytes = "RSS" if job.device.kind == "cpu" else "allocated"
        self._bar = tqdm(
            total=self._steps,
            initial=start,
            desc=job.strategy.label,
            unit="step",
            disable=not self._main,
            mininterval=0.5,
        )

    def record(self, step: Step) -> None:
        """Write one step."""
        if not self._main:
            return
        left = ("gradients", "request", *(() if step.experts else ("experts",)))
        fields = {name: value for name, value in vars(step).items() if name not in left}
        samples = hash_ids(self._samples(step.step))
        self._folder.append_event({**fields, "attempt": self._attempt, "samples": samples})
        sizes = [size for rank in step.bytes for name, size in rank.items() if name in ("rss", "allocated") and size]
        speed, size = f"{step.tokens / step.seconds:,.0f} tokens/s", format_bytes(max(sizes, default=0))
        self._bar.set_postfix_str(f"loss {step.loss:.4f}, {speed}, {self._bytes} {size} a rank", refresh=False)
        self._bar.update()
        if step.skipped:
            self._bar.write(f"step {step.step}: fp16 overflowed, and the step was skipped")
        if step.step == self._steps or step.stops:
            self._bar.close()


def evaluate(prepared: Prepared, loader: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> float | None:
    """Return the mean cross-entropy in nats over all trained tokens of all ranks' batches. A collective.

    Args:
        prepared: model and optimizer after `prepare`.
        loader: this rank's batches; every rank has equally many.
        stop: called before every fourth batch, where the host waits for the device. Where any rank's returns true, the
            result is None.
    """
    import torch

    job, accelerator, engine = prepared.job, prepared.accelerator, prepared.job.engine
    sums, stopped = torch.zeros(2, dtype=torch.float64, device=accelerator.device), False
    prepared.model.eval()
    for number, batch in enumerate(loader):
        if number % STOP_EVERY == 0 and (stopped := on_any_rank(stop())):
            break
        batch = shifted(batch, prepared)
        sums[0] += sum(engine.evaluate(prepared, [batch]))
        sums[1] += trained_tokens(batch)
    prepared.model.train()
    if stopped:
        return None
    if accelerator.process_index not in job.parallelism.loss_ranks():  # another rank of the group counts the same rows
        sums.zero_()
    total, tokens = accelerator.reduce(sums, reduction="sum").tolist()
    return float(total / tokens) if tokens else math.nan


def should_stop() -> bool:
    """Return whether this run was asked to stop, the same on every rank. Call it on all ranks, once a step.

    For a loop of your own, like `log`. When it is true, save what you need and return. From the first call on, signals wait for
    the loop; ranks that have not ended 30 s later are killed. Without calls, a signal ends a rank at once.
    """
    if RUN_DIR not in os.environ:
        return False
    if not _signals.listening:
        _signals.__enter__()
    return on_any_rank(_signals.number is not None)
