"""`find` and `restore`: the newest checkpoint whose hashes hold, into whatever engine and number of ranks there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.identity import Identity, check_same
from toolkit.checkpoints.layout import GENERATOR, WEIGHT, Range, range_of, trained_pieces
from toolkit.checkpoints.manifest import UNREADABLE, Manifest, file_name, listed, misplaced, problems, read_manifest
from toolkit.checkpoints.randomness import write_generators
from toolkit.engines.job import Counters, Job, Prepared, engine_of
from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run goes on from."""

    path: Path | None
    """None where there is no checkpoint: the run starts again."""
    manifest: Manifest | None
    skipped: tuple[str, ...]
    """A sentence for every newer checkpoint that could not be taken."""
    damaged: tuple[Path, ...] = ()
    """Those checkpoints."""

    @classmethod
    def nothing(cls) -> Found:
        """A run's beginning."""
        return cls(path=None, manifest=None, skipped=())

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.manifest.step if self.manifest else 0

    def __str__(self) -> str:
        """What is said to the user."""
        taken = (
            f"resuming from {self.path}, after step {self.step}" if self.path else "no checkpoint: starting from step 0"
        )
        return "\n".join([*self.skipped, taken])


def find(accelerator: Accelerator, checkpoints: Path) -> Found:
    """The newest checkpoint of a run whose hashes hold; every rank hashes a part of the files. A collective.

    Nothing is renamed: `set_aside` does that to the newer ones that are damaged, once it is clear that the run goes on.

    Raises:
        CheckpointError: where there are checkpoints, and none can be taken; where a file system does not answer, which is
            no damage.
    """
    from accelerate.utils import broadcast_object_list, gather_object

    rank, ranks = accelerator.process_index, accelerator.num_processes
    names: list[Any] = [[path.name for path in listed(checkpoints)]]
    if ranks > 1:
        broadcast_object_list(names)
    skipped: list[str] = []
    for name in names[0]:
        path = checkpoints / name
        here = misplaced(path) or problems(path, share=(rank, ranks))
        wrong = list(dict.fromkeys(gather_object(here)))
        if not wrong:
            damaged = tuple(checkpoints / newer for newer in names[0][: len(skipped)])
            return Found(path=path, manifest=read_manifest(path), skipped=tuple(skipped), damaged=damaged)
        if unread := [sentence for sentence in wrong if sentence.startswith(UNREADABLE)]:
            raise CheckpointError(f"{path}: {unread[0]}. Go on where its file system answers, or remove it.")
        skipped.append(f"skipping {path}: {'; '.join(wrong[:3]).removesuffix('.')}. It is set aside as {name}.damaged")
    if skipped:
        said = "; ".join(sentence.partition(". It is")[0].removeprefix("skipping ") for sentence in skipped)
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {checkpoints} can be taken: {said}. "
            "Bring one back from a copy, or remove that folder to start the run again from step 0."
        )
    return Found.nothing()


def set_aside(accelerator: Accelerator, found: Found) -> None:
    """Rename what `find` found damaged, so that it is not taken for the newest again. A collective."""
    import shutil

    accelerator.wait_for_everyone()
    for path in found.damaged if accelerator.is_main_process else ():
        aside = path.with_name(f"{path.name}.damaged")
        if aside.is_symlink():
            aside.unlink()
        elif aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
    accelerator.wait_for_everyone()


def check_fits(found: Found, job: Job, identity: Identity) -> None:
    """Refuse what a checkpoint cannot go on as, before anything is loaded or written.

    Raises:
        CheckpointError: for another model, adapter, base or data; for another order of the data; for fewer steps than
            are done.
    """
    manifest, path = found.manifest, found.path
    if manifest is None or path is None:
        return
    check_same(identity, manifest.identity, path)
    for name, was, is_ in (
        ("global batch", manifest.global_batch, job.global_batch),
        ("seed", manifest.loop.get("seed"), job.loop.seed),
    ):
        if was != is_:
            raise CheckpointError(
                f"{path} was written with {name} {was}, and here it is {is_}: the order of the data stands on it. "
                f"Go on with {name} {was}, or start a new run."
            )
    if job.loop.steps < manifest.step:
        raise CheckpointError(
            f"steps {job.loop.steps}: {path} has done {manifest.step} already. Give --steps {manifest.step} or more."
        )


