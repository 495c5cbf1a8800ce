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
from toolkit.engines.job import Job
from toolkit.engines.rank_calls import from_main
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
    """A sentence for each newer checkpoint that is invalid."""
    damaged: tuple[Path, ...] = ()
    """The invalid newer checkpoints."""

    @classmethod
    def nothing(cls) -> ResumePoint:
        """Return the start of a run, without a checkpoint."""
        return cls(path=None, manifest=None, skipped=())

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.manifest.step if self.manifest else 0

    def __str__(self) -> str:
        """Return the line for the user."""
        source = (
            f"resuming from {self.path}, after step {self.step}" if self.path else "no checkpoint: starting from step 0"
        )
        return "\n".join([*self.skipped, source])


def find_resume_point(accelerator: Accelerator, checkpoints: Path) -> ResumePoint:
    """Return a run's newest checkpoint with valid hashes. Each rank hashes a part of the files. A collective.

    Nothing is renamed here: `quarantine` renames damaged checkpoints after all checks of the resumed run.

    Raises:
        CheckpointError: if all checkpoints are invalid, or a file system does not answer.
    """
    from accelerate.utils import gather_object

    share = (accelerator.process_index, accelerator.num_processes)
    names = from_main([path.name for path in listed(checkpoints)])
    skipped: dict[Path, str] = {}
    for path in (checkpoints / name for name in names):
        faults = list(dict.fromkeys(gather_object(misplacement(path) or validate(path, share=share))))
        if not faults:
            notes = (
                f"skipping {newer}: {fault}. It is set aside as {newer.name}.damaged"
                for newer, fault in skipped.items()
            )
            return ResumePoint(path=path, manifest=read_manifest(path), skipped=tuple(notes), damaged=tuple(skipped))
        if unread := [fault for fault in faults if fault.startswith(UNREADABLE)]:
            raise CheckpointError(f"{path}: {unread[0]}. Resume when its file system answers, or remove it.")
        skipped[path] = "; ".join(faults[:3]).removesuffix(".")
    if skipped:
        reasons = "; ".join(f"{path}: {fault}" for path, fault in skipped.items())
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {checkpoints} can be taken: {reasons}. "
            "Bring one back from a copy, or remove that folder to start the run again from step 0."
        )
    return ResumePoint.nothing()


def quarantine(accelerator: Accelerator, point: ResumePoint) -> None:
    """Rename the damaged checkpoints of a resume point, so that no later search finds them. A collective."""
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
        CheckpointError: for another model, adapter, base or data, another order of the data, or fewer steps than finished.
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
                f"{path} was written with {name} {was}, not {is_}: the order of the data depends on it. "
                f"Resume with {name} {was}, or start a new run."
            )
    if job.train_config.total_steps < manifest.step:
        raise CheckpointError(
            f"steps {job.train_config.total_steps}: {path} has done {manifest.step} already. Give --steps {manifest.step} or more."
        )


def restore(prepared: Prepared, schedule: Any, point: ResumePoint, identity: Identity) -> None:
    """Write a checkpoint's weights, moments, buffers, counters, schedule and generators into a prepared model. A collective.

    Each rank reads only its own parts of each file, whatever strategy and number of ranks wrote them.

    Raises:
        CheckpointError: for a checkpoint of another model, base or data, or with a missing part.
    """
    import torch

    manifest, path = point.manifest, point.path
    assert manifest is not None, "there is no checkpoint to restore"
    assert path is not None, "a manifest lies in a folder"
    check_fits(point, prepared.job, identity)
    module = prepared.accelerator.unwrap_model(prepared.model)
    shards = [shard for shard in checkpoint_shards(prepared, create=True) if shard.kind != BUFFER]
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if differing := sorted((trained | set(persistent_buffers(module))) ^ set(manifest.tensors)):
        raise CheckpointError(f"{path} and the model differ in trained tensors or buffers, first in {differing[0]}.")
    with opened(path, manifest) as stored:
        for shard in shards:
            _check_shape(stored, shard)
            stored.read(shard.name, shard.kind, parts(shard))
        prepared.job.engine.after_restore(prepared, Counters(**manifest.counters))
        # After the engine's `after_restore`, which may run the model and change buffers.
        for shard in buffer_shards(module):
            _check_shape(stored, shard)
            value = stored.whole(shard.name, BUFFER)
            # Equal values stay: the checkpoint may have rounded them.
            if not torch.equal(shard.tensor.to("cpu", value.dtype), value):
                copy([(shard.box, value)], parts(shard))
        # Last, since restoring may draw random numbers. Additional data-parallel ranks take the stored states in turn.
        wrote = Parallelism(**manifest.parallelism)
        rank = prepared.accelerator.process_index
        dp_rank = prepared.job.coordinates(rank).dp_rank
        # Stages of a pipeline draw for themselves. Under another layout they take the first stage's.
        writer = rank if wrote == prepared.job.parallelism else wrote.first_rank(dp_rank % wrote.dp_size)
        try:
            _restore_schedule(schedule, manifest.schedule)
            write_generators(stored.generators(writer))
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} is damaged: its schedule or its generators cannot be restored ({error}). Take another checkpoint."
            ) from error
    prepared.accelerator.wait_for_everyone()


def _check_shape(stored: StoredTensors, shard: Shard) -> None:
    shape = stored.manifest.tensors[shard.name].get(shard.kind, {}).get("shape")
    if shape != list(shard.shape):
        raise CheckpointError(f"{stored.path} has no {shard.kind} of {shard.name} of shape {list(shard.shape)}.")


def _restore_schedule(schedule: Any, state: Mapping[str, Any]) -> None:
    """Restore the position and the rates. Rates of a LambdaLR are computed: its peak or length may have changed."""
    from torch.optim.lr_scheduler import LambdaLR

    inner = getattr(schedule, "scheduler", schedule)
    own = inner.state_dict()
    computed = {"base_lrs", "_last_lr", "lr_lambdas"} if isinstance(inner, LambdaLR) else set()
    inner.load_state_dict({**own, **{name: state[name] for name in own.keys() & state.keys() - computed}})
    if computed:
        inner._last_lr = [
            base * rule(inner.last_epoch) for base, rule in zip(inner.base_lrs, inner.lr_lambdas, strict=True)
        ]
    for group, lr in zip(inner.optimizer.param_groups, inner.get_last_lr(), strict=True):
        group["lr"] = lr
