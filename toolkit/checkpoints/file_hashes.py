"""sha256 of files, several at once. Standard library only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> list[str]:
    """Hash several files in parallel, one thread a core: hashing releases the interpreter's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(sha256_of, paths))
