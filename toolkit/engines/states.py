"""The parameters that a job trains and freezes, with their dtypes; and helpers to measure states and find moments."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from toolkit.core.units import BYTES_OF, GiB, MiB, ceil_div, dtype_name
from toolkit.engines.job import Job
from toolkit.engines.records import StateMemory
from toolkit.engines.shards import BUFFER, PARAMETER, Box, Shard, whole_box
from toolkit.models import NF4, ModelSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class State:
    """A parameter of the whole model, adapters included, before an engine shards it."""

    name: str
    """Canonical; with an adapter PEFT's, without its `base_model.model.`."""
    shape: tuple[int, ...]
    """The stored shape; packed weights are a column of storage elements."""
    trainable: bool
    dtype: str
    """torch's name of the dtype that it is loaded in."""

    @cached_property  # a plan asks half a million times
    def elements(self) -> int:
        """Elements as stored."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes as stored."""
        return self.elements * BYTES_OF[self.dtype]


def policy_dtypes(job: Job) -> dict[str, Any]:
    """Return the dtypes of FSDP2's mixed-precision policy; None leaves the parameters' own."""
    import torch

    names = {field: job.settings[field] for field in ("param_dtype", "reduce_dtype")}
    return {field: getattr(torch, name) if name else None for field, name in names.items()}


def adapted(spec: ModelSpec, targets: str) -> list[str]:
    """Return the names of the linear modules that get an adapter, all in the text part.

    `targets` is `all-linear`, or the last parts of module names separated by commas, as PEFT's `target_modules`.
    """
    text = spec.trained_linears
    if targets == "all-linear":
        return [name for name in text if name not in set(spec.unadapted)]
    names = [word.strip() for word in targets.split(",")]
    return [name for name in text if any(name == word or name.endswith("." + word) for word in names)]


def quantizable(spec: ModelSpec) -> list[str]:
    """Return the names of the linear modules that 4 and 8 bits pack."""
    left = set(spec.unquantized)
    return [name for name in spec.linears if name not in left]


def expert_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the fused experts that 4 bits pack: each half of one is whole blocks of 64 weights.

    Quantized files have none. Vision-language models have none, either: transformers may transpose their experts.
    """
    if spec.frozen or spec.quantization:
        return {}
    return {
        parameter.name: parameter.shape
        for parameter in spec.parameters
        if parameter.role == "expert" and len(parameter.shape) == 3 and math.prod(parameter.shape[1:]) % 128 == 0
    }


def packed_names(spec: ModelSpec, adapter: str) -> set[str]:
    """Return the names of the weights that an adapter's base packs: in 4 bits fused experts, too."""
    linear = {f"{name}.weight" for name in quantizable(spec)} if adapter in ("qlora", "qlora8") else set()
    return linear | (expert_shapes(spec).keys() if adapter == "qlora" else set())


