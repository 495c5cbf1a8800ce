"""Engines and transforms: this package's own, and those of modules from elsewhere, which every process of a run imports."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from toolkit.config.strategy import SHARDINGS, Sharding
from toolkit.core.atomic_io import open_regular
from toolkit.core.errors import StrategyError
from toolkit.engines.base import Engine
from toolkit.engines.job import Transform

PLUGINS = "TOOLKIT_ENGINES"
"""The environment variable with the modules, or module files, of engines and transforms from elsewhere."""

_BUILT_IN = {"ddp": "DDP", "deepspeed": "DeepSpeed", "fsdp": "FSDP"}
"""Module of this package → its class. It is imported at its first use, as its libraries are."""

_engines: dict[str, Engine] = {}
"""Engines that were used or registered, by name."""

_BUILT_IN_TRANSFORMS = {
    "activation_checkpointing": "checkpointing",
    "activation_offload": "activation_offload",
    "mlp_tiles": "mlp_tiles",
    "tp_sequence": "sequence_parallel",
    "adapter": "adapters",
    "loss": "chunked_loss",
    "cp": "context_parallel",
    "compile": "compile",
}
"""Name → its module in `toolkit.transforms`, in the order of their use. Others come after them."""

_transforms: dict[str, Transform] = {}
"""Registered transforms, by name."""


def engine_for(sharding: str, tp: int = 1, ep: int = 1, pp: int = 1) -> Engine:
    """Return the engine of a sharding; with tensor or expert parallelism, the mesh around it; with stages, the pipeline."""
    name = SHARDINGS[sharding].engine
    if tp == ep == pp == 1:
        return _named(name)
    key = f"{f'pipeline {max(tp, ep) > 1}' if pp > 1 else 'mesh'} {name}"
    if key not in _engines and pp > 1:
        inner = engine_for(sharding, tp, ep)
        _engines[key] = importlib.import_module("toolkit.engines.pipeline").Pipeline(inner)
    elif key not in _engines:
        _engines[key] = importlib.import_module("toolkit.engines.mesh").Mesh(_named(name), sharded=name != "ddp")
    return _engines[key]


def all_engines() -> Iterator[Engine]:
    """Return every engine of the table once."""
    return map(_named, dict.fromkeys(row.engine for row in SHARDINGS.values()))


def _named(name: str) -> Engine:
    if name not in _engines:
        module = importlib.import_module(f"toolkit.engines.{name}")
        _engines[name] = getattr(module, _BUILT_IN[name])()
    return _engines[name]


def register(row: Sharding, engine: Engine) -> None:
    """Add a sharding, and the engine that runs it, from outside this package.

    Processes that this one starts import the engine's module, too: it is added to `TOOLKIT_ENGINES`. A class of `__main__` cannot
    be imported there, so it is known to this process alone.

    Args:
        row: of the table of shardings; `row.engine` is the engine's name there.
        engine: that runs it.

    Raises:
        StrategyError: for a sharding or an engine that exists already.
    """
    module = type(engine).__module__
    registered = SHARDINGS.get(row.word)
    other = type(_engines.get(row.engine, engine)) is not type(engine)
    if (registered is not None and registered != row) or row.engine in _BUILT_IN or other:
        raise StrategyError(
            f"sharding {row.word!r} with engine {row.engine!r} cannot be registered: one of the two exists already. "
            "Choose other names."
        )
    SHARDINGS[row.word] = row
    _engines[row.engine] = engine
    _import_in_children(module)


def register_transform(transform: Transform) -> None:
    """Add a transform. One from outside this package follows the built-in ones, in all processes, as `register` says.

    Raises:
        StrategyError: for a name that another transform has.
    """
    if type(_transforms.setdefault(transform.name, transform)) is not type(transform):
        raise StrategyError(f"transform {transform.name!r} exists already. Choose another name.")
    _import_in_children(type(transform).__module__)


def all_transforms() -> list[Transform]:
    """Return every transform in the order of use. The built-in ones register at the first call."""
    if not _BUILT_IN_TRANSFORMS.keys() <= _transforms.keys():
        for module in _BUILT_IN_TRANSFORMS.values():
            importlib.import_module(f"toolkit.transforms.{module}")
    return [_transforms[name] for name in dict.fromkeys((*_BUILT_IN_TRANSFORMS, *_transforms))]


def _import_in_children(module: str) -> None:
    """Add the module of an engine or a transform to `TOOLKIT_ENGINES`."""
    named = [name for name in os.environ.get(PLUGINS, "").split(",") if name]
    if module not in (*named, "__main__") and not module.startswith("toolkit."):
        # Ranks do not look into the working directory, so a module that is one file is named by it.
        file = Path(getattr(sys.modules[module], "__file__", None) or "")
        os.environ[PLUGINS] = ",".join([*named, str(file.resolve()) if file.name == f"{module}.py" else module])


def import_plugins() -> None:
    """Import the modules and files that `TOOLKIT_ENGINES` names, separated by commas; each of them calls `register`.

    Raises:
        ImportError: for a module that cannot be imported.
    """
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        try:
            if name.endswith(".py"):
                _import_file(Path(name))
            elif importlib.import_module(name).__file__ is None:
                raise ImportError("it is a folder without an __init__.py")
        except Exception as error:  # a module's own code fails in its own way
            raise ImportError(
                f"{PLUGINS} names {name!r}, which cannot be imported: {str(error).rstrip('.')} ({type(error).__name__}). "
                "Correct or install it, put its folder on PYTHONPATH, or name its file."
            ) from error


def _import_file(path: Path) -> None:
    """Import a file as the module of its name, without its folder on the path.

    Raises:
        OSError: for what is not a regular file.
        ImportError: for the name of another module: one of the two would never be imported.
    """
    name = path.stem
    open_regular(path).close()
    other = importlib.util.find_spec(name)
    if other and other.origin and Path(other.origin).resolve() != path.resolve():
        raise ImportError(f"{other.origin} is the module {name!r}, so rename the file")
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends with .py has a loader"
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise
