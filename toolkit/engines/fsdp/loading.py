"""Weights that come from the files one at a time while FSDP2 prepares a model: a rank holds its shard, and one of them whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from toolkit.engines.job import Job

if TYPE_CHECKING:
    import torch


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
    from torch.distributed.tensor import distribute_tensor

    weights, shards = model.streamed_weights, {}
    parameter: Any
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        if name not in weights:
            whole = own[name]
        elif type(module).__name__ == "Linear4bit" and name.endswith(".weight"):
            whole = weights.share_packed(name, module)
        else:
            whole = weights.share(name)
        mesh = parameter.device_mesh
        view = distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
        shards[name] = view.to("cpu" if on_host else mesh.device_type, parameter.dtype, copy=True)
        del whole, view
    model.load_state_dict(shards, strict=False, assign=True)
    weights.close()
