"""FSDP2 in a worker: how the model is read and wrapped, and where its memory is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from toolkit.engines.base import Engine
from toolkit.engines.fsdp.simulation import reduce_dtype
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared, StateMemory
from toolkit.engines.shards import Shard
from toolkit.engines.simulation import streams
from toolkit.engines.states import distributed_shards, measured_distributed, persistent_buffers

if TYPE_CHECKING:
    import torch


class FSDPState(Engine):
    """The worker's half of the engine."""

    needs_optimizer = True
    model_no_sync = False
    sync_each_batch = True  # without it FSDP holds whole gradients until the last micro-batch

    def load_model(self, job: Job, reader: Any) -> Any:
        """Leave the weights in the files until `prepare`, if possible. Else rank 0 reads them; of packed ones every rank."""
        if streams(job) and (model := reader.defer()) is not None:
            return model
        return reader.read() if job.strategy.quantized else reader.read_on_main()

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Merge embeddings with one shared weight into one module: FSDP2 takes a weight in one group only.

        Accelerate puts the input and the output embedding into one group, but not the encoder's and the decoder's
        of a T5. Persistent buffers are kept from Accelerate, which would shard them (`hide_buffers`).
        """
        import torch

        hide_buffers(model)
        first: dict[int, torch.nn.Module] = {}
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Embedding):
                owner = first.setdefault(id(module.weight), module)
                if owner is not module:
                    model.set_submodule(name, owner)
        if not job.settings["wrap"]:
            model._no_split_modules = _blocks(model)  # type: ignore[assignment]

    def preparing(self, job: Job, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Read the weights that were left in the files."""
        weights: Any = getattr(model, "streamed_weights", None)
        return nullcontext() if weights is None or weights.closed else streaming(job, model)

    def check(self, prepared: Prepared) -> list[str]:
        """Return what differs from FSDP2 modules with every parameter a DTensor over the requested mesh."""
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
        meshes = {_data_parallel(parameter.device_mesh) for parameter in parameters.values()}
        return [] if meshes == {expected} else [f"mesh is {sorted(meshes)}, expected {expected}"]

    def measure_state(self, prepared: Prepared) -> StateMemory:
        """Measure the storages of the local shards and of the optimizer's state."""
        return measured_distributed(prepared.model, prepared.optimizer, reduce_dtype(prepared.job))

    def shards(self, prepared: Prepared, create: bool = False) -> Iterator[Shard]:
        """Yield this rank's box of each parameter and its moments, all of it, and the persistent buffers, whole."""
        from torch.distributed.fsdp import FSDPModule

        for module in prepared.model.modules():
            if isinstance(module, FSDPModule):
                # A forward without a backward leaves the last group whole, and then its parameters are no shards.
                module.reshard()
        for hook in prepared.model._state_dict_pre_hooks.values():
            hook(prepared.model, "", False)  # `hide_buffers` ends with the first of them
        yield from distributed_shards(prepared.job, prepared.model, prepared.optimizer, create)


def _data_parallel(mesh: Any) -> tuple[int, ...]:
    """Return the sizes of a mesh without the tensor-parallel dimension."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tuple(size for size, name in zip(mesh.shape, names, strict=True) if name != "tp")


def _groups(prepared: Prepared) -> list[str]:
    """Return what the parameter groups really use, from torch's own fields (`_fsdp_param_group.py`)."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    ours = prepared.job.settings
    expected = {name: getattr(torch, ours[name]) if ours[name] else None for name in ("param_dtype", "reduce_dtype")}
    wrapped, wrong = set(), []
    for name, module in prepared.model.named_modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        wrapped.add(type(module).__name__.removeprefix("FSDP"))
        actual = {key: getattr(group.mp_policy, key) for key in expected}
        if actual != expected:
            wrong.append(f"{name or 'the root'} computes and reduces in {actual}, expected {expected}")
        if isinstance(group.offload_policy, CPUOffloadPolicy) != ours["offload"]:
            wrong.append(f"{name or 'the root'} has offload {not ours['offload']}, expected {ours['offload']}")
        block = type(module).__name__.removeprefix("FSDP") in ours["wrap"]
        if block and group._reshard_after_forward != ours["reshard_after_forward"]:
            wrong.append(f"{name} has reshard_after_forward {group._reshard_after_forward}")
    missing = sorted(set(ours["wrap"]) - wrapped)
    return [*wrong, *(f"{name} is not sharded as a group of its own" for name in missing)][:3]


def hide_buffers(model: torch.nn.Module) -> None:
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
        preflight = isinstance(model, FSDPModule) and not any(parameter.is_meta for parameter in model.parameters())
        for module, leaf in hidden if preflight else ():
            module._non_persistent_buffers_set.discard(leaf)

    if hidden:
        model.register_state_dict_pre_hook(restore)  # type: ignore[no-untyped-call]


def _blocks(model: torch.nn.Module) -> list[str]:
    """Return the classes that a model declares as its blocks; Accelerate shards each of them without a spec.

    Without one around the input embedding (BERT's): Accelerate shards the embedding itself, and a weight is sharded once.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    class_names, blocks = set(getattr(model, "_no_split_modules", None) or ()), set()
    for module in model.modules():
        if type(module).__name__ in class_names and all(part is not embedding for part in module.modules()):
            blocks.add(type(module).__name__)
    return sorted(blocks)


@contextmanager
def streaming(job: Job, model: Any) -> Iterator[None]:
    """Surround `accelerator.prepare` for a model whose weights are still in the files.

    Accelerate shards it on the meta device, and would then broadcast rank 0's state dict. Of a model with packed weights it
    does neither.
    """
    from accelerate.utils import fsdp_utils

    if job.strategy.quantized:
        _to_meta(model)
        yield
        _fill(model, {}, on_host=bool(job.settings["offload"]))
        model.tie_weights()
        return

    def load(_: Any, model: Any, state: Mapping[str, Any], cpu_offload: bool = False) -> None:
        _fill(model, state, on_host=cpu_offload)

    theirs = fsdp_utils.fsdp2_load_full_state_dict
    fsdp_utils.fsdp2_load_full_state_dict = load
    try:
        yield
    finally:
        fsdp_utils.fsdp2_load_full_state_dict = theirs


def _to_meta(model: torch.nn.Module) -> None:
    """Move the frozen parameters to the meta device: the checkpoint has their values."""
    import torch

    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or parameter.requires_grad:
                continue
            if id(parameter) not in moved:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                options = parameter.__dict__ if type(parameter).__name__ == "Params4bit" else {}
                moved[id(parameter)] = type(parameter)(empty, requires_grad=False, **options)
            module._parameters[leaf] = moved[id(parameter)]


def _fill(model: Any, own: Mapping[str, torch.Tensor], *, on_host: bool) -> None:
    """Give each parameter on the meta device its shard, of a weight in the files or of this rank's own tensor. A collective."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    weights, shards = model.streamed_weights, {}
    parameter: Any
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        whole = weights.read(name, module) if name in weights else own[name]
        mesh, placements = parameter.device_mesh, parameter.placements
        sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        # One copy: `distribute_tensor` makes another, beside the whole.
        local = whole[box].to(mesh.device_type, parameter.dtype, copy=True)
        shard: Any = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        shards[name] = shard.to("cpu") if on_host else shard
        del whole, local
    model.load_state_dict(shards, strict=False, assign=True)
    weights.close()
