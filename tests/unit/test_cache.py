"""What was described or traced by other code is not found again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toolkit
from toolkit.core.cache import cache_file, source_digest

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
