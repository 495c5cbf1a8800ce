"""`CheckpointWriter`: snapshot into host memory, write in the background on every rank, publish on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.checkpoints.identity import Identity
from toolkit.checkpoints.layout import GENERATOR, Layout, WriteItem, lay_out
from toolkit.checkpoints.manifest import (
    MANIFEST,
    MANIFEST_FORMAT,
    Manifest,
    file_name,
    folder_name,
    list_checkpoints,
    sha256_of,
)
from toolkit.checkpoints.randomness import read_generators
from toolkit.checkpoints.rank_files import (
    BackgroundWriter,
    await_ranks,
    check_space,
    is_disk_full,
    no_room_error,
    note,
    save_tensors,
    sign_of_life,
    write_note,
)
from toolkit.core.atomic_io import sync_folder, write_whole
from toolkit.core.errors import CheckpointError, StrategyError
from toolkit.core.redaction import redact_all
from toolkit.core.units import round_up, timestamp
from toolkit.engines.rank_calls import on_main
from toolkit.engines.records import Prepared
from toolkit.engines.states import SNAPSHOT_CHUNK

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CHECKPOINT_OVERHEAD = 16 * 2**20
"""Bytes of a checkpoint in addition to the tensors: manifest, generators, headers."""

BUFFER_ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes in a buffer."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published checkpoint and its cost."""

    path: Path
    step: int
    size_bytes: int
    stall_seconds: float
    """The time in which the loop waited for it: the snapshot, and the end of the previous write."""
    write_seconds: float
    """From the snapshot to the rename."""


