"""The toolkit's errors. Every message names the value, what was expected, and the fix."""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

from toolkit.core.redaction import redact, visible

T = TypeVar("T")

_MEMORY_MESSAGES = re.compile(
    r"can't allocate memory|not enough memory|CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA malloc|std::bad_alloc",
    re.IGNORECASE,
)


class ToolkitError(Exception):
    """A user's mistake or a machine's limit. The shell prints the message alone and exits with `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        """Return the message without secrets and terminal control characters."""
        return visible(redact(super().__str__()))

    def _render_traceback_(self) -> list[str]:
        """Return the user's line and the message for IPython, without frames of this package."""
        cells = ("<ipython-input", "ipykernel_")
        frames = [
            frame for frame in traceback.extract_tb(self.__traceback__) if any(mark in frame.filename for mark in cells)
        ]
        line = [f"----> {frames[-1].line}"] if frames and frames[-1].line else []
        return [*line, f"{type(self).__name__}: {self}"]


class StrategyError(ToolkitError):
    """A `Strategy` or `TrainConfig` that cannot be: a wrong value, or a combination that nothing can run."""


class UnknownName(StrategyError, TypeError):
    """An argument that a function or a dataclass does not have, with the one that means the same."""


class StrategyMismatch(ToolkitError):
    """The result differs from the request: engine, world size, bytes, dtypes or tied weights."""

    exit_code = 1


class ModelError(ToolkitError):
    """A model that cannot be found, described or loaded."""


class DataError(ToolkitError):
    """Data that cannot be read: names file, line and reason."""


class RunError(ToolkitError):
    """A run that cannot start or continue: its folder, its lock, or a dead rank."""


class CheckpointError(RunError):
    """A checkpoint that cannot be written, found or taken."""


class OtherFormat(CheckpointError):
    """A checkpoint that another version of the toolkit wrote."""


class NotFinite(RunError):
    """A loss, norm or update that is not finite. The weights are those of the step before."""

    exit_code = 1


class OutOfMemory(RunError):
    """A rank needed more memory than there is: the figures, and the smallest change that could fit."""

    exit_code = 1


class MissingLibrary(ToolkitError):
    """A required library or kernel that is not installed, or does not work here."""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return `" Did you mean 'zero3'?"`, or an empty string where no known word is near."""
    values = {str(candidate).lower().strip("-").replace("_", "-"): candidate for candidate in candidates}
    matches = difflib.get_close_matches(str(word).lower().strip("-").replace("_", "-"), values, n=1, cutoff=0.75)
    return f" Did you mean {values[matches[0]]!r}?" if matches else ""


def value_or(default: T, find: Callable[..., T], *arguments: object) -> T:
    """Return `find(*arguments)`, or `default` if it raises: a missing detail must not hide the message."""
    try:
        return find(*arguments)
    except Exception:
        return default


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or one of its causes is a failed allocation, on a device or the host."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(
        isinstance(cause, MemoryError)
        or type(cause).__name__ == "OutOfMemoryError"  # torch's
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or (isinstance(cause, RuntimeError) and bool(_MEMORY_MESSAGES.search(str(cause))))
        for cause in chain
    )
