"""Cached specs, read in milliseconds without torch and transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import json

from toolkit.core.cache import cache_file, keep
from toolkit.core.errors import ToolkitError
from toolkit.models.spec import ModelSpec, MoE, Parameter

KIND = "specs"
"""The cache's folder."""


def recall(config: bytes) -> ModelSpec | None:
    """Return the cached spec of this text of a `config.json` under these versions, or None."""
    try:
        values = json.loads(cache_file(KIND, config).read_bytes())
        values["parameters"] = tuple(
            Parameter(name=parameter["name"], shape=tuple(parameter["shape"]), role=parameter["role"])
            for parameter in values["parameters"]
        )
        values["tied"] = tuple(map(tuple, values["tied"]))
        values["moe"] = MoE(**values["moe"]) if values["moe"] else None
        for name in ("linears", "blocks", "attentions", "unadapted", "unquantized", "frozen"):
            values[name] = tuple(values[name])
        return ModelSpec(**values)
    except (OSError, ToolkitError, ValueError, KeyError, TypeError):
        return None


def remember(config: bytes, spec: ModelSpec) -> None:
    """Keep it. Where the cache cannot be written, it is described again next time."""
    with contextlib.suppress(OSError, ToolkitError):
        keep(cache_file(KIND, config), json.dumps(dataclasses.asdict(spec), separators=(",", ":")))
