"""DeepSpeed in a worker: its compiled operators, how the model is read and stepped, and where its memory is."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import StrategyError
from toolkit.core.phases import phase
from toolkit.core.units import dtype_name
from toolkit.engines.base import Engine
from toolkit.engines.deepspeed.own_loop import ZeroLoop
from toolkit.engines.deepspeed.zero3 import copies, stage_of
from toolkit.engines.deferred import broadcast, defer, end_deferral
from toolkit.engines.gradients import check_gradients
from toolkit.engines.job import Job
from toolkit.engines.records import Counters, Prepared, StateMemory, StepResult
from toolkit.engines.shards import MASTER, PARAMETER, Shard, whole_box
from toolkit.engines.states import buffer_shards, measured_state, optimizer_shards, set_steps, steps_of

if TYPE_CHECKING:
    import torch


LONGEST_BUILD = 1800.0
"""Seconds that no compilation of an operator takes."""

SIZES = {
    "reduce_bucket_size": 2**20,
    "stage3_prefetch_bucket_size": int(0.9 * 2**20),
    "stage3_param_persistence_threshold": 10 * 2**10,
}
"""Accelerate's rule for "auto" at hidden size 1,024, for models of unknown size."""

LOCAL_FILESYSTEMS = ("apfs", "btrfs", "ext", "f2fs", "overlay", "tmpfs", "xfs", "zfs")


