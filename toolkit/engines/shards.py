"""Shards: the parts of named tensors that a rank holds, and the one way to copy between any two layouts.

A box is (offset, size) per dimension of a whole tensor. Nothing here loops over elements or rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(offset, size) per dimension of a whole tensor; `()` for a tensor without dimensions."""

Part: TypeAlias = "tuple[Box, torch.Tensor]"
"""A box, and a tensor of the box's shape with its values. Any strides."""

PARAMETER, BUFFER, MASTER = "parameter", "buffer", "master"


@dataclass(frozen=True)
class Shard:
    """The part of a named tensor that this rank holds. Writing into `tensor` writes into the engine's own memory.

    A tensor of the box's shape, with any strides, is all of the box. A one-dimensional tensor is a flat range of the
    box in row-major order, from offset `start` on. A tensor may come in several shards with different boxes.
    """

    name: str
    """Canonical name in the whole model, equal on all ranks."""
    kind: str
    """`parameter`, `buffer`, `master`, or a state of the optimizer such as `exp_avg`."""
    shape: tuple[int, ...]
    """Of the whole tensor of this name and kind."""
    box: Box
    start: int
    """Offset in the flattened box, in elements. 0 where `tensor` has the box's shape."""
    tensor: torch.Tensor


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor."""
    return tuple((0, int(size)) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the sizes of a box."""
    return tuple(size for _, size in box)


def box_elements(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(box_shape(box))


def intersect(first: Box, second: Box) -> Box | None:
    """Return the box that two boxes share, or None if they share no element."""
    shared = []
    for (a, n), (b, m) in zip(first, second, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        shared.append((low, high - low))
    return tuple(shared)


def subtract(box: Box, other: Box) -> list[Box]:
    """Return boxes that cover exactly the elements of `box` outside of `other`: at most two per dimension."""
    shared = intersect(box, other)
    if shared is None:
        return [box] if box_elements(box) else []
    rest: list[Box] = []
    for dim, ((start, size), (low, shared_size)) in enumerate(zip(box, shared, strict=True)):
        for offset, length in ((start, low - start), (low + shared_size, start + size - low - shared_size)):
            if length:
                rest.append((*shared[:dim], (offset, length), *box[dim + 1 :]))
    return rest


def uncovered(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return boxes that cover exactly the elements of `box` that lie in none of `boxes`."""
    rest = [box] if box_elements(box) else []
    for other in boxes:
        if not rest:
            break
        rest = [left for hole in rest for left in subtract(hole, other)]
    return rest


def flat_boxes(box: Box, start: int, length: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes that make up a flat range of a box, in order, each with its offset in the range.

    Each of them is contiguous in the range. There are at most 2d - 1 in d dimensions: the end of a row, whole rows and
    the beginning of a row, where the end and the beginning are such ranges with one dimension less.
    """
    if not box:
        if length:
            yield (), 0
        return
    (origin, _), rest = box[0], box[1:]
    row, done = box_elements(rest), 0
    while done < length:
        first, inside = divmod(start + done, row)
        rows = (length - done) // row
        if inside or not rows:
            length_ = min(row - inside, length - done)
            for part, offset in flat_boxes(rest, inside, length_):
                yield ((origin + first, 1), *part), done + offset
        else:
            length_ = rows * row
            yield ((origin + first, rows), *rest), done
        done += length_


def parts(shard: Shard) -> Iterator[Part]:
    """Yield boxes that make up exactly a shard, each with a view of the shard's memory in the box's shape."""
    if tuple(shard.tensor.shape) == box_shape(shard.box):
        if shard.tensor.numel():
            yield shard.box, shard.tensor
        return
    for box, offset in flat_boxes(shard.box, shard.start, shard.tensor.numel()):
        yield box, shard.tensor.narrow(0, offset, box_elements(box)).view(box_shape(box))


def narrow(part: Part, box: Box) -> torch.Tensor:
    """Return the view of a part on a box inside the part's own."""
    tensor = part[1]
    for dim, ((origin, _), (offset, size)) in enumerate(zip(part[0], box, strict=True)):
        tensor = tensor.narrow(dim, offset - origin, size)
    return tensor


def overlaps(sources: Iterable[Part], targets: Iterable[Part]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the views of a source and of a target on each box that the two share. `sources` may be made one at a time."""
    targets = list(targets)
    for source in sources:
        for target in targets:
            shared = intersect(source[0], target[0])
            if shared is not None:
                yield narrow(source, shared), narrow(target, shared)


def copy(sources: Iterable[Part], targets: Iterable[Part]) -> None:
    """Copy the values of the sources into the targets, wherever their boxes meet, between any devices and dtypes."""
    for source, target in overlaps(sources, targets):
        for dim, stride in enumerate(target.stride()):
            if stride == 0:  # an expanded buffer: torch refuses to write an element several times
                source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
        target.copy_(source)
