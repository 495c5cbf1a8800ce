"""DeepSpeed's memory: a rank's bytes, its shards, and the counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolkit.core.units import dtype_name
from toolkit.engines.deepspeed.zero3 import copies
from toolkit.engines.records import Counters, Prepared, StateMemory
from toolkit.engines.shards import MASTER, PARAMETER, Shard, whole_box
from toolkit.engines.states import buffer_shards, measured_state, moment_bytes, optimizer_shards, set_steps, steps_of

if TYPE_CHECKING:
    import torch


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat fp32 partitions that the inner optimizer steps."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def check(prepared: Prepared) -> list[str]:
    """Check for a DeepSpeedEngine of the requested stage, offload and clipping."""
    engine = prepared.model
    if type(engine).__name__ != "DeepSpeedEngine":
        return [f"engine is {type(engine).__name__}, expected DeepSpeedEngine"]
    strategy, zero = prepared.job.strategy, prepared.job.settings["zero_optimization"]
    rows = (
        ("ZeRO stage", engine.zero_optimization_stage(), zero["stage"]),
        ("optimizer offload", bool(engine.zero_cpu_offload()), strategy.offload != "none"),
        ("parameter offload", _device(engine.zero_offload_param()), "cpu" if strategy.offload == "cpu" else "none"),
        ("gradient clipping", engine.gradient_clipping(), prepared.job.train_config.max_grad_norm),
    )
    wrong = [f"{name} is {actual}, expected {expected}" for name, actual, expected in rows if actual != expected]
    where = {master.device.type for master in masters_of(engine.optimizer)}
    expected_on = {"cpu"} if strategy.offload != "none" else {prepared.job.device.kind}
    return (
        wrong if where == expected_on else [*wrong, f"masters are on {sorted(where)}, expected {sorted(expected_on)}"]
    )


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def measure(prepared: Prepared) -> StateMemory:
    """Measure what the engine holds: shards (`ds_tensor`), whole parameters, flat masters and moments.

    Persistent parameters become whole in the first forward and stay so: they are counted from the start.
    """
    optimizer = prepared.model.optimizer
    masters = masters_of(optimizer)
    size, kinds = moment_bytes(optimizer.optimizer)

    def held() -> Iterator[tuple[torch.Tensor, bool]]:
        for parameter in prepared.model.module.parameters():
            if hasattr(parameter, "ds_tensor"):
                yield parameter.ds_tensor, parameter.requires_grad
                if not parameter.data.numel():
                    continue
            yield parameter.data, parameter.requires_grad

    later = {True: 0, False: 0}
    for parameter in prepared.model.module.parameters():
        if getattr(parameter, "ds_persist", False) and not parameter.data.numel() and copies(prepared.job):
            later[parameter.requires_grad] += parameter.ds_numel * parameter.ds_tensor.element_size()
    return measured_state(
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


def shards(prepared: Prepared, create: bool = False) -> Iterator[Shard]:
    """Yield whole parameters and this rank's range of masters and moments (stages 1 and 2), or flat ranges (stage 3).

    Persistent buffers are whole in every stage.
    """
    engine = prepared.model
    stage3 = hasattr(engine.optimizer, "fp32_partitioned_groups_flat")
    for name, parameter in engine.module.named_parameters():
        local = _shards3(engine, name, parameter) if stage3 else _shards12(engine, name, parameter)
        for shard, flat, offset in local:
            yield shard
            if flat is not None:
                length = shard.tensor.numel()

                def cut(tensor: torch.Tensor, offset: int = offset, length: int = length) -> torch.Tensor:
                    return tensor.detach()[offset : offset + length]

                yield from optimizer_shards(prepared.job, engine.optimizer.optimizer, flat, shard, cut, create)
    yield from buffer_shards(engine.module)


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


def read_counters(prepared: Prepared) -> Counters:
    """Read the inner optimizer's steps, and the state of DeepSpeed's dynamic loss scaler."""
    optimizer = prepared.model.optimizer
    scaler, steps = optimizer.loss_scaler, steps_of(optimizer.optimizer)
    if not scaler.dynamic:
        return Counters(steps=steps)
    good = scaler.cur_iter - scaler.last_overflow_iter - 1
    left = scaler.cur_hysteresis
    return Counters(steps=steps, scale=float(scaler.cur_scale), good_steps=good, hysteresis=left)


def write_counters(prepared: Prepared, counters: Counters) -> None:
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
