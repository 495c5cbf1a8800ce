"""`forward_backward()`: a step's forward and backward in a user's own loop, on every engine."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import DataError, StrategyError
from toolkit.engines.records import Prepared, job_of
from toolkit.training.global_sums import GlobalSums, StepRequest
from toolkit.training.loop import shifted, trained_tokens

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def forward_backward(
    accelerator: Accelerator, model: Any, batches: Iterable[Mapping[str, torch.Tensor]]
) -> torch.Tensor:
    """Run forward and backward of all micro-batches of a step, as `train` does; `optimizer.step()` follows.

    A pipeline computes them together. The gradient is that of the mean loss over the trained tokens of all ranks, so it does not
    depend on how rows are divided.

    Args:
        accelerator: from `toolkit.accelerator()`.
        model: prepared, with its optimizer.
        batches: `TrainConfig.accumulation` micro-batches of this rank: `input_ids`, `labels`, … [b, s]; labels as transformers
            takes them, not shifted. Ranks that share one data-parallel rank give the same rows.

    Returns:
        The mean loss in nats over the step's trained tokens, the same on every rank.

    Raises:
        StrategyError: for a model without a prepared optimizer.
        DataError: for another number of micro-batches, for a step without a trained label, and in the first step for other rows
            on ranks that share one data-parallel rank.
    """
    import torch

    job, loop = job_of(accelerator), accelerator
    optimizer = next((each for each in loop._optimizers if loop.model_of(each) is model), None)
    if optimizer is None:
        raise StrategyError(
            f"forward_backward got a {type(model).__name__} without a prepared optimizer. Give the model that accelerator.prepare "
            "returned together with its optimizer."
        )
    prepared = Prepared(job, model, optimizer, accelerator)
    batches = list(batches)
    if not loop.rows_compared:
        _compare_rows(accelerator, batches)
        loop.rows_compared = True
    micro_batches = [shifted(batch, prepared) for batch in batches]
    if len(micro_batches) != job.train_config.accumulation:
        raise DataError(
            f"forward_backward got {len(micro_batches)} micro-batches, expected accumulation {job.train_config.accumulation}. Give "
            "so many, or another tk.TrainConfig(accumulation=…)."
        )
    sums = GlobalSums(prepared, sum(map(trained_tokens, micro_batches)), lambda: StepRequest.NOTHING)
    loop.run_backwards(
        lambda: job.engine.forward_backward(prepared, micro_batches, sums.loss_weight, sums.send_loss), optimizer
    )
    if not sums.tokens():
        raise DataError(
            "forward_backward: no label of the step is trained. Give micro-batches with labels other than -100."
        )
    return torch.tensor(sums.loss() / sums.tokens(), device=accelerator.device)


def _compare_rows(accelerator: Accelerator, batches: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """Refuse other rows on ranks that share one data-parallel rank. A collective where there are such."""
    from accelerate.utils import gather_object

    job, rank = job_of(accelerator), accelerator.process_index
    if job.parallelism.dp_size == job.ranks:
        return
    own = [zlib.crc32(batch["input_ids"].cpu().numpy().tobytes()) for batch in batches]
    first: dict[int, tuple[int, list[int]]] = {}
    for other, rows in gather_object([(rank, own)]):
        same_rank, same = first.setdefault(job.coordinates(other).dp_rank, (other, rows))
        if rows != same:
            raise DataError(
                f"forward_backward got other rows on rank {other} than on rank {same_rank}, and both compute the same ones under "
                f"{job.strategy.label}. Prepare the DataLoader, and make its data alike on every rank, from one seed."
            )
