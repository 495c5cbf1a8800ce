"""What a rank trains with: model, tokenizer, optimizer, batches and schedule, prepared."""

from __future__ import annotations

from typing import Any

from toolkit.config.run_config import RunConfig
from toolkit.data import batches
from toolkit.engines.records import Prepared
from toolkit.training.loading import load
from toolkit.training.loop import make_optimizer, warmup_cosine
from toolkit.training.preflight import Preflight
from toolkit.training.preparation import prepare, prepared
from toolkit.training.setup import job


def assembled(
    accelerator: Any, preflight: Preflight, run_config: RunConfig, *, start: int
) -> tuple[Prepared, Any, Any, Any]:
    """What is trained, prepared: model and optimizer; its tokenizer, the batches behind step `start`, the schedule."""
    asked = job(accelerator)
    model, tokenizer = load(accelerator, allow_unquantized=run_config.allow_unquantized)
    optimizer = make_optimizer(model, asked.train_config)
    schedule = warmup_cosine(optimizer, asked.train_config)
    loader = batches(
        preflight.rows,
        asked.train_config,
        dp_rank=asked.coordinates(accelerator.process_index).dp_rank,
        dp_size=asked.parallelism.dp_size,
        start_step=start,
        attention=asked.strategy.attention,
        workers=run_config.workers,
    )
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule)
    return prepared(accelerator, (model, optimizer)), tokenizer, loader, schedule


def seed_everything(accelerator: Any) -> None:
    """Seed this rank's generators from the job's seed and its data-parallel rank: ranks with the same rows draw alike."""
    from accelerate.utils import set_seed

    asked = job(accelerator)
    set_seed(asked.train_config.seed + asked.coordinates(accelerator.process_index).dp_rank)
