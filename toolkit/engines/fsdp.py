"""torch's FSDP2 (`fully_shard`): full shard, grad-op, and HSDP. Parameters are their own fp32 masters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from toolkit.devices import Device
from toolkit.engines.job import Counters, Holdings, Job, Piece, Prepared, Update, base_yaml, bound_precision
from toolkit.engines.states import (
    State,
    holdings,
    moment_pieces,
    moments,
    parameters_of,
    persistent_buffers,
)
from toolkit.engines.stepping import backward_weighted, clip_and_step, read_counters, write_counters
from toolkit.engines.waiting import handlers
from toolkit.errors import StrategyError
from toolkit.model import ModelSpec
from toolkit.strategy import Loop, Strategy
from toolkit.units import BYTES_OF, ceil_div

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch


def settings(strategy: Strategy, loop: Loop, spec: ModelSpec | None, ranks: int, device: Device) -> dict[str, Any]:
    """Wrap policy, dtypes and mesh. Refuses fp16 and offload on a CPU, and groups that do not divide the ranks."""
    if strategy.precision == "fp16" and device.kind == "cpu":
        raise StrategyError(
            f"sharding {strategy.sharding!r} cannot train in precision 'fp16' on a CPU: FSDP has no loss scaling there. "
            "Choose precision 'bf16', or sharding 'zero3'."
        )
    if strategy.offload != "none" and device.kind == "cpu":
        raise StrategyError(
            f"sharding {strategy.sharding!r} cannot offload on CPU ranks: FSDP's offload needs an accelerator. "
            "Choose offload 'none', or sharding 'zero3'."
        )
    if ranks % strategy.replicate or ranks < 2 * strategy.replicate:
        raise StrategyError(
            f"sharding {strategy.sharding!r} with replicate {strategy.replicate} needs groups of at least 2 ranks each; "
            f"got {ranks} {'rank' if ranks == 1 else 'ranks'}. Choose {2 * strategy.replicate} processes"
            + (", or sharding 'none' for one." if strategy.replicate == 1 else ", or sharding 'fsdp'.")
        )
    half = strategy.precision in ("bf16", "fp16")
    compute = {"bf16": "bfloat16", "fp16": "float16", "bf16_pure": "bfloat16", "fp32": "float32"}[strategy.precision]
    return {
        "reshard_after_forward": strategy.sharding != "fsdp_grad_op",
        "wrap": list(spec.blocks) if spec else [],
        "param_dtype": compute if half else None,
        # Accelerate's own default reduces in the compute dtype.
        "reduce_dtype": "float32" if half else None,
        "offload": strategy.offload == "cpu",
        "replicate": strategy.replicate,
        "shard": ranks // strategy.replicate,
    }


def require_library(strategy: Strategy) -> None:
    """torch alone."""


def plugin(job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
    """A `FullyShardedDataParallelPlugin` of version 2, the mesh for HSDP, and the shim where the ranks have no device."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from toolkit.engines import cpu

    def dtype(name: str | None) -> torch.dtype | None:
        return getattr(torch, name) if name else None

    ours = job.settings
    policy = MixedPrecisionPolicy(
        param_dtype=dtype(ours["param_dtype"]),
        reduce_dtype=dtype(ours["reduce_dtype"]),
    )
    chosen = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=ours["reshard_after_forward"],
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=ours["wrap"] or None,
        mixed_precision_policy=policy,
        cpu_offload=ours["offload"],
        cpu_ram_efficient_loading=not job.strategy.quantized,
        activation_checkpointing=False,
    )
    found: dict[str, Any] = {
        "fsdp_plugin": chosen,
        "mixed_precision": {"bf16": "bf16", "fp16": "fp16"}.get(job.strategy.precision, "no"),
        "kwargs_handlers": handlers(timeout),
    }
    if job.strategy.sharding == "hsdp":
        found["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=ours["replicate"], dp_shard_size=ours["shard"]
        )
    if job.device.kind == "cpu":
        cpu.shard_with_fsdp(timeout)
    return found


def variables(job: Job) -> dict[str, str | None]:
    """Accelerate adds gloo to the process group, for tensors on the host, only where it finds the offload (state.py:226).

    The last one tells transformers to read on one rank. Quantized weights cannot be moved to meta (accelerate's
    fsdp_utils.py near 770), so every rank reads those.
    """
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_OFFLOAD_PARAMS": str(job.settings["offload"]).lower(),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": str(not job.strategy.quantized).lower(),
    }


def to_yaml(strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
    """`distributed_type: FSDP`, version 2. The wrapped classes are filled in by the worker, from the model."""
    config = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": strategy.offload == "cpu",
        "fsdp_reshard_after_forward": strategy.sharding != "fsdp_grad_op",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    found = base_yaml(strategy, ranks, nodes) | {"distributed_type": "FSDP", "fsdp_config": config}
    if strategy.sharding == "hsdp":
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": strategy.replicate,
            "parallelism_config_dp_shard_size": ranks // strategy.replicate,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": 1,
        }
    return found


