"""The user's cache and state folders under `$XDG_CACHE_HOME` and `$XDG_STATE_HOME`.

Standard library only.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from toolkit.core.atomic_io import expand_user, write_whole
from toolkit.core.errors import ToolkitError


def cache_folder(*parts: str) -> Path:
    """Return a folder of the cache. It is created if needed.

    Raises:
        ToolkitError: where it cannot be made.
    """
    return _make_folder("the cache", "XDG_CACHE_HOME", Path(".cache"), parts)


def state_folder(*parts: str) -> Path:
    """Return a folder for this user's state on this machine, created if needed, unreadable for others.

    Raises:
        ToolkitError: where it cannot be made.
    """
    return _make_folder("the folder of states", "XDG_STATE_HOME", Path(".local", "state"), parts)


def _make_folder(what: str, variable: str, default: Path, parts: tuple[str, ...]) -> Path:
    root = Path(os.environ.get(variable, ""))
    if not root.is_absolute():  # then it does not count (specifications.freedesktop.org/basedir-spec)
        root = expand_user("~") / default
    folder = root.joinpath("accelerate-toolkit", *parts)
    try:
        (root / "accelerate-toolkit").mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ToolkitError(
            f"{what} {folder} cannot be made: {error.strerror}. Set {variable} to a folder that can be written."
        ) from error
    return folder


def cache_file(kind: str, key: bytes) -> Path:
    """Return the cache file for `key` under the versions of the libraries that produced it.

    Raises:
        ToolkitError: where the cache cannot be made.
    """
    versions = [_version(name) for name in ("torch", "transformers", "accelerate")]
    versions.append(source_digest(Path(__file__).parents[1]))
    digest = hashlib.sha256(key + repr(versions).encode()).hexdigest()[:32]
    return cache_folder(kind) / f"{digest}.json"


TRACING = ("config", "engines", "forecasting", "models")
"""The packages that describe and trace."""


@lru_cache(maxsize=4)
def source_digest(package: Path) -> str:
    """Return the sha256 of the code that describes and traces models: results of changed code are not reused."""
    files = [path for name in TRACING for path in sorted((package / name).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


_version = lru_cache(metadata.version)
"""Cached: every forecast of a plan calls it."""


def keep(path: Path, text: str) -> None:
    """Write a file of the cache whole: others may read or write it meanwhile."""
    write_whole(path, text.encode())
