"""The parts of parameters on all ranks: together they have each tensor's elements, and equal parts have equal bits.

A cut that leaves something out shows here, and a gradient that was reduced wrongly.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from toolkit.core.units import dtype_name
from toolkit.engines.records import Prepared
from toolkit.engines.shards import PARAMETER
from toolkit.training.given_weights import value_sum


def wrong_parts(prepared: Prepared) -> list[str]:
    """Return a sentence for each parameter that the ranks' parts do not make up, or with other bits on another rank. A collective.

    Ranks send the names of their parts, and then a number for each part that another rank holds, too.
    """
    from accelerate.utils import gather_object

    held: dict[Any, Any] = {
        (shard.name, shard.shape, shard.box, shard.start, shard.tensor.numel()): shard.tensor
        for shard in prepared.job.engine.shards(prepared)
        if shard.kind == PARAMETER
    }
    holders = Counter(gather_object(list(held)))
    elements: Counter[Any] = Counter()
    for name, shape, *_, count in holders:
        elements[name, shape] += count
    wrong = [
        f"the ranks hold {count:,} of the {math.prod(shape):,} elements of {name}"
        for (name, shape), count in elements.items()
        if count != math.prod(shape)
    ]
    rank = prepared.accelerator.process_index
    sums = [
        (key, value_sum(tensor, dtype_name(tensor.dtype)), rank) for key, tensor in held.items() if holders[key] > 1
    ]
    ranks: dict[Any, dict[int, int]] = defaultdict(dict)
    for key, value, owner in gather_object(sums):
        ranks[key].setdefault(value, owner)
    wrong += [
        f"{name} has other values on rank {max(owners.values())} than on rank {min(owners.values())}"
        for (name, *_), owners in ranks.items()
        if len(owners) > 1
    ]
    return wrong[:3]
