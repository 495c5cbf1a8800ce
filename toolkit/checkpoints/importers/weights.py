"""`Weights`: a foreign checkpoint as whole tensors by the model's own parameter names, one at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP1 and activation checkpointing put into names, at any depth."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's tensors in a foreign checkpoint, read on demand."""

    kind: str
    """A description: `"DeepSpeed ZeRO-3 checkpoint, step 10, 2 ranks"`."""
    shapes: Mapping[str, tuple[int, ...]]
    """By the model's own parameter names, persistent buffers too. Of tied weights one name may be all there is."""
    dtypes: Mapping[str, str]
    """torch's names. float32 where the checkpoint holds fp32 masters."""
    read: Callable[[str], torch.Tensor]
    """As `tensor`, unchecked."""
    rounded: frozenset[str] = frozenset()
    """As an export asks for it: what may be the base's own, in another dtype. Unknown here."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole, contiguous tensor on the host. It may share memory with the mapped file: copy it first.

        Raises:
            CheckpointError: where its bytes cannot be read, or are not what the checkpoint said.
        """
        tensor = self.read(name).contiguous()
        if tuple(tensor.shape) != self.shapes[name]:
            raise CheckpointError(
                f"{name} has the shape {tuple(tensor.shape)}, but the {self.kind} says {self.shapes[name]}. Copy it again."
            )
        return tensor


@dataclass(frozen=True)
class Entry:
    """One tensor as a format found it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


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
            f"{folder} ({kind}) holds tensors of size zero: {_first_names(empty)}. They were saved before they were gathered; "
            "save the checkpoint again with every rank taking part."
        )
    wrapped = all(name.startswith("module.") for name in entries)
    named: dict[str, Entry] = {}
    for name, entry in entries.items():
        own = _WRAPPERS.sub("", name.removeprefix("module.") if wrapped else name)
        if own in named:
            raise CheckpointError(f"{folder} ({kind}) holds {own!r} twice, once as {name!r}: expected one model.")
        named[own] = entry
    return Weights(
        kind=kind,
        shapes={name: entry.shape for name, entry in named.items()},
        dtypes={name: entry.dtype for name, entry in named.items()},
        read=lambda name: named[name].read(),
    )


def list_files(folder: Path, root: Path) -> dict[str, Path]:
    """Return the files of a folder by name.

    Raises:
        CheckpointError: for a symbolic link that leads out of `root`.
    """
    files = {path.name: path for path in sorted(folder.iterdir())}
    for path in files.values():
        ensure_inside(path, root)
    return files


def ensure_inside(path: Path, root: Path) -> Path:
    """Return the path if it stays in `root` when every symbolic link is followed.

    Raises:
        CheckpointError: where it does not.
    """
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise CheckpointError(
            f"{path} leads out of {root}, to {real}, and was not read: a checkpoint may name only what lies in it. "
            "Copy the file there, if it belongs to it."
        )
    return path


def indexed(index: Path, files: Mapping[str, Path]) -> list[Path]:
    """Return the files that a Hugging Face index names, in order.

    Raises:
        CheckpointError: for an invalid index, one that names a file in another folder, and a missing file.
    """
    with wrap_errors(f"{index} is not an index of weights"):
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}: expected the name of a file in the same folder.")
    require(names, files, index.parent)
    return [files[name] for name in names]


def require(names: list[str], files: Mapping[str, Path], folder: Path) -> None:
    """Check that every name is an existing file.

    Raises:
        CheckpointError: naming the first that are not.
    """
    missing = [name for name in names if name not in files or not files[name].is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(names)} files: {_first_names(missing)}. "
            "Copy them there, or take another checkpoint."
        )


@contextmanager
def wrap_errors(what: str) -> Iterator[None]:
    """Turn any error that a broken or crafted file causes into one that names the file.

    Raises:
        CheckpointError: for every exception that is none yet.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise CheckpointError(f"{what}: {type(error).__name__}: {first}. Copy it again, or take another.") from None


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