def _bound(reshard: str, offload: str, replicate: str, precision: str | None) -> dict[str, Any]:
    sharding = "hsdp" if int(replicate) > 1 else "fsdp" if reshard.lower() == "true" else "fsdp_grad_op"
    found = {"sharding": sharding, "offload": "cpu" if offload.lower() == "true" else "none"}
    return found | ({"replicate": int(replicate)} if int(replicate) > 1 else {}) | bound_precision(precision)


def from_yaml(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Resharding, offload, groups and precision of a file with `distributed_type: FSDP`."""
    if config.get("distributed_type") != "FSDP":
        return None
    ours, mesh = config.get("fsdp_config", {}), config.get("parallelism_config", {})
    return _bound(
        str(ours.get("fsdp_reshard_after_forward", True)),
        str(ours.get("fsdp_offload_params", False)),
        str(mesh.get("parallelism_config_dp_replicate_size", 1)),
        config.get("mixed_precision"),
    )


def from_env(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The same, from `FSDP_*` and `PARALLELISM_CONFIG_*`.

    Raises:
        StrategyError: for FSDP1, which is deprecated and fails on a CPU.
    """
    if environ.get("ACCELERATE_USE_FSDP") != "true":
        return None
    if environ.get("FSDP_VERSION", "1") != "2":
        raise StrategyError("fsdp_version 1 is deprecated upstream and not supported. Write `fsdp_version: 2`.")
    return _bound(
        environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"),
        environ.get("FSDP_OFFLOAD_PARAMS", "false"),
        environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"),
        environ.get("ACCELERATE_MIXED_PRECISION"),
    )


def loading(job: Job) -> AbstractContextManager[str]:
    """Rank 0 reads; the others build the model without its weights and get their shards by broadcast in `prepare`."""
    if job.strategy.quantized:
        return nullcontext("every rank reads and quantizes the whole model, then keeps its shard")
    return nullcontext("rank 0 reads the whole model and broadcasts each shard; the others start empty")


def arrange(job: Job, model: torch.nn.Module) -> None:
    """Embeddings that share one weight become one module: FSDP2 takes a weight in one group only.

    Accelerate puts the input and the output embedding into one group by itself, but not the encoder's and the decoder's
    of a T5. Persistent buffers are kept from Accelerate, which would shard them (`_hide_buffers`).
    """
    import torch

    _hide_buffers(model)
    first: dict[int, torch.nn.Module] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Embedding):
            kept = first.setdefault(id(module.weight), module)
            if kept is not module:
                model.set_submodule(name, kept)
    if not job.settings["wrap"]:
        model._no_split_modules = _blocks(model)  # type: ignore[assignment]


def _blocks(model: torch.nn.Module) -> list[str]:
    """The classes that a model says are its blocks, which Accelerate shards one by one where there is no spec.

    Without one around the input embedding (BERT's): Accelerate shards the embedding itself, and a weight is sharded once.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    said, found = set(getattr(model, "_no_split_modules", None) or ()), set()
    for module in model.modules():
        if type(module).__name__ in said and all(part is not embedding for part in module.modules()):
            found.add(type(module).__name__)
    return sorted(found)


def _hide_buffers(model: torch.nn.Module) -> None:
    """Let persistent buffers count as non-persistent until the model is sharded.

    Accelerate's `fsdp2_load_full_state_dict` takes every tensor in a state dict for a sharded parameter. Non-persistent
    buffers it leaves as they are on each rank. The first state dict of the sharded model restores them.
    """
    from torch.distributed.fsdp import FSDPModule

    places = [name.rpartition(".") for name in persistent_buffers(model)]
    hidden = [(model.get_submodule(owner), leaf) for owner, _, leaf in places]
    for module, leaf in hidden:
        module._non_persistent_buffers_set.add(leaf)

    def restore(*_: Any) -> None:
        ready = isinstance(model, FSDPModule) and not any(parameter.is_meta for parameter in model.parameters())
        for module, leaf in hidden if ready else ():
            module._non_persistent_buffers_set.discard(leaf)

    if hidden:
        model.register_state_dict_pre_hook(restore)  # type: ignore[no-untyped-call]


def account(job: Job) -> Holdings:
    """A shard of everything: each parameter is split along its first dimension, padded to equal parts.

    torch `_fully_shard/_fsdp_param.py`: the padded shard stays allocated. The parameters are the masters.
    """
    found, ranks = list(parameters_of(job)), job.shard_ranks
    trained = sum(shard_of(state, ranks) for state in found if state.trainable)
    return Holdings(
        trainable=trained * BYTES_OF[job.weight_dtype],
        frozen=sum(shard_of(state, ranks) * BYTES_OF[state.dtype] for state in found if not state.trainable),
        optimizer=2 * trained * BYTES_OF[job.weight_dtype],
        dtypes={**dict.fromkeys(("trainable", "gradients", "optimizer"), job.weight_dtype), "reduce": _reduced(job)},
    )


def _reduced(job: Job) -> str:
    """The dtype in which gradients are summed over the ranks."""
    return str(job.settings["reduce_dtype"] or job.weight_dtype)


def computing(job: Job) -> str:
    """The mixed-precision policy casts what an all-gather sends, group by group."""
    cast = job.settings["param_dtype"]
    return f"on copies that each all-gather makes in {cast}" if cast else "on the weights as they are gathered"


def shard_of(state: State, ranks: int) -> int:
    """Elements of a parameter that each of `ranks` holds: equally many rows, the last padded."""
    rows = state.shape[0] if state.shape else 1
    return ceil_div(rows, ranks) * (state.elements // rows)


def check(prepared: Prepared) -> list[str]:
    """FSDP2 modules, every parameter a DTensor over the mesh that was asked for."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    model: Any = prepared.model
    if not isinstance(model, FSDPModule):
        return [f"engine is {type(model).__name__}, expected an FSDPModule"]
    parameters = dict(prepared.model.named_parameters())
    whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if whole:
        return [f"{len(whole)} parameters are not sharded, the first is {whole[0]}"]
    ours = prepared.job.settings
    expected = (ours["replicate"], ours["shard"]) if ours["replicate"] > 1 else (ours["shard"],)
    if wrong := _groups(prepared):
        return wrong
    meshes = {tuple(parameter.device_mesh.shape) for parameter in parameters.values()}
    return [] if meshes == {expected} else [f"mesh is {sorted(meshes)}, expected {expected}"]


