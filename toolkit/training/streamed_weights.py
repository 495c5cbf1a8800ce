"""A checkpoint's weights one at a time: rank 0 reads, every rank gets each by broadcast. No rank holds the whole model."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from toolkit.core.units import ceil_div
from toolkit.engines.deferred import defer, end_deferral
from toolkit.engines.rank_calls import on_main
from toolkit.engines.simulation import NESTED_BLOCK, PIECE, QUANT_BLOCK
from toolkit.engines.states import persistent_buffers
from toolkit.models import ModelSpec
from toolkit.models.files import SAFETENSORS_DTYPES
from toolkit.models.hf_loading import disk_layouts, open_tensors, set_tensor
from toolkit.transforms.fused_experts import packed_experts

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    Shapes = Mapping[str, tuple[int, ...]]

PACKED = "uint8"
"""The dtype of a weight that the files hold packed in 4 bits."""

FLOATS = {"float64", "float32", "float16", "bfloat16"}
"""Dtypes of weights that need no more than a cast."""


@dataclass
class Source:
    """Where the files hold a weight."""

    tensors: list[str]
    """Names of the tensors that are joined along their rows."""
    dtype: str
    shape: tuple[int, ...]
    """The weight's own, as the files have it."""


class StreamedWeights:
    """The weights of a checkpoint, each of one tensor in the files or of several that lie row below row in it."""

    def __init__(
        self, accelerator: Accelerator, spec: ModelSpec, files: Mapping[str, Any], sources: Mapping[str, Source]
    ) -> None:
        """Take the open files by the names of their tensors, which only rank 0 has."""
        self._accelerator, self._spec, self._files, self._sources = accelerator, spec, files, sources
        self._own_files: Mapping[str, Any] = {}
        self._places: dict[int, tuple[str, torch.nn.Parameter]] = {}
        """Parameters without memory, by id, with their names in `_sources`."""
        self._first = {other: group[0] for group in spec.tied for other in group[1:]}
        self._packing: dict[str, Any] = {}
        self._code: torch.Tensor | None = None
        self.closed = False

    @classmethod
    def of_shapes(
        cls, accelerator: Accelerator, spec: ModelSpec, model: PreTrainedModel, shapes: Shapes
    ) -> StreamedWeights | None:
        """Open the files of a checkpoint for a model's weights of these names and shapes. A collective.

        Returns:
            None where transformers has to convert the files: joined along their columns, 8-bit weights.

        Raises:
            ModelError: where the model has no weights.
        """
        files: dict[str, Any] = {}

        def find() -> dict[str, tuple[list[str], str]] | None:
            files.update(open_tensors(spec))
            sources = {name: _source(files, model, name, shape) for name, shape in shapes.items()}
            return None if None in sources.values() else cast("dict[str, tuple[list[str], str]]", sources)

        places = on_main(accelerator, find)
        if places is None:
            return None
        return cls(accelerator, spec, files, {name: Source(*places[name], shape) for name, shape in shapes.items()})

    @classmethod
    def of_model(cls, accelerator: Accelerator, spec: ModelSpec, model: PreTrainedModel) -> StreamedWeights | None:
        """Open the files of an empty model, and fill its buffers. As `of_shapes`."""
        buffers = persistent_buffers(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *buffers.items())}
        packed = {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
        for name, module in packed.items():
            shape = module.out_features, module.in_features
            shapes[f"{name}.weight"] = shape[::-1] if _is_transposed(module) else shape
        weights = cls.of_shapes(accelerator, spec, model, shapes | packed_experts(model))
        if weights is None:
            return None
        for name, buffer in buffers.items():
            set_tensor(model, name, weights.share(name).to("cpu", buffer.dtype, copy=True))
        for module in packed.values():  # their options are the same
            weights._packing = {"storage": module.weight.quant_storage, "kind": module.weight.quant_type}
        return weights

    @property
    def dtypes(self) -> set[str]:
        """torch's names of the dtypes in the files."""
        return {source.dtype for source in self._sources.values()}

    @property
    def renamed(self) -> bool:
        """Whether the files hold weights under other names than the model's, or in parts."""
        return any(source.tensors != [name] for name, source in self._sources.items())

    def _entry(self, name: str) -> Source:
        """Return where a weight is, perhaps a tied one."""
        return self._sources[self._first.get(name, name)]

    def share(self, name: str) -> torch.Tensor:
        """Return a weight on every rank, in the file's dtype. A collective."""
        whole = self._read(name, self._files)
        self._broadcast(whole)
        return whole

    def attach(self, model: PreTrainedModel) -> None:
        """Take the parameters of an empty model as the places of these weights, whatever the script makes of the model.

        They are an attribute of the model, because what wraps it (PEFT's model) passes attributes on to `prepare`.
        """
        self._places = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        model.streamed_weights = self

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedWeights:
        """Return the same files for a copy of the model. `copy.deepcopy` has copied its parameters."""
        other = copy.copy(self)
        other._places = {id(memo[key]): (name, memo[key]) for key, (name, _) in self._places.items() if key in memo}
        return other

    def defer(self) -> None:
        """Let a script use the parameters as if they had their values. Packed ones stay as they are."""
        defer((place for place in self._places.values() if self._is_whole(*place)), self.fetch)

    def _is_whole(self, name: str, parameter: torch.nn.Parameter) -> bool:
        return tuple(parameter.shape) == self._entry(name).shape

    def untouched(self, model: torch.nn.Module) -> dict[str, str]:
        """Return the parameters that still have their values in the files alone: name in the model → name in the files.

        A script may have replaced others, dropped layers, or moved them to other places.
        """
        left = end_deferral(model)
        left |= {key for key, place in self._places.items() if not self._is_whole(*place) and is_empty(place[1])}
        return {name: self._places[id(each)][0] for name, each in model.named_parameters() if id(each) in left}

    def fetch(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Give a parameter the values of a weight, which this rank reads alone."""
        self._own_files = self._files or self._own_files or open_tensors(self._spec)
        parameter.data = self._read(name, self._own_files).to("cpu", parameter.dtype, copy=True)

    def _read(self, name: str, files: Mapping[str, Any]) -> torch.Tensor:
        """Return a weight on the device; without files its memory."""
        import torch

        source, device = self._entry(name), self._accelerator.device
        if files and len(source.tensors) == 1:
            return cast("torch.Tensor", files[source.tensors[0]].get_tensor(source.tensors[0]).to(device))
        whole = torch.empty(source.shape, dtype=getattr(torch, source.dtype), device=device)
        first = 0
        for tensor in source.tensors if files else ():
            part = files[tensor].get_tensor(tensor).view(-1)
            whole.view(-1)[first : first + len(part)] = part
            first += len(part)
        return whole

    def close(self) -> None:
        """Close the files: every weight has its place."""
        self._files, self._own_files, self._places, self.closed = {}, {}, {}, True

    def read(self, name: str, module: Any) -> torch.Tensor:
        """Return a parameter of a module on every rank, packed where the module takes it packed. A collective."""
        leaf = name.rpartition(".")[2]
        experts = getattr(module, "packed_experts", None)
        if experts is not None and leaf in experts.shapes:
            data, experts.states[leaf] = self._share_packed(name, experts.shapes[leaf], experts.dtype)
            return data
        if type(module).__name__ == "Linear4bit" and leaf == "weight":
            shape = (module.out_features, module.in_features)
            data, module.quant_state = self._share_packed(
                name, shape, module.compute_dtype, transposed=_is_transposed(module)
            )
            return data
        return self.share(name)

    def fill(self, model: Any, then: Callable[[Any], object] = lambda parameter: None) -> None:
        """Read every parameter of a model, whole on every rank, and close the files. A collective.

        Args:
            model: the owner of these `streamed_weights`.
            then: is called with each parameter as soon as it has its values.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        filled: dict[int, Any] = {}
        for module in model.modules():
            for leaf, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in filled:
                    filled[id(parameter)] = self._filled(names[id(parameter)], module, parameter)
                    then(filled[id(parameter)])
                module._parameters[leaf] = filled[id(parameter)]
        self.close()
        del model.streamed_weights

    def _filled(self, name: str, module: Any, parameter: Any) -> Any:
        """Return the parameter with its values."""
        import torch

        whole = self.read(name, module)
        if type(parameter).__name__ == "Params4bit":
            options = {**parameter.__dict__, "quant_state": module.quant_state}
            return type(parameter)(whole, requires_grad=False, **options)
        whole = whole.to(parameter.dtype)
        if whole.device.type == "cpu" and not whole.untyped_storage().resizable():
            whole = whole.clone()  # rank 0's may be a view of the mapped file
        return torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)

    def _share_packed(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Return a packed weight of this whole shape on every rank, and its constants. A collective.

        The bits are those of `from_pretrained`: blocks of 64 weights are packed one by one (`quantize_4bit`).
        """
        import torch
        from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

        device, elements = self._accelerator.device, math.prod(shape)
        storage, kind = self._packing["storage"], self._packing["kind"]
        blocks = ceil_div(elements, QUANT_BLOCK)
        data = torch.empty(ceil_div(elements, 2 * storage.itemsize), 1, dtype=storage, device=device)
        scales = torch.empty(blocks, dtype=torch.uint8, device=device)
        offset = torch.empty(1, dtype=torch.float32, device=device)
        nested = torch.empty(ceil_div(blocks, NESTED_BLOCK), dtype=torch.float32, device=device)
        if self._files and self._entry(name).dtype == PACKED:
            scales, offset, nested = self._read_packed(name, data)
        elif self._files:
            exact = self._pack(name, dtype, data, transposed)
            offset[0] = exact.mean()
            _, state = quantize_blockwise(exact - offset[0], blocksize=NESTED_BLOCK, out=scales)
            nested = state.absmax
        for tensor in (data, scales, offset, nested):
            self._broadcast(tensor)
        if self._code is None:
            self._code = quantize_blockwise(nested, blocksize=NESTED_BLOCK)[1].code
        constants = QuantState(
            absmax=scales,
            shape=torch.Size(shape),
            dtype=dtype,
            blocksize=QUANT_BLOCK,
            code=get_4bit_type(kind, device=device),
            quant_type=kind,
            offset=offset[0],
            state2=QuantState(absmax=nested, blocksize=NESTED_BLOCK, code=self._code.clone(), dtype=torch.float32),
        )
        return data, constants

    def _read_packed(self, name: str, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy a weight that the file holds packed into `data`. Return its scales, their offset and the constants of these."""
        import torch
        from bitsandbytes.functional import QuantState

        (tensor,) = self._entry(name).tensors
        packed = self._files[tensor].get_tensor(tensor).view(torch.uint8).view(-1)
        data.view(-1).view(torch.uint8)[: len(packed)] = packed
        parts = [part for part in self._files if part.startswith(f"{tensor}.")]
        device = self._accelerator.device
        state = QuantState.from_dict({part: self._files[part].get_tensor(part) for part in parts}, device)
        return state.absmax, state.offset.view(1), state.state2.absmax

    def _pack(self, name: str, dtype: torch.dtype, data: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Read a weight in pieces, pack them into `data`, and return the exact constant of each block."""
        import torch
        from bitsandbytes.functional import quantize_4bit

        packed, first, exact = data.view(-1).view(torch.uint8), 0, []
        for source in self._entry(name).tensors:
            weight = self._files[source].get_tensor(source)  # a view of the mapped file; only a piece is copied
            if transposed:
                weight = weight.T
            *experts, rows, columns = weight.shape
            step = max(QUANT_BLOCK, PIECE // columns // QUANT_BLOCK * QUANT_BLOCK)
            # Experts that are fused in the file, too, are whole blocks each.
            for *expert, start in itertools.product(*map(range, experts), range(0, rows, step)):
                piece = weight[*expert, start : start + step]
                piece = piece.to(self._accelerator.device, dtype, memory_format=torch.contiguous_format)
                part, state = quantize_4bit(
                    piece, blocksize=QUANT_BLOCK, compress_statistics=False, quant_type=self._packing["kind"]
                )
                packed[first : first + part.numel()] = part.view(-1)
                first += part.numel()
                exact.append(state.absmax)
        return torch.cat(exact)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        assert not self.closed, "the files are closed: every weight has its place"
        if dist.is_initialized():
            dist.broadcast(tensor, src=0)


def _source(
    files: Mapping[str, Any], model: PreTrainedModel, name: str, shape: tuple[int, ...]
) -> tuple[list[str], str] | None:
    """Return the tensors in the files that hold a weight, and their dtype; None for other layouts and dtypes with scales."""
    for layout in disk_layouts(model, name, shape):
        if not layout.keys() <= files.keys():
            continue
        if (state := f"{next(iter(layout))}.quant_state.bitsandbytes__nf4") in files:
            return ([*layout], PACKED) if _is_known(files[state].get_tensor(state), shape) else None
        slices = [files[tensor].get_slice(tensor) for tensor in layout]
        dtypes = {SAFETENSORS_DTYPES.get(part.get_dtype(), "") for part in slices}
        shapes = [tuple(part.get_shape()) for part in slices]
        if len(dtypes) == 1 and dtypes <= FLOATS and shapes == [*layout.values()]:
            return [*layout], dtypes.pop()
    return None


def is_empty(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has the memory of one element alone."""
    return parameter.untyped_storage().nbytes() < parameter.nbytes


def _is_known(state: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the files hold a packed weight of this shape, perhaps transposed, as QLoRA packs it."""
    from bitsandbytes.utils import unpack_tensor_to_dict

    values = unpack_tensor_to_dict(state)
    blocks = values.get("blocksize"), values.get("nested_blocksize")
    return blocks == (QUANT_BLOCK, NESTED_BLOCK) and sorted(values.get("shape", ())) == sorted(shape)


def _is_transposed(module: Any) -> bool:
    """Return whether a packed module was GPT-2's `Conv1D`, which transformers transposes before it packs."""
    from transformers.pytorch_utils import Conv1D

    return issubclass(module.source_cls, Conv1D)
