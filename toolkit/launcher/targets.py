"""A run's target besides the recipe: a module, a script or a stored function, and whether its folder may start it again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import check_fields, open_regular, write_whole
from toolkit.core.cache import state_folder
from toolkit.core.errors import MissingLibrary, RunError, ToolkitError, nearest
from toolkit.core.redaction import MARK
from toolkit.run_folder.folder import Folder

RECIPE = "toolkit.finetune"

OWN = ("timeout",)
"""Fields outside Strategy that code of one's own takes."""

KINDS = ("module", "script", "function")

_PYTHONS = (BuiltinImporter, FrozenImporter, PathFinder)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The code that each rank runs."""

    kind: str
    """One of `KINDS`."""
    name: str
    """A module's name, a script's path, or a function's qualified name."""
    arguments: tuple[str, ...] = ()
    """Command line of a module or a script."""
    sha256: str = ""
    """Digest of a function's file: no other file is run."""

    @property
    def words(self) -> list[str]:
        """The target on a command line."""
        return [self.name, *self.arguments]


def named(target: str, arguments: Sequence[str] = ()) -> Target:
    """Return the target for a module's name or a script's path.

    Raises:
        RunError: for a script that is not there, and a module that Python does not find.
    """
    if target.endswith(".py") or os.sep in target:
        if not Path(target).is_file():
            raise RunError(f"target {target!r}: no such script. Name a script, a module or a function.")
        return Target(kind="script", name=str(Path(target).resolve()), arguments=tuple(arguments))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file there takes no library's place
    try:
        spec = importlib.util.find_spec(target)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise RunError(
            f"target {target!r}: Python finds no such module.{nearest(target, [RECIPE])} Name a module, a script that ends in .py, "
            f"or pass a function."
        )
    return Target(kind="module", name=target, arguments=tuple(arguments))


def dump_function(
    function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Target, bytes]:
    """Return a function and everything it refers to as the bytes of a file.

    By value, with cloudpickle: also what was defined in a notebook's cells. Modules go by name, and the ranks look for them
    where this process does (`sys.path`).

    Raises:
        MissingLibrary: without cloudpickle.
        RunError: for what cannot be called with these arguments, or not be shipped, with the name of the variable that holds it.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingLibrary("launching a function needs cloudpickle: pip install cloudpickle") from error
    _check_call(function, args, kwargs)
    try:
        shipped = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # whatever a value's own code raises
        raise RunError(_explain_unpicklable(function, args, kwargs, error, cloudpickle.dumps)) from error
    data: bytes = cloudpickle.dumps((sys.path, shipped))
    return Target(kind="function", name=_name(function), sha256=hashlib.sha256(data).hexdigest()), data


def write_function(file: Path, data: bytes) -> None:
    """Write the bytes of a function into a file that only its owner can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(data)


