"""A checkpoint's weights one at a time, so that a rank reads what it keeps."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from toolkit.core.units import ceil_div
from toolkit.engines.deferred import defer, end_deferral
from toolkit.engines.simulation import NESTED_BLOCK, PACKED_AT_ONCE, QUANT_BLOCK
from toolkit.engines.states import persistent_buffers
from toolkit.models import ModelSpec
from toolkit.models.files import SAFETENSORS_DTYPES
from toolkit.models.hf_loading import disk_layouts, first_names, open_tensors, set_tensor
from toolkit.transforms.fused_experts import packed_experts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    Shapes = Mapping[str, tuple[int, ...]]

PACKED_DTYPE = "uint8"
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
    """The weights of a checkpoint, each of one tensor in the files or of several that lie row below row in it.

    No call is a collective: a rank reads from the mapped files what it keeps. Packed weights it packs whole, block by block.
    """

    def __init__(self, device: torch.device, spec: ModelSpec, files: Mapping[str, Any], sources: Mapping[str, Source]):
        """Take the open files by the names of their tensors."""
        self._device, self._files, self._sources = device, files, sources
        self._places: dict[int, tuple[str, torch.nn.Parameter]] = {}
        """Parameters without memory, by id, with their names in `_sources`."""
        self._first = {other: group[0] for group in spec.tied for other in group[1:]}
        self._packing: dict[str, Any] = {}
        self._code: torch.Tensor | None = None

    @classmethod
    def of_shapes(
        cls, device: torch.device, spec: ModelSpec, model: PreTrainedModel, shapes: Shapes
    ) -> StreamedWeights | None:
        """Open the files of a checkpoint for a model's weights of these names and shapes.

        Returns:
            None where transformers has to convert the files: joined along their columns, 8-bit weights.

        Raises:
            ModelError: where the model has no weights.
        """
        files, sources = open_tensors(spec), dict[str, Source]()
        for name, shape in shapes.items():
            if (source := _source(files, model, name, shape)) is None:
                return None
            sources[name] = source
        return cls(device, spec, files, sources)

    @classmethod
    def of_model(cls, device: torch.device, spec: ModelSpec, model: PreTrainedModel) -> StreamedWeights | None:
        """Open the files of an empty model, and fill its buffers. As `of_shapes`."""
        buffers = persistent_buffers(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *buffers.items())}
        packed = {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
        for name, module in packed.items():
            shape = module.out_features, module.in_features
            shapes[f"{name}.weight"] = shape[::-1] if _is_transposed(module) else shape
        weights = cls.of_shapes(device, spec, model, shapes | packed_experts(model))
        if weights is None:
            return None
        for name, buffer in buffers.items():
            set_tensor(model, name, weights.tensor(name).to("cpu", buffer.dtype, copy=True))
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

    @property
    def closed(self) -> bool:
        """Whether every weight has its place."""
        return not self._files

    def _entry(self, name: str) -> Source:
        """Return where a weight is, perhaps a tied one."""
        return self._sources[self._first.get(name, name)]

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
        kept = copy.copy(
            self
        )  # its files stay open for parameters that a script takes off the model and reads after `close`
        defer((place for place in self._places.values() if self._is_whole(*place)), kept._fetch)

    def _is_whole(self, name: str, parameter: torch.nn.Parameter) -> bool:
        return tuple(parameter.shape) == self._entry(name).shape

    def untouched(self, model: torch.nn.Module) -> dict[str, str]:
        """Return the parameters that still have their values in the files alone: name in the model → name in the files.

        A script may have replaced others, dropped layers, or moved them to other places.
        """
        left = end_deferral(model)
        left |= {key for key, place in self._places.items() if not self._is_whole(*place) and is_empty(place[1])}
        return {name: self._places[id(each)][0] for name, each in model.named_parameters() if id(each) in left}

    def _fetch(self, name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = self.tensor(name).to("cpu", parameter.dtype, copy=True)

    def close(self) -> None:
        """Close the files: every weight has its place."""
        self._files, self._places = {}, {}

    def tensor(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a weight, or rows of it, in the files' dtype on the host; a view of the mapped file where one tensor has it."""
        import torch

        source = self._entry(name)
        parts = (self._files[tensor].get_tensor(tensor) for tensor in source.tensors)
        if len(source.tensors) == 1:
            return cast("torch.Tensor", next(parts) if rows is None else next(parts)[rows])
        count, *others = source.shape
        first, end, _ = (rows or slice(None)).indices(count)
        whole = torch.empty(end - first, *others, dtype=getattr(torch, source.dtype))
        flat, place = whole.view(-1), -first * math.prod(others)
        for part in parts:  # each begins at `place` in what is returned
            low, high = max(place, 0), min(place + part.numel(), flat.numel())
            if low < high:
                flat[low:high] = part.view(-1)[low - place : high - place]
            place += part.numel()
        return whole

    def read(self, name: str, module: Any, dtype: torch.dtype, rows: slice | None = None) -> torch.Tensor:
        """Return a parameter of a module, or rows of it, in memory of its own on the device.

        It comes in this dtype, or packed where the module takes it packed. The module then gets the constants of all of it.
        """
        leaf = name.rpartition(".")[2]
        experts = getattr(module, "packed_experts", None)
        if experts is not None and leaf in experts.shapes:
            data, experts.states[leaf] = self._packed(name, experts.shapes[leaf], experts.dtype)
        elif type(module).__name__ == "Linear4bit" and leaf == "weight":
            shape = (module.out_features, module.in_features)
            data, module.quant_state = self._packed(
                name, shape, module.compute_dtype, transposed=_is_transposed(module)
            )
        else:
            mapped = len(self._entry(name).tensors) == 1
            return self.tensor(name, rows).to(self._device, dtype, copy=mapped)
        return data if rows is None else data[rows].clone()

    def fill(self, model: Any, then: Callable[[Any], object] = lambda parameter: None) -> None:
        """Read every parameter of a model whole, and close the files.

        Args:
            model: the owner of these `streamed_weights`.
            then: is called with each parameter as soon as it has its values.
        """
        for name, first in first_names(model, buffers=False).items():
            if name != first:
                set_tensor(model, name, model.get_parameter(first))
                continue
            parameter, module = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
            whole, options = self.read(name, module, parameter.dtype), {}
            if type(parameter).__name__ == "Params4bit":
                options = {**parameter.__dict__, "quant_state": module.quant_state}
            made = type(parameter)(whole, requires_grad=parameter.requires_grad, **options)
            module._parameters[name.rpartition(".")[2]] = made
            del parameter
            then(made)
        self.close()
        del model.streamed_weights

    def _packed(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Return a packed weight of this whole shape, and its constants.

        The bits are those of `from_pretrained`: blocks of 64 weights are packed one by one (`quantize_4bit`).
        """
        import torch
        from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

        storage, kind = self._packing["storage"], self._packing["kind"]
        data = torch.empty(ceil_div(math.prod(shape), 2 * storage.itemsize), 1, dtype=storage, device=self._device)
        if self._entry(name).dtype == PACKED_DTYPE:
            scales, offset, nested = self._read_packed(name, data)
        else:
            exact = self._pack(name, dtype, data, transposed)
            offset = exact.mean()
            scales, state = quantize_blockwise(exact - offset, blocksize=NESTED_BLOCK)
            nested = state.absmax
        if self._code is None:
            self._code = quantize_blockwise(nested, blocksize=NESTED_BLOCK)[1].code
        constants = QuantState(
            absmax=scales,
            shape=torch.Size(shape),
            dtype=dtype,
            blocksize=QUANT_BLOCK,
            code=get_4bit_type(kind, device=self._device),
            quant_type=kind,
            offset=offset,
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
        state = QuantState.from_dict({part: self._files[part].get_tensor(part) for part in parts}, self._device)
        return state.absmax, state.offset, state.state2.absmax

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
            step = max(QUANT_BLOCK, PACKED_AT_ONCE // columns // QUANT_BLOCK * QUANT_BLOCK)
            # Experts that are fused in the file, too, are whole blocks each.
            for *expert, start in itertools.product(*map(range, experts), range(0, rows, step)):
                piece = weight[*expert, start : start + step]
                piece = piece.to(self._device, dtype, memory_format=torch.contiguous_format)
                part, state = quantize_4bit(
                    piece, blocksize=QUANT_BLOCK, compress_statistics=False, quant_type=self._packing["kind"]
                )
                packed[first : first + part.numel()] = part.view(-1)
                first += part.numel()
                exact.append(state.absmax)
        return torch.cat(exact)


def _source(files: Mapping[str, Any], model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> Source | None:
    """Return where the files hold a weight; None for other layouts and dtypes with scales."""
    for layout in disk_layouts(model, name, shape):
        if not layout.keys() <= files.keys():
            continue
        if (state := f"{next(iter(layout))}.quant_state.bitsandbytes__nf4") in files:
            return Source([*layout], PACKED_DTYPE, shape) if _is_known(files[state].get_tensor(state), shape) else None
        slices = [files[tensor].get_slice(tensor) for tensor in layout]
        dtypes = {SAFETENSORS_DTYPES.get(part.get_dtype(), "") for part in slices}
        shapes = [tuple(part.get_shape()) for part in slices]
        if len(dtypes) == 1 and dtypes <= FLOATS and shapes == [*layout.values()]:
            return Source([*layout], dtypes.pop(), shape)
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
