"""A trace of one tensor-parallel rank without processes: a fake process group, transformers' own plan, fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from toolkit.engines.traces import TraceConfig
from toolkit.forecasting.tracing import local
from toolkit.forecasting.tracker import Tracker

WAIT = torch.ops._c10d_functional.wait_tensor.default
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


class LocalTracker(Tracker):  # type: ignore[no-untyped-call]
    """Counts the tensors inside of wrappers, which unwrap themselves first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        if func is WAIT:  # its fake kernel makes another tensor, the real one returns its argument
            return args[0]
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if func is GATHER and self._device == "cpu":  # gloo gathers into its own buffer
            size = output.untyped_storage().nbytes()
            self.events += [("+", size, ""), ("-", size, "")]
        return output


class Split:
    """A model over the ranks of a tensor-parallel group."""

    tracker = LocalTracker

    def __init__(self, mesh: Any, size: int) -> None:
        self._mesh, self._size = mesh, size

    def distribute(self, model: Any) -> None:
        """Apply transformers' plan, as `from_pretrained` does before it reads weights."""
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        from toolkit.engines.mesh import register_summed

        register_summed()
        _untie_weights(model)
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=self._size))
        apply_tensor_parallelism(model, self._mesh, plan)

    def allocate(self, model: Any) -> None:
        """Replace tensors on the meta device by fake ones; of a DTensor, the local part."""
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(
                        _allocated(parameter), requires_grad=parameter.requires_grad
                    )
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


@contextmanager
def split(config: TraceConfig) -> Iterator[Split]:
    """Yield how a model is split. A fake group is this process's default group meanwhile."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=config.tp_rank, world_size=config.tp)
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # its keys do not name the rank
    try:
        yield Split(init_device_mesh("cpu", (config.tp,), mesh_dim_names=("tp",)), config.tp)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _allocated(tensor: torch.Tensor) -> torch.Tensor:
    probe = torch.empty(local(tensor).shape, dtype=tensor.dtype)
    if not isinstance(tensor, DTensor):
        return probe
    return DTensor.from_local(
        probe, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _untie_weights(model: Any) -> None:
    """Give tied weights parameters of their own until they are tied again: a plan finds a shared one by one name only."""
    counted: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in counted:
                own = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = own
            elif parameter is not None:
                counted.add(id(parameter))
