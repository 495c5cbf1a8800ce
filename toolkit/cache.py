"""Where what can be made again is kept: `$XDG_CACHE_HOME/accelerate-toolkit`. Standard library only."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from toolkit.errors import ToolkitError


def cache_folder(*parts: str) -> Path:
    """A folder of the cache, made where it does not exist.

    Raises:
        ToolkitError: where it cannot be made.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accelerate-toolkit", *parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolkitError(
            f"the cache {folder} cannot be made: {error.strerror}. Set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return folder


def cache_file(kind: str, key: bytes) -> Path:
    """Where what was made from `key` is kept, under the versions of the libraries that made it.

    Raises:
        ToolkitError: where the cache cannot be made.
    """
    versions = [_version(name) for name in ("accelerate-toolkit", "torch", "transformers", "accelerate")]
    versions.append(_sources())
    digest = hashlib.sha256(key + repr(versions).encode()).hexdigest()[:32]
    return cache_folder(kind) / f"{digest}.json"


@lru_cache(maxsize=1)
def _sources() -> str:
    """Of the code that describes and traces: what an older state of it made is not found again."""
    here = Path(__file__).parent
    files = [path for folder in ("model", "forecasting") for path in sorted((here / folder).glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


_version = lru_cache(metadata.version)
"""Asked for every forecast of a plan."""


def keep(path: Path, text: str) -> None:
    """Write a file of the cache whole: others may read or write it meanwhile."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)