class CheckpointWriter:
    """Writes the checkpoints of one run. Every rank has one and calls it at the same steps.

    Each rank flushes its file into a draft folder. Then rank 0 writes the manifest, renames the folder, and only then removes
    the oldest checkpoint. So after the first one there is always a complete checkpoint.
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
            patience: seconds that rank 0 waits for a rank without a sign of life.

        Raises:
            StrategyError: for an optimizer or a schedule with a state that a checkpoint cannot hold.
            CheckpointError: if the disk has no room for one checkpoint more than `keep`.
        """
        from accelerate.utils import gather_object

        self.prepared, self.schedule, self.folder, self.identity = prepared, schedule, folder, identity
        self.versions, self.keep, self.patience = versions, keep, patience
        _check_schedule(schedule)
        self.main: bool = prepared.accelerator.is_main_process
        self.rank: int = prepared.accelerator.process_index
        self.ranks = range(prepared.job.ranks)
        self.layout: Layout = lay_out(prepared, SNAPSHOT_CHUNK)
        self._waits: bool = any(gather_object([any(map(self.stays, self.layout.mine))]))
        """Whether steps wait for the write. Equal on all ranks, also on one with padding alone."""
        self._chunks: list[torch.Tensor] = []
        self._places: dict[str, tuple[int, int]] = {}
        """Of each item in the snapshot: its chunk, and its first byte there."""
        self._in_file = threading.Event()
        self._writer = BackgroundWriter()
        self._error: BaseException | None = None
        self._published: deque[Published] = deque()
        if self.main:
            folder.mkdir(parents=True, exist_ok=True)
            _clear_partial(folder)
        prepared.accelerator.wait_for_everyone()
        if prepared.accelerator.device.type == "cuda":
            self._make_chunks()  # a lack of memory shows before the first step
        missing = keep + 1 - min(keep, len(list_checkpoints(folder)))
        needed = missing * (self.layout.total_bytes + CHECKPOINT_OVERHEAD)
        on_main(prepared.accelerator, lambda: check_space(folder, needed, f"{missing} checkpoints"))

    def save(self, step: int) -> None:
        """Take a snapshot and write it in the background. A collective that waits for the previous write.

        Raises:
            CheckpointError: if the disk has too little room, or the previous write failed.
        """
        began = time.perf_counter()
        self.wait_all(lambda: check_space(self.folder, self.layout.total_bytes + CHECKPOINT_OVERHEAD, "a checkpoint"))
        tensors = self._snapshot()
        about = self._manifest_fields(step) if self.main else None
        stall = None if self._waits else time.perf_counter() - began
        self._in_file.clear()
        self._writer.do(lambda: self._write(step, tensors, about, began, stall))
        if self._waits:
            self._in_file.wait()
            on_main(self.prepared.accelerator, lambda: None)  # without a time limit, as rank 0 has waited for all

    def stays(self, item: WriteItem) -> bool:
        """Return whether an item is written from its own memory, while the optimizer waits: offloaded states of a GPU.

        They fill most of a node's memory, so a copy would not fit.
        """
        return self.prepared.accelerator.device.type == "cuda" and item.tensor.device.type == "cpu"

    def published(self) -> list[Published]:
        """Return the checkpoints published since the last call, on rank 0. Raise write errors on their own rank."""
        self._raise_background_error()
        # The thread may append during this line.
        return [self._published.popleft() for _ in range(len(self._published))]

    def wait(self) -> None:
        """Wait until the current write is published; on ranks other than 0, until their part is written."""
        self._writer.wait()
        self._raise_background_error()

    def wait_published(self, step: int) -> None:
        """Wait on every rank until the checkpoint of `step`, the last one saved, is published. A collective.

        Raises:
            CheckpointError: on every rank, if rank 0 could not publish it.
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

    def _make_chunks(self) -> None:
        """Allocate the snapshot: buffers of at most `SNAPSHOT_CHUNK` bytes, each filled before another one is begun.

        Pinned memory is rounded up to a power of two.
        """
        import torch

        sizes: list[int] = []
        for item in self.layout.mine:
            if not self.stays(item):
                size = round_up(item.tensor.nbytes, BUFFER_ALIGNMENT)
                chunk = next((at for at, filled in enumerate(sizes) if filled + size <= SNAPSHOT_CHUNK), len(sizes))
                if chunk == len(sizes):
                    sizes.append(0)
                self._places[item.region.key] = (chunk, sizes[chunk])
                sizes[chunk] += size
        pinned = self.prepared.accelerator.device.type == "cuda"
        self._chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def _snapshot(self) -> dict[str, torch.Tensor]:
        """Copy this rank's items into host memory, in buffers that every save uses."""
        import torch

        if not self._places:
            self._make_chunks()
        tensors = {}
        for item in self.layout.items():
            key = item.region.key
            tensors[key] = item.tensor
            if not self.stays(item):
                chunk, start = self._places[key]
                flat = self._chunks[chunk][start : start + item.tensor.nbytes].view(item.tensor.dtype)
                tensors[key] = flat.view(item.tensor.shape)
                tensors[key].copy_(item.tensor, non_blocking=True)
        if self.prepared.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return tensors | {f"{GENERATOR}:{name}": state for name, state in read_generators().items()}

    def _manifest_fields(self, step: int) -> dict[str, Any]:
        """Return the manifest's fields at the time of the snapshot."""
        job = self.prepared.job
        counters = job.engine.counters(self.prepared)
        return {
            "format": MANIFEST_FORMAT,
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

    def _write(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        about: dict[str, Any] | None,
        began: float,
        stall: float | None,
    ) -> None:
        from safetensors import SafetensorError

        partial, snapshot = self.folder / f".{folder_name(step)}.partial", time.perf_counter()
        path = partial / file_name(self.rank)
        try:
            partial.mkdir(exist_ok=True)
            with sign_of_life(partial, self.rank):
                save_tensors(path, tensors)
                if stall is None:
                    note(partial, self.rank, "written").touch()
                    if self.main:
                        await_ranks(partial, self.ranks, self.patience, "written")
                    stall = time.perf_counter() - began
                self._in_file.set()
                sync_folder(path)  # it flushes a file as well
                sync_folder(partial)
                file = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
            write_note(note(partial, self.rank, "json"), json.dumps({"name": path.name, **file}))
            if about is not None:
                final, size = self._publish(partial, about)
                seconds = time.perf_counter() - snapshot
                self._published.append(
                    Published(path=final, step=step, size_bytes=size, stall_seconds=stall, write_seconds=seconds)
                )
        except BaseException as error:
            # The loop raises it at its next step.
            self._error = error
            if is_disk_full(error):
                self._error = no_room_error(self.folder, self.layout.total_bytes + CHECKPOINT_OVERHEAD, "a checkpoint")
            elif isinstance(error, OSError | SafetensorError):
                self._error = CheckpointError(
                    f"the checkpoint {partial} cannot be written: {error}. Complete checkpoints there are unchanged. "
                    "Check that disk, or choose another with --run-dir."
                )
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                note(partial, self.rank, "failed").touch()  # a full disk may have no room for the message
                write_note(note(partial, self.rank, "failed"), str(self._error))
        finally:
            self._in_file.set()

    def _publish(self, partial: Path, about: dict[str, Any]) -> tuple[Path, int]:
        """Wait for every rank's note, write the manifest, rename the folder, remove the oldest checkpoint."""
        await_ranks(partial, self.ranks, self.patience, "json")
        files = {}
        for rank in self.ranks:
            note(partial, rank, "written").unlink(missing_ok=True)
            report = note(partial, rank, "json")
            file = json.loads(report.read_bytes())
            files[file.pop("name")] = file
            report.unlink()
        manifest = Manifest(**redact_all(about), files=files)
        write_whole(partial / MANIFEST, manifest.encode())
        path = self.folder / folder_name(manifest.step)
        partial.rename(path)
        sync_folder(self.folder)
        for old in list_checkpoints(self.folder)[self.keep :]:
            try:
                _remove(old)
            except OSError as error:  # the new checkpoint is safe, and training continues
                warnings.warn(f"the old checkpoint {old} cannot be removed: {error}. Remove it by hand.", stacklevel=2)
        return path, manifest.size_bytes


def _clear_partial(folder: Path) -> None:
    """Remove partial writes and deletions of a killed run."""
    for path in folder.glob(".step-*"):
        if re.fullmatch(r"\.step-\d{8,}\.(partial|old)", path.name):
            shutil.rmtree(path)


def _is_json_value(value: Any) -> bool:
    """Return whether JSON keeps the value unchanged, unlike a schedule's functions."""
    if isinstance(value, list):
        return all(_is_json_value(item) for item in value)
    return value is None or isinstance(value, int | float | str | bool)


def _check_schedule(schedule: Any) -> None:
    """Refuse a schedule with a state that JSON does not keep."""
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
