"""`CheckpointWriter`: a snapshot into host memory, written in the background by every rank, published whole by the first."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.checkpoints.background_writer import BackgroundWriter
from toolkit.checkpoints.file_hashes import sha256_of
from toolkit.checkpoints.identity import Identity
from toolkit.checkpoints.layout import GENERATOR, Layout, lay_out
from toolkit.checkpoints.manifest import FORMAT, NAME, Manifest, file_name, folder_name, list_checkpoints
from toolkit.checkpoints.randomness import read_generators
from toolkit.core.atomic_io import sync_folder, write_whole
from toolkit.core.errors import CheckpointError, StrategyError
from toolkit.core.redaction import redact_all
from toolkit.core.units import format_bytes, timestamp
from toolkit.engines.base import engine_of
from toolkit.engines.records import Prepared
from toolkit.engines.timeouts import on_main, ticking

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

SLACK = 16 * 2**20
"""Bytes besides the tensors: manifest, generators, headers."""

_POLL = 0.02


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published checkpoint and its cost."""

    path: Path
    step: int
    size_bytes: int
    stall_seconds: float
    """How long the loop stood still for it: the snapshot, and the wait for the one before."""
    write_seconds: float
    """From the snapshot to its name."""


class CheckpointWriter:
    """Writes the checkpoints of one run. Every rank has one and calls it at the same steps.

    Each rank flushes its file into a draft folder. Then rank 0 writes the manifest, renames the folder, and only then removes
    the oldest checkpoint. So there is always a complete one after the first.
    """

    def __init__(
        self,
        prepared: Prepared,
        schedule: Any,
        folder: Path,
        identity: Identity,
        *,
        versions: Mapping[str, Any],
        keep: int = 2,
        patience: float = 600.0,
    ) -> None:
        """Lay out which rank writes what, and remove partial writes of a killed run. A collective.

        Args:
            prepared: model and optimizer after `prepare`, and after `restore` in a resumed run.
            schedule: the learning-rate schedule.
            folder: the run's `checkpoints/`, held by this run's lock.
            identity: of the training.
            versions: of the libraries, for the manifest.
            keep: complete checkpoints to keep.
            patience: seconds that rank 0 waits for another rank's file without a sign of life.

        Raises:
            StrategyError: for an optimizer or a schedule whose state a checkpoint cannot hold.
            CheckpointError: where the disk has no room for one checkpoint more than `keep`.
        """
        self.prepared, self.schedule, self.folder, self.identity = prepared, schedule, folder, identity
        self.versions, self.keep, self.patience = versions, keep, patience
        _check_schedule(schedule)
        self.main: bool = prepared.accelerator.is_main_process
        self.rank: int = prepared.accelerator.process_index
        self.layout: Layout = lay_out(prepared)
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._writer = BackgroundWriter()
        self._error: BaseException | None = None
        self._published: deque[Published] = deque()
        if self.main:
            folder.mkdir(parents=True, exist_ok=True)
            clear_partial(folder)
        prepared.accelerator.wait_for_everyone()
        if prepared.accelerator.device.type == "cuda":
            self._make_buffers()  # a lack of memory shows before the first step
        missing = keep + 1 - min(keep, len(list_checkpoints(folder)))
        needed = missing * (self.layout.total_bytes + SLACK)
        on_main(prepared.accelerator, lambda: check_space(folder, needed, f"{missing} checkpoints"))

    def save(self, step: int) -> None:
        """Take a snapshot and write it in the background. A collective; waits for the one before.

        Raises:
            CheckpointError: where the disk has too little room, or the one before could not be written.
        """
        began = time.perf_counter()
        self.wait_all(lambda: check_space(self.folder, self.layout.total_bytes + SLACK, "a checkpoint"))
        tensors = self._snapshot()
        about = self._manifest_fields(step) if self.main else None
        stall = time.perf_counter() - began
        self._writer.do(lambda: self._write(step, tensors, about, stall))

    def published(self) -> list[Published]:
        """Return what was published since the last call, on rank 0. Raise write errors on their own rank."""
        self._raise_background_error()
        # One by one: the thread may add another meanwhile.
        return [self._published.popleft() for _ in range(len(self._published))]

    def wait(self) -> None:
        """Wait until the current write is published; on other ranks than 0, until their part is written."""
        self._writer.wait()
        self._raise_background_error()

    def wait_published(self, step: int) -> None:
        """Wait on every rank until the checkpoint of `step`, the last one saved, has its name. A collective.

        Raises:
            CheckpointError: on every rank, where rank 0 could not publish it.
        """
        published = self.wait_all((self.folder / folder_name(step)).exists)
        assert published, f"step {step} was saved last"

    def wait_all(self, then: Callable[[], T]) -> T:
        """Wait until the current write is published. Return `then()` of rank 0. A collective without a time limit."""

        def work() -> T:
            self.wait()
            return then()

        if not self.main:
            self.wait()
        return on_main(self.prepared.accelerator, work)

    def _raise_background_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _make_buffers(self) -> None:
        import torch

        sizes: dict[torch.dtype, int] = {}
        for item in self.layout.mine:
            sizes[item.tensor.dtype] = sizes.get(item.tensor.dtype, 0) + item.region.length
        pinned = self.prepared.accelerator.device.type == "cuda"
        self._buffers = {dtype: torch.empty(n, dtype=dtype, pin_memory=pinned) for dtype, n in sizes.items()}

    def _snapshot(self) -> dict[str, torch.Tensor]:
        """Copy this rank's items into host memory, in flat buffers that are used again."""
        import torch

        if not self._buffers:
            self._make_buffers()
        at = dict.fromkeys(self._buffers, 0)
        copies = {}
        for item in self.layout.items():
            dtype, length = item.tensor.dtype, item.region.length
            copy = self._buffers[dtype][at[dtype] : at[dtype] + length].view(item.tensor.shape)
            copy.copy_(item.tensor, non_blocking=True)
            at[dtype] += length
            copies[item.region.key] = copy
        if self.prepared.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return copies | {f"{GENERATOR}:{name}": state for name, state in read_generators().items()}

    def _manifest_fields(self, step: int) -> dict[str, Any]:
        """Return the manifest's fields at the time of the snapshot."""
        job = self.prepared.job
        counters = engine_of(job.strategy).counters(self.prepared)
        return {
            "format": FORMAT,
            "step": step,
            "parallelism": dataclasses.asdict(job.parallelism),
            "global_batch": job.global_batch,
            "strategy": dataclasses.asdict(job.strategy),
            "train_config": dataclasses.asdict(job.train_config),
            "counters": dataclasses.asdict(counters),
            "schedule": self.schedule.state_dict(),
            "tensors": self.layout.tensors,
            "identity": dataclasses.asdict(self.identity),
            "versions": dict(self.versions),
            "written": timestamp(),
        }

    def _write(self, step: int, tensors: dict[str, torch.Tensor], about: dict[str, Any] | None, stall: float) -> None:
        from safetensors import SafetensorError

        began = time.perf_counter()
        partial = self.folder / f".{folder_name(step)}.partial"
        name = file_name(self.rank)
        try:
            partial.mkdir(exist_ok=True)
            with _sign_of_life(partial, self.rank):
                write_tensors(partial / name, tensors)
                sync_folder(partial)
                note = {"sha256": sha256_of(partial / name), "bytes": (partial / name).stat().st_size}
            _write_atomically(_done_file(partial, self.rank), json.dumps({"name": name, **note}))
            if about is not None:
                path, size = self._publish(partial, about)
                seconds = time.perf_counter() - began
                self._published.append(
                    Published(path=path, step=step, size_bytes=size, stall_seconds=stall, write_seconds=seconds)
                )
        except BaseException as error:
            # An error in the thread is raised by the loop at its next step.
            self._error = error
            if _is_disk_full(error):
                self._error = _no_room_error(self.folder, self.layout.total_bytes + SLACK, "a checkpoint")
            elif isinstance(error, OSError | SafetensorError):
                self._error = CheckpointError(
                    f"the checkpoint {partial} cannot be written: {error}. Complete ones there are as they were. "
                    "Look at that disk, or choose another with --run-dir."
                )
            with contextlib.suppress(OSError):
                (partial / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                _failed_file(partial, self.rank).touch()  # even where the disk has no room for the message
                _write_atomically(_failed_file(partial, self.rank), str(self._error))

    def _publish(self, partial: Path, about: dict[str, Any]) -> tuple[Path, int]:
        """Wait for every rank's note, write the manifest, give the folder its name, remove the oldest."""
        ranks = range(self.prepared.job.ranks)
        self._await(partial, ranks)
        files = {}
        for rank in ranks:
            note = json.loads(_done_file(partial, rank).read_bytes())
            files[note.pop("name")] = note
            _done_file(partial, rank).unlink()
        manifest = Manifest(**redact_all(about), files=files)
        write_whole(partial / NAME, manifest.encode())
        path = self.folder / folder_name(manifest.step)
        partial.rename(path)
        sync_folder(self.folder)
        for old in list_checkpoints(self.folder)[self.keep :]:
            try:
                _remove(old)
            except OSError as error:  # the new checkpoint is safe, and training continues
                warnings.warn(f"the old checkpoint {old} cannot be removed: {error}. Remove it yourself.", stacklevel=2)
        return path, manifest.size_bytes

    def _await(self, partial: Path, ranks: range) -> None:
        """Wait until every rank has recorded its file.

        Raises:
            CheckpointError: where a rank could not write, or says nothing for too long.
        """
        waiting = _Waiting(partial, self.patience)
        while missing := [rank for rank in ranks if not _done_file(partial, rank).exists()]:
            failed = [rank for rank in missing if _failed_file(partial, rank).exists()]
            if failed:
                message = _failed_file(partial, failed[0]).read_text()
                raise CheckpointError(f"rank {failed[0]} could not write its part of {partial}: {message}")
            if waiting.too_long():
                raise CheckpointError(
                    f"no file of rank(s) {', '.join(map(str, missing))} in {partial} after {self.patience:g} s. All hosts "
                    "have to see one run folder: choose one on a shared disk with --run-dir."
                )
            time.sleep(_POLL)


@contextlib.contextmanager
def _sign_of_life(partial: Path, rank: int) -> Iterator[None]:
    """Let a file grow while this rank works: flushing and hashing take long and change no other file."""
    path = partial / f"rank-{rank:05d}.alive"
    with path.open("ab", buffering=0) as file, ticking(lambda: file.write(b".")):
        yield
    path.unlink()


class _Waiting:
    """A deadline that restarts whenever a file in a folder grows: a slow disk is no hung rank."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._size, self._since = -1, 0.0

    def too_long(self) -> bool:
        size = 0
        with contextlib.suppress(OSError):  # it has its name by now
            size = sum(file.stat().st_size for file in self._folder.iterdir())
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since > self._seconds


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file and flush it to the disk."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it the owner's alone
    with path.open("rb") as file:
        os.fsync(file.fileno())


def clear_partial(folder: Path) -> list[str]:
    """Remove partial writes and deletions of a killed run. Return the removed names."""
    left = [path for path in folder.iterdir() if path.name.startswith(".step-")] if folder.is_dir() else []
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def check_space(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin what does not fit on the disk.

    Raises:
        CheckpointError: with the bytes that are needed and free.
    """
    if shutil.disk_usage(folder).free < needed:
        raise _no_room_error(folder, needed, what)


def _no_room_error(folder: Path, needed: int, what: str) -> CheckpointError:
    free = shutil.disk_usage(folder).free
    return CheckpointError(
        f"the disk of {folder} is too full for {what}: {format_bytes(needed)} ({needed:,} bytes) are needed, "
        f"{format_bytes(free)} ({free:,} bytes) are free. Complete checkpoints there are as they were. Make room, "
        "lower --keep, or choose another disk with --run-dir."
    )


def _is_disk_full(error: BaseException) -> bool:
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error) or "StorageFull" in str(error)


