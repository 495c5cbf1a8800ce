"""`forward_backward()`: a step's forward and backward in a user's own loop, on every engine."""

from __future__ import annotations

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
        DataError: for another number of micro-batches, and for a step without a trained label.
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
