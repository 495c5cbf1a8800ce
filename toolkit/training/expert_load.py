"""Tokens that reach each expert: counted at the experts' input, summed over all ranks once a step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.engines.records import Prepared
from toolkit.training.global_sums import HostCopy

if TYPE_CHECKING:
    import torch

IDS = ("top_k_index", "router_indices")
"""Names of the second argument of fused experts: each token's experts [tokens, k], numbered over all ranks."""


class ExpertLoad:
    """Counts the tokens of every layer with fused experts. Compiled blocks are left alone: a hook would break their graph."""

    def __init__(self, prepared: Prepared) -> None:
        import torch

        job, device = prepared.job, prepared.accelerator.device
        self._ranks = job.parallelism.ranks
        self._own_rows = job.coordinates(prepared.accelerator.process_index).tp == 0
        """Another rank of a tensor-parallel group sees the same tokens; each stage of a pipeline counts its own layers."""
        self._layers: list[torch.Tensor] = []
        for module in prepared.model.modules() if not job.strategy.compile else ():
            names = [name for name in inspect.signature(type(module).forward).parameters if name in IDS]
            if names and hasattr(module, "num_experts"):
                experts = int(module.num_experts) * job.strategy.ep
                self._layers.append(torch.zeros(experts, dtype=torch.long, device=device))
                module.register_forward_pre_hook(self._hook(self._layers[-1], names[0]), with_kwargs=True)

    def _hook(self, counts: torch.Tensor, name: str) -> Any:
        import torch

        def count(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            # A backward that recomputes the layer would count its tokens again.
            if module.training and torch._C._current_graph_task_id() == -1:
                ids = (kwargs[name] if name in kwargs else args[1]).flatten()
                counts.scatter_add_(0, ids, torch.ones_like(ids))

        return count

    def send(self) -> HostCopy | None:
        """Return the counts of a step on all ranks, on their way to the host, and begin the next; None without experts."""
        import torch
        import torch.distributed as dist

        if not self._layers:
            return None
        counts = torch.cat(self._layers) * int(self._own_rows)
        for layer in self._layers:
            layer.zero_()
        if self._ranks > 1:
            dist.all_reduce(counts)
        return HostCopy(counts)

    def read(self, sent: HostCopy | None) -> tuple[dict[str, float], ...]:
        """Return for each layer the mean number of tokens of an expert, the largest over it, and the share of idle experts."""
        values = [] if sent is None else sent.read()
        layers, begin = [], 0
        for layer in self._layers:
            counts = values[begin : begin + len(layer)]
            begin += len(layer)
            mean = sum(counts) / len(counts)
            most = max(counts) / mean if mean else 0.0
            layers.append({"tokens": mean, "most": most, "idle": counts.count(0) / len(counts)})
        return tuple(layers)
