"""An adapter on a model that is traced: PEFT's own modules, and bitsandbytes' over weights that hold nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.engines.adapters import add_adapter, import_bitsandbytes
from toolkit.engines.states import adapted, packed_shape, quantizable
from toolkit.engines.traces import Adapter, LayerStack
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_traced_adapter(model: PreTrainedModel, stacks: Sequence[LayerStack], spec: ModelSpec, adapter: Adapter) -> Any:
    """Replace what is quantized and put the adapter on, in place, on the meta device.

    Returns:
        PEFT's model around the one that was given.
    """
    import torch

    if adapter.kind == "qlora":
        model.is_loaded_in_4bit = True  # PEFT asks
        for name in _kept_names(stacks, quantizable(spec)):
            _replace(model, name)
    targets = list(_kept_names(stacks, adapted(spec, adapter.targets)))
    with torch.device("meta"):
        peft_model = add_adapter(model, spec.kind, adapter.kind, adapter.rank, targets)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, adapter.dtype))
    return peft_model


def pack(model: PreTrainedModel) -> None:
    """Give each module of 4 bits its packed weight, in storage elements of the dtype that it had.

    A parameter of torch's own, since a fake tensor takes no subclass; all that is asked of it is its `quant_state`.
    """
    import torch

    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and not hasattr(module, "base_layer"):
            whole: Any = module.weight
            shape = packed_shape(whole.numel(), whole.dtype.itemsize)
            packed: Any = torch.nn.Parameter(torch.empty(shape, dtype=whole.dtype), requires_grad=False)
            packed.quant_state = tuple(whole.shape)
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


def _replace(model: PreTrainedModel, name: str) -> None:
    """Replace a linear module with bitsandbytes' 4-bit module; its weight stays."""
    import_bitsandbytes()
    from bitsandbytes.nn import Linear4bit, Params4bit

    plain: Any = model.get_submodule(name)
    # GPT-2's `Conv1D` keeps its weight the other way round.
    weight = plain.weight.data if hasattr(plain, "out_features") else plain.weight.data.t()
    dtype = weight.dtype
    packed = Linear4bit(1, 1, bias=False, compute_dtype=dtype, quant_type="nf4", quant_storage=dtype)
    (packed.out_features, packed.in_features), packed.bias = weight.shape, plain.bias
    packed.weight = Params4bit(weight, requires_grad=False)
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, packed)
