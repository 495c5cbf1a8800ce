"""Traces between cached lengths, children that trace, and work that goes on after an answer."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_forecasting import FP32, config

from toolkit.engines.traces import Trace
from toolkit.forecasting import lengths, trace_cache
from toolkit.forecasting.tracing import trace
from toolkit.models import describe


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("eager", [False, True])
def test_a_trace_between_cached_lengths_is_the_real_one(own_cache: Path, eager: bool) -> None:
    """Also with attention weights, which are squares of the length."""
    spec = describe(config("llama", 2))
    chosen = dataclasses.replace(FP32, attention="eager") if eager else FP32
    known = {length: trace(spec, chosen, batch=2, seq_len=length) for length in (512, 1024, 2048, 4096)}
    for seq_len in (700, 1536, 3000):
        given = lengths.interpolated(known.get, seq_len)
        assert given == trace(spec, chosen, batch=2, seq_len=seq_len)


def test_a_length_has_no_trace_without_lengths_around_it() -> None:
    assert lengths.interpolated(lambda length: None, 1000) is None
    assert lengths.interpolated(pytest.fail, 100) is None
    assert lengths.interpolated(pytest.fail, 200_000) is None


@pytest.mark.parametrize("change", ["size", "event"])
def test_lengths_that_differ_in_kind_give_no_trace(change: str) -> None:
    """As where another kernel runs from some length on."""

    def known(length: int) -> Trace:
        size = 4 * length + (10**6 if change == "size" and length >= 4096 else 0)
        more = [("+", 1, "")] if change == "event" and length >= 4096 else []
        return Trace(stacks=(), events=(("+", size, ""), ("-", size, ""), *more), ends=(None, None, None))

    assert lengths.interpolated(known, 2500) is None
    assert lengths.interpolated(lambda length: known(512 * length // 4096), 2500) is not None


def test_a_child_answers_several_requests_and_errors(own_cache: Path) -> None:
    spec = describe(config("llama", 2))
    wrong = dataclasses.replace(FP32, attention="none such")
    (first,), child = trace_cache._trace_in_child(spec, [FP32], [1], 16), trace_cache._idle[-1]
    with pytest.raises(RuntimeError, match="none such"):
        trace_cache._trace_in_child(spec, [wrong], [1], 16)
    assert trace_cache._trace_in_child(spec, [FP32], [1], 16) == [first] == [[trace(spec, FP32, batch=1, seq_len=16)]]
    assert child.poll() is None
    child.kill()
    child.wait()
    assert trace_cache._trace_in_child(spec, [FP32], [1], 16) == [first]  # by another child


@pytest.mark.slow
def test_after_an_answer_the_background_traces_for_the_next(own_cache: Path) -> None:
    """The command ends at once, its pipe too; the next command with another length imports no torch."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(own_cache), "TOOLKIT_BACKGROUND": "1"}
    ask = [sys.executable, "-X", "importtime", "-m", "toolkit", "forecast", "--sharding", "none", "--hardware", "1x L4"]

    def imports_torch(*words: str) -> bool:
        result = subprocess.run([*ask, *words], env=environ, capture_output=True, text=True, check=True)
        assert "fits" in result.stdout
        return any(line.rpartition("|")[2].strip() == "torch" for line in result.stderr.splitlines())

    assert imports_torch("--seq-len", "512")
    locks = list((own_cache / "accelerate-toolkit" / "background").glob("*.lock"))
    assert locks
    for path in locks:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # the work holds it until its end
    for words in (
        ["--seq-len", "1024"],
        ["--seq-len", "600", "--micro-batch", "2"],
        ["--micro-batch", "1", "--seq-len", "2048"],
        ["--seq-len", "1024", "--hardware", "2x A100-80GB"],
        ["--seq-len", "1024", "--hardware", "2x L4", "--sharding", "zero2"],
    ):
        assert not imports_torch(*words)
