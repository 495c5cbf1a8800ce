"""Output of results: text, JSON, and files, which are checked before hours of work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import encode_json
from toolkit.core.display import Result
from toolkit.core.errors import ToolkitError


@contextlib.contextmanager
def quiet(target: str | None) -> Iterator[None]:
    """With `--json -`, send everything but the JSON to standard error, also from child processes."""
    if target != "-":
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def check_target(target: str | None, flag: str) -> None:
    """Check before hours of work that a result can be written."""
    if target is None or target == "-":
        return
    folder = Path(target).absolute().parent
    if Path(target).is_dir():
        why = "it is a folder"
    elif Path(target).is_file() or Path(target).is_symlink():
        raise ToolkitError(f"{flag} {target}: it exists. Remove it, name another file, or - for standard output.")
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    else:
        why = "" if os.access(folder, os.W_OK) else f"{folder} cannot be written"
    if why:
        raise ToolkitError(f"{flag} {target}: {why}. Name a file in a folder that exists, or - for standard output.")


def write_config(path: Path, content: dict[str, Any], flag: str) -> None:
    """Write an Accelerate config file. Another content in an existing file is an error."""
    import yaml

    text = yaml.safe_dump(content)
    if path.is_file() and path.read_bytes() != text.encode():
        raise ToolkitError(f"{path} exists with other content. Remove it, or name another file with {flag}.")
    if not path.is_file():
        write(path, text)


def write(path: Path, text: str) -> None:
    """Write a new file and the folders above it, or write into a device or a pipe.

    Raises:
        ToolkitError: where it cannot be written, or a file has come there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if path.exists() and not path.is_file() else "x") as file:
            file.write(text)
    except OSError as error:
        raise ToolkitError(f"{path} cannot be written: {error.strerror}. Choose another place.") from error


def show(result: Result | dict[str, Any], target: str | None) -> None:
    """Print a result, and write it as JSON to the target of `--json`."""
    if target is not None:
        text = encode_json(result.to_dict() if isinstance(result, Result) else result, indent=2) + "\n"
        if target == "-":
            print(text, end="")
        else:
            write(Path(target), text)
    if isinstance(result, Result) and target != "-":
        print(result)
    sys.stdout.flush()
