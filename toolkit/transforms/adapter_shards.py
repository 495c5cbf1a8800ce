"""LoRA over matrices that tensor parallelism splits: of each pair one half is split like its base, the other one stays whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from toolkit.core.units import ceil_div
from toolkit.engines.mesh.plan import COLWISE, SHARED, style_of
from toolkit.engines.upstream import patched

if TYPE_CHECKING:
    import torch


@contextmanager
def whole_sizes() -> Iterator[None]:
    """Let PEFT make adapters of whole matrices: of a split one it takes this rank's part (0.21, `_get_in_out_features`).

    So first values are those of one process, and each rank keeps its part of them.
    """
    from peft.tuners.lora import LoraLayer
    from torch.distributed.tensor import DTensor

    sizes = LoraLayer._get_in_out_features

    def whole(layer: Any, module: Any) -> Any:
        split = isinstance(getattr(module, "weight", None), DTensor)
        return (module.in_features, module.out_features) if split else sizes(layer, module)

    with patched(LoraLayer, _get_in_out_features=whole):
        yield


def split_adapters(peft_model: Any) -> None:
    """Split the adapters of split matrices, in place. Every rank has drawn the same whole values.

    A matrix that is split by outputs: B is split by rows, and the gradient at its input is summed over the ranks. One that is
    split by inputs: A is split by columns, and its partial outputs are summed before B. Where inputs and outputs are whole on
    every rank (Phi-3), the half is gathered, and each rank computes the whole product.
    """
    from peft.tuners.lora import LoraLayer
    from torch.distributed.tensor import DTensor
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    model = peft_model.get_base_model()
    for name, layer in model.named_modules():
        weight = getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, LoraLayer) else None
        if not isinstance(weight, DTensor):
            continue
        style, mesh = style_of(f"{name}.weight", model.tp_plan), weight.device_mesh
        kind, half = ("colwise", layer.lora_B) if style in COLWISE else ("rowwise", layer.lora_A)
        split: Any = half["default"]
        ALL_PARALLEL_STYLES[kind].shard_param(split, "weight", mesh)
        if style not in (kind, SHARED):
            split.forward = _gathered(split)
            continue
        ALL_PARALLEL_STYLES[style].install_forward(split, mesh)
        dropout: Any = layer.lora_dropout["default"]
        if kind == "rowwise" and getattr(dropout, "p", None):  # an `Identity` has none
            dropout.forward = _dropped(dropout, layer.in_features, mesh)


def _gathered(linear: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward over the whole matrix. Its gradient is the same on every rank, which keeps its part."""
    import torch
    from torch.distributed.tensor import Replicate

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, linear.weight.redistribute(placements=[Replicate()]).to_local())

    return forward


def _dropped(dropout: Any, width: int, mesh: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that drops of this rank's part of an input what one process drops of the whole one.

    So the generators of the ranks stay alike, and the ranks drop independently of each other.
    """
    import torch

    first = mesh.get_local_rank() * ceil_div(width, mesh.size())

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not dropout.training:
            return x
        kept = torch.empty((*x.shape[:-1], width), dtype=torch.bool, device=x.device).bernoulli_(1 - dropout.p)
        dropped: torch.Tensor = torch.where(kept.narrow(-1, first, x.shape[-1]), x, 0)
        return dropped * float(1 / (1 - dropout.p))

    return forward