def can_stream(job: Job) -> bool:
    """Return whether weights can be read one by one: not if they are dequantized, in 8 bits, or for DoRA, which needs all."""
    assert job.spec is not None
    adapter = job.strategy.adapter
    packs = adapter != "qlora" or bool(packed_names(job.spec, adapter))
    return packs and job.spec.quantization in (None, NF4) and adapter not in ("dora", "qlora8")


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a model's checkpoint contains, by name."""
    return {
        f"{module_name}.{name}" if module_name else name: buffer
        for module_name, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def buffer_shards(model: torch.nn.Module) -> Iterator[Shard]:
    """Yield the persistent buffers, which every rank holds whole."""
    for name, buffer in persistent_buffers(model).items():
        shape = tuple(buffer.shape)
        yield Shard(name, BUFFER, shape, whole_box(shape), 0, buffer.detach())


def packed_shape(elements: int, size: int) -> tuple[int, int]:
    """Return the shape of 4-bit weights: a column of storage elements of `size` bytes each."""
    return ceil_div(ceil_div(elements, 2), size), 1


SNAPSHOT_CHUNK = GiB
"""Bytes of the largest buffer of a checkpoint's snapshot, and of the largest tensor in its files."""


def trained_elements(job: Job) -> int:
    """Return the number of trained elements in the whole model."""
    return sum(state.elements for state in parameters_of(job) if state.trainable)


SEND_CHUNK = 4 * MiB
"""Bytes that a rank sends at once, where rank 0 puts an export's tensors together."""


def checkpoint_bytes(job: Job) -> int:
    """Return the bytes of the trained weights and of the optimizer's states."""
    trained = trained_elements(job)
    return trained * BYTES_OF[job.weight_dtype] + optimizer_bytes(job, trained)


def snapshot_bytes(job: Job) -> int:
    """Return the bytes of a rank's share of a checkpoint."""
    return checkpoint_bytes(job) // job.ranks


def optimizer_bytes(job: Job, elements: int) -> int:
    """Return the bytes of the optimizer's states of so many trained elements."""
    return elements * sum(BYTES_OF[state.dtype or job.weight_dtype] for state in job.optimizer.states)


def optimizer_dtypes(job: Job) -> str:
    """Return torch's names of the dtypes of the optimizer's states, joined by `+`."""
    return "+".join(sorted({state.dtype or job.weight_dtype for state in job.optimizer.states}))


def parameters_of(job: Job) -> tuple[State, ...]:
    """Return every parameter of the job's model, in the model's order, tied ones once.

    Without an adapter the text part is trainable, which is all of most models, and the rest is frozen in the compute dtype.
    With one the base is frozen in the compute dtype, or packed: 4 bits an element in storage elements of the compute dtype
    (`bnb_4bit_quant_storage`), 8 bits in int8. LoRA adds r·(in + out) elements a module, DoRA `out` more (Hu et al. 2021;
    Liu et al. 2024). Quantization constants are no parameters: about 0.127 bits a weight with double quantization
    (Dettmers et al. 2023), not counted here.
    """
    assert job.spec is not None, "an account needs a model"
    strategy = job.strategy
    key = (strategy.adapter, strategy.lora_rank, strategy.lora_targets, job.weight_dtype, job.compute_dtype)
    # A spec is frozen, and so is what follows from it: it is made once for all jobs of a plan that hold the same.
    cache: dict[Any, tuple[State, ...]] = vars(job.spec).setdefault("_states", {})
    if key not in cache:
        cache[key] = tuple(_states(job))
    return cache[key]


def _states(job: Job) -> Iterator[State]:
    spec, strategy = job.spec, job.strategy
    assert spec is not None
    packed = packed_names(spec, strategy.adapter)
    targets = set() if strategy.adapter == "none" else set(adapted(spec, strategy.lora_targets))
    for module, members in itertools.groupby(spec.parameters, key=lambda parameter: parameter.name.rpartition(".")[0]):
        for parameter in members:
            name, shape = parameter.name, parameter.shape
            trained = strategy.adapter == "none" and spec.trains(name)
            dtype = job.weight_dtype if trained else job.compute_dtype
            if name in packed and strategy.adapter == "qlora8":
                dtype = "int8"
            elif name in packed:
                shape = packed_shape(parameter.elements, BYTES_OF[dtype])
            if module in targets:
                if name.endswith(".weight"):
                    weight = parameter.shape
                name = f"{module}.base_layer{name.removeprefix(module)}"
            yield State(name=name, shape=shape, trainable=trained, dtype=dtype)
        if module in targets:
            yield from _adapter_parameters(job, module, *weight)


def _adapter_parameters(job: Job, module: str, out_features: int, in_features: int) -> Iterator[State]:
    """Yield the parameters that an adapter adds to a linear module (peft/tuners/lora/layer.py `LoraLayer`)."""
    rank = job.strategy.lora_rank
    shapes: dict[str, tuple[int, ...]] = {"lora_A": (rank, in_features), "lora_B": (out_features, rank)}
    if job.strategy.adapter == "dora":
        shapes["lora_magnitude_vector"] = (out_features,)
    for part, shape in shapes.items():
        yield State(name=f"{module}.{part}.default.weight", shape=shape, trainable=True, dtype=job.weight_dtype)


def measured_state(
    tensors: Iterable[tuple[torch.Tensor, bool]],
    optimizer: torch.optim.Optimizer,
    *,
    masters: Sequence[torch.Tensor] = (),
    reduce: str = "",
    later: Mapping[bool, int] | None = None,
) -> StateMemory:
    """Return a measured state: unique storages, so a view counts what it keeps alive.

    Args:
        tensors: (tensor, trainable) of each tensor that holds parameters.
        optimizer: that holds the moments. Step counters (one element each) are not counted.
        masters: separate fp32 copies of the trained weights.
        reduce: torch's name of the dtype that gradients are reduced in.
        later: bytes, trainable and frozen, that the first step will hold from then on.
    """
    import torch

    counted: set[int] = set()
    sizes = {True: 0, False: 0, **(later or {})}
    kinds: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for tensor, trainable in tensors:
        storage = tensor.untyped_storage()
        kinds[trainable].add(tensor.dtype)
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            sizes[trainable] += storage.nbytes()
    values = (value for state in optimizer.state.values() for value in state.values())
    moments = [local_tensor(value) for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    dtypes = {
        "trainable": _joined(kinds[True]),
        "frozen": _joined(kinds[False]),
        "master": _joined(master.dtype for master in masters),
        "optimizer": _joined(moment.dtype for moment in moments),
        "reduce": reduce,
    }
    return StateMemory(
        trainable=sizes[True],
        frozen=sizes[False],
        master=sum(master.untyped_storage().nbytes() for master in masters),
        optimizer=sum(moment.untyped_storage().nbytes() for moment in moments) if moments else None,
        dtypes={part: names for part, names in dtypes.items() if names},
    )


def _joined(dtypes: Iterable[torch.dtype]) -> str:
    return "+".join(sorted(set(map(dtype_name, dtypes))))


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that lies on this rank: of a DTensor its shard, of another tensor all."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def optimizer_shards(
    job: Job,
    optimizer: torch.optim.Optimizer,
    owner: torch.Tensor,
    shard: Shard,
    cut: Callable[[Any], Any],
    create: bool,
) -> Iterator[Shard]:
    """Yield the optimizer's states that belong to a shard of a parameter or master, if there are any.

    Args:
        job: that names the optimizer.
        optimizer: that steps `owner`.
        owner: the tensor by which the optimizer finds its state; `shard` is a part of it.
        shard: a parameter's or a master's.
        cut: takes of a tensor like `owner` the part that `shard` is.
        create: make states of zeros first, as the optimizer's first step would (torch/optim/adam.py `_init_group`;
            deepspeed/ops/adam/cpu_adam.py counts its steps in a plain int).
    """
    import torch

    kinds = [state.name for state in job.optimizer.states]
    if create and not optimizer.state.get(owner):
        zeros = {kind: torch.zeros_like(owner, memory_format=torch.preserve_format) for kind in kinds}
        plain, fused = type(optimizer).__name__ == "DeepSpeedCPUAdam", optimizer.param_groups[0].get("fused")
        step = 0 if plain else torch.zeros((), device=owner.device if fused else "cpu")
        optimizer.state[owner] = {"step": step, **zeros}
    state = optimizer.state.get(owner, {})
    for kind in kinds:
        if kind in state:
            yield dataclasses.replace(shard, kind=kind, tensor=cut(state[kind]))


def distributed_shards(
    job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, create: bool
) -> Iterator[Shard]:
    """Yield this rank's box of each parameter and its moments, with the strides that it has, and the persistent buffers whole.

    Parameters may be plain tensors or DTensors.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # on another rank's stage
            continue
        for box, cut in _held_boxes(parameter):
            shard = Shard(name, PARAMETER, tuple(parameter.shape), box, 0, cut(parameter))
            if shard.tensor.numel():  # the last ranks hold nothing of a tensor with few rows
                yield shard
                if parameter.requires_grad:
                    yield from optimizer_shards(job, optimizer, parameter, shard, cut, create)
    yield from buffer_shards(model)


def _held_boxes(parameter: torch.Tensor) -> Iterator[tuple[Box, Callable[[Any], torch.Tensor]]]:
    """Yield the boxes of a parameter on this rank, each with what cuts it from the parameter or from a tensor like it.

    Of matrices that are packed in one (gate and up of fused experts) a rank holds the same part of each: as many boxes.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    if not isinstance(parameter, DTensor):
        yield whole_box(parameter.shape), local_tensor
        return
    mesh, places = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, places)
    box = tuple(zip(offsets, sizes, strict=True))
    for group, place in enumerate(places):
        # FSDP2 names a dimension that tensor parallelism divides, too, in the same way: one box.
        if isinstance(place, _StridedShard) and not any(other.is_shard(place.dim) for other in places):
            dim, count = place.dim, place.split_factor
            whole, part = parameter.shape[dim] // count, sizes[dim] // count
            for number in range(count):
                start = number * whole + mesh.get_local_rank(group) * part
                cut = partial(_narrowed, dim=dim, start=number * part, length=part)
                yield (*box[:dim], (start, part), *box[dim + 1 :]), cut
            return
    yield box, local_tensor


def _narrowed(tensor: Any, dim: int, start: int, length: int) -> torch.Tensor:
    """Return a part of a tensor's local shard, in the same memory."""
    return local_tensor(tensor).narrow(dim, start, length)


def holds_parts(model: torch.nn.Module) -> bool:
    """Return whether this rank holds parts: DTensors, ZeRO-3's parameters that are not gathered now, or some stages alone."""
    from torch.distributed.tensor import DTensor

    return any(
        isinstance(item, DTensor) or item.is_meta or item.numel() < getattr(item, "ds_numel", 0)
        for item in model.parameters()
    )


def measured_distributed(model: torch.nn.Module, optimizer: torch.optim.Optimizer, reduce: str = "") -> StateMemory:
    """Measure the local shards of DTensors, plain parameters whole, and the optimizer's state."""
    held = (parameter for parameter in model.parameters() if not parameter.is_meta)
    tensors = ((local_tensor(parameter), parameter.requires_grad) for parameter in held)
    return measured_state(tensors, optimizer, reduce=reduce)


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of optimizer steps; 0 before the first."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the number of steps that the optimizer has done."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), int):
            state["step"] = steps
        elif "step" in state:
            state["step"].fill_(steps)