def restore(prepared: Prepared, schedule: Any, found: Found, identity: Identity) -> None:
    """Write a checkpoint's weights, moments, counters, schedule and generators into a prepared model. A collective.

    Each rank reads of each file only the ranges that it holds, whatever strategy and number of ranks wrote them.

    Raises:
        CheckpointError: for a checkpoint of another model, base or data, or one that lacks a range.
    """
    manifest, path = found.manifest, found.path
    assert manifest is not None, "nothing was found to restore"
    assert path is not None, "a manifest lies in a folder"
    check_fits(found, prepared.job, identity)
    module = prepared.accelerator.unwrap_model(prepared.model)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if differing := sorted(trained ^ set(manifest.tensors)):
        raise CheckpointError(f"{path} and the model differ in what is trained, first in {differing[0]}.")
    with opened(path, manifest) as ranges:
        for kind, piece in trained_pieces(prepared, create=True):
            if tuple(manifest.tensors[piece.name]["shape"]) != piece.shape:
                raise CheckpointError(f"{path} has no tensor {piece.name} of shape {list(piece.shape)}.")
            if piece.tensor.numel():
                ranges.read(Range(kind, piece.name, piece.start, piece.tensor.numel()), piece.tensor)
        engine_of(prepared.job.strategy).restored(prepared, Counters(**manifest.counters))
        _restore_schedule(schedule, manifest.schedule)
        # Last of all: restoring itself may draw. More ranks than wrote take the states in turn.
        write_generators(ranges.generators(prepared.accelerator.process_index % manifest.ranks))
    prepared.accelerator.wait_for_everyone()


def _restore_schedule(schedule: Any, state: Mapping[str, Any]) -> None:
    """Where it stands, and its rates: those of a rule are computed, since its peak or length may be given anew."""
    from torch.optim.lr_scheduler import LambdaLR

    inner = getattr(schedule, "scheduler", schedule)
    ruled = isinstance(inner, LambdaLR)
    own = inner.state_dict()
    left = {"base_lrs", "_last_lr", "lr_lambdas"} if ruled else set()
    inner.load_state_dict({**own, **{name: state[name] for name in own if name in state and name not in left}})
    if ruled:
        inner._last_lr = [
            base * rule(inner.last_epoch) for base, rule in zip(inner.base_lrs, inner.lr_lambdas, strict=True)
        ]
    for group, lr in zip(inner.optimizer.param_groups, inner.get_last_lr(), strict=True):
        group["lr"] = lr


class Ranges:
    """A checkpoint's files, read by kind, name and flat range."""

    def __init__(self, path: Path, manifest: Manifest, files: Mapping[str, Any]) -> None:
        """`files`: open safetensors files by name."""
        self.path, self.manifest, self._files = path, manifest, files
        self._where: dict[tuple[str, str], list[tuple[Range, Any, str]]] = {}
        for name, file in files.items():
            for key in file.keys():  # noqa: SIM118  not a dictionary
                if key.startswith(GENERATOR):
                    continue
                try:
                    (length,) = file.get_slice(key).get_shape()
                    range_ = range_of(key, length)
                except ValueError as error:
                    raise CheckpointError(
                        f"{path / name}: {key!r} names no flat range of a tensor, so this toolkit did not write it. "
                        "Take another checkpoint."
                    ) from error
                self._where.setdefault((range_.kind, range_.name), []).append((range_, file, key))
        for parts in self._where.values():
            parts.sort(key=lambda part: part[0].start)

    def read(self, wanted: Range, into: torch.Tensor) -> None:
        """Copy a range into a flat tensor of its length.

        Raises:
            CheckpointError: where the files lack a part of it.
        """
        at, end = wanted.start, wanted.start + wanted.length
        for range_, file, key in self._where.get((wanted.kind, wanted.name), ()):
            low, high = max(at, range_.start), min(end, range_.start + range_.length)
            if low >= high:
                continue
            if low != at:
                break
            part = file.get_slice(key)[low - range_.start : high - range_.start]
            into[low - wanted.start : high - wanted.start].copy_(part)
            at = high
        if at != end:
            raise CheckpointError(f"{self.path} lacks elements from {at} on of {wanted.kind} of {wanted.name}.")

    def whole(self, name: str, kind: str = WEIGHT) -> torch.Tensor:
        """One tensor put together, in its own shape and dtype.

        Raises:
            CheckpointError: where the files lack a part of it.
        """
        import math

        import torch

        about = self.manifest.tensors[name]
        shape = tuple(about["shape"])
        found = torch.empty(shape, dtype=getattr(torch, about["dtypes"][kind]))
        self.read(Range(kind, name, 0, math.prod(shape)), found.view(-1))
        return found

    def generators(self, rank: int) -> dict[str, torch.Tensor]:
        """The states of the random generators of one of the ranks that wrote."""
        file = self._files[file_name(rank)]
        names = [key for key in file.keys() if key.startswith(GENERATOR)]  # noqa: SIM118
        return {name.partition(":")[2]: file.get_tensor(name) for name in names}


@contextlib.contextmanager
def opened(path: Path, manifest: Manifest) -> Iterator[Ranges]:
    """A checkpoint's tensors, mapped: only what is asked for is read."""
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        names = [name for name in manifest.files if name.endswith(".safetensors")]
        try:
            files = {name: stack.enter_context(safe_open(path / name, framework="pt")) for name in names}
        except SafetensorError as error:
            raise CheckpointError(f"{path} holds a file that is no safetensors file: {error}. Take another.") from error
        yield Ranges(path, manifest, files)
