"""SIGINT and SIGTERM: the ranks end their step and publish a checkpoint; a second signal kills."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from toolkit.core.errors import value_or
from toolkit.launcher.failures import as_raised
from toolkit.run_folder.folder import Folder
from toolkit.training.resumption import resume_hint


class Stopped(Exception):
    """SIGINT or SIGTERM reached the supervisor, and the run has ended."""

    def __init__(self, number: int, then: str = "") -> None:
        """Create the exception. `number`: the signal's; `then`: a sentence on what is left, and how to continue."""
        super().__init__(f"stopped by {signal.Signals(number).name}" + (f". {then}" if then else ""))
        self.exit_code = 128 + number

    @classmethod
    def of(cls, number: int, folder: Folder) -> Stopped:
        """Return the exception with the message in `folder`, and why a rank refused to publish."""
        refused = [str(error) for record in folder.errors().values() if (error := as_raised(record))]
        then = value_or("", resume_hint, folder)
        return cls(number, " ".join([*filter(None, [then]), *refused[:1]]))


class Stop:
    """Which signal came, and whether another did."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.again = False

    def _handle(self, number: int, _: object) -> None:
        self.again = self.number is not None
        self.number = self.number or number

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals in the main thread. Python allows no other; there the caller stops the supervisor."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
