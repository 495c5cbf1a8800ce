"""Output of results: text, JSON, and files, which are checked before hours of work."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import encode_json, write_whole
from toolkit.core.cache import keep, recall, state_folder
from toolkit.core.display import Result
from toolkit.core.errors import ToolkitError, value_or


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
    elif Path(target).is_symlink() or (Path(target).is_file() and not value_or(False, _written_here, Path(target))):
        raise ToolkitError(
            f"{flag} {target}: it exists, and has content of others. Remove it, name another file, or - for standard output."
        )
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    else:
        why = "" if os.access(folder, os.W_OK) else f"{folder} cannot be written"
    if why:
        raise ToolkitError(f"{flag} {target}: {why}. Name a file in a folder that exists, or - for standard output.")


def _record(path: Path) -> Path:
    """Return the file with the digest of what `show` wrote to this path."""
    return state_folder("written") / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()


def _written_here(path: Path) -> bool:
    """Return whether `show` wrote the file, and nobody has changed it since."""
    return recall(_record(path), str) == hashlib.sha256(path.read_bytes()).hexdigest()


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
            path = Path(target)
            if not path.is_symlink() and path.is_file() and value_or(False, _written_here, path):
                write_whole(path, text.encode())
            else:
                write(path, text)
            if path.is_file():
                with contextlib.suppress(ToolkitError):
                    keep(_record(path), hashlib.sha256(text.encode()).hexdigest())
    if isinstance(result, Result) and target != "-":
        print(result)
    sys.stdout.flush()
