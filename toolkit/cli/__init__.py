"""The command line, `toolkit`."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from toolkit.cli.output import check_target, quiet, show
from toolkit.cli.parser import build_parser, parse
from toolkit.cli.planning_commands import add_other_devices, print_rows
from toolkit.core import background
from toolkit.core.errors import ToolkitError
from toolkit.core.process_lifecycle import collect_rarely
from toolkit.core.redaction import redacted_output
from toolkit.launcher import Stopped

__all__ = ["build_parser", "main"]


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception with exit code 143, so that drafts are removed."""

    def stop(number: int, _: object) -> None:
        print("toolkit: stopped by SIGTERM", file=sys.stderr)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


TRACING_VERBS = ("describe", "forecast", "plan", "timeline", "precisions")

WEIGHT_VERBS = ("export", "generate")
"""Commands that hold tensors themselves: their garbage is large."""


@contextlib.contextmanager
def _noted(verb: str) -> Iterator[None]:
    """On a terminal, say after 2 s what a forecast waits for: imports and traces show no progress."""
    words = "toolkit: reading and tracing the model: about 10 s, once"
    note = threading.Timer(2.0, print, [words], {"file": sys.stderr})
    note.daemon = True
    if sys.stderr.isatty() and verb in TRACING_VERBS:
        note.start()
    try:
        yield
    finally:
        note.cancel()


@redacted_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `toolkit`.

    Exit codes: 0 done, 2 user error, 130 and 143 stopped by a signal, 141 no reader, 1 other errors. 141 is SIGPIPE's:
    `toolkit … | head` ends as `git … | head` and `grep … | head` do.
    """
    try:
        if code := _run(arguments):
            _flush_or_drop()
        return code
    except BrokenPipeError:
        closed = _closed_outputs()
        if not closed:  # another pipe, of ours
            traceback.print_exc()
            return 1
        _drop_output(*closed)
        return 128 + signal.SIGPIPE


def _closed_outputs() -> list[int]:
    """Return which of standard output and error are pipes that nobody reads any more."""
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    return [descriptor for descriptor, state in outputs.poll(0) if state & (select.POLLERR | select.POLLHUP)]


def _drop_output(*descriptors: int) -> None:
    """Drop what could not be written: the end of the interpreter would try once more, and report it."""
    for descriptor in descriptors:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Write out everything, also of `--help`: at the end of the interpreter no error can be handled."""
    flush = getattr(sys.stdout, "flush", lambda: None)  # a program may have been started without it
    try:
        yield
    except SystemExit:
        flush()
        raise
    flush()


def _flush_or_drop() -> None:
    """Write out what a command that ended with an error has left; where that fails, its own error stands."""
    try:
        getattr(sys.stdout, "flush", lambda: None)()
    except OSError:
        _drop_output(1)


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit code. A pipe that nobody reads is left to `main`."""
    try:
        with _flushed(), _terminable():
            words = list(sys.argv[1:] if arguments is None else arguments)
            flags = parse([*words[1:2], "--help"] if words[:1] == ["help"] else words)
            check_target(flags.json, "--json")
            if arguments is None and flags.verb not in WEIGHT_VERBS:
                collect_rarely()
            works_on = arguments is None and flags.verb in TRACING_VERBS and background.enable()
            with quiet(flags.json), _noted(flags.verb):
                result = flags.call(flags)
                print_rows(flags)
            show(result, flags.json)
            if works_on:
                sys.stdout.flush()
                add_other_devices(flags)
                background.start()
    except (ToolkitError, Stopped) as error:
        print(f"toolkit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"toolkit: {str(error) or 'stopped by SIGINT'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            traceback.print_exc()
            return 1
        print(f"toolkit: {error.filename or 'a file'} cannot be written: {error.strerror}. Make room.", file=sys.stderr)
        return 1
    except Exception:  # a bug of ours: as the interpreter would show it, but redacted
        traceback.print_exc()
        return 1
    return 0
