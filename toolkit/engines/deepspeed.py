"""DeepSpeed ZeRO, stages 1 to 3, with optimizer and parameter offload."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.devices import Device
from toolkit.engines.job import Counters, Holdings, Job, Piece, Prepared, Update, base_yaml, bound_precision
from toolkit.engines.states import holdings, moment_pieces, moments, parameters_of, set_steps, steps_of
from toolkit.engines.waiting import handlers
from toolkit.errors import MissingLibrary, RunError, StrategyError
from toolkit.model import ModelSpec
from toolkit.phases import phase
from toolkit.strategy import Loop, Strategy
from toolkit.units import BYTES_OF, ceil_div, dtype_name, round_up

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch

ALIGNMENT = 2
"""Elements per rank to which stages 1 and 2 pad their flat partition (`nccl_start_alignment_factor`)."""


FLOOR = 2**20
"""Least elements of a bucket. For a small model Accelerate's rule makes a collective for nearly every tensor: with hidden 256
on two gloo ranks ZeRO-3 then trains at 0.4 of the speed, for 4 MiB less."""


def _stage(strategy: Strategy) -> int:
    return int(strategy.sharding.removeprefix("zero"))


def settings(strategy: Strategy, loop: Loop, spec: ModelSpec | None, ranks: int, device: Device) -> dict[str, Any]:
    """DeepSpeed's configuration, word for word.

    Buckets follow Accelerate's rule for "auto" (h², 0.9 h², 10 h elements; accelerator.py `hidden_size_based_keys`), the
    first two at least `FLOOR`: DeepSpeed's own defaults are 5e8 elements, allocated whole. Without a spec they stay "auto".
    """
    if strategy.offload != "none" and strategy.precision == "bf16_pure":
        # DeepSpeed asks for a cpu_adam with bf16 states, and Accelerate makes one with fp32 states (base_optimizer.py:514).
        raise StrategyError(
            f"offload {strategy.offload!r} cannot run in precision 'bf16_pure' under DeepSpeed. "
            "Choose precision 'bf16', or offload 'none'."
        )
    if strategy.sharding == "zero1" and strategy.precision == "bf16" and loop.accumulation > 1:
        raise StrategyError(
            f"sharding 'zero1' in precision 'bf16' adds up gradients in bf16, so accumulation {loop.accumulation} would not "
            "be one large batch. Choose sharding 'zero2', which adds them up in fp32, or accumulation 1."
        )
    if strategy.precision == "fp16" and "fp16" not in device.dtypes:
        raise StrategyError(
            f"sharding {strategy.sharding!r} cannot train in precision 'fp16' on {device.name}, which does not compute it"
            + (" (a processor needs avx512_fp16)" if device.kind == "cpu" else "")
            + ". Choose precision 'bf16'."
        )
    half = strategy.precision if strategy.precision in ("bf16", "fp16") else None
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": loop.micro_batch,
        "gradient_accumulation_steps": loop.accumulation,
        "gradient_clipping": loop.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero(strategy, spec, device),
        "bf16": {"enabled": strategy.precision in ("bf16", "bf16_pure"), "check_grad_overflow": True},
        "fp16": {"enabled": strategy.precision == "fp16"},
    }
    if half:
        # Reduce in fp32, as DDP and FSDP do here; the default is the compute dtype.
        config["communication_data_type"] = "fp32"
        if _stage(strategy) > 1 or half == "fp16":
            # Under stage 1 and bf16 fp32 accumulation would switch to another optimizer (BF16_Optimizer), which replicates it.
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if strategy.precision == "bf16_pure":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if strategy.offload != "none" and device.kind == "cpu":
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def _zero(strategy: Strategy, spec: ModelSpec | None, device: Device) -> dict[str, Any]:
    stage = _stage(strategy)
    square = max(spec.hidden**2, FLOOR) if spec else 0
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": stage == 3 and device.kind == "cuda",
        "reduce_bucket_size": square or "auto",
    }
    if stage < 3:
        zero["allgather_bucket_size"] = round_up(square, 2) or int(5e8)
    else:
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * square) or "auto",
            "stage3_param_persistence_threshold": 10 * spec.hidden if spec else "auto",
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    pinned = device.kind == "cuda"
    if strategy.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if strategy.offload == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return zero


def require_library(strategy: Strategy) -> None:
    """Refuse where DeepSpeed is not installed. A forecast needs none, so `settings` does not ask.

    Raises:
        MissingLibrary: with the command that installs it.
    """
    import importlib.util

    if importlib.util.find_spec("deepspeed") is None:
        raise MissingLibrary(
            f"sharding {strategy.sharding!r} needs DeepSpeed, which is not installed. "
            "Install it with `pip install 'accelerate-toolkit[deepspeed]'`, or choose sharding 'fsdp'."
        )


def plugin(job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
    """A `DeepSpeedPlugin` over the resolved configuration, and gloo where the ranks have no device.

    Raises:
        MissingLibrary: where DeepSpeed is not installed.
        RunError: in a process that no launcher started.
    """
    import copy
    import logging

    require_library(job.strategy)
    if "RANK" not in os.environ:
        word = job.strategy.sharding
        raise RunError(
            f"sharding {word!r} needs ranks that were launched. Start the script with `accelerate launch "
            f"--config_file accelerate_configs/{word}.yaml`; `toolkit config` writes such a file."
        )
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.utils import logger

    from toolkit.engines import cpu

    if os.environ.get("LOCAL_RANK", "0") == "0":
        _free_builds()
        _announce_build(job)
    logger.setLevel(logging.WARNING)
    # torch 2.13 renamed collectives that DeepSpeed calls; its warning comes once for every call site and rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    config = copy.deepcopy(dict(job.settings))
    chosen = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=_stage(job.strategy) == 3)
    mixed = {"bf16": "bf16", "bf16_pure": "bf16", "fp16": "fp16"}.get(job.strategy.precision, "no")
    return {
        "deepspeed_plugin": chosen,
        "mixed_precision": mixed,
        "kwargs_handlers": [cpu.gloo(timeout)] if job.device.kind == "cpu" else handlers(timeout),
    }


def variables(job: Job) -> dict[str, str | None]:
    """DeepSpeed calls ninja by name; it lies beside this interpreter, whether its environment is active or not.

    The launcher's own fields would be refused beside a configuration that is given whole.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": None}


