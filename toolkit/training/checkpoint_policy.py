"""`CheckpointPolicy`: when a run writes a checkpoint, and what is noted of each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from toolkit.checkpoints import folder_name, list_checkpoints
from toolkit.config.run_config import RunConfig
from toolkit.core.atomic_io import append_line
from toolkit.core.process_lifecycle import StopSignal
from toolkit.measurement import Window
from toolkit.run_folder.folder import Folder
from toolkit.training.loop import Step, StepRequest

if TYPE_CHECKING:
    from toolkit.checkpoints import CheckpointWriter


class CheckpointPolicy:
    """Decides after each step whether a checkpoint is due: by steps, by time, because a signal came, or at the end."""

    def __init__(
        self,
        saver: CheckpointWriter | None,
        run_config: RunConfig,
        window: Window,
        folder: Folder,
        stop: StopSignal,
        *,
        steps: int,
        attempt: int,
    ) -> None:
        """`saver`: None where the recipe asks for no checkpoints; `steps`: of the whole run."""
        self.saver, self.run_config, self.window, self.folder = saver, run_config, window, folder
        self.stop, self.steps, self.attempt = stop, steps, attempt
        self._saved_at = time.monotonic()

    def request(self) -> StepRequest:
        """What this rank asks of all: to stop where a signal reached it; rank 0's clock says when to save."""
        found = StepRequest.STOP if self.stop.number is not None else StepRequest.NOTHING
        if self.saver is not None and self.saver.main and self.run_config.save_seconds:
            late = time.monotonic() - self._saved_at >= self.run_config.save_seconds
            found |= StepRequest.SAVE if late else StepRequest.NOTHING
        return found

    def step_done(self, step: Step) -> None:
        """Write a checkpoint where one is due. At the end, or before a stop, it is published when this returns."""
        if self.saver is None:
            return
        ends = StepRequest.STOP in step.request or step.step == self.steps
        every = self.run_config.save_every
        if ends or StepRequest.SAVE in step.request or (every and step.step % every == 0):
            with self.window.saving("checkpoint"):
                self.saver.save(step.step)
            self._saved_at = time.monotonic()
        if ends:
            self.saver.wait_published(step.step)
        self._note_published()

    def save_last_good(self, step: int) -> None:
        """Publish the weights of `step`, the last one that was whole, where a run ends that cannot go on."""
        if self.saver is None:
            return
        folder = self.saver.folder
        newest = self.saver.wait_all(lambda: next((path.name for path in list_checkpoints(folder)), None))
        if step and newest != folder_name(step):
            self.saver.save(step)
            self.saver.wait_published(step)
        self._note_published()

    def _note_published(self) -> None:
        assert self.saver is not None, "nothing is published without one"
        for done in self.saver.published():
            append_line(
                self.folder.published,
                {
                    "step": done.step,
                    "attempt": self.attempt,
                    "checkpoint": done.path.name,
                    "bytes": done.size_bytes,
                    "stall_seconds": done.stall_seconds,
                    "write_seconds": done.write_seconds,
                },
            )
