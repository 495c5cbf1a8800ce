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
    from toolkit.engines.records import Prepared
    from toolkit.training.checkpoint_policy import CheckpointPolicy
    from toolkit.training.loop import Step
    from toolkit.training.rank_run import RankRun

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

    run: RankRun
    prepared: Prepared
    tokenizer: Any
    loader: Any
    schedule: Any
    start: int

    def policy(self, writer: CheckpointWriter | None) -> CheckpointPolicy:
        """Return what decides after each step whether a checkpoint is due."""
        return self.run.policy_of(writer)

    def writer(self) -> CheckpointWriter:
        """Return what writes the checkpoints."""
        from toolkit.checkpoints import CheckpointWriter, identify
        from toolkit.training.preflight import versions

        preflight = self.run.preflight
        identity = identify(preflight.spec, preflight.job.strategy, preflight.rows.fingerprint)
        return CheckpointWriter(
            self.prepared, self.schedule, self.run.folder.checkpoints, identity, versions=versions()
        )

    def steps(self, policy: CheckpointPolicy) -> Iterator[Step]:
        """Train as the recipe does. The caller gives each step to the policy."""
        from toolkit.training.loop import train

        for step in train(
            self.prepared,
            self.loader,
            self.schedule,
            start=self.start,
            on_begin=self.run.on_step_begin,
            samples=lambda step: self.run.format_samples(step, self.tokenizer),
            request=policy.request,
        ):
            self.run.on_step_end(self.prepared, step)
            yield step


@contextlib.contextmanager
def rank(
    strategy: Strategy, train_config: TrainConfig, run_config: RunConfig, path: Path, *, start: int = 0
) -> Iterator[Rank]:
    """Set up this rank of a run in the folder `path`, with its share of the cores. It ends with the context."""
    import torch

    import toolkit as tk
    from toolkit.run_folder.folder import enter
    from toolkit.run_folder.heartbeat import Beat
    from toolkit.training.optimizers import make_optimizer, make_schedule
    from toolkit.training.rank_run import RankRun

    number, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    with enter(path) as folder:
        folder.beat(number).parent.mkdir(exist_ok=True)
        with Beat(folder.beat(number), number) as beat:
            run = RankRun(folder, beat, run_config, train_config, strategy)
            run.check()
            accelerator = run.make_accelerator()
            model, tokenizer = tk.load(accelerator)
            optimizer = make_optimizer(model, run.job.train_config, fused=accelerator.scaler is None)
            schedule = make_schedule(optimizer, run.job.train_config)
            loader = run.preflight.batches(number, start=start, workers=run_config.workers)
            model, optimizer, loader = tk.prepare(accelerator, model, optimizer, loader)
            prepared = tk.prepared(accelerator, (model, optimizer))
            with run.listening():
                yield Rank(
                    run=run, prepared=prepared, tokenizer=tokenizer, loader=loader, schedule=schedule, start=start
                )
    accelerator.end_training()
