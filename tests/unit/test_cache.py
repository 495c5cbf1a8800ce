"""What was described or traced by other code is not found again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import toolkit
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.cache import _version, cache_file, source_digest
from toolkit.devices.machine import hardware
from toolkit.engines.job import resolve
from toolkit.forecasting.memory import trace_configs
from toolkit.forecasting.traces import _cache_path
from toolkit.models import describe

PACKAGE = Path(toolkit.__file__).parent


@pytest.mark.parametrize(
    "changed",
    [
        "engines/losses.py",
        "engines/fsdp/simulation.py",
        "models/spec.py",
        "forecasting/tracker.py",
        "engines/adapters.py",
        "config/tables.py",
    ],
)
def test_a_changed_byte_is_a_miss(changed: str, tmp_path: Path) -> None:
    copy = tmp_path / "toolkit"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_digest(copy) == source_digest(PACKAGE)
    source_digest.cache_clear()
    with (copy / changed).open("ab") as file:
        file.write(b"#")
    assert source_digest(copy) != source_digest(PACKAGE)


def test_the_digest_is_part_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_file("traces", b"key")
    monkeypatch.setattr("toolkit.core.cache.source_digest", lambda package: "other")
    assert cache_file("traces", b"key") != before


def test_a_copy_of_the_sources_keeps_what_lora_traced_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither package is installed, and no version of them is needed."""
    discover = metadata.Distribution.discover

    def installed(**options: Any) -> Iterator[metadata.Distribution]:
        missing = ("accelerate-toolkit", "bitsandbytes")
        return (found for found in discover(**options) if found.metadata["Name"] not in missing)

    spec, strategy = describe(None), Strategy(sharding="none", adapter="lora")
    (config,) = trace_configs(resolve(strategy, TrainConfig(), spec, 1, hardware("cpu").device), masked=True)
    monkeypatch.setattr(metadata.Distribution, "discover", installed)
    _version.cache_clear()
    assert _cache_path(spec, config, 1, 64).parent.name == "traces"
