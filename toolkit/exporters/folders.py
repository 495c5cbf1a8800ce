"""The folders of an export: the source, ours or another library's, and a target that appears complete or not at all."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolkit.checkpoints import Manifest, list_checkpoints, read_manifest, validate
from toolkit.checkpoints.identity import ADAPTER_FIELDS
from toolkit.checkpoints.importers import Entry, Weights, open_foreign
from toolkit.checkpoints.layout import WEIGHT
from toolkit.checkpoints.manifest import MANIFEST, listed, misplacement
from toolkit.checkpoints.stored_tensors import StoredTensors, opened
from toolkit.config.fields import from_dict
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import check_fields, sync_folder
from toolkit.core.errors import CheckpointError, RunError, StrategyError
from toolkit.engines.shards import BUFFER

_REQUIRED = {
    "strategy": ("sharding", "precision", *ADAPTER_FIELDS),
    "train_config": ("micro_batch", "accumulation", "seq_len", "optimizer", "lr", "warmup", "seed"),
    "identity": ("data",),
}
"""The fields that an export needs in a manifest: for its tensors and the model card."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of an export."""

    path: Path
    weights: Weights
    manifest: Manifest | None
    """None for another library's checkpoint."""
    skipped: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that is invalid."""

    @property
    def adapter(self) -> str:
        """As `Strategy.adapter`."""
        return str(self.manifest.strategy["adapter"]) if self.manifest else "none"


@contextlib.contextmanager
def opened_source(path: Path) -> Iterator[Source]:
    """Open a run's newest sound checkpoint, one checkpoint, or a folder of DeepSpeed's or Accelerate's.

    Raises:
        RunError: for a folder without a checkpoint, and for a damaged checkpoint (`CheckpointError`).
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such folder. Name a run's folder, or a checkpoint in it.")
    skipped: tuple[str, ...] = ()
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        faults = validate(path)
        if faults:
            raise CheckpointError(f"{path} is damaged: {'; '.join(faults[:3])}. {_other_checkpoints(path)}")
    elif (path / "run.json").exists() or list_checkpoints(path / "checkpoints"):
        path, skipped = _newest_checkpoint(path)
    else:
        yield _foreign(path)
        return
    manifest = read_manifest(path)
    _check_manifest(path, manifest)
    with opened(path, manifest) as stored:
        yield Source(path=path, weights=_trained_weights(stored), manifest=manifest, skipped=skipped)


def _trained_weights(stored: StoredTensors) -> Weights:
    """Return the trained weights of one of our checkpoints: masters if there are any. Of a whole model the buffers too."""
    kinds = (WEIGHT, BUFFER) if stored.manifest.strategy["adapter"] == "none" else (WEIGHT,)
    entries = {
        name: Entry(
            tuple(tensor["shape"]),
            tensor["dtype"],
            partial(stored.whole, name, kind),
            trained=kind != BUFFER,
            source=name,
        )
        for name, of_kind in stored.manifest.tensors.items()
        for kind, tensor in of_kind.items()
        if kind in kinds
    }
    return Weights("checkpoint", entries)


def _check_manifest(path: Path, manifest: Manifest) -> None:
    """Refuse a crafted manifest without the fields that an export needs."""
    faults = [
        f"{part} has no {name}"
        for part, names in _REQUIRED.items()
        for name in names
        if name not in getattr(manifest, part)
    ]
    try:
        from_dict(Strategy, manifest.strategy)
        from_dict(TrainConfig, manifest.train_config)
        check_fields(manifest.train_config, {"lr": int | float})
        text = str | None
        check_fields(manifest.identity, {"data": str, "model": text, "source": text, "base": dict | None})
    except (StrategyError, ValueError) as error:
        faults.append(str(error).removesuffix("."))
    faults += [f"{name} has no weight" for name, about in manifest.tensors.items() if not {WEIGHT, BUFFER} & set(about)]
    if faults:
        raise CheckpointError(
            f"{path / MANIFEST} cannot be exported from: {'; '.join(faults[:3])}. {_other_checkpoints(path)}"
        )


