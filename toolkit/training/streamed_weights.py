"""A checkpoint's weights one at a time: rank 0 reads, every rank gets each by broadcast. No rank holds the whole model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.core.units import ceil_div
from toolkit.engines.fused_experts import packed_experts
from toolkit.engines.simulation import BLOCK, GROUP, PIECE
from toolkit.engines.states import persistent_buffers
from toolkit.engines.timeouts import on_main
from toolkit.models import ModelSpec, require_weights
from toolkit.models.files import SAFETENSORS_DTYPES
from toolkit.models.hf_loading import disk_names, disk_parts

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    Shapes = Mapping[str, tuple[int, ...]]

FLOATS = {"float64", "float32", "float16", "bfloat16"}
"""Dtypes of weights that need no more than a cast."""


class StreamedWeights:
    """The weights of a checkpoint with the model's own names in its files."""

    def __init__(
        self,
        accelerator: Accelerator,
        spec: ModelSpec,
        files: Mapping[str, Any],
        dtypes: Mapping[str, str],
        shapes: Shapes,
    ) -> None:
        """Take the open files by the names of their tensors, which only rank 0 has; the tensors' dtypes and shapes."""
        self._accelerator, self._files, self.dtypes, self._shapes = accelerator, files, dtypes, shapes
        self._first = {other: group[0] for group in spec.tied for other in group[1:]}
        self._packing: dict[str, Any] = {}
        self._sources: dict[str, list[str]] = {}
        """A parameter → the tensors of the files that are joined along their rows to make it."""
        self._code: torch.Tensor | None = None
        self.closed = False

    @classmethod
    def of_shapes(cls, accelerator: Accelerator, spec: ModelSpec, shapes: Shapes) -> StreamedWeights | None:
        """Open the files of a checkpoint for weights of these names and shapes. A collective.

        Returns:
            None where transformers has to convert the files: other names, experts one by one, 8-bit weights.

        Raises:
            ModelError: where the model has no weights.
        """
        files: dict[str, Any] = {}

        def read_dtypes() -> dict[str, str] | None:
            from safetensors import safe_open

            for path in require_weights(spec):
                file: Any = safe_open(path, framework="pt")
                files.update(dict.fromkeys(file.keys(), file))
            if not shapes.keys() <= files.keys():
                return None
            slices = {name: files[name].get_slice(name) for name in shapes}
            dtypes = {name: SAFETENSORS_DTYPES.get(part.get_dtype(), "") for name, part in slices.items()}
            same = all(tuple(slices[name].get_shape()) == shape for name, shape in shapes.items())
            return dtypes if same and set(dtypes.values()) <= FLOATS else None  # 8-bit weights have scales of their own

        dtypes = on_main(accelerator, read_dtypes)
        return None if dtypes is None else cls(accelerator, spec, files, dtypes, shapes)

    @classmethod
    def of_model(cls, accelerator: Accelerator, spec: ModelSpec, model: PreTrainedModel) -> StreamedWeights | None:
        """Open the files of an empty model, and fill its buffers. As `of_shapes`."""
        buffers = persistent_buffers(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *buffers.items())}
        packed = {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
        for name, module in packed.items():
            shapes[f"{name}.weight"] = (module.out_features, module.in_features)
        sources: dict[str, list[str]] = {}
        if experts := packed_experts(model):
            renamed = disk_names(model, [name for name in shapes if name not in experts])
            for name, shape in [*shapes.items()]:
                parts = disk_parts(model, name, experts[name]) if name in experts else {renamed.get(name, ""): shape}
                sources[name] = [*parts]
                del shapes[name]
                shapes |= parts
        weights = cls.of_shapes(accelerator, spec, shapes)
        if weights is None or not all(sources.values()):
            return None
        weights._sources = sources
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, weights.share(name).to("cpu", buffer.dtype, copy=True))
        for module in packed.values():  # their options are the same
            weights._packing = {"storage": module.weight.quant_storage, "kind": module.weight.quant_type}
        return weights

    def __contains__(self, name: str) -> bool:
        """Whether a parameter of the model, perhaps under an adapter, is the checkpoint's."""
        return self.source_name(name) in self._shapes or self.source_name(name) in self._sources

    def source_name(self, name: str) -> str:
        """Return the checkpoint's name of a parameter, also of one under an adapter or of a tied one."""
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        return self._first.get(name, name)

    def share(self, name: str) -> torch.Tensor:
        """Return a weight on every rank, in the file's dtype. A collective."""
        import torch

        name, device = self.source_name(name), self._accelerator.device
        (name,) = self._sources.get(name, [name])
        if self._files:
            whole: torch.Tensor = self._files[name].get_tensor(name).to(device)
        else:
            whole = torch.empty(self._shapes[name], dtype=getattr(torch, self.dtypes[name]), device=device)
        self._broadcast(whole)
        return whole

    def close(self) -> None:
        """Close the files: every weight has its place."""
        self._files, self.closed = {}, True

    def read(self, name: str, module: Any) -> torch.Tensor:
        """Return a parameter of a module on every rank, packed where the module takes it packed. A collective."""
        leaf = name.rpartition(".")[2]
        experts = getattr(module, "packed_experts", None)
        if experts is not None and leaf in experts.shapes:
            data, experts.states[leaf] = self._share_packed(name, experts.shapes[leaf], experts.dtype)
            return data
        if type(module).__name__ == "Linear4bit" and leaf == "weight":
            shape = (module.out_features, module.in_features)
            data, module.quant_state = self._share_packed(name, shape, module.compute_dtype)
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

    def _share_packed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Return a packed weight of this whole shape on every rank, and its constants. A collective.

        The bits are those of `from_pretrained`: blocks of 64 weights are packed one by one (`quantize_4bit`).
        """
        import torch
        from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

        device, elements = self._accelerator.device, math.prod(shape)
        storage, kind = self._packing["storage"], self._packing["kind"]
        blocks = ceil_div(elements, BLOCK)
        data = torch.empty(ceil_div(elements, 2 * storage.itemsize), 1, dtype=storage, device=device)
        scales = torch.empty(blocks, dtype=torch.uint8, device=device)
        offset = torch.empty(1, dtype=torch.float32, device=device)
        nested = torch.empty(ceil_div(blocks, GROUP), dtype=torch.float32, device=device)
        if self._files:
            exact = self._pack(name, dtype, data)
            offset[0] = exact.mean()
            _, state = quantize_blockwise(exact - offset[0], blocksize=GROUP, out=scales)
            nested = state.absmax
        for tensor in (data, scales, offset, nested):
            self._broadcast(tensor)
        if self._code is None:
            self._code = quantize_blockwise(nested, blocksize=GROUP)[1].code
        constants = QuantState(
            absmax=scales,
            shape=torch.Size(shape),
            dtype=dtype,
            blocksize=BLOCK,
            code=get_4bit_type(kind, device=device),
            quant_type=kind,
            offset=offset[0],
            state2=QuantState(absmax=nested, blocksize=GROUP, code=self._code.clone(), dtype=torch.float32),
        )
        return data, constants

    def _pack(self, name: str, dtype: torch.dtype, data: torch.Tensor) -> torch.Tensor:
        """Read a weight in pieces, pack them into `data`, and return the exact constant of each block."""
        import torch
        from bitsandbytes.functional import quantize_4bit

        name = self.source_name(name)
        packed, first, exact = data.view(-1).view(torch.uint8), 0, []
        for source in self._sources.get(name, [name]):
            weight = self._files[source].get_slice(source)
            *experts, rows, columns = weight.get_shape()
            step = max(BLOCK, PIECE // columns // BLOCK * BLOCK)
            # Experts that are fused in the file, too, are whole blocks each.
            for *expert, start in itertools.product(*map(range, experts), range(0, rows, step)):
                piece = weight[*expert, start : start + step].to(self._accelerator.device, dtype)
                part, state = quantize_4bit(
                    piece, blocksize=BLOCK, compress_statistics=False, quant_type=self._packing["kind"]
                )
                packed[first : first + part.numel()] = part.view(-1)
                first += part.numel()
                exact.append(state.absmax)
        return torch.cat(exact)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.broadcast(tensor, src=0)
