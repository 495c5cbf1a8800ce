"""Division of trained tensors and buffers among the ranks: each element is written once, as boxes and flat ranges."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config.tables import Optimizer
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF, ceil_div, dtype_name
from toolkit.engines.records import Prepared
from toolkit.engines.shards import BUFFER, MASTER, PARAMETER, Box, Shard, box_elements, box_shape
from toolkit.engines.states import persistent_buffers

if TYPE_CHECKING:
    import torch

WEIGHT = "weight"
"""The kind of a parameter's values in a checkpoint: of its master, if the engine keeps one."""

GENERATOR = "generator"
"""The kind of the tensors that hold a generator's state."""

_KEY = re.compile(r"(?s)(?P<kind>[a-z0-9_]+):(?P<name>.+):(?P<box>[0-9+,]*):(?P<start>[0-9]+)")


@dataclass(frozen=True)
class Region:
    """A box of a named tensor, or a flat range in it; the unit of a rank's memory and of a file."""

    kind: str
    name: str
    box: Box
    start: int
    """Offset in the flattened box, in elements."""
    length: int
    """In elements."""

    @property
    def whole(self) -> bool:
        """Whether it is all of the box."""
        return self.length == box_elements(self.box)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of its tensor in a file: the box's for all of the box, flat for a part."""
        return box_shape(self.box) if self.whole else (self.length,)

    @property
    def key(self) -> str:
        """Its name in a safetensors file, as `KIND:NAME:BOX:START`: `weight:lm_head.weight:0+4096,512+256:0`.

        BOX is `offset+size` for each dimension of the whole tensor, separated by commas. It is empty for a tensor
        without dimensions. A name may contain colons; the other three cannot.
        """
        box = ",".join(f"{offset}+{size}" for offset, size in self.box)
        return f"{self.kind}:{self.name}:{box}:{self.start}"

    @classmethod
    def parse(cls, key: str, stored_shape: Sequence[int]) -> Region:
        """Read a key and the shape of its tensor. Inverse of `key` and `stored_shape`.

        Raises:
            ValueError: for a key or a shape that no region has.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError("expected KIND:NAME:BOX:START")
        sides = [side.split("+") for side in match["box"].split(",")] if match["box"] else []
        box = tuple((int(offset), int(size)) for offset, size in sides)
        region = cls(match["kind"], match["name"], box, int(match["start"]), math.prod(stored_shape))
        if region.key != key or region.stored_shape != tuple(stored_shape):
            raise ValueError(f"its spelling, or its shape {list(stored_shape)}, is not the toolkit's")
        if region.length < 1 or region.start + region.length > box_elements(box):
            raise ValueError("it is empty, or reaches beyond its box")
        return region

    @classmethod
    def of(cls, shard: Shard) -> Region:
        """Return the region that a shard holds."""
        return cls(shard.kind, shard.name, shard.box, shard.start, shard.tensor.numel())


@dataclass(frozen=True)
class WriteItem:
    """A region that this rank writes, and a view of its memory in the stored shape."""

    region: Region
    tensor: torch.Tensor

    def divide(self, index: int, count: int) -> WriteItem | None:
        """Return share `index` of `count` about equal shares, or None if there are too few rows."""
        region, tensor = self.region, self.tensor
        if not tensor.dim():
            return self if index == 0 else None
        dim = _dimension(tensor.shape, count) if region.whole else 0
        low, high = tensor.shape[dim] * index // count, tensor.shape[dim] * (index + 1) // count
        if low == high:
            return None
        if region.whole:
            box = (*region.box[:dim], (region.box[dim][0] + low, high - low), *region.box[dim + 1 :])
            share = dataclasses.replace(region, box=box, length=box_elements(box))
        else:
            share = dataclasses.replace(region, start=region.start + low, length=high - low)
        return WriteItem(share, tensor.narrow(dim, low, high - low))


def _dimension(shape: Sequence[int], count: int) -> int:
    """Return the first dimension that divides about evenly, else the largest.

    Whole rows are contiguous, so a device copies them to the host without a temporary copy.
    """
    even = (dim for dim, size in enumerate(shape) if size >= 16 * count or size % count == 0)
    return next(even, max(range(len(shape)), key=lambda dim: shape[dim]))


@dataclass(frozen=True)
class Layout:
    """The parts of a checkpoint that this rank writes, and the tensors of all ranks. Valid for one set of ranks."""

    mine: tuple[WriteItem, ...]
    tensors: dict[str, dict[str, dict[str, Any]]]
    """As `Manifest.tensors`."""
    total_bytes: int
    """Of all ranks' regions."""
    model: Any
    """The unwrapped module, which may replace its buffers while it trains."""

    def items(self) -> Iterator[WriteItem]:
        """Yield this rank's items, with the model's current buffers.

        Raises:
            StrategyError: for a buffer with another shape or dtype than at the start of training.
        """
        buffers = persistent_buffers(self.model)
        for item in self.mine:
            if item.region.kind == BUFFER:
                now, was = buffers.get(item.region.name), item.tensor
                if now is None or (now.shape, now.dtype) != (was.shape, was.dtype):
                    raise StrategyError(
                        f"buffer {item.region.name} had shape {list(was.shape)} and {was.dtype} when training began, and "
                        "has another now. A checkpoint needs it unchanged: register it with persistent=False."
                    )
                item = dataclasses.replace(item, tensor=now.detach())
            yield item


