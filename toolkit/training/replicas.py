"""The parts of parameters on all ranks: together they have each tensor's elements, and equal parts have equal bits.

A cut that leaves something out shows here, and a gradient that was reduced wrongly.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from toolkit.core.units import dtype_name
from toolkit.engines.records import Prepared
from toolkit.engines.shards import PARAMETER, Box, parts, whole_box
from toolkit.training.given_weights import value_sum


def wrong_parts(prepared: Prepared) -> list[str]:
    """Return a sentence for each parameter that the ranks' parts do not make up, or with other bits on another rank. A collective.

    Ranks send the names of their parts, and then a number for each part that another rank holds, too.
    """
    from accelerate.utils import gather_object

    held: dict[Any, Any] = {
        (shard.name, shard.shape, tuple(box for box, _ in parts(shard))): shard.tensor
        for shard in prepared.job.engine.shards(prepared)
        if shard.kind == PARAMETER
    }
    holders = Counter(gather_object(list(held)))
    boxes: dict[Any, list[Box]] = defaultdict(list)
    for name, shape, own in holders:
        boxes[name, shape].extend(own)
    wrong = []
    for (name, shape), several in boxes.items():
        count = sum(math.prod(size for _, size in box) for box in several)
        if count != math.prod(shape):
            wrong.append(f"the ranks hold {count:,} of the {math.prod(shape):,} elements of {name}")
        elif _corners(several) != _corners([whole_box(shape)]):
            wrong.append(f"the ranks hold some elements of {name} twice, and others not at all")
    rank = prepared.accelerator.process_index
    sums = [
        (key, value_sum(tensor, dtype_name(tensor.dtype), in_order=True), rank)
        for key, tensor in held.items()
        if holders[key] > 1
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


def _corners(boxes: Iterable[Box]) -> set[tuple[int, ...]]:
    """Return the corners that an odd number of boxes has. Boxes of as many elements as a whole tile it if it has the same."""
    corners: set[tuple[int, ...]] = set()
    for box in boxes:
        if all(size for _, size in box):
            corners ^= set(itertools.product(*((start, start + size) for start, size in box)))
    return corners
