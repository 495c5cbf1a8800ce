"""`Evaluator`: the loss over data that is held out, every so many steps and after the last one."""

from __future__ import annotations

from toolkit.config.run_config import RunConfig
from toolkit.core.atomic_io import read_events
from toolkit.core.process_lifecycle import StopSignal
from toolkit.data import Rows, eval_batches
from toolkit.engines.records import Prepared
from toolkit.run_folder.folder import Folder
from toolkit.training.loop import evaluate
from toolkit.training.setup import on_any_rank


class Evaluator:
    """Evaluates a run where its recipe says, and notes it in `events.jsonl`."""

    def __init__(
        self,
        ours: Prepared,
        rows: Rows | None,
        run_config: RunConfig,
        folder: Folder,
        stop: StopSignal,
        *,
        attempt: int,
    ) -> None:
        """`rows`: None where the recipe names no data for it, and nothing is ever due."""
        self.ours, self.rows, self.run_config, self.folder = ours, rows, run_config, folder
        self.stop, self.attempt = stop, attempt

    def due(self, step: int) -> bool:
        """Whether one belongs after this step."""
        every = self.run_config.eval_every
        return self.rows is not None and (step == self.ours.job.train_config.steps or (every > 0 and step % every == 0))

    def left_out(self, step: int) -> bool:
        """Whether the one after the step that a run goes on from was never made: it was stopped before. A collective."""
        if not step or not self.due(step):
            return False
        made = any(line["step"] == step for line in read_events(self.folder.events) if "eval_loss" in line)
        return not on_any_rank(self.ours.accelerator, made)

    def evaluate(self, step: int) -> bool:
        """The mean loss over all rows. False where a signal cut it short: the run ends with this step, and makes up for it later.

        A collective.
        """
        assert self.rows is not None, "nothing is due without data"
        job, accelerator = self.ours.job, self.ours.accelerator
        held_out = eval_batches(
            self.rows,
            micro_batch=job.train_config.micro_batch,
            dp_rank=job.coordinates(accelerator.process_index).dp_rank,
            dp_size=job.parallelism.dp_size,
            attention=job.strategy.attention,
        )
        loss = evaluate(self.ours, held_out, lambda: self.stop.number is not None)
        if loss is None:
            accelerator.print(f"step {step}: evaluation left out, since the run is asked to stop")
            return False
        if accelerator.is_main_process:
            self.folder.append_event({"step": step, "attempt": self.attempt, "eval_loss": loss})
        if self.run_config.tracker:
            accelerator.log({"eval_loss": loss}, step=step)
        accelerator.print(f"step {step}: evaluation loss {loss:.4f}")
        return True
