"""Reading a model whose weights transformers shards while it loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from toolkit.engines.job import Job


def load_sharded(job: Job, reader: Any) -> Any:
    """Read this rank's part of every weight; `reader` is a `loading.Reader`.

    transformers applies tensor parallelism and FSDP2 on the meta device, then reads only the slices of this rank.
    """
    from transformers.distributed import DistributedConfig

    register_summed()
    sizes = job.parallelism
    config = DistributedConfig(tp_size=sizes.tp, fsdp_size=sizes.dp_shard, dp_replicate_size=sizes.dp_replicate)
    plugin = getattr(reader.accelerator.state, "fsdp_plugin", None)
    with _sharding_with(job, plugin):
        model = reader.read(distributed_config=config)
    # Saving would gather the model once more, which the export has done.
    model.config.distributed_config = None
    return model


def register_summed() -> None:
    """Replace transformers' style of a norm over local heads, whose gradients are summed over the ranks.

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


@contextmanager
def _sharding_with(job: Job, plugin: Any) -> Iterator[None]:
    """Let transformers shard over the data-parallel ranks as Accelerate does, with the job's dtypes."""
    from transformers.distributed import mixin

    theirs = mixin.apply_fully_sharded_data_parallelism
    mixin.apply_fully_sharded_data_parallelism = _fully_shard(job, plugin)
    try:
        yield
    finally:
        mixin.apply_fully_sharded_data_parallelism = theirs


def _fully_shard(job: Job, plugin: Any) -> Callable[..., Any]:
    """Return a function with the groups of accelerate's `fsdp2_prepare_model` (utils/fsdp_utils.py)."""

    def apply(model: Any, mesh_manager: Any, fsdp_plan: Any, ep_plan: Any) -> Any:
        from accelerate.utils.fsdp_utils import _find_final_norm
        from torch.distributed.fsdp import fully_shard

        names: Any = ("dp_replicate", "fsdp") if job.parallelism.dp_replicate > 1 else "fsdp"
        options = {"mesh": mesh_manager.get_mesh(names), "mp_policy": plugin.mixed_precision_policy}
        reshard = job.settings["reshard_after_forward"]
        for module in [child for child in model.modules() if type(child).__name__ in job.settings["wrap"]][::-1]:
            fully_shard(module, reshard_after_forward=reshard, **options)
        embedding, head, norm = model.get_input_embeddings(), model.get_output_embeddings(), _find_final_norm(model)
        if tied := bool(model.all_tied_weights_keys):
            model.tie_weights(recompute_mapping=False)  # on the meta device they are not tied yet
        else:
            fully_shard(embedding, reshard_after_forward=reshard, **options)
        tail = [module for module in ((norm, embedding, head) if tied else (norm, head)) if module is not None]
        fully_shard(tail, reshard_after_forward=False, **options)
        fully_shard(model, **options)
        return model

    return apply