class ZeroState(Engine):
    """The worker's half of the engine."""

    own_loop = ZeroLoop
    needs_every_group = True
    model_no_sync = False

    def fill(self, job: Job, model: Any) -> None:
        """Partition each weight as soon as it is packed under stage 3: transformers skips `zero.Init` for packed weights."""
        if stage_of(job.strategy) < 3:
            super().fill(job, model)
            return
        import deepspeed
        from transformers.integrations.deepspeed import deepspeed_config

        init = deepspeed.zero.Init(config_dict_or_path=deepspeed_config(), dtype=model.dtype)
        model.streamed_weights.fill(model, init._zero_init_param)
        for buffer in model.buffers():  # DeepSpeed does not move a model that is partitioned
            buffer.data = buffer.data.to(init.local_device)

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Gather a mixture of experts whole under ZeRO-3: ranks with different routes would wait for each other.

        Without a spec, set the sizes that Accelerate would read from `model.config`, where there is none.
        """
        from accelerate.state import AcceleratorState

        config = getattr(model, "config", None)
        if not (hasattr(config, "hidden_size") or hasattr(config, "hidden_sizes")):
            zero = AcceleratorState().deepspeed_plugin.deepspeed_config["zero_optimization"]
            zero.update({name: size for name, size in SIZES.items() if zero.get(name) == "auto"})
        if stage_of(job.strategy) == 3 and job.spec is not None and job.spec.moe is not None:
            from deepspeed.utils import set_z3_leaf_modules

            block = job.spec.moe.block
            set_z3_leaf_modules(model, list({type(m) for m in model.modules() if type(m).__name__ == block}))

    def defer_values(self, job: Job, model: torch.nn.Module) -> None:
        """Gather a partitioned parameter when a script uses it. `preparing` partitions it again."""
        if stage_of(job.strategy) == 3:
            parts = ((name, each) for name, each in model.named_parameters() if hasattr(each, "ds_tensor"))
            defer(parts, _gather)

    @contextmanager
    def preparing(self, job: Job, model: torch.nn.Module) -> Iterator[None]:
        """Partition what the script gathered, assigned or added since `zero.Init`, with rank 0's values."""
        import torch
        from accelerate import PartialState
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        end_deferral(model)
        parameters: list[tuple[str, Any]] = list(model.named_parameters())
        wide = next((name for name, each in parameters if each.dtype == torch.float64), None)
        if wide and stage_of(job.strategy) == 3 and job.device.kind == "cuda":  # InsertPostInitMethodToModuleSubClasses
            raise StrategyError(
                f"{wide} is float64, which zero3 takes on no GPU. Choose sharding 'fsdp', or model.float()."
            )
        partitioned = any(hasattr(each, "ds_tensor") for _, each in parameters)
        for name, parameter in parameters if partitioned else ():
            if not hasattr(parameter, "ds_tensor"):
                parameter.data = parameter.data.to(getattr(torch, job.compute_dtype))
            elif parameter.numel():
                if parameter.shape != parameter.ds_shape:
                    raise StrategyError(
                        f"{name} was given a tensor of shape {list(parameter.shape)}, and it has {list(parameter.ds_shape)}. "
                        "Replace the module or the parameter."
                    )
                parameter.data = parameter.data.to(PartialState().device)
                broadcast(parameter)
                parameter.ds_status = ZeroParamStatus.AVAILABLE
                parameter.partition(has_been_updated=True)
        yield

    def keeps_masters(self, job: Job) -> bool:
        """Return whether it trains in mixed precision."""
        return job.precision.mixed

    def backward(self, prepared: Prepared, loss: torch.Tensor, last: bool) -> None:
        """Run the backward without Accelerate's step (`DeepSpeedEngineWrapper.backward`); `step` takes it.

        DeepSpeed divides the loss by the accumulation steps, which a loss weighted by tokens has to undo.
        """
        engine = prepared.model
        check_gradients(prepared.accelerator, loss)
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.backward(loss * prepared.job.train_config.accumulation)

    def steps_on_device(self, prepared: Prepared) -> bool:
        """Return false: DeepSpeed's step reads the norm on the host."""
        return False

    def step(self, prepared: Prepared, found_inf: torch.Tensor | None = None) -> StepResult:
        """Let DeepSpeed clip and step. If the norm is not finite, it keeps its weights and returns inf or -1."""
        engine = prepared.model
        with phase("step"):
            engine.step()
        norm = float(engine.get_global_grad_norm())
        norm = norm if norm >= 0 else math.inf
        overflow = bool(getattr(engine.optimizer, "overflow", False))
        return StepResult(
            norm=norm,
            skipped=overflow or not engine.was_step_applied() or not math.isfinite(norm),
            gradients=dtype_name(engine.optimizer.gradient_accumulation_dtype),
            scale=float(engine.optimizer.loss_scaler.loss_scale),
        )

    def check(self, prepared: Prepared) -> list[str]:
        """Check for a DeepSpeedEngine of the requested stage, offload and clipping."""
        engine = prepared.model
        if type(engine).__name__ != "DeepSpeedEngine":
            return [f"engine is {type(engine).__name__}, expected DeepSpeedEngine"]
        strategy, zero = prepared.job.strategy, prepared.job.settings["zero_optimization"]
        where = "+".join(sorted({master.device.type for master in masters_of(engine.optimizer)}))
        rows = (
            ("ZeRO stage", engine.zero_optimization_stage(), zero["stage"]),
            ("optimizer offload", bool(engine.zero_cpu_offload()), strategy.offload != "none"),
            ("parameter offload", _device(engine.zero_offload_param()), "cpu" if strategy.offload == "cpu" else "none"),
            ("gradient clipping", engine.gradient_clipping(), prepared.job.train_config.max_grad_norm),
            ("device of the masters", where, "cpu" if strategy.offload != "none" else prepared.job.device.kind),
        )
        return [f"{name} is {actual}, expected {expected}" for name, actual, expected in rows if actual != expected]

    def measure_state(self, prepared: Prepared) -> StateMemory:
        """Measure what the engine holds: shards (`ds_tensor`), whole parameters, flat masters and moments.

        Persistent parameters become whole in the first forward and stay so: they are counted from the start.
        """
        optimizer, parameters = prepared.model.optimizer, list(prepared.model.module.parameters())
        tensors = []
        later = {True: 0, False: 0}
        for parameter in parameters:
            sharded, whole = hasattr(parameter, "ds_tensor"), parameter.data.numel() > 0
            if sharded:
                tensors.append((parameter.ds_tensor, parameter.requires_grad))
            if whole or not sharded:
                tensors.append((parameter.data, parameter.requires_grad))
            elif parameter.ds_persist and copies(prepared.job):
                later[parameter.requires_grad] += parameter.ds_numel * parameter.ds_tensor.element_size()
        reduce = dtype_name(optimizer.communication_data_type)
        return measured_state(tensors, optimizer.optimizer, masters=masters_of(optimizer), reduce=reduce, later=later)

    def shards(self, prepared: Prepared, create: bool = False) -> Iterator[Shard]:
        """Yield whole parameters and this rank's range of masters and moments (stages 1 and 2), or flat ranges (stage 3).

        Persistent buffers are whole in every stage.
        """
        import torch

        engine = prepared.model
        stage3 = hasattr(engine.optimizer, "fp32_partitioned_groups_flat")
        for name, parameter in engine.module.named_parameters():
            local = _shards3(engine, name, parameter) if stage3 else _shards12(engine, name, parameter)
            for shard, flat, offset in local:
                yield shard
                if flat is not None:
                    cut = partial(torch.narrow, dim=0, start=offset, length=shard.tensor.numel())
                    yield from optimizer_shards(prepared.job, engine.optimizer.optimizer, flat, shard, cut, create)
        yield from buffer_shards(engine.module)

    def counters(self, prepared: Prepared) -> Counters:
        """Read the inner optimizer's steps, and the state of DeepSpeed's dynamic loss scaler."""
        optimizer = prepared.model.optimizer
        scaler, steps = optimizer.loss_scaler, steps_of(optimizer.optimizer)
        if not scaler.dynamic:
            return Counters(steps=steps)
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        left = scaler.cur_hysteresis
        return Counters(steps=steps, scale=float(scaler.cur_scale), good_steps=good, hysteresis=left)

    def after_restore(self, prepared: Prepared, counters: Counters) -> None:
        """Set the counters; copy masters to the compute copies with the functions that end DeepSpeed's own step."""
        engine, optimizer = prepared.model, prepared.model.optimizer
        set_steps(optimizer.optimizer, counters.steps)
        engine.global_steps = counters.steps
        scaler = optimizer.loss_scaler
        if scaler.dynamic and counters.scale is not None:
            scaler.cur_scale = counters.scale
            scaler.last_overflow_iter = scaler.cur_iter - counters.good_steps - 1
            if counters.hysteresis is not None:
                scaler.cur_hysteresis = counters.hysteresis
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat fp32 partitions that the inner optimizer steps."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _gather(_: str, parameter: Any) -> None:
    """Gather a parameter on the host, where other engines have it: a script's generators are the host's, too."""
    parameter.all_gather()
    parameter.data = parameter.data.cpu()


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _shards12(engine: Any, name: str, parameter: Any) -> Iterator[tuple[Shard, Any, int]]:
    """Yield each shard; for a master also the flat partition that the optimizer steps, and its offset there."""
    shape = tuple(parameter.shape)
    yield Shard(name, PARAMETER, shape, whole_box(shape), 0, parameter.detach()), None, 0
    fragment = getattr(parameter, "_hp_mapping", None)
    if fragment is not None:
        flat = engine.optimizer.single_partition_of_fp32_groups[fragment.param_group_index]
        start, tensor = fragment.lp_fragment_address.start, fragment.hp_fragment.detach()
        yield Shard(name, MASTER, shape, whole_box(shape), start, tensor), flat, fragment.hp_fragment_address.start


