"""Styles of a plan in the place of transformers' own, and one that it has not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.config.parallelism import Parallelism
from toolkit.engines.mesh.plan import SHARED, plan_of
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import torch


def register_shared(spec: ModelSpec, sizes: Parallelism) -> dict[str, str]:
    """Register the style of keys and values with fewer heads than ranks. Return the rules with it; empty where it has no use.

    The ranks of one head gather its parts. Each has queries of its own for it, so its gradient is summed.
    """
    rules = {name: style for name, style in plan_of(spec, sizes).items() if style == SHARED}
    if not rules:
        return {}
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from transformers.distributed import tensor_parallel

    heads = spec.config["num_key_value_heads"]

    class Shared(tensor_parallel.ColwiseParallel):  # type: ignore[misc]
        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            if not isinstance(output, DTensor):
                output = self._from_local_last_dim_shard(output, mesh, module.out_features)
            whole = output.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            width = module.out_features // heads
            return whole.narrow(-1, mesh.get_local_rank() * heads // mesh.size() * width, width).contiguous()

    tensor_parallel.ALL_PARALLEL_STYLES.register(SHARED, Shared())
    return rules


def group_heads(model: torch.nn.Module, spec: ModelSpec, sizes: Parallelism) -> None:
    """Tell each attention how many of a rank's queries use its one head of keys: all."""
    module: Any
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = spec.heads // sizes.tp


def register_summed() -> None:
    """Replace transformers' style of a norm over local heads: its gradients are summed over the ranks.

    Upstream's hook sums `parameter.grad`, which from the second micro-batch on contains the first one's sum. A hook on the
    tensor gets the gradient of each micro-batch alone.
    """
    import torch
    import torch.distributed as dist
    from transformers.distributed import tensor_parallel

    class Summed(tensor_parallel.ReplicatedWithGradAllReduce):  # type: ignore[misc]
        def install_forward(self, module: Any, mesh: Any) -> Any:
            forward = module.forward
            hooked: dict[str, torch.nn.Parameter] = {}

            def summed(gradient: torch.Tensor) -> torch.Tensor:
                total = gradient.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
                dist.all_reduce(total, group=mesh.get_group())
                return total.to(gradient.dtype)

            def tp_forward(*args: Any, **kwargs: Any) -> Any:
                if torch.is_grad_enabled():
                    for name, parameter in module.named_parameters(recurse=False):
                        if parameter.requires_grad and hooked.get(name) is not parameter:
                            parameter.register_hook(summed)
                            hooked[name] = parameter
                return forward(*args, **kwargs)

            module.forward = tp_forward
            return module

    tensor_parallel.ALL_PARALLEL_STYLES.register("replicated_with_grad_allreduce", Summed())