def _other_checkpoints(damaged: Path) -> str:
    others = [path for path in list_checkpoints(damaged.parent) if path != damaged]
    return f"Take another: {others[0]}." if others else "The folder holds no other."


def _newest_checkpoint(run: Path) -> tuple[Path, tuple[str, ...]]:
    skipped: list[str] = []
    for path in listed(run / "checkpoints"):
        faults = misplacement(path) or validate(path)
        if not faults:
            return path, tuple(skipped)
        skipped.append(f"skipped {path}: {'; '.join(faults[:3])}")
    fix = (
        f"The run's own export is in {run / 'export'}."
        if (run / "export").is_dir()
        else f"Resume it: `toolkit resume {run} --save-every N`, which writes one every N steps and at the end."
    )
    raise RunError(f"{run} has no checkpoint that can be exported{''.join(f'; {line}' for line in skipped)}. {fix}")


def _foreign(path: Path) -> Source:
    weights = open_foreign(path)
    if weights is None:
        raise RunError(
            f"{path} holds nothing to export: expected a run (run.json), a checkpoint ({MANIFEST}), or a folder of "
            "DeepSpeed's or Accelerate's. Give one of these."
        )
    if any(".lora_" in name for name in weights.shapes):
        raise RunError(
            f"{path} ({weights.kind}) holds an adapter without its rank, alpha and base. "
            "Export adapters from the toolkit's own checkpoints."
        )
    return Source(path=path, weights=weights, manifest=None)


def check_target(folder: Path, source: Path) -> None:
    """Refuse a folder with files in it, or among the checkpoints. Writes nothing.

    Raises:
        RunError: naming the obstacle.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file: expected a new or an empty folder. Choose another with -o.")
    if folder.is_dir() and (entry := next(folder.iterdir(), None)):
        raise RunError(
            f"{folder} is not empty (it has {entry.name}): expected a new or an empty folder. "
            "Choose another with -o, or remove it."
        )
    resolved = source.resolve()
    if (resolved / "run.json").exists():
        resolved = resolved / "checkpoints"
    elif resolved.parent.name == "checkpoints":
        resolved = resolved.parent
    if folder.resolve().is_relative_to(resolved):
        raise RunError(f"{folder} lies among the checkpoints in {resolved}. Choose another place with -o.")


@contextlib.contextmanager
def atomic_dir(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a draft folder that becomes `folder` on success and is removed on an error.

    Args:
        folder: a new or an empty one; its parents are created.
        replace: replace an existing folder by the finished draft. After a kill between the two renames, the next call
            restores the old folder from `.NAME.old`.

    Raises:
        RunError: if the folder cannot be created, or a new file took its place.
    """
    final = folder.absolute()
    old = final.with_name(f".{final.name}.old")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if replace:  # of a killed run
            _restore_old(old, final)
            for unfinished in final.parent.glob(f".{final.name}.{'[0-9a-f]' * 16}.partial"):
                shutil.rmtree(unfinished, ignore_errors=True)
        draft = final.with_name(f".{final.name}.{secrets.token_hex(8)}.partial")
        draft.mkdir()
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}. Choose another place.") from error
    try:
        yield draft
        _flush(draft)
        try:
            if replace and final.exists():
                final.rename(old)
            draft.rename(final)
        except OSError as error:
            raise RunError(f"{folder} cannot be put in place: {error.strerror}. Choose another place.") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if replace:
            _restore_old(old, final)
        raise
    sync_folder(final.parent)
    if replace:
        shutil.rmtree(old, ignore_errors=True)


def _restore_old(old: Path, final: Path) -> None:
    """Rename the old folder back, or remove it if its place is taken."""
    if old.exists() and not final.exists():
        old.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in (*folder.rglob("*"), folder):
        if path.is_file() or path.is_dir():
            sync_folder(path)  # it flushes a file as well
