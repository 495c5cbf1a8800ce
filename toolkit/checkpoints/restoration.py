"""`find_resume_point` and `restore`: the newest valid checkpoint, into any engine and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.identity import Identity, check_same
from toolkit.checkpoints.layout import checkpoint_shards
from toolkit.checkpoints.manifest import UNREADABLE, Manifest, listed, misplacement, read_manifest, validate
from toolkit.checkpoints.randomness import write_generators
from toolkit.checkpoints.stored_tensors import StoredTensors, opened
from toolkit.config.parallelism import Parallelism
from toolkit.core.errors import CheckpointError
from toolkit.engines.base import engine_of
from toolkit.engines.job import Job
from toolkit.engines.records import Counters, Prepared
from toolkit.engines.shards import BUFFER, Shard, copy, parts
from toolkit.engines.states import buffer_shards, persistent_buffers

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a run continues from."""

    path: Path | None
    """None without a checkpoint: the run starts at step 0."""
    manifest: Manifest | None
    skipped: tuple[str, ...]
    """A sentence for every newer checkpoint that could not be taken."""
    damaged: tuple[Path, ...] = ()
    """Those checkpoints."""

    @classmethod
    def nothing(cls) -> ResumePoint:
        """Return the start of a run, without a checkpoint."""
        return cls(path=None, manifest=None, skipped=())

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.manifest.step if self.manifest else 0

    def __str__(self) -> str:
        """Return the line for the user."""
        source = (
            f"resuming from {self.path}, after step {self.step}" if self.path else "no checkpoint: starting from step 0"
        )
        return "\n".join([*self.skipped, source])


def find_resume_point(accelerator: Accelerator, checkpoints: Path) -> ResumePoint:
    """Return a run's newest checkpoint with valid hashes. Each rank hashes a part of the files. A collective.

    Nothing is renamed: `quarantine` does that to the newer ones that are damaged, once it is clear that the run goes on.

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
        here = misplacement(path) or validate(path, share=(rank, ranks))
        wrong = list(dict.fromkeys(gather_object(here)))
        if not wrong:
            damaged = tuple(checkpoints / newer for newer in names[0][: len(skipped)])
            return ResumePoint(path=path, manifest=read_manifest(path), skipped=tuple(skipped), damaged=damaged)
        if unread := [sentence for sentence in wrong if sentence.startswith(UNREADABLE)]:
            raise CheckpointError(f"{path}: {unread[0]}. Resume when its file system answers, or remove it.")
        skipped.append(f"skipping {path}: {'; '.join(wrong[:3]).removesuffix('.')}. It is set aside as {name}.damaged")
    if skipped:
        reasons = "; ".join(sentence.partition(". It is")[0].removeprefix("skipping ") for sentence in skipped)
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {checkpoints} can be taken: {reasons}. "
            "Bring one back from a copy, or remove that folder to start the run again from step 0."
        )
    return ResumePoint.nothing()


def quarantine(accelerator: Accelerator, point: ResumePoint) -> None:
    """Rename what `find` found damaged, so that it is not taken for the newest again. A collective."""
    import shutil

    accelerator.wait_for_everyone()
    for path in point.damaged if accelerator.is_main_process else ():
        aside = path.with_name(f"{path.name}.damaged")
        if aside.is_symlink():
            aside.unlink()
        elif aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
    accelerator.wait_for_everyone()


def check_fits(point: ResumePoint, job: Job, identity: Identity) -> None:
    """Refuse a checkpoint that the run cannot continue, before anything is loaded or written.

    Raises:
        CheckpointError: for another model, adapter, base or data; for another order of the data; for fewer steps than
            are done.
    """
    manifest, path = point.manifest, point.path
    if manifest is None or path is None:
        return
    check_same(identity, manifest.identity, path)
    for name, was, is_ in (
        ("global batch", manifest.global_batch, job.global_batch),
        ("seed", manifest.train_config.get("seed"), job.train_config.seed),
    ):
        if was != is_:
            raise CheckpointError(
                f"{path} was written with {name} {was}, and here it is {is_}: the order of the data stands on it. "
                f"Go on with {name} {was}, or start a new run."
            )
    if job.train_config.steps < manifest.step:
        raise CheckpointError(
            f"steps {job.train_config.steps}: {path} has done {manifest.step} already. Give --steps {manifest.step} or more."
        )


def restore(prepared: Prepared, schedule: Any, point: ResumePoint, identity: Identity) -> None:
    """Write a checkpoint's weights, moments, buffers, counters, schedule and generators into a prepared model. A collective.

    Each rank reads of each file only what it holds itself, whatever strategy and number of ranks wrote them.

    Raises:
        CheckpointError: for a checkpoint of another model, base or data, or one that lacks a part.
    """
    manifest, path = point.manifest, point.path
    assert manifest is not None, "nothing was found to restore"
    assert path is not None, "a manifest lies in a folder"
    check_fits(point, prepared.job, identity)
    module = prepared.accelerator.unwrap_model(prepared.model)
    shards = [(kind, shard) for kind, shard in checkpoint_shards(prepared, create=True) if kind != BUFFER]
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if differing := sorted((trained | set(persistent_buffers(module))) ^ set(manifest.tensors)):
        raise CheckpointError(f"{path} and the model differ in trained tensors or buffers, first in {differing[0]}.")
    with opened(path, manifest) as stored:
        for kind, shard in shards:
            _read(stored, kind, shard)
        engine_of(prepared.job.strategy).after_restore(prepared, Counters(**manifest.counters))
        for shard in buffer_shards(
            module
        ):  # last: an engine's `after_restore` may run the model, which may change them
            _restore_buffer(stored, shard)
        _restore_schedule(schedule, manifest.schedule)
        # Last of all: restoring itself may draw. More data-parallel ranks than wrote take the states in turn.
        wrote = Parallelism(**manifest.parallelism)
        dp_rank = prepared.job.coordinates(prepared.accelerator.process_index).dp_rank
        write_generators(stored.generators(wrote.first_rank(dp_rank % wrote.dp_size)))
    prepared.accelerator.wait_for_everyone()


def _read(stored: StoredTensors, kind: str, shard: Shard) -> None:
    _check_shape(stored, kind, shard)
    stored.read(shard.name, kind, parts(shard))


def _restore_buffer(stored: StoredTensors, shard: Shard) -> None:
    """Read a buffer, unless it differs only by the rounding of the strategy that wrote it."""
    import torch

    _check_shape(stored, BUFFER, shard)
    value = stored.whole(shard.name, BUFFER)
    if not torch.equal(shard.tensor.to("cpu", value.dtype), value):
        copy([(shard.box, value)], parts(shard))


def _check_shape(stored: StoredTensors, kind: str, shard: Shard) -> None:
    shape = stored.manifest.tensors[shard.name].get(kind, {}).get("shape")
    if shape != list(shard.shape):
        raise CheckpointError(f"{stored.path} has no {kind} of {shard.name} of shape {list(shard.shape)}.")


def _restore_schedule(schedule: Any, state: Mapping[str, Any]) -> None:
    """Restore the position and the rates. Rates of a rule are computed, since its peak or length may have changed."""
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
