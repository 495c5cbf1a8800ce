"""The mesh of all ranks, and FSDP2 over the data-parallel ranks of a stage: shards between steps, whole within one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.config.parallelism import ORDER
from toolkit.engines.job import Job
from toolkit.engines.pipeline.anatomy import anatomy_of, name_in_spec, places_of
from toolkit.engines.states import local_tensor
from toolkit.models.hf_loading import set_tensor

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

MESH = "_toolkit_mesh"
"""The attribute of a loaded model with the mesh of all ranks: its groups are made once."""


def sharded(job: Job) -> bool:
    """Return whether FSDP2 shards parameters between steps."""
    return job.strategy.sharding in ("fsdp", "hsdp")


def bare(model: Any) -> Any:
    """Return the model of transformers, without an adapter's wrapper: the adapter is in its modules."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def make_mesh(job: Job) -> DeviceMesh:
    """Return the mesh of all ranks: `pp`, and the other dimensions over which there are several. A collective."""
    from torch.distributed.device_mesh import init_device_mesh

    names = [name for name in ORDER if name == "pp" or getattr(job.parallelism, name) > 1]
    return init_device_mesh(
        job.device.kind, tuple(getattr(job.parallelism, name) for name in names), mesh_dim_names=tuple(names)
    )


def shard_stages(job: Job, model: nn.Module) -> None:
    """Shard each layer of this rank's stages, and each module before and after them, over the data-parallel ranks of its stage."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert job.spec is not None
    base, parts = bare(model), anatomy_of(job.spec)
    mesh = getattr(base, MESH)
    mine = places_of(job, mesh.get_rank())
    outside = [*parts.before] * (-1 in mine) + [*parts.after] * (parts.count in mine)
    layers = [f"{parts.layers}.{place}" for place in sorted(mine) if 0 <= place < parts.count]
    for name in (*layers, *sorted(outside, key=lambda name: -name.count("."))):  # inner ones first
        module = base.get_submodule(name)
        if not isinstance(module, FSDPModule):
            fully_shard(module, **_options(job, mesh))
    tie(job, base, mesh.get_rank())


def spread(job: Job, model: nn.Module) -> None:
    """Give all ranks of a stage the values of its first one: a script may have written into one of them. A collective."""
    import torch.distributed as dist

    mesh = getattr(bare(model), MESH)
    for name in _dimensions(mesh):
        group = mesh[name].get_group()
        first = dist.get_process_group_ranks(group)[0]
        for parameter in model.parameters():
            if not parameter.is_meta:
                dist.broadcast(local_tensor(parameter.data), src=first, group=group)


def as_root(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a stage's module, which has no parameter of its own, the root of the sharded ones inside: torch's schedules take it."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh[_dimensions(mesh)], reshard_after_forward=False)


def _dimensions(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(name for name in ("dp_replicate", "dp_shard") if name in (mesh.mesh_dim_names or ()))


def _options(job: Job, mesh: DeviceMesh) -> Mapping[str, Any]:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    names = {field: job.settings[field] for field in ("param_dtype", "reduce_dtype")}
    dtypes: dict[str, Any] = {field: getattr(torch, name) if name else None for field, name in names.items()}
    policy = MixedPrecisionPolicy(**dtypes)
    return {"mesh": mesh[_dimensions(mesh)], "mp_policy": policy, "reshard_after_forward": False}


def tie(job: Job, model: Any, rank: int) -> None:
    """Give all names of a tied weight the tensor of the one that a stage of this rank uses."""
    assert job.spec is not None
    parts, mine = anatomy_of(job.spec), places_of(job, rank)
    named = {
        name_in_spec(name): (name, tensor)
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if ".lora_" not in name
    }
    for group in job.spec.tied:
        used = [name for name in group if mine.intersection(parts.places(name))]
        for name in group if used else ():
            set_tensor(model, named[name][0], named[used[0]][1])
