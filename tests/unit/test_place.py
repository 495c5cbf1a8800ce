"""`environment()`: what stands at the head of every notebook."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from importlib import metadata

from toolkit import environment
from toolkit.diagnosis import Environment


def test_it_says_where_with_what_and_when() -> None:
    found = environment()
    assert isinstance(found, Environment)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", found.date)
    assert found.versions["python"] == platform.python_version()
    assert found.versions["torch"] == metadata.version("torch")
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    where, versions = found.tables()
    assert ("date", found.date) in where.rows
    assert [name for name, _ in versions.rows] == list(found.versions)
    assert found.hardware.device.name in str(found)


def test_what_is_not_installed_is_said() -> None:
    without = dataclasses.replace(environment(), versions={"python": "3.11", "deepspeed": None})
    assert "deepspeed  not installed" in str(without)
