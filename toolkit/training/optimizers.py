"""The optimizer of a `TrainConfig` and its schedule. `config.tables.OPTIMIZERS` has the words, and what each holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.config.tables import OPTIMIZERS
from toolkit.config.train_config import TrainConfig
from toolkit.engines.optimizer_step import by_mesh

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR


def make_optimizer(model: torch.nn.Module, train_config: TrainConfig, *, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters.

    Args:
        model: with all its parameters; those on the meta device are another rank's.
        train_config: names the optimizer, and its numbers.
        fused: use torch's fused kernels, which need no temporaries. Not under fp16's GradScaler: Accelerate sees a skipped
            step only where it does not call the optimizer.
    """
    import torch

    assert train_config.lr is not None, "a resolved TrainConfig has a learning rate"
    groups = by_mesh(each for each in model.parameters() if each.requires_grad and not each.is_meta)
    optimizer_class = getattr(torch.optim, OPTIMIZERS[train_config.optimizer].torch)
    optimizer: torch.optim.Optimizer = optimizer_class(
        [{"params": group} for group in groups],
        lr=train_config.lr,
        betas=(train_config.beta1, train_config.beta2),
        eps=train_config.eps,
        weight_decay=train_config.weight_decay,
        fused=fused or None,
    )
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, train_config: TrainConfig) -> LambdaLR:
    """Return the scheduler of `TrainConfig`: a rise over `warmup` steps to `lr`, then its curve, down to `min_lr`."""
    from torch.optim.lr_scheduler import LambdaLR

    # torch stores the attributes of a bound method's owner with the schedule; a function has none.
    return LambdaLR(optimizer, lambda done: train_config.rate_factor(done))
