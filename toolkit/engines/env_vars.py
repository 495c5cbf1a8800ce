"""`engine_environment()`: the environment variables that an engine's libraries read, set only while they read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.engines.base import engine_of
from toolkit.engines.job import Job


@contextmanager
def engine_environment(job: Job) -> Iterator[None]:
    """Set an engine's variables, and restore `os.environ` later: Accelerate and its plugins write into it, too."""
    before = dict(os.environ)
    try:
        for name, value in engine_of(job.strategy).environment(job).items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
