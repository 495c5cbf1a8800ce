"""Fused experts in 4 bits: three-dimensional parameters, which bitsandbytes' linear modules do not hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.engines.states import expert_shapes
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn


class PackedExperts:
    """Fused experts of one module.

    For the module's forward each is dequantized, under its own name.

    bitsandbytes' `nn/parametrize.py` does the same with parametrizations, which change the module's class and its parameters'
    names; engines, checkpoints and forecasts know parameters by name.
    """

    def __init__(self, module: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None = None) -> None:
        """Take the parameters' names in the module with their whole shapes, and the dtype to compute in; a trace has none."""
        self.shapes, self.dtype = shapes, dtype
        self.states: dict[str, Any] = {}
        """bitsandbytes' constants of each, as soon as it has values."""
        module.packed_experts = self
        module.register_forward_pre_hook(self._dequantize)
        # Activation checkpointing ends a recomputed forward by an exception.
        module.register_forward_hook(self._release, always_call=True)

    def _dequantize(self, module: Any, *_: Any) -> None:
        from bitsandbytes.functional import dequantize_4bit

        for name, state in self.states.items():
            # An attribute of the module itself comes before its parameter.
            vars(module)[name] = dequantize_4bit(module._parameters[name].detach(), state)

    def _release(self, module: Any, *_: Any) -> None:
        for name in self.states:
            vars(module).pop(name, None)


def experts_of(model: nn.Module) -> dict[str, PackedExperts]:
    """Return the packed experts by the names of their modules."""
    return {name: module.packed_experts for name, module in model.named_modules() if hasattr(module, "packed_experts")}


def packed_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the names of a model's packed experts, each with its shape before packing."""
    return {
        f"{owner}.{name}": shape
        for owner, experts in experts_of(model).items()
        for name, shape in experts.shapes.items()
    }


def mark_experts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None = None) -> None:
    """Let the modules of these fused experts take packed parameters."""
    for owner, names in itertools.groupby(shapes, key=lambda name: name.rpartition(".")[0]):
        PackedExperts(model.get_submodule(owner), {name.rpartition(".")[2]: shapes[name] for name in names}, dtype)


def pack_experts(model: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Pack the fused experts of a model that has their values, with the bits of a streamed load."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    mark_experts(model, expert_shapes(spec), dtype)
    for owner, experts in experts_of(model).items():
        module = model.get_submodule(owner)
        for name in experts.shapes:
            whole = module.get_parameter(name).data.to(dtype)
            data, experts.states[name] = quantize_4bit(
                whole, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=dtype
            )
            module._parameters[name] = torch.nn.Parameter(data, requires_grad=False)


def unpack_experts(model: nn.Module) -> None:
    """Dequantize the fused experts of a model for good."""
    import torch

    for owner, experts in experts_of(model).items():
        module = model.get_submodule(owner)
        experts._dequantize(module)
        for name in experts.shapes:
            module._parameters[name] = torch.nn.Parameter(vars(module).pop(name), requires_grad=False)
        experts.states = {}
