"""Phases of a step: `phase(name)` marks the beginning and the end of one, and calls the observers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

PHASES = ("load", "prepare", "forward", "backward", "step", "save")
"""In the order of a run. Load begins with the process; recomputation belongs to backward."""

PREFIX = "toolkit/"
"""Prefix of a phase's name in a profiler's trace."""

Observer = Callable[[str, bool], None]
"""Called with a phase's name, and True where it begins, False where it ends."""

_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Call `observer` at both ends of every phase, until the returned function is called."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a phase: a call to every observer at both ends; where torch profiles, `record_function("toolkit/<name>")` too.

    Raises:
        ValueError: for a name that is not in `PHASES`.
    """
    if name not in PHASES:
        raise ValueError(f"phase {name!r}: expected one of {', '.join(PHASES)}")
    # Without torch there is no profiler, and importing it takes two seconds.
    torch = sys.modules.get("torch")
    profiled = torch and torch.autograd._profiler_enabled()
    mark = torch.profiler.record_function(PREFIX + name) if torch and profiled else nullcontext()
    for observer in _observers.copy():
        observer(name, True)
    try:
        with mark:
            yield
    finally:
        for observer in _observers.copy():
            observer(name, False)
