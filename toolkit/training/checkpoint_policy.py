"""`CheckpointPolicy`: when a run writes a checkpoint, and the record of each in `checkpoints.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.checkpoints import folder_name, list_checkpoints
from toolkit.core.atomic_io import append_line
from toolkit.core.errors import CheckpointError, NotFinite
from toolkit.engines.rank_calls import on_any_rank
from toolkit.training.global_sums import StepRequest
from toolkit.training.loop import Step

if TYPE_CHECKING:
    from pathlib import Path

    from toolkit.checkpoints import CheckpointWriter
    from toolkit.config.run_config import RunConfig
    from toolkit.engines.job import Job
    from toolkit.measurement.window import Window
    from toolkit.run_folder.heartbeat import Beat


def is_due(step: int, every: int, steps: int) -> bool:
    """Return whether work of every `every` steps is due after this one. The last of `steps` always counts; 0 is never."""
    return step == steps or (every > 0 and step % every == 0)


class CheckpointPolicy:
    """Decides after each step whether a checkpoint is due: by steps, by time, because of a signal, or at the end."""

    def __init__(
        self,
        writer: CheckpointWriter | None,
        job: Job,
        config: RunConfig,
        published: Path,
        *,
        attempt: int,
        beat: Beat,
        window: Window,
        stop_received: Callable[[], bool],
    ) -> None:
        """Create the policy of a run.

        Args:
            writer: None for a run without checkpoints.
            job, config: of the run.
            published: the file of the records.
            attempt: its number.
            beat: this rank's heartbeat.
            window: measures what a save takes.
            stop_received: returns whether a signal has reached this rank.
        """
        self.writer, self._config, self._steps = writer, config, job.train_config.total_steps
        self._published, self._attempt = published, attempt
        self._beat, self._window, self._stop_received = beat, window, stop_received
        self._saved_at = time.monotonic()

    def request(self) -> StepRequest:
        """Return this rank's request: to stop after a signal; to save, by the clock of rank 0."""
        request, seconds = StepRequest.NOTHING, self._config.save_seconds
        if self._stop_received():
            request |= StepRequest.STOP
        if self.writer is not None and self.writer.main and seconds and time.monotonic() - self._saved_at >= seconds:
            request |= StepRequest.SAVE
        return request

    def stop_requested(self) -> bool:
        """Return whether a signal has reached any rank. A collective."""
        return on_any_rank(self._stop_received())

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step by its number."""
        return self.writer is not None and is_due(step, self._config.save_every, self._steps)

    def step_done(self, step: Step) -> None:
        """Write a checkpoint if one is due. After the last step and before a stop it is published when this returns."""
        if step.stops:
            self._beat.note("save")  # the supervisor waits for it, however long it takes
        if self.writer is None:
            return
        if step.stops or self.due(step.step) or StepRequest.SAVE in step.request:
            with self._window.saving("checkpoint"):
                self.writer.save(step.step)
            self._saved_at = time.monotonic()
        if step.stops or step.step == self._steps:
            self.writer.wait_published(step.step)
        self._record_published(self.writer)

    def save_last_good(self, step: int) -> None:
        """Publish the weights of `step`, the last finite ones, before a run ends early."""
        self._beat.note("save")
        if self.writer is None:
            return
        folder = self.writer.folder
        newest = self.writer.wait_all(lambda: next((path.name for path in list_checkpoints(folder)), None))
        if step and newest != folder_name(step):
            self.writer.save(step)
            self.writer.wait_published(step)
        self._record_published(self.writer)

    def save_before_failing(self, step: int, error: NotFinite) -> None:
        """Publish the weights of `step` before `error` ends the run.

        Raises:
            NotFinite: where they cannot be saved; names both errors.
        """
        try:
            self.save_last_good(step)
        except CheckpointError as failure:
            raise NotFinite(f"{error} The weights could not be saved: {failure}") from failure

    def _record_published(self, writer: CheckpointWriter) -> None:
        for done in writer.published():
            line = {
                "step": done.step,
                "attempt": self._attempt,
                "checkpoint": done.path.name,
                "bytes": done.size_bytes,
                "stall_seconds": done.stall_seconds,
                "write_seconds": done.write_seconds,
            }
            append_line(self._published, line)
