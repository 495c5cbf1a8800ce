"""Decide which code a run's folder may start again: code that this user launched here, or names again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import check_fields, open_regular, write_whole
from toolkit.core.cache import state_folder
from toolkit.core.errors import RunError, ToolkitError
from toolkit.core.redaction import MARK
from toolkit.launcher.targets import KINDS, Target
from toolkit.run_folder.folder import Folder

_PYTHONS = (BuiltinImporter, FrozenImporter, PathFinder)
_FIELDS = {"kind": str, "name": str, "arguments": list, "sha256": str}


def target_of(about: dict[str, Any]) -> Target | None:
    """Return the target in a run's `run.json`; None for the recipe. Whether it may run is another question.

    Raises:
        RunError: for fields, and for a kind, that no run of ours has.
    """
    target = about.get("target")
    if target is None:
        return None
    try:
        check_fields(target, _FIELDS)
        if set(target) != set(_FIELDS):
            raise ValueError(f"its fields are {', '.join(sorted(target))}, expected {', '.join(_FIELDS)}")
        if target["kind"] not in KINDS:
            raise ValueError(f"kind is {target['kind']!r}, expected {', '.join(KINDS)}")
        if not all(isinstance(word, str) and "\0" not in word for word in (target["name"], *target["arguments"])):
            raise ValueError("its name and arguments are not all words")
    except ValueError as error:
        raise RunError(f"run.json names a target that cannot be: {error}. Name the folder of a run.") from None
    return Target(**{**target, "arguments": tuple(target["arguments"])})


def check_target(folder: Folder, target: Target, trust: str | None) -> Target:
    """Return the target if it may run again, with the sha256 of a function's file.

    Args:
        folder: of the run.
        target: in its `run.json`.
        trust: the digest that the user trusts, or None.

    Raises:
        RunError: for a target that this user has not launched here in this form, and does not trust; with its digest.
    """
    if any(MARK in word for word in target.arguments):
        raise RunError(
            f"{target.name} was given a secret, and run.json does not say it: {' '.join(target.arguments)}. Name it again with "
            f"all of its arguments: --target '{target.name} …'."
        )
    file = _file(folder, target)
    try:
        sha256 = _sha256(file)
    except OSError as error:
        raise RunError(
            f"{file}, which {folder.path} ran, cannot be read: {error.strerror}. Name it again with --target."
        ) from error
    digest, noted = _digest(target, sha256), _noted_digest(folder)
    if digest not in (trust, noted):
        words = shlex.quote(shlex.join([target.name, *target.arguments]))
        again = (
            f"tk.resume(run, {target.name})"
            if target.kind == "function"
            else f"toolkit resume {folder.path} --target {words}"
        )
        why = "has changed since you launched it" if noted else "you did not launch in this folder"
        raise RunError(
            f"{folder.path} would run the {target.kind} {target.name!r}, which {why}, and a folder alone lets no code run. "
            f"Name it again (`{again}`), or read {file} and add --trust-target {digest}."
        )
    return dataclasses.replace(target, sha256=sha256) if target.kind == "function" else target


def note_launch(folder: Folder, target: Target) -> None:
    """Remember that this user runs the target in this folder, so that a resume needs no target."""
    with contextlib.suppress(OSError, ToolkitError):  # then it has to be named
        write_whole(_note_file(folder), _digest(target, _sha256(_file(folder, target))).encode())


def _noted_digest(folder: Folder) -> str | None:
    """Return the digest of the target that this user launched in this folder."""
    with contextlib.suppress(OSError, ValueError, ToolkitError):
        note = _note_file(folder)
        return note.read_text() if note.stat().st_uid == os.getuid() else None
    return None


def _note_file(folder: Folder) -> Path:
    return state_folder("launched") / f"{hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:32]}"


def _digest(target: Target, sha256: str) -> str:
    """Return a digest of kind, name, arguments, and the bytes of the file that runs."""
    text = json.dumps([target.kind, target.name, list(target.arguments), sha256])
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _file(folder: Folder, target: Target) -> Path:
    """Return the file that runs.

    Raises:
        RunError: for a module that Python does not find.
    """
    if target.kind == "function":
        return folder.function
    return Path(target.name) if target.kind == "script" else _module_file(target.name)


def _module_file(name: str) -> Path:
    """Find a module's file, or a package's `__main__`, without running parent packages as `find_spec` does."""
    where: Any = [*sys.path, os.getcwd()]  # as a rank looks for it
    for number, part in enumerate(name.split(".")):
        # An editable package may have its own finder.
        others = [finder.find_spec(part, None) for finder in sys.meta_path if number == 0 and finder not in _PYTHONS]
        spec = PathFinder.find_spec(part, where) or next(filter(None, others), None)
        if spec is None:
            break
        where = spec.submodule_search_locations or []
    else:
        if where and (main := PathFinder.find_spec("__main__", where)):
            spec = main
        if spec and spec.origin and spec.has_location:
            return Path(spec.origin)
    raise RunError(
        f"target {name!r}: from here Python finds no such module. Go to the folder in which the run was launched, or name it with "
        "--target."
    )
