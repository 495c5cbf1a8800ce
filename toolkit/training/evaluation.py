"""`Evaluator`: the loss over held-out data, every `eval_every` steps and after the last one."""

from __future__ import annotations

from toolkit.config.run_config import RunConfig
from toolkit.core.atomic_io import read_events
from toolkit.core.process_lifecycle import StopSignal
from toolkit.data import Rows, eval_batches
from toolkit.engines.records import Prepared
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import Beat
from toolkit.training.loop import evaluate
from toolkit.training.setup import on_any_rank


class Evaluator:
    """Evaluates a run and records the loss in `events.jsonl`."""

    def __init__(
        self,
        prepared: Prepared,
        rows: Rows | None,
        run_config: RunConfig,
        folder: Folder,
        stop: StopSignal,
        beat: Beat,
        *,
        attempt: int,
    ) -> None:
        """Create the evaluator. `rows`: the held-out data; None for a run without evaluation."""
        self.prepared, self.rows, self.run_config, self.folder = prepared, rows, run_config, folder
        self.stop, self.beat, self.attempt = stop, beat, attempt

    def due(self, step: int) -> bool:
        """Return whether the run evaluates after this step."""
        every, last = self.run_config.eval_every, self.prepared.job.train_config.steps
        return self.rows is not None and (step == last or (every > 0 and step % every == 0))

    def missed(self, step: int) -> bool:
        """Return whether an earlier attempt was stopped between this step and its evaluation. A collective."""
        if not step or not self.due(step):
            return False
        recorded = any(line["step"] == step for line in read_events(self.folder.events) if "eval_loss" in line)
        return not on_any_rank(self.prepared.accelerator, recorded)

    def evaluate(self, step: int) -> bool:
        """Record the mean loss over all rows. Return False where a signal interrupted it. A collective."""
        assert self.rows is not None, "nothing is due without data"
        job, accelerator = self.prepared.job, self.prepared.accelerator
        self.beat.note("evaluate")
        batches = eval_batches(
            self.rows,
            micro_batch=job.train_config.micro_batch,
            dp_rank=job.coordinates(accelerator.process_index).dp_rank,
            dp_size=job.parallelism.dp_size,
            attention=job.strategy.attention,
        )
        loss = evaluate(self.prepared, batches, lambda: self.stop.number is not None)
        if loss is None:
            accelerator.print(f"step {step}: evaluation left out because the run stops")
            return False
        if accelerator.is_main_process:
            self.folder.append_event({"step": step, "attempt": self.attempt, "eval_loss": loss})
        if self.run_config.tracker:
            accelerator.log({"eval_loss": loss}, step=step)
        accelerator.print(f"step {step}: evaluation loss {loss:.4f}")
        self.beat.note("between")
        return True
