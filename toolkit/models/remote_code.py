"""A model's own code: it runs only at its trusted revision, so that it is the reviewed code."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import outside_target, read_json
from toolkit.core.errors import ModelError

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit of a repository on the Hub, written out."""

_REFERENCE = re.compile(r"(?!.*--)(?:[\w-]+/)*[\w-]+\.\w+", re.ASCII)
"""`modeling_mine.Mine`, a class in a file of the model's own folder (transformers' `dynamic_module_utils`)."""


def check_code(name: str, folder: Path, trust: str | None, *, needed: bool, hub: bool) -> None:
    """Refuse untrusted code of a model, and trust in another revision than this one.

    Args:
        name: of the model, as given.
        folder: with its config.json.
        trust: the trusted revision: a commit on the Hub, or `digest_of` a folder.
        needed: whether transformers needs the code.
        hub: whether `folder` is the Hub's cache of `name`.

    Raises:
        ModelError: naming the files and the flag.
    """
    if trust is None and not needed:
        return
    files = _code_files(name, folder, hub)
    if not files:
        raise ModelError(f"model {name!r} has no own code to trust: leave --trust-remote-code out.")
    here = folder.name if hub else digest_of(folder)
    if trust is None:
        raise ModelError(
            f"model {name!r} needs its own code ({', '.join(files)}), which runs only if you trust it: "
            f"read it, then add --trust-remote-code {here}, or choose a model with an architecture of transformers."
        )
    if trust != here:
        expected = "the full commit of 40 digits" if hub else "the sha256 of its *.py files, 64 digits"
        raise ModelError(
            f"model {name!r}: --trust-remote-code {trust} is not its code ({', '.join(files)}): expected {expected}, which is "
            f"{here} now. Read the code again, then name that."
        )


def check_kernels(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a config that takes a compiled attention kernel from the Hub: transformers would fetch and run it.

    Raises:
        ModelError: naming the kernel.
    """
    for key in ("attn_implementation", "_attn_implementation"):
        for word in _strings(config.get(key)):
            if "/" in word:
                raise ModelError(
                    f"model {name!r}: its config takes attention from {word!r} on the Hub, and compiled code from "
                    f"there never runs. Remove {key} from config.json; --attention chooses a kernel."
                )
    for part in config.values():
        if isinstance(part, dict):
            check_kernels(name, part)


def digest_of(folder: Path) -> str:
    """Return a sha256 over names and contents of all *.py files below a folder.

    Raises:
        ModelError: for a link out of the folder, and for a link to a folder, since its files would be left out.
    """
    check_links(folder, folders=False)
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
        digest.update(f"{name}\0{hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def check_links(folder: Path, *, folders: bool = True) -> None:
    """Refuse a model's folder with a link, at any depth, that leads out of it.

    Args:
        folder: of the model.
        folders: whether links to folders inside it are allowed.

    Raises:
        ModelError: naming the link and its target.
    """
    for here, below, files in os.walk(folder):
        if folders:  # hidden folders are not read
            below[:] = [name for name in below if not name.startswith(".") or Path(here, name).is_symlink()]
        for path in filter(Path.is_symlink, (Path(here, name) for name in (*below, *files))):
            check_inside(path, folder)
            if path.name in below and not folders:
                raise ModelError(
                    f"{path} is a link to a folder, which the digest does not cover. Copy the folder there."
                )


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a file that is a link out of its folder. The Hub's cache may link into the blobs of its repository.

    Raises:
        ModelError: naming the file and its target.
    """
    if leads := outside_target(path, folder):
        raise ModelError(f"{path} is a link that leaves its folder, to {leads}. Copy the file there in its place.")


def _code_files(name: str, folder: Path, hub: bool) -> list[str]:
    """Return the Python files that the folder's configs name."""
    files = set()
    for reference in (*named_code(folder / "config.json"), *named_code(folder / "tokenizer_config.json")):
        if not _REFERENCE.fullmatch(reference):
            raise ModelError(
                f"model {name!r} takes code from elsewhere ({reference!r} in its auto_map), and a revision pins only its own. "
                "Put that code into its folder, and name it there as FILE.CLASS."
            )
        files.add(f"{reference.rpartition('.')[0]}.py")
    missing = [] if hub else sorted(file for file in files if not (folder / file).is_file())
    if missing:
        raise ModelError(
            f"model {name!r} needs its own code, and its folder lacks {', '.join(missing)}. Copy it there, or choose a "
            "model with an architecture of transformers."
        )
    return sorted(files)


def named_code(config: Path) -> list[str]:
    """Return every class that `auto_map` of a config names: a dictionary's values, or a list."""
    try:
        values = read_json(config, finite=False)
    except (OSError, ValueError):
        return []  # transformers reports the error
    return list(_strings(values.get("auto_map") if isinstance(values, dict) else None))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
