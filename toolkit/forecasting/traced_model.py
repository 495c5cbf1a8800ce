"""The model that is traced: three layers of each kind on the meta device, with PEFT's and bitsandbytes' own modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.config.parallelism import Parallelism
from toolkit.engines.states import expert_shapes, packed_shape, quantizable
from toolkit.engines.traces import LayerStack, TraceConfig
from toolkit.models import ModelSpec
from toolkit.models.structure import module_lists
from toolkit.transforms.adapters import import_bitsandbytes
from toolkit.transforms.fused_experts import mark_experts

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


def truncate_layers(model: nn.Module, spec: ModelSpec, stage: tuple[int, int] | None = None) -> tuple[LayerStack, ...]:
    """Keep three layers of each kind in every stack of the model, in place; of a stage's layers (first, end) alone.

    Layers are of one kind where class, shapes of parameters, switches and the config's `layer_types` agree.
    """
    from torch import nn

    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    text_types = getattr(text, "layer_types", None)
    stacks = []
    for name, stack in module_lists(model):
        if not any(type(layer).__name__ in spec.blocks for layer in stack.children()):
            continue
        types = text_types if spec.in_text(name) else None
        kinds_: list[Any] = []
        for index, layer in enumerate(stack.children()):
            shapes = tuple((key, tuple(parameter.shape)) for key, parameter in layer.named_parameters())
            switches = tuple((name, value) for name, value in vars(layer).items() if isinstance(value, bool))
            kinds_.append((type(layer), shapes, switches, types[index] if types and index < len(types) else None))
        distinct = list(dict.fromkeys(kinds_))
        first, end = stage or (0, len(kinds_))
        kinds = tuple(distinct.index(kind) for kind in kinds_[first:end])
        indices = _kept_layers(kinds)
        kept_layers = [first + index for index in indices]
        owner, _, leaf = name.rpartition(".")
        layers = list(stack.children())
        setattr(model.get_submodule(owner), leaf, nn.ModuleList(layers[index] for index in kept_layers))
        if types and len(set(types)) > 1:  # models look their layers' types up by number
            # The config is the trace's own.
            attribute = text.attribute_map.get("layer_types", "layer_types")
            kept_types = {attribute: [types[index] for index in kept_layers]}
            if isinstance(getattr(type(text), attribute, None), property):  # Jamba's follow from periods
                text.__class__ = type(type(text).__name__, (type(text),), kept_types)
            else:
                vars(text).update(kept_types)
        stacks.append(LayerStack(name=name, kinds=kinds, indices=indices))
    return tuple(stacks)


def _kept_layers(kinds: Sequence[int]) -> tuple[int, ...]:
    """Return the first two and the last layer of each kind."""
    return tuple(
        index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < 2 or kind not in kinds[index + 1 :]
    )


def transform(model: PreTrainedModel, config: TraceConfig, spec: ModelSpec) -> Any:
    """Replace the quantized modules, as reading does, and apply the job's transforms, all on the meta device.

    Returns:
        The model, or PEFT's around it. Its trained parameters have the dtype of the forward.
    """
    import torch

    if config.job is None:
        return model
    adapter, outer = config.job.strategy.adapter, model
    if config.job.strategy.quantized:
        bits = 4 if adapter == "qlora" else 8
        setattr(model, f"is_loaded_in_{bits}bit", True)  # read by PEFT
        for name in quantizable(spec):
            _replace(model, name, bits)
        mark_experts(model, expert_shapes(spec) if bits == 4 else {})
    with torch.device("meta"):
        for each in config.job.transforms:
            outer = each.apply(outer, replace(config.job, spec=spec))
    for parameter in outer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, config.trained))
    return outer


def pack(model: PreTrainedModel) -> None:
    """Give each quantized module its packed weight: 4 bits in storage elements of the dtype that it had, 8 bits with scales.

    It is a plain parameter, since fake tensors have no subclasses. Of a 4-bit weight only `quant_state` is read.
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
        weight: Any = module.weight
        shape, dtype = tuple(weight.shape), torch.int8
        if kind == "Linear4bit":
            shape, dtype = packed_shape(weight.numel(), weight.dtype.itemsize), weight.dtype
        packed: Any = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        packed.quant_state, packed.CB, packed.SCB = tuple(weight.shape), None, None
        if kind == "Linear8bitLt":
            state: Any = module.state
            state.CB, state.SCB = packed.data, torch.empty(shape[0])
            module.register_buffer("scales", state.SCB)  # a buffer exists before the step
        module.weight = packed


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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds, or a plain tensor itself."""
    local_tensor: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local_tensor


@contextmanager
def fake_mesh(config: TraceConfig) -> Iterator[Any]:
    """Yield transformers' meshes of one rank over a fake process group, which is this process's default group meanwhile.

    Yields None for a model that one rank holds whole.
    """
    if config.ranks == 1:
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers.distributed.utils import TransformersDeviceMesh

    dist.init_process_group("fake", store=FakeStore(), rank=config.tp_rank, world_size=config.ranks)
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # its keys do not name the rank
    try:
        if config.tp == config.ep == 1:
            yield None
            return
        dense, experts = (config.ranks // config.tp, config.tp), (config.ranks // config.ep, config.ep)
        yield TransformersDeviceMesh(
            init_device_mesh("cpu", dense, mesh_dim_names=("fsdp", "tp")),
            init_device_mesh("cpu", experts, mesh_dim_names=("efsdp", "ep")),
        )
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def distribute(model: Any, mesh: Any, spec: ModelSpec, expert_imbalance: float = 1.0) -> None:
    """Apply transformers' tensor-parallel and expert-parallel plans, as `from_pretrained` does before it reads weights.

    Tied weights get parameters of their own until they are tied again: a plan finds a shared parameter by one name only.
    """
    import torch
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from toolkit.engines.mesh.styles import group_heads, planned, register_shared, register_summed, share_inputs
    from toolkit.forecasting.fake_kernels import register_exchange

    register_summed()
    known: set[int] = set()
    for module, name, parameter in _parameters(model):
        if id(parameter) in known:
            copy = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = copy
        known.add(id(parameter))
    tp, ep, fsdp = (mesh.get_mesh(name) for name in ("tp", "ep", "fsdp"))
    degrees = Parallelism(tp=tp.size(), ep=ep.size())
    if shared := register_shared(spec, degrees):
        group_heads(model, spec, degrees)
    sizes = DistributedConfig(tp_size=tp.size(), ep_size=ep.size(), fsdp_size=fsdp.size(), tp_plan=shared or None)
    with planned(spec):
        plan, experts, _ = model._resolve_parallel_plans(sizes)
    if tp.size() > 1:
        apply_tensor_parallelism(model, tp, plan)
        share_inputs(model, spec, degrees, tp)
    if ep.size() > 1:
        apply_expert_parallelism(model, ep, tp, experts, register_exchange(expert_imbalance))


def unwrap(model: Any) -> None:
    """Replace bitsandbytes' parameters by plain ones: fake tensors of torch 2.11 refuse subclasses."""
    import torch

    for module, name, parameter in _parameters(model):
        if type(parameter).__module__.startswith("bitsandbytes"):
            plain = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            module._parameters[name] = torch.nn.Parameter(plain, requires_grad=False)


def allocate(model: Any, *, sharded: bool) -> None:
    """Replace tensors on the meta device by fake ones; of a sharded DTensor, the local part."""
    import torch
    from torch.distributed.tensor import DTensor

    if not sharded:
        model.to_empty(device="cpu")
        return
    for module, name, parameter in _parameters(model):
        tensor: Any = torch.empty(local(parameter).shape, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            shape, stride = parameter.shape, parameter.stride()
            mesh, placements = parameter.device_mesh, parameter.placements
            tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
        module._parameters[name] = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _parameters(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield each module with the names and values of its own parameters; a shared one comes once for each module."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module, name, parameter
