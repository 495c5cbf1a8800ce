"""Engines from outside this package: a module registers its own, and every process of a run imports it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from toolkit.config.strategy import SHARDINGS, Sharding
from toolkit.core.errors import StrategyError
from toolkit.engines.base import BUILT_IN, ENGINES, Engine

PLUGINS = "TOOLKIT_ENGINES"
"""The environment variable with the modules of engines from elsewhere, or the files of modules that are not installed."""


def register(row: Sharding, engine: Engine) -> None:
    """Add a sharding, and the engine that runs it, from outside this package.

    Processes that this one starts import the engine's module, too: it is added to `TOOLKITENGINES`. A class of `__main__` cannot
    be imported there, so it is known to this process alone.

    Args:
        row: of the table of shardings; `row.engine` is the engine's name there.
        engine: that runs it.

    Raises:
        StrategyError: for a sharding or an engine that exists already.
    """
    module = type(engine).__module__
    registered = SHARDINGS.get(row.word)
    other = type(ENGINES.get(row.engine, engine)) is not type(engine)
    if (registered is not None and registered != row) or row.engine in BUILT_IN or other:
        raise StrategyError(
            f"sharding {row.word!r} with engine {row.engine!r} cannot be registered: one of the two exists already. "
            "Choose other names."
        )
    SHARDINGS[row.word] = row
    ENGINES[row.engine] = engine
    named = [name for name in os.environ.get(PLUGINS, "").split(",") if name]
    if module not in (*named, "__main__"):
        # Ranks do not look into the working directory, so a module that is one file is named by it.
        file = Path(getattr(sys.modules[module], "__file__", None) or "")
        os.environ[PLUGINS] = ",".join([*named, str(file.resolve()) if file.name == f"{module}.py" else module])


def import_plugins() -> None:
    """Import the modules and files that `TOOLKITENGINES` names, separated by commas; each of them calls `register`.

    Raises:
        ImportError: for a module that cannot be imported.
    """
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        try:
            if name.endswith(".py"):
                _import_file(Path(name))
            else:
                importlib.import_module(name)
        except (ImportError, FileNotFoundError) as error:
            raise ImportError(
                f"{PLUGINS} names {name!r}, which cannot be imported: {error}. Install it, put its folder on PYTHONPATH, "
                "or name its file."
            ) from error


def _import_file(path: Path) -> None:
    """Import a file as the module of its name, without its folder on the path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a file that ends with .py has a loader"
    assert spec.loader is not None
    if path.stem not in sys.modules:
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
