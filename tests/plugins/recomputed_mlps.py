"""A transform from outside the package: each MLP is computed again in the backward. No file of `toolkit/` names it."""

from __future__ import annotations

from functools import partial
from typing import Any

from toolkit.engines.job import Job, Transform
from toolkit.engines.registry import register_transform


class RecomputedMLPs(Transform):
    name = "recomputed_mlps"

    def settings(self, job: Job) -> bool | None:
        return True if job.strategy.activation_checkpointing == "none" else None

    def apply(self, model: Any, job: Job) -> Any:
        from torch.utils.checkpoint import checkpoint

        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        return model

    def after_prepare(self, prepared: Any) -> None:
        prepared.accelerator.print("recomputed MLPs")


register_transform(RecomputedMLPs())
