"""Each rank's shards of a model: the model is sharded without values, which then come one parameter at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from toolkit.engines.deferred import broadcast, end_deferral
from toolkit.engines.job import Job
from toolkit.engines.rank_calls import from_main
from toolkit.engines.upstream import patched

if TYPE_CHECKING:
    import torch

BNB_TYPES = ("Params4bit", "Int8Params")
"""bitsandbytes' classes of parameters."""


@contextmanager
def filling(job: Job, model: Any) -> Iterator[None]:
    """Surround `accelerator.prepare`. The model is sharded on the meta device; then each parameter gets its shard.

    Accelerate's own way (`cpu_ram_efficient_loading`) would broadcast rank 0's state dict, of which it takes each tensor for a
    sharded parameter of a submodule, and leaves out models with packed weights.
    """
    import accelerate
    from torch.distributed.fsdp import FSDPModule

    weights: Any = getattr(model, "streamed_weights", None)
    if weights is None or weights.closed:
        end_deferral(model)
        weights, untouched = None, {}
    else:
        untouched = from_main(weights.untouched(model))  # a script may have read some on rank 0 alone
    upstream: Any = accelerate.accelerator.fsdp2_prepare_model

    def shard(accelerator: Any, model: Any) -> Any:
        if isinstance(model, FSDPModule):  # sharded as it was read (`mesh`)
            return upstream(accelerator, model)
        # Packed weights that are read whole are on every rank, with constants that belong to their memory.
        named = model.named_parameters()
        own = {key: each.data for key, each in named if key not in untouched and type(each).__name__ not in BNB_TYPES}
        _to_meta(model, own.keys() | untouched.keys())
        model = upstream(accelerator, model)
        fill_shards(weights, untouched, model, own, job.settings["offload"])
        model.tie_weights()
        return model

    # Within Accelerate's call, since it finds an optimizer's parameters by their addresses before.
    with patched(accelerate.accelerator, fsdp2_prepare_model=shard):
        yield


def _to_meta(model: torch.nn.Module, names: Container[str]) -> None:
    """Move parameters of these names to the meta device."""
    import torch

    moved: dict[int, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in names:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            packed = type(parameter).__name__ in BNB_TYPES
            kind, options = (type(parameter), parameter.__dict__) if packed else (torch.nn.Parameter, {})
            moved[id(parameter)] = kind(empty, requires_grad=parameter.requires_grad, **options)
    for module in model.modules():
        for leaf, place in module._parameters.items():
            module._parameters[leaf] = moved.get(id(place), place)


def fill_shards(
    weights: Any, untouched: Mapping[str, str], model: Any, own: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Give each parameter on the meta device its shard. A collective for those that are not untouched.

    Args:
        weights: the `StreamedWeights` of the model, or None.
        untouched: name of a parameter → its name in the files.
        model: sharded.
        own: the values of the other parameters, by name; emptied. Rank 0's count.
        cpu_offload: whether shards are offloaded.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parameter: Any
    for name, parameter in [*model.named_parameters()]:
        if not parameter.is_meta:
            continue
        owner, _, leaf = name.rpartition(".")
        module, mesh, placements = model.get_submodule(owner), parameter.device_mesh, parameter.placements
        sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        rows = slice(offsets[0], offsets[0] + sizes[0])  # FSDP2 splits the first dimension
        if name in untouched:
            local = weights.read(untouched[name], module, parameter.dtype, rows)
        else:
            whole = own.pop(name)
            whole = torch.empty_like(whole, device="cpu") if whole.is_meta else whole
            broadcast(whole)
            local = whole[rows].to(
                mesh.device_type, parameter.dtype, copy=True
            )  # one copy: `distribute_tensor` makes two
            del whole
        shard: Any = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        del local
        # The last ranks' shards are copied to pad them (`reset_sharded_param`), so each is assigned before the next is read.
        module.load_state_dict({leaf: shard.to("cpu") if cpu_offload else shard}, strict=False, assign=True)
        del shard
    if weights is not None:
        weights.close()
