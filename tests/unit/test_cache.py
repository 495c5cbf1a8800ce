"""What was described or traced by other code is not found again; what is damaged or another user's is not used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import toolkit
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.cache import _version, cache_file, cache_folder, keep, recall, source_digest, state_folder
from toolkit.core.errors import ToolkitError
from toolkit.devices.machine import hardware
from toolkit.engines.resolution import resolve
from toolkit.forecasting.memory import trace_configs
from toolkit.forecasting.trace_cache import _cache_path, _read_file
from toolkit.models import describe

PACKAGE = Path(toolkit.__file__).parent


@pytest.mark.parametrize(
    "changed",
    [
        "engines/losses.py",
        "engines/fsdp/simulation.py",
        "models/spec.py",
        "forecasting/tracker.py",
        "transforms/adapters.py",
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
        return (each for each in discover(**options) if each.metadata["Name"] not in missing)

    spec, strategy = describe(None), Strategy(sharding="none", adapter="lora")
    (config,) = trace_configs(resolve(strategy, TrainConfig(), spec, 1, hardware("cpu").device), masked=True)
    monkeypatch.setattr(metadata.Distribution, "discover", installed)
    _version.cache_clear()
    assert _cache_path(spec, config, 1, 64).parent.name == "traces"


def damage(path: Path) -> Iterator[str]:
    """Put one thing after the other in the place of a file, and name it."""
    kept = path.read_bytes()
    value = json.loads(kept)["value"]
    changed = [[value], *({**value, name: junk} for name in value for junk in (-1, "4", None, "../x", []))]
    texts = {
        "empty": b"", "cut": kept[:-3], "longer": kept + b"{}", "deep": b"[" * 200_000, "not UTF-8": b"\xff",
        "deep value": kept[:84] + b'{"a":' * 900 + b"1" + b"}" * 902, "number": b"1", "no digest": json.dumps(value).encode(),
        **{f"changed {number}": json.dumps({**json.loads(kept), "value": each}).encode() for number, each in enumerate(changed)},
    }  # fmt: skip
    for name, text in texts.items():
        path.write_bytes(text)
        yield name
    for name, put in {
        "pipe": lambda: os.mkfifo(path),
        "endless": lambda: path.symlink_to("/dev/zero"),
        "circle": lambda: path.symlink_to(path.name),
        "other": lambda: keep(path.with_name("other"), value) or path.with_name("other").rename(path),
        "folder": path.mkdir,
    }.items():
        path.unlink(missing_ok=True)
        put()
        yield name
    path.rmdir()


def test_what_is_damaged_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec, value = describe(None), {"size": 3, "name": "a", "nested": {"list": [1, 2.5, None]}}
    path = cache_folder("any") / "key.json"
    keep(path, value)
    assert recall(path, dict) == value
    for name in damage(path):
        assert recall(path, dict) is None, name
        keep(path, value)
        assert recall(path, dict) == (None if name == "folder" else value), name
    (path,) = (tmp_path / "accelerate-toolkit/specs").iterdir()
    for name in damage(path):
        if name in ("changed 1", "pipe"):  # it is described again, in half a second
            assert describe(None) == spec, name

    def forecast() -> str:
        _read_file.cache_clear()
        train_config = TrainConfig(seq_len=32, micro_batch=1)
        return toolkit.forecast(spec, Strategy(), "1x A100-80GB", train_config).to_json()

    expected = forecast()
    paths = list((tmp_path / "accelerate-toolkit/traces").iterdir())
    for path, put in zip(paths, (lambda path: path.write_text('{"stacks": []}'), os.mkfifo), strict=True):
        path.unlink()
        put(path)
    assert forecast() == expected
    assert all(recall(path, dict) for path in paths)


def test_a_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    spec = describe(None)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    for function, variable in ((cache_folder, "XDG_CACHE_HOME"), (state_folder, "XDG_STATE_HOME")):
        with pytest.raises(ToolkitError, match=rf"accelerate-toolkit belongs to another user\. Set {variable} to a"):
            function("any")
    for file in (tmp_path / "accelerate-toolkit/specs").iterdir():
        file.write_text("not read, and not written")
    assert describe(None) == spec
    assert file.read_text() == "not read, and not written"
