"""`save_pretrained`, `generate` and `state_dict` of a prepared model: whole and alike on every engine, or refused.

DeepSpeed keeps a model after its Accelerator was dropped, so the methods hold the Accelerator weakly.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from toolkit.core.errors import StrategyError
from toolkit.engines.rank_calls import meet
from toolkit.engines.states import holds_parts
from toolkit.exporters.state_dict import whole_state_dict

if TYPE_CHECKING:
    import torch

    from toolkit.engines.records import Prepared

READERS = ("deepspeed.", "torch.distributed.checkpoint.", "toolkit.")
"""Callers of `state_dict` that know shards. The caller's frame alone tells them from a script: both call without arguments."""


def refuse_parts(module: Any) -> None:
    """Let a model that holds parts of its tensors refuse a state dict to a caller that would take them for the model."""
    if holds_parts(module):
        module.register_state_dict_post_hook(_refuse)


def _refuse(module: torch.nn.Module, *_: Any) -> None:
    frame: Any = sys._getframe(1)
    while frame.f_globals["__name__"].startswith("torch.nn."):
        frame = frame.f_back
    if holds_parts(module) and not frame.f_globals["__name__"].startswith(READERS):
        raise StrategyError(
            "state_dict() holds parts of tensors: other ranks have the rest. Call accelerator.get_state_dict(model) on every "
            "rank, or tk.save(tk.prepared(accelerator, (model, optimizer)), tokenizer, folder)."
        )


def gather_in_methods(prepared: Prepared, sharded: dict[torch.nn.Module, Prepared]) -> None:
    """Let the methods of a prepared model gather what each rank holds a part of. Give DDP the methods of its model.

    Saved are the masters, where they say more than the weights.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    model, module = prepared.model, prepared.accelerator.unwrap_model(prepared.model)
    job, shares = prepared.job, holds_parts(module)
    methods = {name: method for name, method in METHODS.items() if hasattr(module, name)}
    masters = job.engine.keeps_masters(job)
    if (shares or masters) and module not in sharded:
        if "generate" in methods:  # an adapter's does not call the root's `forward`
            register_fsdp_forward_method(module, "generate")
        for name in methods if shares else methods.keys() & {"save_pretrained"}:
            method = methods[name]
            setattr(module, name, partial(method, getattr(module, name), module, ref(prepared.accelerator)))
        sharded[module] = prepared
    for name in methods:
        if not hasattr(model, name):
            setattr(model, name, getattr(module, name))


def _save_pretrained(upstream: Any, module: Any, accelerator: Any, *args: Any, **options: Any) -> Any:
    """Gather the weights, unless they are given. Rank 0 writes: no other has them."""
    options = dict(zip(inspect.signature(upstream).parameters, args, strict=False)) | options
    if (owner := accelerator()) is not None:
        if options.get("state_dict") is None:
            options["state_dict"] = whole_state_dict(owner.sharded[module], "save_pretrained")
        if not (options.get("is_main_process", True) and owner.is_main_process):
            return None  # PEFT's would look for names in the empty state dict of this rank
    return upstream(**options)


def _generate(upstream: Any, module: Any, accelerator: Any, *args: Any, **options: Any) -> Any:
    """Wait for all ranks first. They generate until the last of them has ended: each forward gathers the weights."""
    if (owner := accelerator()) is not None:
        meet(owner, "generate", "Each holds a part of the weights. Generate on all of them, and print on one.")
    if options.get("synced_gpus") is None and hasattr(module, "generation_config"):
        options["synced_gpus"] = True
    return upstream(*args, **options)


METHODS = {"save_pretrained": _save_pretrained, "generate": _generate}