def _shards3(engine: Any, name: str, parameter: Any) -> Iterator[tuple[Shard, Any, int]]:
    shape, local = tuple(parameter.ds_shape), parameter.ds_tensor
    box, start = whole_box(shape), local.numel() * parameter.ds_zero_partition_rank
    # The last rank's shard is padded to the common size.
    length = max(0, min(local.numel(), parameter.ds_numel - start))
    if length:
        yield Shard(name, PARAMETER, shape, box, start, local.detach().view(-1)[:length]), None, 0
    if length and parameter.requires_grad:
        group, offset, _ = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
        flat = engine.optimizer.fp32_partitioned_groups_flat[group]
        yield Shard(name, MASTER, shape, box, start, flat.detach()[offset : offset + length]), flat, offset


def free_builds() -> None:
    """Remove the locks of killed processes where torch compiles DeepSpeed's operators. torch waits for them without a limit.

    torch's `FileBaton` keeps its lock file open. So a lock of this user that no process has open belongs to nobody.
    Where other hosts may share the folder, the lock must also be older than any build.
    """
    import psutil

    root = _build_root().resolve()  # as the system names open files
    least_age = 0.0 if _is_local(root) else LONGEST_BUILD
    locks = {str(path) for path in root.glob("**/lock") if _is_own(path, least_age)}
    # Looked at twice: a rank that has just closed its lock removes it itself, and another may take the next one.
    for pause in (0.5, 0.0):
        if not locks:
            return
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                locks -= {file.path for file in process.open_files()}
        time.sleep(pause if locks else 0.0)
    for lock in locks:
        Path(lock).unlink(missing_ok=True)


def _is_own(path: Path, least_age: float) -> bool:
    """Return whether a file exists, belongs to this user and is at least this old, in seconds."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime >= least_age


def _is_local(folder: Path) -> bool:
    """Return whether a folder lies on a filesystem that no other host can have."""
    import psutil

    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    mounts = (kinds[str(path)] for path in (folder, *folder.parents) if str(path) in kinds)
    return next(mounts, "").startswith(LOCAL_FILESYSTEMS)


def announce_build(job: Job) -> None:
    """Announce the compilation of an operator, which happens once."""
    name = "deepspeed_shm_comm" if job.device.kind == "cpu" else "cpu_adam"
    needed = job.device.kind == "cpu" or job.strategy.offload != "none"
    if needed and not any(_build_root().glob(f"**/{name}.so")):
        print(f"DeepSpeed compiles {name}, which takes a minute or two, once", file=sys.stderr, flush=True)


def _build_root() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
