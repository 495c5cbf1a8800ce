"""Tokens that reach each expert: counted at the experts' input, summed over all ranks once a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.engines.records import Prepared
from toolkit.training.global_sums import HostCopy

if TYPE_CHECKING:
    import torch

IDS = ("top_k_index", "router_indices")
"""Names of the second argument of fused experts: each token's experts [tokens, k], numbered over all ranks."""


def routed_modules(prepared: Prepared) -> Iterator[tuple[Any, str, int]]:
    """Yield each module with fused experts, the name of its argument with each token's experts, and their number over all ranks."""
    for module in prepared.model.modules():
        names = [name for name in inspect.signature(type(module).forward).parameters if name in IDS]
        if names and hasattr(module, "num_experts"):
            yield module, names[0], int(module.num_experts) * prepared.job.strategy.ep


class ExpertLoad:
    """Counts the tokens of every layer with fused experts. Compiled blocks are left alone: a hook would break their graph."""

    def __init__(self, prepared: Prepared) -> None:
        import torch

        job, device = prepared.job, prepared.accelerator.device
        self._ranks, self._ep = job.parallelism.ranks, job.parallelism.ep
        self._own_rows = job.coordinates(prepared.accelerator.process_index).tp == 0
        """Another rank of a tensor-parallel group sees the same tokens; each stage of a pipeline counts its own layers."""
        self._layers: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        for module, name, experts in routed_modules(prepared) if not job.strategy.compile else ():
            self._layers.append(torch.zeros(experts, dtype=torch.long, device=device))
            hook = self._hook(self._layers[-1], name)
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

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

    def read(self, sent: HostCopy | None) -> Mapping[str, Any]:
        """Return a step's load, in few figures: models have hundreds of experts. Empty without experts.

        Returns:
            Of each layer `tokens` of an expert on average, `most` of one over that, the share of `idle` ones. With expert
            parallelism `imbalance`: the tokens of the rank with most, over all layers, divided by the mean of the ranks; and
            `layer_imbalance`: the same of the layer where it is largest.
        """
        if sent is None:
            return {}
        values, begin, highest, ranks = sent.read(), 0, 1.0, [0] * self._ep
        load: dict[str, list[float]] = {"tokens": [], "most": [], "idle": []}
        for layer in self._layers:
            counts = values[begin : begin + len(layer)]
            begin, total, each = begin + len(layer), sum(counts), len(counts) // self._ep
            load["tokens"].append(round(total / len(counts), 2))
            load["most"].append(round(max(counts) * len(counts) / max(1, total), 3))
            load["idle"].append(round(counts.count(0) / len(counts), 4))
            own = [sum(counts[rank * each : (rank + 1) * each]) for rank in range(self._ep)]
            ranks, highest = [sum(pair) for pair in zip(ranks, own, strict=True)], max(highest, self._over_mean(own))
        if self._ep == 1:
            return load
        return {**load, "imbalance": round(self._over_mean(ranks), 4), "layer_imbalance": round(highest, 4)}

    def _over_mean(self, ranks: Sequence[int]) -> float:
        """Return the largest of the ranks' tokens, divided by their mean."""
        return max(ranks) * self._ep / max(1, sum(ranks))

    def close(self) -> None:
        """Remove the hooks: a model may be trained again."""
        for hook in self._hooks:
            hook.remove()
