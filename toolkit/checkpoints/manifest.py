"""`manifest.json`: the contents of a checkpoint and their validation, without reading tensors."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.parallelism import Parallelism
from toolkit.core.atomic_io import check_fields, parse_json, read_limited
from toolkit.core.errors import CheckpointError, OtherFormat, value_or
from toolkit.core.units import BYTES_OF
from toolkit.engines.records import Counters
from toolkit.run_folder.run_json import MOST_RANKS

MANIFEST_FORMAT = 2
"""The version of the files' format."""

MANIFEST = "manifest.json"

LONGEST_MANIFEST = 64 * 2**20
"""Bytes of the longest manifest; a tensor takes about 400."""

DIMENSIONS = 64
"""The most dimensions of a tensor, far more than models have."""

_MANIFEST_TYPES: Mapping[str, Any] = {
    "format": int, "step": int, "parallelism": dict, "global_batch": int, "strategy": dict, "train_config": dict, "counters": dict,
    "schedule": dict, "tensors": dict, "identity": dict, "versions": dict, "written": str, "files": dict,
}  # fmt: skip

_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"rank-\d{5,}\.safetensors")


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps: `step-00000100`."""
    return f"step-{step:08d}"


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes into it: `rank-00000.safetensors`."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint. `files` has all files but the manifest."""

    format: int
    step: int
    """Finished steps of the loop, including steps that fp16's scaler skipped."""
    parallelism: Mapping[str, int]
    """Ranks along each dimension: see `Parallelism`."""
    global_batch: int
    """Samples of a step. The first `step` × `global_batch` samples of the data's order are trained."""
    strategy: Mapping[str, Any]
    """The strategy of the run; any other can read the checkpoint."""
    train_config: Mapping[str, Any]
    counters: Mapping[str, Any]
    """The optimizer's steps, fp16's scale: see `engines.records.Counters`."""
    schedule: Mapping[str, Any]
    """The learning-rate schedule's state."""
    tensors: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Canonical name → kind (`weight`, `exp_avg`, `exp_avg_sq`, `buffer`) → `shape` of the whole tensor, and `dtype`."""
    identity: Mapping[str, Any]
    """Fingerprints of model, tokenizer, data and, under an adapter, of the base: see `Identity`."""
    versions: Mapping[str, Any]
    written: str
    """Local time with its offset from UTC."""
    files: Mapping[str, Mapping[str, Any]]
    """File → its `sha256` and `bytes`."""

    @property
    def ranks(self) -> int:
        """The world size of the run."""
        return Parallelism(**self.parallelism).ranks

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(int(file["bytes"]) for file in self.files.values())

    def encode(self) -> bytes:
        """Return `manifest.json` byte for byte: the fields, and a sha256 over them."""
        fields = dataclasses.asdict(self)
        own = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        return (json.dumps({**fields, "sha256": own}, indent=1) + "\n").encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: for a missing or invalid manifest, and one that names a file in another folder.
    """
    path = checkpoint / MANIFEST
    if not path.is_file() or path.is_symlink():
        raise CheckpointError(
            f"{checkpoint} holds no checkpoint: {path} is missing. Name another, or the run's folder."
        )
    try:
        data = read_limited(path, LONGEST_MANIFEST)
        values = parse_json(data)
        own = values.pop("sha256")
        # Every format has this hash, so that damage differs from another format.
        if hashlib.sha256(json.dumps(values).encode()).hexdigest() != own:
            raise ValueError(f"its own sha256 is not {str(own)[:12]}…: it was changed")
        if values["format"] != MANIFEST_FORMAT:
            raise OtherFormat(
                f"{path} is of format {values['format']!r}, and this version reads {MANIFEST_FORMAT}. "
                "Use the version of the toolkit that wrote it."
            )
        manifest = Manifest(**values)
        if manifest.encode() != data:
            raise ValueError("expected the toolkit's own spelling of JSON")
        _check(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or no manifest: {error}. Take an older checkpoint.") from None
    return manifest


def _check(manifest: Manifest) -> None:
    """Validate the contents: a crafted manifest may have a valid sha256."""
    check_fields(vars(manifest), _MANIFEST_TYPES)
    for name, file in manifest.files.items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"it names {name!r}: expected rank-00000.safetensors and the like")
        check_fields(file, {"sha256": str, "bytes": int})
        if file["bytes"] < 0 or "sha256" not in file:
            raise ValueError(f"it has no sha256 and bytes of {name!r}")
    for name, kinds in manifest.tensors.items():
        for kind, tensor in kinds.items():
            _check_tensor(f"{kind} of {name!r}", tensor)
        if not kinds:
            raise ValueError(f"it names no kind of {name!r}")
    check_fields(
        manifest.counters, {"steps": int, "scale": int | float | None, "good_steps": int, "hysteresis": int | None}
    )
    Counters(**manifest.counters)
    check_fields(manifest.identity, {"config": dict})
    sizes = manifest.parallelism
    right = all(type(size) is int and 0 < size <= MOST_RANKS for size in sizes.values())
    if not right or set(sizes) != set(vars(Parallelism())):
        raise ValueError(f"its parallelism is {sizes}: expected a size of at least 1 of each dimension")
    if manifest.step < 0 or manifest.global_batch < 1:
        raise ValueError(f"step {manifest.step} or global_batch {manifest.global_batch} is too small")
    if manifest.ranks > len(manifest.files) or set(manifest.files) != set(map(file_name, range(manifest.ranks))):
        raise ValueError(
            f"it is of {manifest.ranks} ranks, and names {len(manifest.files)} files: expected one of each"
        )


