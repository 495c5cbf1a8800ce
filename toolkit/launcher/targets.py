"""A run's target besides the recipe: a module, a script, or a function from a notebook, stored in a file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.core.errors import MissingLibrary, RunError, nearest

RECIPE = "toolkit.finetune"

KINDS = ("module", "script", "function")


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
    """Of the file that holds a function: only this one is run."""

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
