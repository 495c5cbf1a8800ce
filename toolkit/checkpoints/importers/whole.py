"""State dicts that were saved whole: safetensors, and `.bin` files through the restricted unpickler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers.restricted_unpickler import load
from toolkit.checkpoints.importers.weights import Entry, Weights, as_weights, indexed, wrap_errors
from toolkit.core.units import dtype_name

if TYPE_CHECKING:
    import torch

_FSDP = "pytorch_model_fsdp.bin"

_NAMES = (_FSDP, "model.safetensors", "pytorch_model.bin")
"""In the order in which they are looked for."""

WHOLE = frozenset(_NAMES) | {f"{name}.index.json" for name in _NAMES}
"""What marks a folder that holds a whole state dict."""


def whole_files(files: Mapping[str, Path]) -> list[Path]:
    """Return the files of the state dict in a folder that contains one of `WHOLE`.

    Raises:
        CheckpointError: for an index that names a missing file, or one in another folder.
    """
    name = next(name for name in _NAMES if name in files or f"{name}.index.json" in files)
    return [files[name]] if name in files else indexed(files[f"{name}.index.json"], files)


def open_whole(folder: Path, paths: Sequence[Path]) -> Weights:
    """Open the tensors of these files. `.bin` files are mapped and read on demand.

    Raises:
        CheckpointError: for a file that is cut short, and for a pickle that holds more than the list allows.
    """
    entries: dict[str, Entry] = {}
    for path in paths:
        with wrap_errors(f"{path} cannot be read"):
            entries |= _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    form = "safetensors" if paths[0].suffix == ".safetensors" else "pickled state dict"
    count = f"{len(paths)} file{'s' * (len(paths) != 1)}"
    kind = "FSDP's full state dict" if paths[0].name == _FSDP else f"whole model ({form}, {count})"
    return as_weights(kind, folder, entries)


def _safetensors(path: Path) -> dict[str, Entry]:
    from safetensors import safe_open

    entries = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            piece = file.get_slice(name)
            shape = tuple(piece.get_shape())
            # An empty slice shows torch's dtype; a tensor without dimensions has no slice.
            probe = piece[:0] if shape else file.get_tensor(name)
            entries[name] = Entry(shape, dtype_name(probe.dtype), partial(_read_tensor, path, name))
    return entries


def _read_tensor(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with wrap_errors(f"{path} cannot be read"), safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _pickled(path: Path) -> dict[str, Entry]:
    import torch

    entries: dict[str, Entry] = {}
    for name, tensor in dict(load(path)).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            continue  # extra states of modules: no weights
        plain = checked(name, tensor)
        entries[name] = Entry(tuple(plain.shape), dtype_name(plain.dtype), partial(_return_tensor, plain))
    return entries


def _return_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def checked(name: str, tensor: Any) -> torch.Tensor:
    """Check that a value is a plain tensor with bytes on the host.

    Raises:
        TypeError: for anything else.
    """
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    if type(tensor) not in kinds or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a plain tensor on the host")
    plain: torch.Tensor = tensor.detach()
    return plain
