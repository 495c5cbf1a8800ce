"""The identity of a training: fingerprints of model, tokenizer, data and base that a checkpoint has to match."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.manifest import sha256_of_all
from toolkit.core.cache import cache_folder, keep, recall
from toolkit.core.errors import CheckpointError
from toolkit.core.redaction import MARK, redact_all
from toolkit.models import ModelSpec, local_weights

if TYPE_CHECKING:
    from toolkit.config.strategy import Strategy

ADAPTER_FIELDS = ("adapter", "lora_rank", "lora_targets")
"""Fields of Strategy on which the set of parameters depends. They cannot change in a run."""

_UNFIXED = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "use_cache", "return_dict"),
    *("bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type"),
)
"""Config fields without effect on the computation, and those that the strategy sets."""

_BLOB = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The model and data of a training."""

    model: str
    """The name that the user gave."""
    source: str | None
    """Hub id or folder of its weights."""
    architecture: str
    parameters: str
    """sha256 over names and shapes of the model's parameters."""
    config: Mapping[str, Any]
    """The transformers config without `_UNFIXED`."""
    data: str
    """The rows' fingerprint, which covers tokenizer and sequence length."""
    adapter: Mapping[str, Any]
    """`ADAPTER_FIELDS`."""
    base: Mapping[str, Any] | None
    """With frozen weights (an adapter, a vision tower): the base's `revision` on the Hub, and the sha256 of its weight `files`."""


def identify(spec: ModelSpec, strategy: Strategy, data: str) -> Identity:
    """Return the identity of a run; `data` is the fingerprint of its rows."""
    shapes = json.dumps([(parameter.name, parameter.shape) for parameter in spec.parameters])
    adapter = {name: getattr(strategy, name) for name in ADAPTER_FIELDS} if strategy.adapter != "none" else {}
    adapter |= {"lora_alpha": strategy.lora_alpha} if adapter and strategy.lora_alpha else {}
    return Identity(
        model=spec.name,
        source=spec.source,
        architecture=spec.architecture,
        parameters=hashlib.sha256(shapes.encode()).hexdigest(),
        config={name: value for name, value in spec.config.items() if name not in _UNFIXED},
        data=data,
        adapter=adapter,
        base=_base_digests(spec) if adapter or spec.frozen or spec.untrained else None,
    )


def check_same(ours: Identity, theirs: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse a checkpoint of another model, adapter, base or data set.

    Raises:
        CheckpointError: naming what differs.
    """
    our_fields = asdict(ours)
    differences = {
        "architecture": "another architecture",
        "parameters": f"another model than {ours.model}: parameters differ in name or shape",
        "data": "other data, another tokenizer or another sequence length",
        "adapter": "another adapter",
    }
    for name, what in differences.items():
        if our_fields[name] != theirs.get(name):
            raise CheckpointError(
                f"{checkpoint} was written of {what} ({_shorten(theirs.get(name))}, and here it is {_shorten(our_fields[name])}). "
                "Use the run's own, or start a new run."
            )
    if changed := list(_changed_fields(theirs.get("config") or {}, redact_all(our_fields["config"]))):
        raise CheckpointError(
            f"{checkpoint} was written of another config than that of {ours.source or ours.model} now: {', '.join(changed[:5])}. "
            "If another version of transformers reads it differently, use the version in the manifest; else pass --model the "
            "folder with the run's own config, or start a new run."
        )
    their_base, our_base = theirs.get("base") or {}, our_fields["base"] or {}
    if their_base.get("files") != our_base.get("files"):
        raise CheckpointError(
            f"{checkpoint} was trained over another base: the weights of {ours.source} have changed since (revision "
            f"{their_base.get('revision')}, now {our_base.get('revision')}). Give the base that it was trained over."
        )


def _changed_fields(was: Mapping[str, Any], is_: Mapping[str, Any]) -> Iterator[str]:
    """Describe the differences in fields of both. Fields of one alone may come from another version of transformers."""
    for name in sorted((was.keys() & is_.keys()) - set(_UNFIXED)):
        if isinstance(was[name], dict) and isinstance(is_[name], dict):
            yield from _changed_fields(was[name], is_[name])
        elif was[name] != is_[name] and MARK not in str(was[name]):
            yield f"{name} {_shorten(was[name])} → {_shorten(is_[name])}"


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:12] + "…" if re.fullmatch(r"[0-9a-f]{64}", text) else text


def _base_digests(spec: ModelSpec) -> dict[str, Any]:
    files = local_weights(spec.source or spec.name)
    blobs = {path: path.resolve() for path in files}
    # The Hub's cache names a weight file by its sha256, and the folder of a snapshot by its revision.
    fields = {
        path: blob.name for path, blob in blobs.items() if _BLOB.fullmatch(blob.name) and blob.parent.name == "blobs"
    }
    parent = files[0].parent
    revision = parent.name if parent.parent.name == "snapshots" else None
    digests = {**fields, **_cached_digests([path for path in files if path not in fields])}
    return {"revision": revision, "files": {path.name: digests[path] for path in files}}


def _cached_digests(files: list[Path]) -> dict[Path, str]:
    """Return the sha256 of files, each computed once for a path, size and time of change."""
    memory = cache_folder("hashes")
    notes, digests = {}, {}
    for path in files:
        stat = path.stat()
        stamp = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        notes[path] = memory / hashlib.sha256(stamp.encode()).hexdigest()
        digests[path] = recall(notes[path], str)
    unknown = [path for path in files if digests[path] is None]
    for path, digest in zip(unknown, sha256_of_all(unknown), strict=True):
        keep(notes[path], digest)
        digests[path] = digest
    return {path: str(digest) for path, digest in digests.items()}
