"""`opened()`: a checkpoint's tensors on disk, read by box, on demand."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.layout import GENERATOR, WEIGHT, Region
from toolkit.checkpoints.manifest import Manifest, file_name
from toolkit.core.errors import CheckpointError
from toolkit.engines.shards import (
    Box,
    Part,
    box_elements,
    box_shape,
    copy,
    flat_boxes,
    intersect,
    uncovered,
    whole_box,
)
from toolkit.models.files import SAFETENSORS_DTYPES

if TYPE_CHECKING:
    import torch


MOST_PARTS = 64
"""The most parts of one tensor in a rank's file. A tensor that packs two matrices has two, each of at most a GiB."""


class StoredTensors:
    """The tensors in a checkpoint's files, in any layout."""

    def __init__(self, path: Path, manifest: Manifest, files: Mapping[str, Any]) -> None:
        """Read the keys of `files`, open safetensors files by name.

        Raises:
            CheckpointError: for an invalid key, or one that differs from the manifest.
        """
        self.path, self.manifest, self._files = path, manifest, files
        self._stored: dict[tuple[str, str], list[tuple[Region, Any]]] = {}
        counts: Counter[tuple[str, str, str]] = Counter()
        for name, file in files.items():
            for key in file.keys():  # noqa: SIM118  not a dictionary
                if key.startswith(f"{GENERATOR}:"):
                    continue
                try:
                    part = file.get_slice(key)
                    region = Region.parse(key, part.get_shape())
                    _check_inside(region, SAFETENSORS_DTYPES.get(part.get_dtype()), manifest)
                    counts[name, region.name, region.kind] += 1
                    if counts[name, region.name, region.kind] > MOST_PARTS:
                        raise ValueError(f"the file holds more than {MOST_PARTS} parts of it")
                except ValueError as error:
                    raise CheckpointError(
                        f"{path / name} is damaged: {key!r} names no part of a tensor of this checkpoint: {error}. "
                        "The toolkit did not write it. Take another checkpoint."
                    ) from error
                self._stored.setdefault((region.name, region.kind), []).append((region, file))
        for (tensor, kind), stored in self._stored.items():
            stored.sort(key=lambda part: (part[0].box, part[0].start))
            elements = box_elements(whole_box(manifest.tensors[tensor][kind]["shape"]))
            if sum(region.length for region, _ in stored) > elements:
                raise CheckpointError(f"{path} holds a part of {kind} of {tensor} twice. Take another checkpoint.")

    def read(self, name: str, kind: str, targets: Iterable[Part]) -> None:
        """Copy the values of boxes of a tensor into views of their shapes.

        Raises:
            CheckpointError: if the files lack a part of them. Then nothing is written.
        """
        targets = list(targets)
        for box, _ in targets:
            self._check_complete(name, kind, box)
        for target in targets:
            copy(self._parts(name, kind, target[0]), [target])

    def whole(self, name: str, kind: str = WEIGHT) -> torch.Tensor:
        """Return one whole tensor, in its own shape and dtype.

        Raises:
            CheckpointError: if the files lack a part of it.
        """
        import torch

        about = self.manifest.tensors[name][kind]
        box = whole_box(about["shape"])
        self._check_complete(name, kind, box)  # before the allocation: a crafted manifest may state any shape
        tensor = torch.empty(box_shape(box), dtype=getattr(torch, about["dtype"]))
        copy(self._parts(name, kind, box), [(box, tensor)])
        return tensor

    def generators(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the states of a writing rank's random generators."""
        file = self._files[file_name(rank)]
        names = [key for key in file.keys() if key.startswith(f"{GENERATOR}:")]  # noqa: SIM118
        return {name.partition(":")[2]: file.get_tensor(name) for name in names}

    def _check_complete(self, name: str, kind: str, box: Box) -> None:
        holes = uncovered(box, (part for region, _ in self._stored.get((name, kind), ()) for part in _boxes(region)))
        if holes:
            raise CheckpointError(
                f"{self.path} lacks {kind} of {name} from {[offset for offset, _ in holes[0]]} on, a box of shape "
                f"{list(box_shape(holes[0]))}. Take another checkpoint."
            )

    def _parts(self, name: str, kind: str, box: Box) -> Iterator[Part]:
        """Yield the stored parts of a box."""
        for region, file in self._stored.get((name, kind), ()):
            for part in _boxes(region):
                shared = intersect(part, box)
                if shared is not None:
                    yield shared, _read(region, file, shared)


def _check_inside(region: Region, dtype: str | None, manifest: Manifest) -> None:
    """Check that a region lies inside a tensor of the manifest, and has its dtype.

    Raises:
        ValueError: if it does not.
    """
    about = manifest.tensors.get(region.name, {}).get(region.kind)
    if about is None:
        raise ValueError("the manifest has no such tensor")
    shape = about["shape"]
    if len(shape) != len(region.box) or any(o + n > size for (o, n), size in zip(region.box, shape, strict=True)):
        raise ValueError(f"its box reaches beyond the shape {shape}")
    if dtype != about["dtype"]:
        raise ValueError(f"it holds {dtype}, and the manifest names {about['dtype']}")


def _boxes(region: Region) -> Iterator[Box]:
    """Yield the boxes that make up a region."""
    for box, _ in flat_boxes(region.box, region.start, region.length):
        yield box


def _read(region: Region, file: Any, box: Box) -> torch.Tensor:
    """Return a box inside a stored region: a slice per dimension, or a view of the smallest flat range that holds it."""
    from_origin = [offset - origin for (offset, _), (origin, _) in zip(box, region.box, strict=True)]
    sizes = box_shape(box)
    stored: torch.Tensor
    if region.whole:
        slices = tuple(slice(first, first + size) for first, size in zip(from_origin, sizes, strict=True))
        stored = file.get_slice(region.key)[slices] if slices else file.get_tensor(region.key)
        return stored
    strides = list(accumulate(reversed(box_shape(region.box)[1:]), mul, initial=1))[::-1]
    first = sum(map(mul, from_origin, strides))
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    stored = file.get_slice(region.key)[first - region.start : last + 1 - region.start]
    return stored.as_strided(sizes, strides)


@contextlib.contextmanager
def opened(path: Path, manifest: Manifest) -> Iterator[StoredTensors]:
    """Open a checkpoint's files, mapped and read on demand."""
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        names = [name for name in manifest.files if name.endswith(".safetensors")]
        try:
            files = {name: stack.enter_context(safe_open(path / name, framework="pt")) for name in names}
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} has a file that is not a safetensors file: {error}. Take another."
            ) from error
        yield StoredTensors(path, manifest, files)
