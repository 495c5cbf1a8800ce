"""`BackgroundWriter`: the thread that writes a rank's checkpoints while it trains."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_ALIVE = 1.0
"""Seconds after which it is looked whether the thread still lives."""


class BackgroundWriter:
    """A thread that does one piece of work after another, and ends with its owner or the process.

    There before the first: a thread that is started where memory has run out never says that it could not.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._raised: list[BaseException] = []
        shared = (self._work, self._idle, self._raised)
        self._thread = threading.Thread(target=_serve, args=shared, name="toolkit-checkpoint", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._work.put, None)

    def do(self, work: Callable[[], None]) -> None:
        """Start work on the thread. The previous work must be done.

        Raises:
            RuntimeError: where the thread has ended.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the thread that writes checkpoints has ended: the rank's log has the error.")
        self._idle.clear()
        try:
            self._work.put(work)
        except BaseException:
            self._idle.set()
            raise

    def wait(self) -> None:
        """Wait until the work is done, and raise its error."""
        while not self._idle.wait(_ALIVE) and self._thread.is_alive():
            pass
        if self._raised:
            raise self._raised.pop()


def _serve(queue: SimpleQueue[Callable[[], None] | None], idle: threading.Event, raised: list[BaseException]) -> None:
    try:
        while (work := queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                raised.append(error)
            del work  # its owner could not end while this thread holds it
            idle.set()
    finally:
        idle.set()
