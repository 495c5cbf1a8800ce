"""What every test stands on: no network, caches of its own, one thread a process, and our own warnings as errors."""

from __future__ import annotations

import gc
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

import toolkit

LAST = ("slow", "browser", "dist", "gpu")
"""Tiers that run after everything else, in this order: the file that takes longest first, so that two workers end together."""


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment, of this process and of all that tests start, before any library reads it."""
    cache = Path(tempfile.mkdtemp(prefix="toolkit-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    keep_compiled_operators(cache)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "HF_"))]:
        del os.environ[name]
    os.environ.update(
        XDG_CACHE_HOME=str(cache),
        HF_HOME=str(cache / "huggingface"),  # also where Accelerate looks for a default config file
        XDG_STATE_HOME=str(cache / "state"),
        HF_HUB_OFFLINE="1",
        TOOLKIT_BACKGROUND="0",  # on, it would take the cores of the tests
        OMP_NUM_THREADS="1",
        PYTHONWARNINGS=",".join(f"error:::{module}" for module in modules()),
    )


def keep_compiled_operators(cache: Path) -> None:
    """Leave what DeepSpeed compiled where it is: it takes most of a minute, and depends on nothing that tests do."""
    compiled = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "torch_extensions").symlink_to(compiled)


def modules() -> list[str]:
    """Every module of the package: the interpreter's own warning filters know no patterns."""
    return ["toolkit", *(module.name for module in pkgutil.walk_packages(toolkit.__path__, "toolkit."))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first: a mistake shows in seconds."""

    def tier(item: pytest.Item) -> int:
        return max((place for place, name in enumerate(LAST, start=1) if item.get_closest_marker(name)), default=0)

    items.sort(key=tier)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import without collections, and leave it out of later ones: measurements ask for one each, over a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Look for no garbage at the end: that takes a second for each worker."""
    gc.freeze()
