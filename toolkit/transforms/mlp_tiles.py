"""`--mlp-tiles`: each MLP computes a row in pieces, and the backward recomputes them: one piece's products exist at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, cast

from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job, Transform
from toolkit.engines.registry import register_transform
from toolkit.models import ModelSpec
from toolkit.models.structure import module_lists, routed_blocks

if TYPE_CHECKING:
    import torch


class MlpTiles(Transform):
    """`--mlp-tiles`, for MLPs with one input, the hidden states. A mixture's routed experts are left as they are."""

    name = "mlp_tiles"

    def settings(self, job: Job) -> str | None:
        return None if job.strategy.mlp_tiles == "none" else job.strategy.mlp_tiles

    def refuse(self, job: Job) -> None:
        if job.strategy.compile:
            raise StrategyError(
                "mlp_tiles does not run with compile: the recomputation would break its graphs. Leave out one of the two."
            )

    def apply(self, model: Any, job: Job) -> Any:
        tiles, spec = job.strategy.mlp_tiles, cast("ModelSpec", job.spec)
        mlps = list(_mlps(model, spec))
        if not mlps:
            raise StrategyError(
                f"mlp_tiles {tiles}: the layers of {spec.architecture} have no MLP that takes the hidden states alone. "
                "Leave it out."
            )
        for mlp in mlps:
            mlp.forward = update_wrapper(partial(_in_tiles, mlp.forward, int(tiles)), mlp.forward)
        return model


register_transform(MlpTiles())


def _mlps(model: Any, spec: ModelSpec) -> Iterator[Any]:
    """Yield the outermost modules inside trained layers that have one input and several linear modules."""
    routed = routed_blocks(model)
    apart = [name for each in routed for name in (each.name, *each.experts, *each.routers)]
    for stack, layers in module_lists(model):
        left = [*spec.frozen, *(name for each in routed for name in (*each.experts, *each.routers))]
        for name, module in layers.named_modules(prefix=stack):
            inside = any(f"{name}.".startswith(f"{each}.") for each in left)
            holds = any(f"{each}.".startswith(f"{name}.") for each in apart)
            products = sum(linear.startswith(f"{name}.") for linear in spec.linears)
            if inside or holds or products < 2 or type(module).__name__ in spec.blocks:
                continue
            inputs = list(inspect.signature(module.forward).parameters.values())
            if len(inputs) == 1 and inputs[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                left.append(name)
                yield module


def _in_tiles(inner: Any, number: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the MLP's output for hidden states [b, s, h], computed in at most `number` pieces of tokens by its own forward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def one(piece: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", inner(piece.contiguous()))  # GPT-2's layers take a view of it

    call = partial(checkpoint, one, use_reentrant=False) if torch.is_grad_enabled() else one
    return torch.cat([call(piece) for piece in hidden.chunk(number, -2)], -2)
