"""Ctrl-C and SIGTERM: recorded as a request to stop, or held until a block ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

SAME_REQUEST: dict[int, float] = {signal.SIGTERM: 3.0, signal.SIGINT: 0.1}
"""Seconds in which a second signal belongs to the first: `timeout` signals a process and its group."""


class StopSignal:
    """SIGTERM and SIGINT as a request: recorded, so that the step can end and a checkpoint be published first.

    A context for the main thread. Python allows no other thread to handle signals; there it does nothing.
    """

    number: int | None = None
    """The first signal that came."""
    again = False
    """Whether a second signal followed the first, later than `SAME_REQUEST`."""
    listening = False

    def _on_signal(self, number: int, _: object) -> None:
        if self.number is None:
            self.number, self._came_at = number, time.monotonic()
        elif time.monotonic() - self._came_at > SAME_REQUEST[number]:
            self.again = True

    def __enter__(self) -> StopSignal:
        """Start to listen."""
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
            }
        self.listening = True
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in reversed(self._before.items()):  # SIGINT last: its handler raises
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait until the block ends: an exception between a fork and its hooks leaves their locks taken."""
    stop = StopSignal()
    try:
        with stop:
            yield
    finally:
        if stop.number is not None:
            signal.raise_signal(stop.number)
