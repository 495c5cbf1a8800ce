"""A rank's part of a checkpoint: the thread that writes it, its file, and notes by which rank 0 sees the progress."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from toolkit.core.errors import CheckpointError
from toolkit.core.units import format_bytes
from toolkit.engines.rank_calls import ticking

if TYPE_CHECKING:
    import torch

_ALIVE = 1.0
"""Seconds between two checks of the thread."""


class BackgroundWriter:
    """A thread that runs one function after another, and ends with its owner or the process.

    It starts before the first save, since a start without free memory fails silently.
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
        """Start `work` on the thread. The previous work must have ended.

        Raises:
            RuntimeError: if the thread has ended.
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
        """Wait for the current work, and raise its error."""
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
            del work  # it refers to the owner, which could not end otherwise
            idle.set()
    finally:
        idle.set()


_NOTE_POLL = 0.02

LESS_ROOM = "Complete checkpoints there are unchanged. Make room, lower --keep, or choose another disk with --run-dir."


def check_space(folder: Path, needed: int, what: str, fix: str = LESS_ROOM) -> None:
    """Refuse to write more than the disk has free.

    Raises:
        CheckpointError: with the bytes that are needed and free.
    """
    if shutil.disk_usage(folder).free < needed:
        raise no_room_error(folder, needed, what, fix)


def no_room_error(folder: Path, needed: int, what: str, fix: str = LESS_ROOM) -> CheckpointError:
    """Return the error for a full disk, with the needed and the free bytes."""
    free = shutil.disk_usage(folder).free
    return CheckpointError(
        f"the disk of {folder} is too full for {what}: {format_bytes(needed)} ({needed:,} bytes) are needed, "
        f"{format_bytes(free)} ({free:,} bytes) are free. {fix}"
    )


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error of Python's or safetensors' writer means a full disk."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error) or "StorageFull" in str(error)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file from the tensors' own memory; only tensors that are not contiguous are copied."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read it


def note(partial: Path, rank: int, kind: str) -> Path:
    """Return the path of a rank's note.

    `alive` grows while the rank works. `written`: its file no longer needs the engine's memory. `json`: its file is on the
    disk, with its hash. `failed`: the reason.
    """
    return partial / f"rank-{rank:05d}.{kind}"


def write_note(path: Path, text: str) -> None:
    """Write a note whole, as the rank's last write: rank 0 renames the folder after the last note."""
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


@contextlib.contextmanager
def sign_of_life(partial: Path, rank: int) -> Iterator[None]:
    """Let a file grow while this rank works. Flushing and hashing take long and change no other file."""
    path = note(partial, rank, "alive")
    with path.open("ab", buffering=0) as file, ticking(lambda: file.write(b".")):
        yield
    path.unlink()


def await_ranks(partial: Path, ranks: range, patience: float, kind: str) -> None:
    """Wait for a note of this kind from every rank, as long as any file in the folder grows: a slow disk is no hung rank.

    Raises:
        CheckpointError: if a rank could not write, or nothing grows for `patience` seconds.
    """
    before, since = -1, time.monotonic()
    while missing := [rank for rank in ranks if not note(partial, rank, kind).exists()]:
        for rank in missing:
            if (failed := note(partial, rank, "failed")).exists():
                raise CheckpointError(f"rank {rank} could not write its part of {partial}: {failed.read_text()}")
        size = 0
        with contextlib.suppress(OSError):  # another rank may remove a file
            size = sum(file.stat().st_size for file in partial.iterdir())
        if size != before:
            before, since = size, time.monotonic()
        if time.monotonic() - since > patience:
            raise CheckpointError(
                f"no file of ranks {', '.join(map(str, missing))} in {partial} after {patience:g} s. All hosts "
                "have to see one run folder: choose one on a shared disk with --run-dir."
            )
        time.sleep(_NOTE_POLL)