def _free_builds() -> None:
    """Remove locks that a killed process left where torch compiles DeepSpeed's operators: it would wait for them for ever.

    torch's `FileBaton` keeps its lock file open while it holds it, so a lock of ours that no process has open is nobody's.
    """
    import psutil

    # Resolved, as the system names open files.
    locks = {str(path) for path in _build_root().resolve().glob("**/lock") if _is_own(path)}
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


def _is_own(path: Path) -> bool:
    """Whether a file exists and belongs to this user."""
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _announce_build(job: Job) -> None:
    """Say that nothing seems to happen for a while, where an operator has not been compiled yet."""
    name = "deepspeed_shm_comm" if job.device.kind == "cpu" else "cpu_adam"
    needed = job.device.kind == "cpu" or job.strategy.offload != "none"
    if needed and not any(_build_root().glob(f"**/{name}.so")):
        print(f"DeepSpeed compiles {name}, which takes a minute or two, once", file=sys.stderr, flush=True)


def _build_root() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def to_yaml(strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
    """`distributed_type: DEEPSPEED`. What depends on the model is filled in by the worker."""
    offloaded = strategy.offload != "none"
    config = {
        "zero_stage": _stage(strategy),
        "offload_optimizer_device": "cpu" if offloaded else "none",
        "offload_param_device": "cpu" if strategy.offload == "cpu" else "none",
        "zero3_init_flag": _stage(strategy) == 3,
        "zero3_save_16bit_model": False,
    }
    return base_yaml(strategy, ranks, nodes) | {"distributed_type": "DEEPSPEED", "deepspeed_config": config}


def _bound(stage: str, optimizer: str, parameters: str, precision: str | None) -> dict[str, Any]:
    offload = "cpu" if parameters == "cpu" else "optimizer" if optimizer == "cpu" else "none"
    return {"sharding": f"zero{stage}", "offload": offload} | bound_precision(precision)


def from_yaml(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Stage, offload and precision of a file with `distributed_type: DEEPSPEED`."""
    if config.get("distributed_type") != "DEEPSPEED":
        return None
    ours = config.get("deepspeed_config", {})
    return _bound(
        str(ours.get("zero_stage", 2)),
        str(ours.get("offload_optimizer_device", "none")),
        str(ours.get("offload_param_device", "none")),
        config.get("mixed_precision"),
    )


def from_env(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The same, from `ACCELERATE_DEEPSPEED_*`.

    Raises:
        StrategyError: for a DeepSpeed configuration file of one's own, which says more than a Strategy can.
    """
    if environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return None
    own = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if own.lower() != "none":
        raise StrategyError(
            f"deepspeed_config_file {own!r}: the toolkit makes DeepSpeed's configuration from the Strategy. "
            "Remove it from the Accelerate config file and say zero_stage and the offload devices there."
        )
    return _bound(
        environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"),
        environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
        environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
        environ.get("ACCELERATE_MIXED_PRECISION"),
    )


def loading(job: Job) -> AbstractContextManager[str]:
    """Stage 3 partitions while it reads: transformers sees the plugin and enters `zero.Init` by itself."""
    if _stage(job.strategy) < 3:
        return nullcontext("every rank reads the whole model, since ZeRO-1 and ZeRO-2 keep all parameters")
    if job.strategy.quantized:
        # transformers skips zero.Init for quantized models (modeling_utils.py, `get_init_context`).
        return nullcontext("every rank reads and quantizes the whole model, then keeps its shard")
    return nullcontext("rank 0 reads each parameter, and every rank keeps its shard of it (zero.Init)")


def arrange(job: Job, model: torch.nn.Module) -> None:
    """Under ZeRO-3 a mixture of experts is gathered whole: ranks that route differently would else wait for each other."""
    if _stage(job.strategy) == 3 and job.spec is not None and job.spec.moe is not None:
        from deepspeed.utils import set_z3_leaf_modules

        block = job.spec.moe.block
        set_z3_leaf_modules(model, list({type(m) for m in model.modules() if type(m).__name__ == block}))


def account(job: Job) -> Holdings:
    """ZeRO's states (Rajbhandari et al. 2020, section 5), with the second fp32 copy that fp32 training keeps too.

    Stages 1 and 2: all parameters, and a shard of masters and moments. Stage 3: shards of all, and small parameters whole.
    """
    found, ranks = list(parameters_of(job)), job.ranks
    compute, weight = BYTES_OF[job.compute_dtype], BYTES_OF[job.weight_dtype]
    trained = [state.elements for state in found if state.trainable]
    if _stage(job.strategy) < 3:
        flat = round_up(sum(trained), ALIGNMENT * ranks)
        shard = flat // ranks
        trainable, frozen = flat * compute, sum(state.bytes for state in found if not state.trainable)
    else:
        shard = sum(ceil_div(elements, ranks) for elements in trained)
        limit = job.settings["zero_optimization"]["stage3_param_persistence_threshold"]
        small = [state for state in found if _copies(job) and state.elements <= limit]
        trainable = shard * compute + sum(state.elements * compute for state in small if state.trainable)
        frozen = sum(state.bytes for state in small if not state.trainable) + sum(
            ceil_div(state.elements, ranks) * BYTES_OF[state.dtype] for state in found if not state.trainable
        )
    return Holdings(
        trainable=trainable,
        frozen=frozen,
        master=shard * weight,
        optimizer=2 * shard * weight,
        dtypes={
            "trainable": job.compute_dtype,
            "master": job.weight_dtype,
            "gradients": "float32" if "data_types" in job.settings else job.compute_dtype,
            "reduce": "float32" if "communication_data_type" in job.settings else job.compute_dtype,
            "optimizer": job.weight_dtype,
        },
    )


def computing(job: Job) -> str:
    """DeepSpeed casts the weights for good, before the first step; autocast is off."""
    return f"on the weights as they are {'held' if _stage(job.strategy) < 3 else 'gathered'}"


def _copies(job: Job) -> bool:
    """Whether a whole parameter is another tensor than its shard: on one rank it is the same, unless that is on the host.

    Source: deepspeed/runtime/zero/partition_parameters.py `NoGatherHandle`.
    """
    return job.ranks > 1 or (job.strategy.offload == "cpu" and job.device.kind == "cuda")


def _masters(optimizer: Any) -> list[torch.Tensor]:
    """The flat fp32 partitions that the inner optimizer steps."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def check(prepared: Prepared) -> list[str]:
    """A DeepSpeedEngine of the stage, offload and clipping that were asked for."""
    engine = prepared.model
    if type(engine).__name__ != "DeepSpeedEngine":
        return [f"engine is {type(engine).__name__}, expected DeepSpeedEngine"]
    strategy, zero = prepared.job.strategy, prepared.job.settings["zero_optimization"]
    rows = (
        ("ZeRO stage", engine.zero_optimization_stage(), zero["stage"]),
        ("optimizer offload", bool(engine.zero_cpu_offload()), strategy.offload != "none"),
        ("parameter offload", _device(engine.zero_offload_param()), "cpu" if strategy.offload == "cpu" else "none"),
        ("gradient clipping", engine.gradient_clipping(), prepared.job.loop.max_grad_norm),
    )
    wrong = [f"{name} is {found}, expected {expected}" for name, found, expected in rows if found != expected]
    where = {master.device.type for master in _masters(engine.optimizer)}
    expected_on = {"cpu"} if strategy.offload != "none" else {prepared.job.device.kind}
    return (
        wrong if where == expected_on else [*wrong, f"masters are on {sorted(where)}, expected {sorted(expected_on)}"]
    )


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def audit(prepared: Prepared) -> Holdings:
    """What the engine holds: shards (`ds_tensor`), parameters that are whole now, its flat masters, the moments.

    Persistent parameters become whole in the first forward and stay so: they are counted from the start.
    """
    optimizer = prepared.model.optimizer
    masters = _masters(optimizer)
    size, kinds = moments(optimizer.optimizer)

    def held() -> Iterator[tuple[torch.Tensor, bool]]:
        for parameter in prepared.model.module.parameters():
            if hasattr(parameter, "ds_tensor"):
                yield parameter.ds_tensor, parameter.requires_grad
                if not parameter.data.numel():
                    continue
            yield parameter.data, parameter.requires_grad

    later = {True: 0, False: 0}
    for parameter in prepared.model.module.parameters():
        if getattr(parameter, "ds_persist", False) and not parameter.data.numel() and _copies(prepared.job):
            later[parameter.requires_grad] += parameter.ds_numel * parameter.ds_tensor.element_size()
    return holdings(
        held(),
        more=later,
        master=sum(master.untyped_storage().nbytes() for master in masters),
        optimizer=size,
        dtypes={
            "master": "+".join(sorted({dtype_name(master.dtype) for master in masters})),
            "optimizer": kinds,
            "reduce": dtype_name(optimizer.communication_data_type),
        },
    )


def backward(prepared: Prepared, loss: torch.Tensor, last: bool) -> None:
    """Without the step that Accelerate would take here (`DeepSpeedEngineWrapper.backward`): `update` takes it.

    DeepSpeed divides the loss by the accumulation steps, which a loss weighted by tokens has to undo.
    """
    engine = prepared.model
    with phase("backward"):
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.backward(loss * prepared.job.loop.accumulation)


def update(prepared: Prepared) -> Update:
    """DeepSpeed clips and steps by itself. It keeps its weights where the norm is not finite, and says inf or -1."""
    engine = prepared.model
    with phase("step"):
        engine.step()
    norm = float(engine.get_global_grad_norm())
    norm = norm if norm >= 0 else math.inf
    overflow = bool(getattr(engine.optimizer, "overflow", False))
    return Update(
        norm=norm,
        skipped=overflow or not engine.was_step_applied() or not math.isfinite(norm),
        gradients=dtype_name(engine.optimizer.gradient_accumulation_dtype),
        scale=float(engine.optimizer.loss_scaler.loss_scale),
    )


def pieces(prepared: Prepared, create: bool = False) -> Iterator[Piece]:
    """Stages 1 and 2: whole parameters, and the part of masters and moments in this rank's flat partition. Stage 3: shards."""
    engine = prepared.model
    stage3 = hasattr(engine.optimizer, "fp32_partitioned_groups_flat")
    for name, parameter in engine.module.named_parameters():
        found = _pieces3(engine, name, parameter) if stage3 else _pieces12(engine, name, parameter)
        for piece, flat, offset in found:
            yield piece
            if flat is not None:
                length = piece.tensor.numel()

                def cut(tensor: torch.Tensor, offset: int = offset, length: int = length) -> torch.Tensor:
                    return tensor.detach()[offset : offset + length]

                yield from moment_pieces(engine.optimizer.optimizer, flat, piece, cut, create)


def _pieces12(engine: Any, name: str, parameter: Any) -> Iterator[tuple[Piece, Any, int]]:
    """Each piece; of a master also the flat partition that the optimizer steps, and its place there."""
    shape = tuple(parameter.shape)
    yield Piece(name, "parameter", shape, 0, parameter.detach().view(-1)), None, 0
    fragment = getattr(parameter, "_hp_mapping", None)
    if fragment is not None:
        flat = engine.optimizer.single_partition_of_fp32_groups[fragment.param_group_index]
        master = Piece(name, "master", shape, fragment.lp_fragment_address.start, fragment.hp_fragment.detach())
        yield master, flat, fragment.hp_fragment_address.start


def _pieces3(engine: Any, name: str, parameter: Any) -> Iterator[tuple[Piece, Any, int]]:
    shape, shard = tuple(parameter.ds_shape), parameter.ds_tensor
    start = shard.numel() * parameter.ds_zero_partition_rank
    # The last rank's shard is padded to the common size.
    length = max(0, min(shard.numel(), parameter.ds_numel - start))
    if length:
        yield Piece(name, "parameter", shape, start, shard.detach().view(-1)[:length]), None, 0
    if length and parameter.requires_grad:
        group, offset, _ = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
        flat = engine.optimizer.fp32_partitioned_groups_flat[group]
        yield Piece(name, "master", shape, start, flat.detach()[offset : offset + length]), flat, offset


def counters(prepared: Prepared) -> Counters:
    """The inner optimizer's steps, and what DeepSpeed's dynamic loss scaler keeps."""
    optimizer = prepared.model.optimizer
    scaler, steps = optimizer.loss_scaler, steps_of(optimizer.optimizer)
    if not scaler.dynamic:
        return Counters(steps=steps)
    good = scaler.cur_iter - scaler.last_overflow_iter - 1
    left = scaler.cur_hysteresis
    return Counters(steps=steps, scale=float(scaler.cur_scale), good_steps=good, hysteresis=left)


def restored(prepared: Prepared, counters: Counters) -> None:
    """Counters, and the compute copies from the masters, by the very functions that end DeepSpeed's own step."""
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