def _is_json_value(value: Any) -> bool:
    """Return whether JSON returns the value unchanged; a schedule's functions are not such values."""
    if isinstance(value, list):
        return all(_is_json_value(item) for item in value)
    return value is None or isinstance(value, int | float | str | bool)


def _done_file(partial: Path, rank: int) -> Path:
    """Return the file in which a rank records that its part is written."""
    return partial / f"rank-{rank:05d}.json"


def _write_atomically(note: Path, what: str) -> None:
    """Write a note whole. Nothing may come behind it: rank 0 renames the folder as soon as it sees the last one."""
    draft = note.with_suffix(".tmp")
    draft.write_text(what, encoding="utf-8")
    os.replace(draft, note)


def _failed_file(partial: Path, rank: int) -> Path:
    """Return the file in which a rank records that its part failed."""
    return partial / f"rank-{rank:05d}.failed"


def _check_schedule(schedule: Any) -> None:
    """Refuse a schedule whose state changes in JSON."""
    state = schedule.state_dict()
    odd = [name for name, value in state.items() if not _is_json_value(value)]
    if odd:
        inner = type(getattr(schedule, "scheduler", schedule)).__name__
        raise StrategyError(
            f"a checkpoint cannot hold the state of {inner} ({', '.join(odd)} is more than numbers). "
            "Use a schedule of torch with plain numbers, such as LambdaLR over one function."
        )


def _remove(path: Path) -> None:
    """Rename a folder, then delete it: a half-deleted folder never counts as a checkpoint."""
    renamed = path.with_name(f".{path.name}.old")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)
