"""`Weights`: a model's whole tensors by name, read one at a time; and checks of the files that hold them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import CheckpointError
from toolkit.models.files import SAFETENSORS_DTYPES, first_line

if TYPE_CHECKING:
    import torch

_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names by torch.compile, FSDP1 and activation checkpointing, at any depth."""


@dataclass(frozen=True)
class Entry:
    """One whole tensor of a model, read on demand."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name. float32 where a checkpoint holds fp32 masters."""
    read: Callable[[], torch.Tensor]
    """Returns it in host memory, perhaps as a view of a mapped file: copy it before changes."""
    trained: bool = True
    """False for buffers and frozen parameters, which the base may hold in another dtype."""
    source: str | None = None
    """Its name in the trained weights; None for a tensor of the base alone."""


@dataclass(frozen=True)
class Weights:
    """Whole tensors of a model by the model's own parameter names, persistent buffers too."""

    kind: str
    """A description: `"DeepSpeed ZeRO-3 checkpoint, step 10, 2 ranks"`."""
    entries: Mapping[str, Entry]
    """Tied weights may have one name only."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """dtype of each tensor, by torch's name."""
        return {name: entry.dtype for name, entry in self.entries.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole, contiguous tensor in host memory.

        Raises:
            CheckpointError: for unreadable bytes, or another shape than stated.
        """
        tensor, shape = self.entries[name].read().contiguous(), self.entries[name].shape
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} has the shape {tuple(tensor.shape)}, expected {shape} by the {self.kind}. Copy it again."
            )
        return tensor


def as_weights(kind: str, folder: Path, entries: Mapping[str, Entry]) -> Weights:
    """Return tensors under their model's own names, without the prefixes of wrappers.

    Raises:
        CheckpointError: for no tensor, an empty tensor, and two tensors of one name.
    """
    if not entries:
        raise CheckpointError(f"{folder} ({kind}) has no tensors of a model. Name the folder of the model.")
    empty = [name for name, entry in entries.items() if 0 in entry.shape]
    if empty:
        raise CheckpointError(
            f"{folder} ({kind}) holds tensors of size zero: {_first_names(empty)}. They were saved before they were gathered. "
            "Save the checkpoint again on all ranks."
        )
    wrapped = all(name.startswith("module.") for name in entries)
    by_own_name: dict[str, Entry] = {}
    for name, entry in entries.items():
        own_name = _WRAPPERS.sub("", name.removeprefix("module.") if wrapped else name)
        if own_name in by_own_name:
            raise CheckpointError(f"{folder} ({kind}) holds {own_name!r} twice, once as {name!r}: expected one model.")
        by_own_name[own_name] = entry
    return Weights(kind, by_own_name)


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file, which is opened again for each read."""
    from safetensors import safe_open

    def read(name: str) -> torch.Tensor:
        with wrap_errors(f"{path} cannot be read"), safe_open(path, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    with safe_open(path, "pt") as file:
        pieces = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
        return {
            name: Entry(tuple(piece.get_shape()), SAFETENSORS_DTYPES[piece.get_dtype()], partial(read, name))
            for name, piece in pieces.items()
        }


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


def list_files(folder: Path, root: Path) -> dict[str, Path]:
    """Return the files of a folder by name.

    Raises:
        CheckpointError: for a folder or an entry that is a symbolic link out of `root`.
    """
    paths, inside = sorted(folder.iterdir()), os.path.realpath(root)
    for path in (folder, *paths):
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(inside):
            raise CheckpointError(
                f"{path} leads out of {root}, to {real}, and was not read: a checkpoint may name only its own files. "
                "Copy the file there, if it belongs to the checkpoint."
            )
    return {path.name: path for path in paths if path.is_file()}


def require(names: list[str], files: Mapping[str, Path], folder: Path) -> None:
    """Check that every name is an existing file.

    Raises:
        CheckpointError: naming the first that are not.
    """
    if missing := [name for name in names if name not in files]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(names)} files: {_first_names(missing)}. "
            "Copy them there, or take another checkpoint."
        )


@contextmanager
def wrap_errors(what: str) -> Iterator[None]:
    """Raise every exception as a CheckpointError that names the file, since crafted files cause any exception."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{what}: {text}. Copy it again, or take another.") from None


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
