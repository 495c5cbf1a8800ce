"""`open_foreign`: checkpoints of DeepSpeed, FSDP and Accelerate, read without running code from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from toolkit.checkpoints.importers.dcp import METADATA_FILE, open_dcp
from toolkit.checkpoints.importers.restricted_unpickler import load
from toolkit.checkpoints.importers.weights import (
    Entry,
    Weights,
    as_weights,
    checked,
    list_files,
    safetensors_entries,
    wrap_errors,
)
from toolkit.checkpoints.importers.zero import is_zero, open_zero
from toolkit.core.errors import CheckpointError
from toolkit.core.units import dtype_name
from toolkit.models.files import indexed_files

__all__ = ["Entry", "Weights", "open_foreign", "safetensors_entries"]

_FSDP = "pytorch_model_fsdp.bin"

_WHOLE_FILES = (_FSDP, "model.safetensors", "pytorch_model.bin")
"""In the order of the search."""

_WHOLE_NAMES = frozenset(_WHOLE_FILES) | {f"{name}.index.json" for name in _WHOLE_FILES}
"""Files of a folder with a whole state dict."""


_OTHER_MODELS = re.compile(r"(?:model|pytorch_model|pytorch_model_fsdp)_[1-9]\d*(?:\.safetensors|\.bin)?")
"""Accelerate's names of a second model."""

_RANK_FILE = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank\d+\.bin")
_OPTIMIZER = re.compile(r"optimizer_\d+")


def open_foreign(folder: Path) -> Weights | None:
    """Open a model's weights in a checkpoint of another library; return None for an unknown format.

    Known are DeepSpeed's ZeRO-1, 2 and 3 (`save_checkpoint`, and `accelerator.save_state` over it), FSDP's sharded and
    full state dicts, any folder of torch.distributed.checkpoint, and whole models as safetensors or `.bin`; in the folder
    itself, or one level down. Only `restricted_unpickler` reads pickles.

    Raises:
        CheckpointError: for an incomplete checkpoint, several models or steps, a name or a symbolic link that leads out of
            the folder, and a pickle with a class that is not on the list.
    """
    if not folder.is_dir():
        return None
    opens = _opener(folder, folder)
    if opens is not None:
        return opens()
    below = (path for path in sorted(folder.iterdir()) if path.is_dir() and not _OPTIMIZER.fullmatch(path.name))
    openers = {path: opens for path in below if (opens := _opener(path, folder)) is not None}
    if len(openers) > 1:
        names = ", ".join(path.name for path in list(openers)[:4])
        raise CheckpointError(f"{folder} holds several checkpoints or models: {names}. Give the one that you want.")
    return next((opens() for opens in openers.values()), None)


def _opener(folder: Path, root: Path) -> Callable[[], Weights] | None:
    """Return the function that opens a folder, chosen by file names; None for an unknown format."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    split = next((name for name in names if _RANK_FILE.fullmatch(name)), None)
    if not (names & {"latest", METADATA_FILE, *_WHOLE_NAMES} or is_zero(names) or split):
        return None
    files = list_files(folder, root)
    if "latest" in files:
        step = _latest_folder(folder, files["latest"])
        return partial(open_zero, step, list_files(step, root))
    if is_zero(files):
        return partial(open_zero, folder, files)
    if METADATA_FILE in files:
        return partial(open_dcp, folder, files)
    if split:
        raise CheckpointError(
            f"{folder / split} is one rank's part, without a layout of all parts: expected SHARDED_STATE_DICT "
            "through torch.distributed.checkpoint, or FULL_STATE_DICT. Save it again as one of these."
        )
    others = [name for name in files if _OTHER_MODELS.fullmatch(name)]
    if others:
        raise CheckpointError(f"{folder} holds several models, {others[0]} among them. Give a folder with one.")
    name = next(name for name in _WHOLE_FILES if name in files or f"{name}.index.json" in files)
    if name in files:
        return partial(_open_whole, folder, [files[name]])
    with wrap_errors(str(index := files[f"{name}.index.json"])):
        return partial(_open_whole, folder, indexed_files(index, Path(name).suffix))


def _latest_folder(folder: Path, pointer: Path) -> Path:
    """Return the folder that DeepSpeed's `latest` names."""
    with wrap_errors(f"{pointer} does not name a folder"), pointer.open(encoding="utf-8") as file:
        tag = file.read(1024).strip()
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    if tag not in names:
        raise CheckpointError(
            f"{pointer} names {tag!r}: expected a folder next to it, written by DeepSpeed's save_checkpoint. "
            "Copy that folder there, or give it itself."
        )
    others = sorted(name for name in names if _OTHER_MODELS.fullmatch(name))
    if others:
        raise CheckpointError(f"{folder} holds several models, {others[0]} among them. Give the folder of one.")
    return folder / tag


def _open_whole(folder: Path, paths: Sequence[Path]) -> Weights:
    """Open the tensors of these files. `.bin` files are mapped and read on demand.

    Raises:
        CheckpointError: for a truncated file, and for a pickle with a class that is not on the list.
    """
    entries: dict[str, Entry] = {}
    for path in paths:
        with wrap_errors(f"{path} cannot be read"):
            entries |= safetensors_entries(path) if path.suffix == ".safetensors" else _pickled(path)
    form = "safetensors" if paths[0].suffix == ".safetensors" else "pickled state dict"
    count = f"{len(paths)} file{'s' * (len(paths) != 1)}"
    kind = "FSDP's full state dict" if paths[0].name == _FSDP else f"whole model ({form}, {count})"
    return as_weights(kind, folder, entries)


def _pickled(path: Path) -> dict[str, Entry]:
    import torch

    entries: dict[str, Entry] = {}
    for name, tensor in dict(load(path)).items():
        if isinstance(name, str) and isinstance(tensor, torch.Tensor):  # modules' extra states are no weights
            plain = checked(name, tensor)
            entries[name] = Entry(tuple(plain.shape), dtype_name(plain.dtype), plain.cpu)
    return entries
