"""Redacted logs of ranks, written by one process for each node. Standard library only: it runs before any heavy import."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import hashlib
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from toolkit.core import redaction

START_SECONDS = 60.0
"""Time limit for the start of the redacting process."""

LAST_SECONDS = 1.0
"""Time that a rank's end waits for its last lines to be written: a child may hold its streams open."""


def tee_output(log: Path, *, rank: int, supervised: bool, token: str) -> None:
    """Copy everything that this process prints into `log`, from libraries and crashes, too.

    Under a supervisor rank 0 is shown too, both streams on standard output, and the other ranks are not; without one
    (a bare `accelerate launch`) everybody prints as before. `token` names the run.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if os.isatty(1):  # a progress bar reads the width of the terminal, and finds a pipe
        os.environ.setdefault("COLUMNS", str(os.get_terminal_size(1).columns))
    _flush()
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if supervised:
        redact_streams([1, 2], [1, log_file] if rank == 0 else [log_file], token)
    else:
        redact_streams([1], [1, log_file], token)
        redact_streams([2], [2, log_file], token)
    os.close(log_file)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()


def redact_streams(streams: Sequence[int], targets: Sequence[int], token: str) -> None:
    """Send file descriptors through the node's redacting process on to `targets`, until this process ends."""
    before = [os.dup(stream) for stream in streams]
    source, sink = os.pipe()
    connection = _hand_over([source, *targets], token)
    for stream in streams:
        os.dup2(sink, stream)
    os.close(source)
    os.close(sink)

    def restore() -> None:
        _flush()
        for stream, original in zip(streams, before, strict=True):
            os.dup2(original, stream)
        connection.settimeout(LAST_SECONDS)
        with contextlib.suppress(OSError):
            connection.recv(1)

    atexit.register(restore)


def _hand_over(descriptors: Sequence[int], token: str) -> socket.socket:
    """Give a source and its targets to the redacting process, which the first rank of a node starts.

    Returns:
        The connection. It ends when all of the source has been written.

    Raises:
        PermissionError: where another user listens at the run's address.
        TimeoutError: where the process does not start.
    """
    # A name without a file (Linux's abstract namespace): nothing is left of it when the process has ended.
    address = f"\0accelerate-toolkit-{hashlib.sha256(token.encode()).hexdigest()}"
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            if not redaction.is_own(connection):
                raise PermissionError("another user listens at the address of this run's redacting process")
            socket.send_fds(connection, [b"+"], descriptors)
            if connection.recv(1):
                return connection
        except ConnectionRefusedError:
            _start_redaction(address)
        except (ConnectionResetError, BrokenPipeError):
            pass  # it ended with its last rank: another one follows
        connection.close()
        time.sleep(0.01)
    raise TimeoutError(f"the process that writes the ranks' output has not started within {START_SECONDS:.0f} s")


def _start_redaction(address: str) -> None:
    """Start the node's redacting process, unless another rank has."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
            raise
        listener.listen(128)
        command = [sys.executable, "-I", "-S", redaction.__file__]
        # Its own session: a signal to a rank's group must not stop the process that writes its last output.
        _started.append(
            subprocess.Popen(command, stdin=listener.fileno(), stdout=subprocess.DEVNULL, start_new_session=True)
        )


_started: list[subprocess.Popen[bytes]] = []
"""None or one: it outlives this process, which does not wait for it."""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
