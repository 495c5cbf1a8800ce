"""An adapter on a model that is traced: PEFT's own modules, and bitsandbytes' over weights that hold nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.engines.adapters import add_adapter, import_bitsandbytes, mark_experts
from toolkit.engines.states import adapted, expert_shapes, packed_shape, quantizable
from toolkit.engines.traces import Adapter, LayerStack
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


QUANTIZED = {"qlora": 4, "qlora8": 8}
"""Adapters over quantized weights, and their bits."""


def add_traced_adapter(model: PreTrainedModel, stacks: Sequence[LayerStack], spec: ModelSpec, adapter: Adapter) -> Any:
    """Replace what is quantized and put the adapter on, in place, on the meta device.

    Returns:
        PEFT's model around the one that was given.
    """
    import torch

    if adapter.kind in QUANTIZED:
        setattr(model, f"is_loaded_in_{QUANTIZED[adapter.kind]}bit", True)  # PEFT asks
        for name in _kept_names(stacks, quantizable(spec)):
            _replace(model, name, QUANTIZED[adapter.kind])
        if adapter.kind == "qlora":
            names = _kept_names(stacks, expert_shapes(spec))
            mark_experts(model, {name: model.get_parameter(name).shape for name in names})
    targets = list(_kept_names(stacks, adapted(spec, adapter.targets)))
    with torch.device("meta"):
        peft_model = add_adapter(model, spec.kind, adapter.kind, adapter.rank, targets)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, adapter.dtype))
    return peft_model


def pack(model: PreTrainedModel) -> None:
    """Give each quantized module its packed weight: 4 bits in storage elements of the dtype that it had, 8 bits with scales.

    A parameter of torch's own, since a fake tensor takes no subclass. A 4-bit one is asked for its `quant_state` alone.
    """
    import torch

    for module in model.modules():
        experts: Any = getattr(module, "packed_experts", None)
        for name in experts.shapes if experts is not None else ():
            fused = module.get_parameter(name)
            column = torch.empty(packed_shape(fused.numel(), fused.dtype.itemsize), dtype=fused.dtype)
            module._parameters[name] = torch.nn.Parameter(column, requires_grad=False)
            experts.states[name] = (tuple(fused.shape), fused.dtype)
        kind = type(module).__name__
        if kind not in ("Linear4bit", "Linear8bitLt") or hasattr(module, "base_layer"):
            continue
        whole: Any = module.weight
        shape, dtype = tuple(whole.shape), torch.int8
        if kind == "Linear4bit":
            shape, dtype = packed_shape(whole.numel(), whole.dtype.itemsize), whole.dtype
        packed: Any = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        packed.quant_state, packed.CB, packed.SCB = tuple(whole.shape), None, None
        if kind == "Linear8bitLt":
            state: Any = module.state
            state.CB, state.SCB = packed.data, torch.empty(shape[0])
            module.register_buffer("scales", state.SCB)  # it exists before the step
        module.weight = packed


def _kept_names(stacks: Sequence[LayerStack], names: Iterable[str]) -> Iterator[str]:
    """Yield the names that the shallow model has, in its spelling."""
    for name in names:
        stack = next((candidate for candidate in stacks if name.startswith(f"{candidate.name}.")), None)
        if stack is None:
            yield name
            continue
        index, _, rest = name.removeprefix(f"{stack.name}.").partition(".")
        if int(index) in stack.indices:
            yield f"{stack.name}.{stack.indices.index(int(index))}.{rest}"


def _replace(model: PreTrainedModel, name: str, bits: int) -> None:
    """Replace a linear module with bitsandbytes' module of 4 or 8 bits; its weight stays."""
    import_bitsandbytes()
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    plain: Any = model.get_submodule(name)
    # GPT-2's `Conv1D` keeps its weight the other way round.
    weight = plain.weight.data if hasattr(plain, "out_features") else plain.weight.data.t()
    dtype = weight.dtype
    packed: Any
    if bits == 4:
        packed = Linear4bit(1, 1, bias=False, compute_dtype=dtype, quant_type="nf4", quant_storage=dtype)
        packed.weight = Params4bit(weight, requires_grad=False)
    else:
        packed = Linear8bitLt(1, 1, bias=False, has_fp16_weights=False)
        packed.weight = Int8Params(weight, requires_grad=False)
    (packed.out_features, packed.in_features), packed.bias = weight.shape, plain.bias
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, packed)
