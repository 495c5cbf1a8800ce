"""`evaluate()`: the loss over held-out data. `Evaluator`: every `eval_every` steps of a run and after the last one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from toolkit.core.atomic_io import read_events
from toolkit.data import eval_batches
from toolkit.engines.base import engine_of
from toolkit.engines.records import Prepared
from toolkit.training.loop import shifted, trained_tokens
from toolkit.training.setup import on_any_rank

if TYPE_CHECKING:
    from toolkit.training.loop import Batch
    from toolkit.training.rank_run import RankRun

STOP_EVERY = 4
"""Batches of an evaluation between two looks at the stop signal of all ranks."""


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
        if number % STOP_EVERY == 0 and (stopped := on_any_rank(stop())):
            break
        batch = shifted(batch, prepared)
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


class Evaluator:
    """Evaluates a run on its held-out data and records the loss in `events.jsonl`."""

    def __init__(self, run: RankRun, prepared: Prepared) -> None:
        self.run, self.prepared = run, prepared

    def due(self, step: int) -> bool:
        """Return whether the run evaluates after this step."""
        every, last = self.run.config.eval_every, self.prepared.job.train_config.steps
        return self.run.preflight.eval_rows is not None and (step == last or (every > 0 and step % every == 0))

    def missed(self, step: int) -> bool:
        """Return whether an earlier attempt was stopped between this step and its evaluation. A collective."""
        if not step or not self.due(step):
            return False
        recorded = any(line["step"] == step for line in read_events(self.run.folder.events) if "eval_loss" in line)
        return not on_any_rank(recorded)

    def evaluate(self, step: int) -> bool:
        """Record the mean loss over all rows. Return False where a signal interrupted it. A collective."""
        run, job, accelerator = self.run, self.prepared.job, self.prepared.accelerator
        assert run.preflight.eval_rows is not None, "nothing is due without data"
        run.beat.note("evaluate")
        batches = eval_batches(
            run.preflight.eval_rows,
            micro_batch=job.train_config.micro_batch,
            dp_rank=job.coordinates(accelerator.process_index).dp_rank,
            dp_size=job.parallelism.dp_size,
            attention=job.strategy.attention,
        )
        loss = evaluate(self.prepared, batches, run.stop_received)
        if loss is None:
            accelerator.print(f"step {step}: evaluation left out because the run stops")
            return False
        if accelerator.is_main_process:
            run.folder.append_event({"step": step, "attempt": run.attempt, "eval_loss": loss})
        if run.config.tracker:
            accelerator.log({"eval_loss": loss}, step=step)
        accelerator.print(f"step {step}: evaluation loss {loss:.4f}")
        run.beat.note("between")
        return True