def _check_tensor(what: str, tensor: Any) -> None:
    check_fields(tensor, {"shape": list, "dtype": str})
    shape = tensor["shape"]
    integers = all(type(size) is int and 0 <= size < 2**60 for size in shape)
    if len(shape) > DIMENSIONS or not integers or math.prod(shape) >= 2**60:
        raise ValueError(f"it has no shape of {what}")
    if tensor["dtype"] not in BYTES_OF:
        raise ValueError(f"it names the dtype {tensor['dtype']!r} of {what}")


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the published checkpoints of a run, newest first. `validate` checks that they are complete."""
    return [path for path in listed(checkpoints) if not path.is_symlink()]


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest published checkpoint, by its name; 0 without one."""
    return max((step for step, _ in _numbered(checkpoints)), default=0)


def listed(checkpoints: Path) -> list[Path]:
    """Return the checkpoints of `list_checkpoints` and symlinks with such names, for `misplacement`."""
    return [path for _, path in sorted(_numbered(checkpoints), reverse=True)]


def _numbered(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each folder and symlink that is named like a checkpoint, in no order."""
    if not checkpoints.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in checkpoints.iterdir() if (match := _FOLDER.fullmatch(path.name))]
    return [(step, path) for step, path in numbered if path.is_dir() or path.is_symlink()]


def misplacement(checkpoint: Path) -> list[str]:
    """Return why a folder is not a checkpoint of this run: a copy must not count as the newest."""
    if checkpoint.is_symlink():
        return ["it is a symlink, and a run's checkpoints lie in its own folder"]
    step = value_or(None, lambda: read_manifest(checkpoint).step)  # None: `validate` reports that
    right = step is None or checkpoint.name == folder_name(step)
    return [] if right else [f"its manifest is of step {step}: a copy, or renamed"]


UNREADABLE = "it cannot be read"
"""Start of a sentence of `validate` about a file system that does not answer, which is no damage."""


def validate(checkpoint: Path, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return a sentence for each file of a checkpoint that is missing, unexpected or changed.

    Args:
        checkpoint: the folder.
        share: (rank, ranks): hash every `ranks`-th file only, from the `rank`-th on. The other ranks hash the rest.

    Raises:
        OtherFormat: for a checkpoint of another version, which is no damage.
    """
    try:
        manifest = read_manifest(checkpoint)
        return _differences(checkpoint, manifest, share)
    except OtherFormat:
        raise
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        # A lost block is damage. A server without an answer and too many open files are not.
        return [f"{'it is damaged' if error.errno == errno.EIO else UNREADABLE}: {error}"]


def _differences(checkpoint: Path, manifest: Manifest, share: tuple[int, int]) -> list[str]:
    names_on_disk = {
        path.relative_to(checkpoint).as_posix()
        for path in checkpoint.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    faults = [f"{name} does not belong to it" for name in sorted(names_on_disk - set(manifest.files) - {MANIFEST})]
    complete = []
    for name, file in manifest.files.items():
        path = checkpoint / name
        if name not in names_on_disk:
            faults.append(f"{name} is missing")
        elif path.is_symlink():
            faults.append(f"{name} is a symlink")
        elif path.stat().st_size != file["bytes"]:
            faults.append(f"{name} has {path.stat().st_size:,} bytes, expected {file['bytes']:,}")
        else:
            complete.append(name)
    rank, ranks = share
    own_share = sorted(complete)[rank::ranks]
    for name, sha256 in zip(own_share, sha256_of_all(checkpoint / name for name in own_share), strict=True):
        expected = manifest.files[name]["sha256"]
        if sha256 != expected:
            faults.append(f"{name} is damaged: its sha256 is {sha256[:12]}…, expected {expected[:12]}…")
    return faults


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> list[str]:
    """Hash several files in parallel, one thread a core: hashing releases the interpreter's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(sha256_of, paths))
