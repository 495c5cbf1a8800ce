"""The user's cache and state folders under `$XDG_CACHE_HOME` and `$XDG_STATE_HOME`.

Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from toolkit.core.atomic_io import expand_user, read_limited, write_whole
from toolkit.core.errors import ToolkitError

T = TypeVar("T")

LONGEST_RECORD = 256 * 2**20
"""Bytes of the longest file of the cache that is read."""


def cache_folder(*parts: str) -> Path:
    """Return a folder of the cache. It is created if needed.

    Raises:
        ToolkitError: where it cannot be made, or is another user's, who could write into it.
    """
    return _make_folder("the cache", "XDG_CACHE_HOME", Path(".cache"), parts)


def state_folder(*parts: str) -> Path:
    """Return a folder for this user's state on this machine, created if needed, unreadable for others.

    Raises:
        ToolkitError: where it cannot be made, or is another user's, who could write into it.
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
        others = [path for path in (root / "accelerate-toolkit", folder) if path.stat().st_uid != os.geteuid()]
    except OSError as error:
        raise ToolkitError(
            f"{what} {folder} cannot be made: {error.strerror}. Set {variable} to a folder that can be written."
        ) from error
    if others:
        raise ToolkitError(f"{what} {others[0]} belongs to another user. Set {variable} to a folder of your own.")
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


TRACING_PACKAGES = ("config", "engines", "forecasting", "models", "transforms")
"""The packages that describe and trace."""


@lru_cache(maxsize=4)
def source_digest(package: Path) -> str:
    """Return the sha256 of the code that describes and traces models: results of changed code are not reused."""
    files = [path for name in TRACING_PACKAGES for path in sorted((package / name).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


_version = lru_cache(metadata.version)
"""Cached: every forecast of a plan calls it."""


def keep(path: Path, value: Any) -> None:
    """Write a JSON value into the cache, whole: others may read or write it meanwhile. Where that fails nothing is kept."""
    with contextlib.suppress(OSError):
        write_whole(path, sealed(path.name, json.dumps(value, separators=(",", ":")).encode()))


def recall(path: Path, decode: Callable[[Any], T]) -> T | None:
    """Return what `decode` makes of the value in a file of the cache.

    None for a missing file, for one that `keep` did not write under this name, and where `decode` fails: make it again.
    """
    try:
        data = read_limited(path, LONGEST_RECORD)
        text = data[len(sealed("", b"")) - 2 : -2]
        return decode(json.loads(text)) if data == sealed(path.name, text) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def sealed(name: str, text: bytes) -> bytes:
    """Return a file of the cache: JSON with a digest of the file's name and content. It shows damage, and other writers."""
    digest = hashlib.sha256(name.encode() + b"\0" + text).hexdigest()
    return b'{"sha256":"%s","value":%s}\n' % (digest.encode(), text)
