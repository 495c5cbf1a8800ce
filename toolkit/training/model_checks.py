"""What `prepare` refuses of a model and its optimizer, by name, before an engine has changed them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError, StrategyMismatch
from toolkit.engines.job import Job
from toolkit.models.hf_loading import first_names

if TYPE_CHECKING:
    import torch

WHOLE_SHAPES = ("Adafactor", "Muon", "Shampoo", "SM3", "LBFGS", "Lamb", "LARS", "CAME", "GaLoreAdamW")
"""Optimizers that look at a parameter's shape, norm or neighbours. ZeRO gives an optimizer flat parts of many parameters."""


LOADED = "_toolkit_loaded"
"""The attribute of a model that `toolkit.load` has made. Copies have it, too."""

ADDED_BY_LOAD: dict[str, tuple[Any, ...]] = {
    "loss": ("auto", "whole"),
    "mlp_tiles": ("none",),
    "activation_offload": (False,),
    "activation_checkpointing": ("auto", "none"),
}
"""Fields of which `toolkit.load` changes a model, and the values with which it does not."""


def check_model(job: Job, model: torch.nn.Module) -> None:
    """Refuse a model that the engine would train otherwise than one process, or cannot take apart.

    Raises:
        StrategyError: naming the parameter, and what to do.
        StrategyMismatch: for trained parameters in several dtypes.
    """
    check_uniform(job, model)
    check_divisible(job, model)
    check_hooks(job, model)
    check_copies(model)


def check_requested(strategy: Strategy, model: torch.nn.Module, resolved: Strategy | None = None) -> None:
    """Refuse a model without what `toolkit.load` adds: context-parallel attention, an adapter, compiled layers, `ADDED_BY_LOAD`.

    Args:
        strategy: as requested, with its `auto`s.
        model: of a user's code.
        resolved: the strategy without an `auto`, where the model is known.
    """
    modules = list(model.modules())
    trained = any(parameter.requires_grad for parameter in model.parameters())
    recomputes = any(
        getattr(each, "gradient_checkpointing", False) or "CheckpointWrapper" in type(each).__name__ for each in modules
    )
    for name, without in ADDED_BY_LOAD.items() if trained and not any(LOADED in vars(each) for each in modules) else ():
        value, fix = getattr(strategy, name), "Make it with tk.load(accelerator)"
        if value in without or getattr(resolved or strategy, name) in without:
            continue
        if name == "activation_checkpointing" and value == "full":
            if recomputes:
                continue
            fix += ", call its gradient_checkpointing_enable()" * hasattr(model, "gradient_checkpointing_enable")
        raise StrategyError(
            f"{name} {value!r} was requested, and the model of this code is without. {fix}, or leave it out."
        )
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", "")
    if strategy.cp > 1 and not str(kernel).startswith("cp_"):
        raise StrategyError(
            f"cp {strategy.cp} was requested, and the attention of this code's model sees this rank's tokens alone. Make it with "
            "tk.load(accelerator), and train with tk.forward_backward; or leave --cp out."
        )
    if strategy.adapter != "none" and not any(".lora_" in name for name, _ in model.named_parameters()):
        raise StrategyError(
            f"adapter {strategy.adapter!r} was requested, and the model of this code has none. Make it with tk.load(accelerator) "
            "or PEFT's get_peft_model, or leave --adapter out."
        )
    if strategy.compile and not any(each._compiled_call_impl for each in model.modules()):
        raise StrategyError(
            "compile was requested, and no layer of this code's model is compiled. Make it with tk.load(accelerator), call "
            "compile() of each layer, or leave --compile out."
        )


