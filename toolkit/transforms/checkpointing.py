"""Activation checkpointing: a layer's activations are computed again in the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job, Transform
from toolkit.engines.registry import register_transform

if TYPE_CHECKING:
    import torch


class Checkpointing(Transform):
    """`--activation-checkpointing`. It comes before an adapter: PEFT then lets embeddings require gradients."""

    name = "activation_checkpointing"

    def settings(self, job: Job) -> str | None:
        policy = job.strategy.activation_checkpointing
        return policy if policy != "none" else None

    def refuse(self, job: Job) -> None:
        if job.spec is not None and not job.spec.checkpointed:
            raise StrategyError(
                f"{job.spec.architecture} has no activation checkpointing. Choose --activation-checkpointing none."
            )

    def apply(self, model: Any, job: Job) -> Any:
        # Before 5.23 transformers has the older name alone.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        return model


register_transform(Checkpointing())


def checkpoint_in_training_only(model: torch.nn.Module) -> None:
    """Switch activation checkpointing off in forwards without gradients.

    In train mode it drops the KV cache (transformers/modeling_layers.py), and `generate` would silently return other tokens.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing") and "checkpointing_paused" not in vars(module):
            module.checkpointing_paused = False
            module.register_forward_pre_hook(_pause)
            module.register_forward_hook(_resume, always_call=True)


def _pause(module: Any, _: Any) -> None:
    import torch

    if module.gradient_checkpointing and not torch.is_grad_enabled():
        module.gradient_checkpointing, module.checkpointing_paused = False, True


def _resume(module: Any, *_: Any) -> None:
    if module.checkpointing_paused:
        module.gradient_checkpointing, module.checkpointing_paused = True, False
