"""Styles of a plan in the place of transformers' own, one that it has not, and one sum of gradients for products of one input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from toolkit.config.parallelism import Parallelism
from toolkit.engines.mesh.plan import PRODUCTS, SHARED, plan_of, style_of
from toolkit.engines.upstream import patched
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import torch


@contextmanager
def planned(spec: ModelSpec) -> Iterator[None]:
    """Let transformers split models by the description's plan, which may be a user's own, and not by their class's."""
    from transformers.distributed.mixin import DistributedMixin

    resolve = DistributedMixin._resolve_parallel_plans

    def resolved(model: Any, config: Any) -> Any:
        model._tp_plan = dict(spec.tp_plan)
        return resolve(model, config)

    with patched(DistributedMixin, _resolve_parallel_plans=resolved):
        yield


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


def share_inputs(model: torch.nn.Module, spec: ModelSpec, sizes: Parallelism, mesh: Any) -> None:
    """Sum the gradients of an input once a part of a layer, not once for each of its products: Megatron-LM's f.

    transformers makes a DTensor of the input for each product that is split by outputs, and the backward all-reduces each one's
    gradient: five in a layer of a Llama, where two are needed. Here queries, keys and values share one, and so do gate and up.
    What else takes the input keeps the tensor itself. Call it before adapters are added: their products stay inside.
    """
    plan = plan_of(spec, sizes)
    for name, part in model.named_modules():
        leaves = [each for leaf, each in part.named_children() if style_of(f"{name}.{leaf}.weight", plan) in PRODUCTS]
        if len(leaves) > 1:
            shared = _SharedInput(mesh)
            part.register_forward_pre_hook(shared.begin)
            part.register_forward_hook(shared.end, always_call=True)  # recomputation stops in the middle
            for leaf in leaves:
                leaf.register_forward_pre_hook(shared.replace)


class _SharedInput:
    """The input that several products take, as one DTensor, while the module around them runs."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._runs = False
        self._made: tuple[Any, Any] = (None, None)
        """The last input, and its DTensor. Both are dropped with the forward: they would hold its activations."""

    def begin(self, *_: Any) -> None:
        self._runs = True

    def end(self, *_: Any) -> None:
        self._runs, self._made = False, (None, None)

    def replace(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        import torch
        from torch.distributed.tensor import DTensor, Replicate

        given, *rest = args
        if not self._runs or not torch.is_grad_enabled() or isinstance(given, DTensor):
            return None
        if self._made[0] is not given:
            self._made = given, DTensor.from_local(given, self._mesh, [Replicate()], run_check=False)
        return (self._made[1], *rest)


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
