"""The command line, `toolkit`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from toolkit.cli.output import check_target, quiet, show
from toolkit.cli.parser import build_parser, parse
from toolkit.cli.planning_commands import add_other_devices
from toolkit.core import background
from toolkit.core.errors import ToolkitError
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
    """Run the command `toolkit`. Exit codes: 0 done, 2 user error, 130 and 143 stopped by a signal, 1 other errors."""
    try:
        with _terminable():
            words = list(sys.argv[1:] if arguments is None else arguments)
            flags = parse([*words[1:2], "--help"] if words[:1] == ["help"] else words)
            check_target(flags.json, "--json")
            works_on = arguments is None and flags.verb in TRACING_VERBS and background.enable()
            with quiet(flags.json), _noted(flags.verb):
                result = flags.call(flags)
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
        # The reader closed the pipe. The interpreter would write the rest once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
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