def checkpoint_shards(prepared: Prepared, *, create: bool = False) -> Iterator[Shard]:
    """Yield the shards of a checkpoint, with their kinds in it: no frozen parameters, no compute copies."""
    module = prepared.accelerator.unwrap_model(prepared.model)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    shards = [
        shard for shard in prepared.job.engine.shards(prepared, create) if shard.kind == BUFFER or shard.name in trained
    ]
    job = prepared.job
    # From the account, so that a rank with padding alone decides as the others do.
    kinds = job.engine.expected_state(job).dtypes if job.spec else {shard.kind for shard in shards}
    apart = MASTER in kinds
    for shard in shards:
        if not (apart and shard.kind == PARAMETER):
            yield dataclasses.replace(shard, kind=WEIGHT) if shard.kind in (PARAMETER, MASTER) else shard


def lay_out(prepared: Prepared, most: int) -> Layout:
    """Divide trained tensors and buffers among the ranks: each region is written once, in about equal shares. A collective.

    The first rank with a buffer writes it, since buffers may differ between ranks.

    Args:
        prepared: model and optimizer.
        most: bytes of the largest item; a larger share becomes several items.

    Raises:
        StrategyError: for an optimizer with other states than the job's, or with states that cannot be resharded.
    """
    from accelerate.utils import gather_object

    _check_optimizer(prepared.job.optimizer, prepared.optimizer)
    shards = list(checkpoint_shards(prepared, create=True))
    by_region = {Region.of(shard): shard.tensor for shard in shards}
    shapes = {(shard.name, shard.kind): (shard.shape, dtype_name(shard.tensor.dtype)) for shard in shards}
    all_ranks: list[tuple[list[Region], dict[tuple[str, str], Any]]] = gather_object([(list(by_region), shapes)])
    holders: dict[Region, list[int]] = {}
    tensors: dict[str, dict[str, dict[str, Any]]] = {}
    for rank, (regions, about) in enumerate(all_ranks):
        for (name, kind), (shape, dtype) in about.items():
            tensors.setdefault(name, {})[kind] = {"shape": list(shape), "dtype": dtype}
        for region in regions:
            if region.length and not (region.kind == BUFFER and region in holders):
                holders.setdefault(region, []).append(rank)
    return Layout(
        mine=tuple(_items(by_region, holders, prepared.accelerator.process_index, most)),
        tensors=tensors,
        total_bytes=sum(region.length * BYTES_OF[tensors[region.name][region.kind]["dtype"]] for region in holders),
        model=prepared.accelerator.unwrap_model(prepared.model),
    )


def _check_optimizer(row: Optimizer, optimizer: Any) -> None:
    while hasattr(optimizer, "optimizer"):  # Accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    movable = all(state.reshards for state in row.states)
    if type(optimizer).__name__ not in row.classes or amsgrad or not movable:
        reason = (
            f"it keeps {', '.join(state.name for state in row.states if state.reshards)} of {', '.join(row.classes)}"
        )
        raise StrategyError(
            f"a checkpoint cannot hold the state of {type(optimizer).__name__}{' with amsgrad' if amsgrad else ''}: {reason}. "
            "Use one of these optimizers, or train without checkpoints."
        )


def _items(
    tensors: Mapping[Region, torch.Tensor], holders: Mapping[Region, list[int]], rank: int, most: int
) -> Iterator[WriteItem]:
    """Yield this rank's share of each of its regions, in items. Larger shares rotate over the ranks."""
    for at, (region, ranks) in enumerate(holders.items()):
        if rank in ranks:
            item = WriteItem(region, tensors[region].view(region.stored_shape))
            share = item.divide((ranks.index(rank) + at) % len(ranks), len(ranks))
            if share is not None:
                count = ceil_div(share.tensor.nbytes, most)
                yield from filter(None, (share.divide(index, count) for index in range(count)))