def _check_call(function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a target that is not a function, and arguments that it does not take: RunError with what it takes."""
    if not callable(function):
        raise RunError(f"target {function!r}: expected a module's name, a script's path or a function.")
    with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
        signature = inspect.signature(function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise RunError(
                f"{_name(function)}{signature} cannot be called so: {error}. Give its arguments: args=(…,), kwargs={{…}}."
            ) from error


def _name(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def load_function(file: Path, sha256: str) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
    """Load a function and its arguments. A file is code: it is loaded only if it is the one that was written.

    Raises:
        RunError: for a file that is missing, somebody else's, or another one than was written.
    """
    import pickle

    try:
        data, owner = file.read_bytes(), file.stat().st_uid
    except OSError as error:
        raise RunError(
            f"the function's file {file} cannot be read: {error.strerror}. Launch the function again."
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256 or owner != os.getuid():
        raise RunError(
            f"the function's file {file} is not the one that was launched (sha256 {digest[:12]}…, expected {sha256[:12]}…; "
            f"owner {owner}). It is not run: launch the function again."
        )
    path, shipped = pickle.loads(data)
    sys.path += [folder for folder in path if folder not in sys.path]
    function, args, kwargs = pickle.loads(shipped)
    return function, args, kwargs


def _explain_unpicklable(
    function: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: Exception,
    dumps: Callable[[Any], bytes],
) -> str:
    """Name the value that cannot be pickled among those that a function refers to, if it can be found."""
    values = {f"argument {number}": value for number, value in enumerate(args, start=1)}
    values |= {f"argument {key!r}": value for key, value in kwargs.items()}
    with contextlib.suppress(TypeError, ValueError):  # of a builtin
        closure = inspect.getclosurevars(function)
        values |= {f"variable {key!r}": value for key, value in {**closure.globals, **closure.nonlocals}.items()}
    why = f"{type(error).__name__}: {error}"
    for what, value in values.items():
        try:
            dumps(value)
        except Exception as reason:
            why = f"its {what} is a {type(value).__name__} ({reason})"
            break
    return (
        f"function {_name(function)!r} cannot be shipped: {why}. "
        "Make it inside of the function, or pass what it is made from (a path, a name, a number)."
    )


# Which code a run's folder may start again: code that this user launched here, or names again ----------------------------

_TARGET_FIELDS = {"kind": str, "name": str, "arguments": list, "sha256": str}


def target_of(about: dict[str, Any]) -> Target | None:
    """Return the target in a run's `run.json`; None for the recipe. Whether it may run is another question.

    Raises:
        RunError: for fields, and for a kind, that no run of ours has.
    """
    target = about.get("target")
    if target is None:
        return None
    try:
        check_fields(target, _TARGET_FIELDS)
        if set(target) != set(_TARGET_FIELDS):
            raise ValueError(f"its fields are {', '.join(sorted(target))}, expected {', '.join(_TARGET_FIELDS)}")
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
            f"{target.name} has a secret among its arguments, which run.json does not store: {' '.join(target.arguments)}. "
            f"Name it again with all of its arguments: --target '{target.name} …'."
        )
    file, note = _file(folder, target), None
    try:
        sha256, digest = _digests(file, target)
    except OSError as error:
        raise RunError(
            f"{file}, which {folder.path} ran, cannot be read: {error.strerror}. Name it again with --target."
        ) from error
    with contextlib.suppress(OSError, ValueError, ToolkitError):
        path = _note_file(folder)
        note = path.read_text() if path.stat().st_uid == os.getuid() else None
    if digest not in (trust, note):
        words = shlex.quote(shlex.join([target.name, *target.arguments]))
        again = (
            f"tk.resume(run, {target.name})"
            if target.kind == "function"
            else f"toolkit resume {folder.path} --target {words}"
        )
        why = "has changed since you launched it" if note else "you did not launch in this folder"
        raise RunError(
            f"{folder.path} would run the {target.kind} {target.name!r}, which {why}, and code of a folder is not run without your "
            f"consent. Name it again (`{again}`), or read {file} and add --trust-target {digest}."
        )
    return dataclasses.replace(target, sha256=sha256) if target.kind == "function" else target


def note_launch(folder: Folder, target: Target) -> None:
    """Remember that this user runs the target in this folder, so that a resume needs no target."""
    with contextlib.suppress(OSError, ToolkitError):  # then it has to be named
        write_whole(_note_file(folder), _digests(_file(folder, target), target)[1].encode())


def _note_file(folder: Folder) -> Path:
    """Return the file with the digest of the target that this user launched in this folder."""
    return state_folder("launched") / f"{hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:32]}"


def _digests(file: Path, target: Target) -> tuple[str, str]:
    """Return the sha256 of the file that runs, and a digest of it with the target's kind, name and arguments."""
    with open_regular(file) as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    text = json.dumps([target.kind, target.name, list(target.arguments), sha256])
    return sha256, hashlib.sha256(text.encode()).hexdigest()


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
