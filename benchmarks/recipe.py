"""One rank of the recipe, set up by the recipe's own functions, up to its first step."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.data.embedded import embedded_model

if TYPE_CHECKING:
    from toolkit.checkpoints import CheckpointWriter
    from toolkit.core.process_lifecycle import StopSignal
    from toolkit.engines.records import Prepared
    from toolkit.measurement import Window
    from toolkit.run_folder.folder import Folder
    from toolkit.run_folder.heartbeat import Beat
    from toolkit.training.checkpoint_policy import CheckpointPolicy
    from toolkit.training.loop import Step
    from toolkit.training.preflight import Preflight

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Of a model in which the training loop's own cost is most of a step."""


def tiny_model(folder: Path) -> Path:
    """Save a Llama of the shape `TINY` with the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_key_value_heads=2, **TINY)).save_pretrained(folder)
    for file in embedded_model().glob("token*"):
        shutil.copy(file, folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What the recipe has before its first step."""

    preflight: Preflight
    ours: Prepared
    tokenizer: Any
    loader: Any
    schedule: Any
    window: Window
    folder: Folder
    beat: Beat
    stop: StopSignal
    start: int

    def policy(self, saver: CheckpointWriter | None, run_config: RunConfig, *, steps: int) -> CheckpointPolicy:
        """Who decides after each step whether a checkpoint is due. `steps`: number of the last."""
        from toolkit.training.checkpoint_policy import CheckpointPolicy

        return CheckpointPolicy(saver, run_config, self.window, self.folder, self.stop, steps=steps, attempt=0)

    def saver(self) -> CheckpointWriter:
        """Who writes the checkpoints."""
        from toolkit.checkpoints import CheckpointWriter, identify
        from toolkit.training.preflight import versions

        identity = identify(self.preflight.spec, self.ours.job.strategy, self.preflight.rows.fingerprint)
        return CheckpointWriter(self.ours, self.schedule, self.folder.checkpoints, identity, versions=versions())

    def steps(self, policy: CheckpointPolicy) -> Iterator[Step]:
        """The recipe's steps; the caller tells the keeper of each."""
        from toolkit.finetune import logged_steps

        ours = (self.ours, self.tokenizer, self.loader, self.schedule)
        return logged_steps(*ours, self.preflight, policy, self.beat, start=self.start)


@contextlib.contextmanager
def rank(
    strategy: Strategy, train_config: TrainConfig, run_config: RunConfig, path: Path, *, start: int = 0
) -> Iterator[Rank]:
    """Set up this rank of a run in the folder `path`, with its share of the cores. It ends with the context."""
    import torch

    from toolkit import measurement
    from toolkit.core.process_lifecycle import StopSignal
    from toolkit.devices.machine import hardware
    from toolkit.run_folder.folder import enter
    from toolkit.run_folder.heartbeat import Beat
    from toolkit.training.assembly import assembled
    from toolkit.training.preflight import run_preflight
    from toolkit.training.setup import accelerator as make

    number, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    device = hardware().device
    window = measurement.start(device.kind, run_config.memory_window)
    preflight = run_preflight(run_config, strategy, train_config, ranks, device)
    accelerator = make(strategy, train_config, preflight.job.spec)
    ours, tokenizer, loader, schedule = assembled(accelerator, preflight, run_config, start=start)
    with enter(path) as folder:
        folder.beat(number).parent.mkdir(exist_ok=True)
        with Beat(folder.beat(number), number) as beat, StopSignal() as stop:
            yield Rank(
                preflight=preflight,
                ours=ours,
                tokenizer=tokenizer,
                loader=loader,
                schedule=schedule,
                window=window,
                folder=folder,
                beat=beat,
                stop=stop,
                start=start,
            )
    accelerator.end_training()
