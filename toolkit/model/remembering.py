"""What was described once is read again in milliseconds, without torch and transformers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path

from toolkit.cache import cache_folder
from toolkit.errors import ToolkitError
from toolkit.model.spec import ModelSpec, MoE, Parameter


def recall(config: bytes) -> ModelSpec | None:
    """The spec that was kept for this text of a `config.json`, under these versions; None where there is none."""
    try:
        values = json.loads(_path(config).read_bytes())
        values["parameters"] = tuple(
            Parameter(name=one["name"], shape=tuple(one["shape"]), role=one["role"]) for one in values["parameters"]
        )
        values["tied"] = tuple(map(tuple, values["tied"]))
        values["moe"] = MoE(**values["moe"]) if values["moe"] else None
        for name in ("linears", "blocks", "attentions", "unadapted", "unquantized"):
            values[name] = tuple(values[name])
        return ModelSpec(**values)
    except (OSError, ToolkitError, ValueError, KeyError, TypeError):
        return None


def remember(config: bytes, spec: ModelSpec) -> None:
    """Keep it. Where the cache cannot be written, it is described again next time."""
    try:
        path = _path(config)
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        draft.write_text(json.dumps(dataclasses.asdict(spec), separators=(",", ":"), default=str))
        draft.replace(path)
    except (OSError, ToolkitError):
        pass


def _path(config: bytes) -> Path:
    versions = [metadata.version(name) for name in ("accelerate-toolkit", "torch", "transformers")]
    digest = hashlib.sha256(config + json.dumps(versions).encode()).hexdigest()[:32]
    return cache_folder("specs") / f"{digest}.json"
