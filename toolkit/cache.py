"""Where what can be made again is kept: `$XDG_CACHE_HOME/accelerate-toolkit`. Standard library only."""

from __future__ import annotations

import os
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
