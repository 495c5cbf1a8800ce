"""sha256 of files, several at once. Standard library only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Iterable[Path]) -> list[str]:
    """Of several files at once, on as many cores as there are: hashing gives the interpreter's lock free."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(sha256_of, paths))
