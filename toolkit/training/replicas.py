"""Tensors that several ranks hold alike, compared by a sum of their bits: a gradient that was reduced wrongly shows here."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from toolkit.core.units import dtype_name
from toolkit.engines.records import Prepared
from toolkit.engines.shards import PARAMETER
from toolkit.training.given_weights import value_sum


def differing_replicas(prepared: Prepared) -> list[str]:
    """Return a sentence for each parameter of which two ranks hold the same part with different bits. A collective.

    Ranks send the names of their parts, and then a number for each part that another rank holds, too.
    """
    from accelerate.utils import gather_object

    held: dict[Any, Any] = {
        (shard.name, shard.box, shard.start, shard.tensor.numel()): shard.tensor
        for shard in prepared.job.engine.shards(prepared)
        if shard.kind == PARAMETER
    }
    holders = Counter(gather_object(list(held)))
    rank = prepared.accelerator.process_index
    sums = [
        (key, value_sum(tensor, dtype_name(tensor.dtype)), rank) for key, tensor in held.items() if holders[key] > 1
    ]
    ranks: dict[Any, dict[int, int]] = defaultdict(dict)
    for key, value, owner in gather_object(sums):
        ranks[key].setdefault(value, owner)
    return [
        f"{name} has other values on rank {max(owners.values())} than on rank {min(owners.values())}"
        for (name, *_), owners in ranks.items()
        if len(owners) > 1
    ][:3]
