"""Activation checkpointing: which activations of a layer are computed again in the backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job, Transform
from toolkit.engines.registry import register_transform
from toolkit.models import ModelSpec
from toolkit.models.structure import module_lists

if TYPE_CHECKING:
    import torch

FASTEST_FIRST = ("none", "selective", "attention", "full")
"""Policies in the order of their steps' time: each recomputes more, and keeps less, than the one before."""

PRODUCT_OPERATORS = {"mm", "addmm", "gemm_4bit", "_grouped_mm", "grouped_mm_fallback"}
"""Names of operators that multiply rows by a weight."""


class Checkpointing(Transform):
    """`--activation-checkpointing`. It comes before an adapter: PEFT then lets embeddings require gradients."""

    name = "activation_checkpointing"

    def settings(self, job: Job) -> str | None:
        policy = job.strategy.activation_checkpointing
        return policy if policy != "none" else None

    def refuse(self, job: Job) -> None:
        policy, spec = job.strategy.activation_checkpointing, job.spec
        if spec is None:
            return
        why = ""
        if not spec.checkpointed:
            why, other = f"{spec.architecture} has no activation checkpointing", "none"
        elif policy == "attention" and (job.strategy.attention == "eager" or not spec.heads):
            why, other = f"attention {job.strategy.attention!r} of {spec.architecture} is no operator to keep", "full"
        elif policy == "selective" and job.strategy.sharding == "zero3" and _biased(spec):
            why, other = "DeepSpeed's stage 3 adds biases to products in place, so none can be kept", "attention"
        if why:
            raise StrategyError(
                f"activation_checkpointing {policy!r}: {why}. Choose --activation-checkpointing {other}."
            )

    def apply(self, model: Any, job: Job) -> Any:
        policy, spec = job.strategy.activation_checkpointing, cast("ModelSpec", job.spec)
        options: dict[str, Any] = {"use_reentrant": False}
        if policy in ("attention", "selective"):
            rank = job.strategy.lora_rank if job.strategy.adapter != "none" else 0
            options["context_fn"] = partial(_contexts, policy == "selective", spec.hidden, rank)
        # Before 5.23 transformers has the older name alone.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(options)
        word, _, every = policy.partition(":")
        layer: Any
        for _, stack in module_lists(model) if word == "every" else ():
            for index, layer in enumerate(stack.children()):
                if type(layer).__name__.removeprefix("FSDP") in spec.blocks:  # it may be sharded already
                    layer.gradient_checkpointing = index % int(every) == 0
        return model


register_transform(Checkpointing())


def _biased(spec: ModelSpec) -> bool:
    """Return whether a linear module has a bias."""
    biases = {f"{name}.bias" for name in spec.linears}
    return any(parameter.name in biases for parameter in spec.parameters)


def _contexts(products: bool, hidden: int, rank: int) -> Any:
    """Return the contexts of a layer's forward and recomputation, which keep outputs of attention, and of `products`.

    Every second product is kept, the first one included. Those that narrow to the `hidden` size do not count: a layer's last one
    is not recomputed. Nor do an adapter's of this `rank`: they take few operations.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    counts = [0, 0]

    def keep(context: Any, operator: Any, *arguments: Any, **_: Any) -> bool:
        name = str(operator)
        if "attention" in name or "_attn" in name:
            return True
        if not products or PRODUCT_OPERATORS.isdisjoint(name.split(".")):
            return False
        if ".gemm_4bit." in name:
            outside, inside = arguments[2]
        else:
            inside, outside = arguments[2 if ".addmm." in name else 1].shape[-2:]
        if inside > outside == hidden or inside == rank or outside == rank:
            return False
        again = int(context.is_recompute)
        counts[again] += 1
        return counts[again] % 2 == 1

    return create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]


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