def check_optimizers(job: Job, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Refuse an optimizer that the sharding engines would train otherwise than one process, or cannot take apart."""
    engine, sharding = job.engine, job.strategy.sharding
    if not engine.prepares_pair or job.ranks < 2 or not optimizers:
        return
    if len(models) > 1:
        raise StrategyError(
            f"prepare got {len(models)} models in one call, and sharding {sharding!r} takes one with its optimizer. Call prepare "
            "for each: first the trained one with its optimizer."
        )
    if not models:
        return
    names = {id(each): name for name, each in models[0].named_parameters(remove_duplicate=False)}
    steps = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    if steps - set(names):
        raise StrategyError(
            f"the optimizer steps {len(steps - set(names))} parameters that are not the model's. Make it after the last change "
            "of the model's parameters, of this model alone."
        )
    trained = {id(each) for each in models[0].parameters() if each.requires_grad}
    if engine.needs_every_group and (left := sorted(names[key] for key in trained - steps)):
        raise StrategyError(
            f"{left[0]} is trained and in no group of the optimizer ({len(left)} of {len(trained)}), and sharding {sharding!r} "
            "needs all that is trained. Freeze it with requires_grad_(False), or put it in a group."
        )
    kinds = {kind.__name__ for optimizer in optimizers for kind in type(optimizer).__mro__}
    if engine.needs_every_group and (whole := sorted(kinds & set(WHOLE_SHAPES))):
        raise StrategyError(
            f"optimizer {whole[0]} looks at whole parameters, and sharding {sharding!r} gives it flat parts of them: it would "
            "train otherwise. Choose sharding 'ddp', or an optimizer that steps each element alone, such as AdamW."
        )


def check_copies(model: torch.nn.Module) -> None:
    """Check that PEFT's trained copies (`modules_to_save`) of a tied weight are one parameter, too."""
    names = first_names(model, buffers=False)
    used: dict[tuple[str, str], str] = {}
    for adapter in getattr(model, "peft_config", ()):
        for name, first in names.items():
            copy = names.get(name.replace(".original_module.", f".modules_to_save.{adapter}."), first)
            if (other := used.setdefault((adapter, first), copy)) != copy:
                raise StrategyError(
                    f"modules_to_save makes {copy} a parameter of its own, but the model ties its weight to {other}. "
                    "Give LoraConfig(ensure_weight_tying=True), which trains and saves one tied copy."
                )


def check_uniform(job: Job, model: torch.nn.Module) -> None:
    """Check for one dtype among the trained parameters: sharding engines need it and do not name the parameter."""
    if job.strategy.adapter == "none":
        return
    kinds: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        named = ", ".join(f"{name} in {dtype}" for dtype, name in kinds.items())
        raise StrategyMismatch(f"trained parameters have several dtypes: {named}. Cast them to one before prepare.")


def check_hooks(job: Job, model: torch.nn.Module) -> None:
    """Refuse hooks on gradients under FSDP, which calls none: it reduces outside of autograd."""
    # Under TP and EP transformers' own lie on the gathered parameters, which FSDP calls.
    shards = job.strategy.engine == "fsdp" and job.strategy.tp * job.strategy.ep == 1
    for name, each in model.named_parameters() if shards else ():
        if each._backward_hooks or each._post_accumulate_grad_hooks:
            raise StrategyError(
                f"{name} has a hook on its gradient, and FSDP would not call it. Change {name}.grad after "
                "accelerator.backward(loss), or choose sharding 'ddp' or 'zero2'."
            )


def check_divisible(job: Job, model: torch.nn.Module) -> None:
    """Refuse parameters that the sharding engines cannot divide: scalars, and those without elements."""
    sharding = job.strategy.sharding
    for name, parameter in model.named_parameters() if job.engine.prepares_pair else ():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if not shape or not math.prod(shape):
            what, cure = ("no elements", "Remove it") if shape else ("no dimension", "Give it the shape (1,)")
            raise StrategyError(
                f"{name} has {what}, and sharding {sharding!r} cannot divide it. {cure}, or choose sharding 'ddp'."
            )
        # A deferred parameter has strides of 0.
        if job.strategy.engine == "fsdp" and not parameter.is_contiguous() and 0 not in parameter.stride():
            raise StrategyError(
                f"{name} is not contiguous (strides {parameter.stride()}), and FSDP cannot divide it. Write "
                "p.data = p.data.contiguous() for each parameter before the optimizer is made, or choose sharding 'ddp'."
            )
