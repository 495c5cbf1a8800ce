"""`toolkit … | head`: a reader who has seen enough closes the pipe. The command ends quietly, as `git` and `grep` do."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import environment, python

ENDED_BY_PIPE = 128 + signal.SIGPIPE
"""The exit code that a shell shows for `git log | head -1`."""


@pytest.fixture
def closed() -> Iterator[int]:
    """The end for writing of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("line", ["--help", "runs", "runs --json -", "config --sharding fsdp --processes 2"])
def test_a_command_whose_output_nobody_reads_ends_quietly(line: str, closed: int, tmp_path: Path) -> None:
    """Python's own default: output is written by the block, the last one at the end of the process."""
    env = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    done = python(
        "-m", "toolkit", *shlex.split(line), stdout=closed, stderr=-1, capture_output=False, env=env, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (ENDED_BY_PIPE, "")


def test_messages_that_nobody_reads_end_a_command_quietly(closed: int, tmp_path: Path) -> None:
    options = {"stdout": -1, "stderr": closed, "capture_output": False, "cwd": tmp_path}
    done = python("-m", "toolkit", "forecast", "--sharding", "zeroo", **options)
    assert (done.returncode, done.stdout) == (ENDED_BY_PIPE, "")


def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    env = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = python("-m", "toolkit", "runs", stdout=full, stderr=-1, capture_output=False, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "No space left on device" in done.stderr