def _groups(prepared: Prepared) -> list[str]:
    """What the parameter groups really do, read where torch keeps it (`_fsdp_param_group.py`)."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    ours = prepared.job.settings
    asked = {name: getattr(torch, ours[name]) if ours[name] else None for name in ("param_dtype", "reduce_dtype")}
    wrapped, wrong = set(), []
    for name, module in prepared.model.named_modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        wrapped.add(type(module).__name__.removeprefix("FSDP"))
        found = {key: getattr(group.mp_policy, key) for key in asked}
        if found != asked:
            wrong.append(f"{name or 'the root'} computes and reduces in {found}, expected {asked}")
        if isinstance(group.offload_policy, CPUOffloadPolicy) != ours["offload"]:
            wrong.append(f"{name or 'the root'} has offload {not ours['offload']}, expected {ours['offload']}")
        block = type(module).__name__.removeprefix("FSDP") in ours["wrap"]
        if block and group._reshard_after_forward != ours["reshard_after_forward"]:
            wrong.append(f"{name} has reshard_after_forward {group._reshard_after_forward}")
    missing = sorted(set(ours["wrap"]) - wrapped)
    return [*wrong, *(f"{name} is not sharded by itself" for name in missing)][:3]


def audit(prepared: Prepared) -> Holdings:
    """Storages of the local shards, and of the optimizer's state."""
    size, kinds = moments(prepared.optimizer)

    def held() -> Iterator[tuple[torch.Tensor, bool]]:
        for parameter in prepared.model.parameters():
            yield parameter.to_local() if hasattr(parameter, "to_local") else parameter.data, parameter.requires_grad

    return holdings(held(), optimizer=size, dtypes={"optimizer": kinds, "reduce": _reduced(prepared.job)})


def backward(prepared: Prepared, loss: torch.Tensor, last: bool) -> None:
    """Every micro-batch is reduced and scattered: without that FSDP2 would hold whole gradients until the last one."""
    backward_weighted(prepared, loss)


def update(prepared: Prepared) -> Update:
    """Clip by the global norm, then step."""
    return clip_and_step(prepared)


def pieces(prepared: Prepared, create: bool = False) -> Iterator[Piece]:
    """Rows of each parameter and its moments: this rank's part of the first dimension."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    def local(tensor: Any) -> torch.Tensor:
        found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return found.detach().view(-1)

    for module in prepared.model.modules():
        if isinstance(module, FSDPModule):
            # A forward without a backward leaves the last group whole, and then its parameters are no shards.
            module.reshard()
    for name, parameter in prepared.model.named_parameters():
        shape, row = tuple(parameter.shape), 0
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
            row = offset[0]
        piece = Piece(name, "parameter", shape, row * math.prod(shape[1:]), local(parameter))
        moments_too = (
            moment_pieces(prepared.optimizer, parameter, piece, local, create) if parameter.requires_grad else ()
        )
        for found in (piece, *moments_too):
            if found.tensor.numel():  # the last ranks hold nothing of a tensor with few rows
                yield found


def counters(prepared: Prepared) -> Counters:
    """The optimizer's and the scaler's."""
    return read_counters(prepared)


def restored(prepared: Prepared, counters: Counters) -> None:
    """Counters alone: the parameters are the masters, and FSDP makes compute copies anew in every forward."""
    write_counters(prepared, counters)
