"""Boxes and flat ranges against masks of every element; copies between layouts, on one process and through a file."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.checkpoints.layout import Region, WriteItem
from toolkit.checkpoints.manifest import Manifest
from toolkit.checkpoints.stored_tensors import StoredTensors, opened
from toolkit.config.parallelism import Parallelism
from toolkit.core.errors import CheckpointError
from toolkit.engines.shards import (
    PARAMETER,
    Box,
    Shard,
    box_elements,
    box_shape,
    copy,
    flat_boxes,
    intersect,
    overlaps,
    parts,
    subtract,
    uncovered,
    whole_box,
)
from toolkit.training.given_weights import value_sum
from toolkit.training.replicas import wrong_parts


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def mask(shape: Sequence[int], box: Box) -> torch.Tensor:
    numbers = torch.zeros(tuple(shape), dtype=torch.int64)
    view = numbers
    for dim, (offset, size) in enumerate(box):
        view = view.narrow(dim, offset, size)
    view += 1
    return numbers


def some_shapes(seed: int, count: int) -> Iterator[tuple[random.Random, tuple[int, ...]]]:
    draw = random.Random(seed)
    for number in range(count):
        yield draw, tuple(draw.randint(1, 5) for _ in range(number % 5))


def some_box(draw: random.Random, shape: Sequence[int], *, least: int = 0) -> Box:
    sizes = [draw.randint(least, size) for size in shape]
    return tuple((draw.randint(0, whole - size), size) for whole, size in zip(shape, sizes, strict=True))


def sharded(whole: torch.Tensor, box: Box, *, start: int = 0, length: int | None = None) -> Shard:
    """A shard of a tensor, with a copy of its values."""
    view = whole
    for dim, (offset, size) in enumerate(box):
        view = view.narrow(dim, offset, size)
    tensor = view.clone() if length is None else view.reshape(-1)[start : start + length].clone()
    return Shard("a:b.c", "parameter", tuple(whole.shape), box, start, tensor)


# Arithmetic ------------------------------------------------------------------------------------------------------------


def test_intersections_and_differences_are_those_of_the_elements() -> None:
    for draw, shape in some_shapes(0, 2_000):
        one, other = some_box(draw, shape), some_box(draw, shape)
        both = mask(shape, one) * mask(shape, other)
        shared = intersect(one, other)
        assert torch.equal(both, torch.zeros_like(both) if shared is None else mask(shape, shared))
        rest = subtract(one, other)
        assert len(rest) <= 2 * max(len(shape), 1)
        assert all(box_elements(box) for box in rest)
        assert torch.equal(sum((mask(shape, box) for box in rest), both), mask(shape, one))


def test_what_no_box_covers() -> None:
    for draw, shape in some_shapes(1, 1_000):
        box, boxes = some_box(draw, shape), [some_box(draw, shape) for _ in range(draw.randint(0, 4))]
        covered = sum((mask(shape, one) for one in boxes), torch.zeros(shape, dtype=torch.int64)).clamp(max=1)
        rest = sum((mask(shape, one) for one in uncovered(box, boxes)), torch.zeros(shape, dtype=torch.int64))
        assert torch.equal(rest, mask(shape, box) * (1 - covered))


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (1, 1), (3, 4), (5, 1), (2, 3, 4), (3, 1, 2), (2, 3, 2, 3), (2, 0, 3)]
)
def test_every_flat_range_is_few_boxes_in_order(shape: tuple[int, ...]) -> None:
    elements, most = math.prod(shape), max(1, 2 * len(shape) - 1)
    numbers = torch.arange(elements).view(shape)
    for start, end in itertools.combinations_with_replacement(range(elements + 1), 2):
        boxes = list(flat_boxes(whole_box(shape), start, end - start))
        assert len(boxes) <= most
        flat = [sharded(numbers, box).tensor.reshape(-1) for box, _ in boxes]
        assert [offset for _, offset in boxes] == [0, *itertools.accumulate(map(len, flat))][: len(boxes)]
        assert torch.cat([*flat, numbers.new_empty(0)]).tolist() == list(range(start, end))


# Copies ----------------------------------------------------------------------------------------------------------------


def strided(shard: Shard) -> Shard:
    """The same values with other strides: transposed memory, or every second element."""
    tensor = shard.tensor
    twice = torch.empty(*tensor.shape, 2).select(-1, 0) if tensor.dim() < 2 else torch.empty(tensor.T.shape).T
    return Shard(shard.name, shard.kind, shard.shape, shard.box, shard.start, twice.copy_(tensor))


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_copies_between_any_two_shards() -> None:
    for draw, shape in some_shapes(2, 1_000):
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1
        pair: list[Shard] = []
        for values in (whole, torch.zeros(shape)):
            box = some_box(draw, shape, least=1)
            start = draw.randint(0, box_elements(box) - 1)
            length = draw.randint(1, box_elements(box) - start)
            shard = sharded(values, box, start=start, length=length) if draw.random() < 0.5 else sharded(values, box)
            pair.append(strided(shard) if draw.random() < 0.5 else shard)
        source, target = pair
        for shard in pair:
            assert sum(view.numel() for _, view in parts(shard)) == shard.tensor.numel()
        copy(parts(source), parts(target))
        expected, got = torch.zeros(shape), torch.zeros(shape)
        stored = sum((mask(shape, box) for box, _ in parts(source)), torch.zeros(shape))
        wanted = sum((mask(shape, box) for box, _ in parts(target)), torch.zeros(shape))
        expected = whole * stored * wanted
        copy(parts(target), [(whole_box(shape), got)])
        assert torch.equal(got, expected)
        assert sum(view.numel() for view, _ in overlaps(parts(source), parts(target))) == int((stored * wanted).sum())


def test_empty_and_expanded_tensors() -> None:
    empty = Shard("e", "buffer", (0, 3), whole_box((0, 3)), 0, torch.zeros(0, 3))
    assert list(parts(empty)) == []
    expanded = torch.zeros(1, 3).expand(4, 3)
    copy([(whole_box((4, 3)), torch.tensor([1.0, 2.0, 3.0]).repeat(4, 1))], [(whole_box((4, 3)), expanded)])
    assert expanded.tolist() == [[1.0, 2.0, 3.0]] * 4


def test_a_packed_matrix_is_two_boxes() -> None:
    """gate_up of fused experts, in three dimensions: a rank of two holds a half of each."""
    whole = torch.randn(3, 8, 5)
    ranks = [[sharded(whole, ((0, 3), (first + 2 * rank, 2), (0, 5))) for first in (0, 4)] for rank in (0, 1)]
    flats = [Shard("a", "parameter", (3, 8, 5), whole_box((3, 8, 5)), 40 * n, torch.empty(40)) for n in range(3)]
    for flat in flats:
        copy((part for shards in ranks for shard in shards for part in parts(shard)), parts(flat))
    assert torch.equal(torch.cat([flat.tensor for flat in flats]).view(3, 8, 5), whole)


# Files -----------------------------------------------------------------------------------------------------------------


def write(folder: Path, ranks: Sequence[Sequence[Shard]]) -> Manifest:
    """Save each rank's shards as a checkpoint's files."""
    folder.mkdir()
    for rank, shards in enumerate(ranks):
        items = [WriteItem(r := Region.of(s), s.tensor.view(r.stored_shape)) for s in shards]
        tensors = {item.region.key: item.tensor.contiguous() for item in items}
        save_file(tensors, folder / f"rank-{rank:05d}.safetensors")
    first = ranks[0][0]
    about = {"shape": list(first.shape), "dtype": str(first.tensor.dtype).removeprefix("torch.")}
    files = {f"rank-{rank:05d}.safetensors": {"sha256": "0", "bytes": 1} for rank in range(len(ranks))}
    parallelism = vars(Parallelism(dp_shard=len(ranks)))
    return runs.manifest(parallelism=parallelism, tensors={first.name: {first.kind: about}}, files=files)


def columns(whole: torch.Tensor, count: int) -> list[list[Shard]]:
    size = whole.shape[1] // count
    return [
        [sharded(whole, ((0, whole.shape[0]), (size * at, size), *whole_box(whole.shape[2:])))] for at in range(count)
    ]


def rows(whole: torch.Tensor, count: int) -> list[list[Shard]]:
    edges = [len(whole) * at // count for at in range(count + 1)]
    return [
        [sharded(whole, ((low, high - low), *whole_box(whole.shape[1:])))] for low, high in itertools.pairwise(edges)
    ]


def flats(whole: torch.Tensor, count: int) -> list[list[Shard]]:
    edges = [whole.numel() * at // count for at in range(count + 1)]
    box = whole_box(whole.shape)
    return [[sharded(whole, box, start=low, length=high - low)] for low, high in itertools.pairwise(edges)]


def flats_of_columns(whole: torch.Tensor, count: int) -> list[list[Shard]]:
    """As TP × ZeRO-1 holds them."""
    pieces = []
    for (column,) in columns(whole, 2):
        half = column.tensor.numel() // 2 + 1
        for low, high in ((0, half), (half, column.tensor.numel())):
            pieces.append([sharded(whole, column.box, start=low, length=high - low)])
    return pieces


LAYOUTS = {"columns": columns, "flats": flats, "rows": rows, "flats of columns": flats_of_columns}


@pytest.mark.parametrize("shape", [(7, 6), (5, 4, 3), (3, 4, 2, 3)])
def test_any_layout_is_read_into_any_other(shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = torch.randn(shape)
    for number, (source, target) in enumerate(itertools.product(LAYOUTS.values(), repeat=2)):
        folder = tmp_path / str(number)
        about = write(folder, source(whole, 2))
        with opened(folder, about) as stored:
            assert torch.equal(stored.whole("a:b.c", "parameter"), whole)
            for (shard,) in target(whole, 2):
                wanted = shard.tensor.clone()
                shard.tensor.fill_(torch.nan)
                stored.read(shard.name, shard.kind, parts(shard))
                assert torch.equal(shard.tensor, wanted)


def test_tensors_without_dimensions_and_of_one_element(tmp_path: Path) -> None:
    for number, (shape, tensor) in enumerate(
        [((), torch.tensor(3)), ((), torch.tensor([3])), ((1,), torch.tensor([3]))]
    ):
        about = write(tmp_path / str(number), [[Shard("a", "buffer", shape, whole_box(shape), 0, tensor)]])
        with opened(tmp_path / str(number), about) as stored:
            assert stored.whole("a", "buffer").shape == shape
            assert int(stored.whole("a", "buffer")) == 3


def test_a_missing_part_is_named_before_anything_is_written(tmp_path: Path) -> None:
    whole = torch.randn(8, 6)
    about = write(tmp_path / "some", [*columns(whole, 3)[:2], columns(whole, 3)[0][:0]])
    target = sharded(torch.zeros(8, 6), ((2, 4), (0, 6)))
    with opened(tmp_path / "some", about) as stored:
        with pytest.raises(
            CheckpointError, match=r"lacks parameter of a:b.c from \[2, 4\] on, a box of shape \[4, 2\]"
        ):
            stored.read("a:b.c", "parameter", parts(target))
        with pytest.raises(CheckpointError, match=r"from \[0, 4\] on, a box of shape \[8, 2\]"):
            stored.whole("a:b.c", "parameter")
        stored.read("a:b.c", "parameter", parts(sharded(torch.zeros(8, 6), ((2, 4), (1, 3)))))
    assert not target.tensor.any()


def test_a_part_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    whole = torch.randn(8, 6)
    about = write(tmp_path / "twice", [*columns(whole, 3), rows(whole, 2)[0]])
    with (
        pytest.raises(CheckpointError, match=r"holds a part of parameter of a:b\.c twice"),
        opened(tmp_path / "twice", about),
    ):
        pass


def test_a_file_of_crumbs_is_refused_before_anything_is_compared(tmp_path: Path) -> None:
    """Boxes of single elements would leave more holes with each of them."""
    whole = torch.randn(130, 130)
    crumbs = [sharded(whole, ((row, 1), (2 * row, 1))) for row in range(65)]
    about = write(tmp_path / "crumbs", [crumbs])
    with (
        pytest.raises(CheckpointError, match="the file holds more than 64 parts of it"),
        opened(tmp_path / "crumbs", about),
    ):
        pass


def test_a_tensor_that_nobody_stored_takes_no_memory() -> None:
    stored = StoredTensors(
        Path("x"), runs.manifest(tensors={"a": {"weight": {"shape": [2**59], "dtype": "float32"}}}), {}
    )
    with pytest.raises(CheckpointError, match=r"lacks weight of a from \[0\] on"):
        stored.whole("a")


def test_a_column_shard_is_one_part_and_one_copy(tmp_path: Path) -> None:
    """Of an 8192×8192 weight, which flat ranges would cut into 8,192."""
    half = Shard("w", "weight", (8192, 8192), ((0, 8192), (4096, 4096)), 0, torch.zeros(8192, 4096, dtype=torch.int8))
    assert len(list(parts(half))) == 1
    about = write(tmp_path / "wide", [[half]])
    about.tensors["w"]["weight"]["shape"] = [8192, 8192]
    rest = sharded(torch.empty(8192, 8192, dtype=torch.int8), ((100, 5000), (6000, 1000)))
    with opened(tmp_path / "wide", about) as stored, Operations() as operations:
        stored.read("w", "weight", parts(rest))
    assert operations.count < 20
    flat = Shard("w", "weight", (8192, 8192), whole_box((8192, 8192)), 5000, torch.ones(2**25, dtype=torch.int8))
    with Operations() as operations:
        copy(parts(half), parts(flat))
    assert operations.count < 30
    assert flat.tensor[:8192].tolist() == [0] * 3192 + [1] * 4096 + [0] * 904


# Sharing out -----------------------------------------------------------------------------------------------------------


def test_replicas_are_divided() -> None:
    for draw, shape in some_shapes(3, 600):
        whole = torch.arange(math.prod(shape)).view(shape)
        box = some_box(draw, shape, least=1)
        start = draw.randint(0, box_elements(box) - 1)
        flat = draw.random() < 0.5
        shard = sharded(whole, box, start=start, length=box_elements(box) - start) if flat else sharded(whole, box)
        region = Region.of(shard)
        item = WriteItem(region, shard.tensor.view(region.stored_shape))
        count = draw.randint(1, 4)
        shares = [share for at in range(count) if (share := item.divide(at, count))]
        got = torch.full(shape, -1)
        for share in shares:
            assert share.tensor.shape == share.region.stored_shape
            assert Region.parse(share.region.key, share.region.stored_shape) == share.region
            written = Shard("a", "parameter", shape, share.region.box, share.region.start, share.tensor)
            copy(parts(written), [(whole_box(shape), got)])
        expected = torch.full(shape, -1)
        copy(parts(shard), [(whole_box(shape), expected)])
        assert torch.equal(got, expected)
        assert sum(share.region.length for share in shares) == region.length


@pytest.mark.parametrize(("shape", "dim"), [((64, 8192), 0), ((3, 8192), 1), ((6, 8192), 0), ((8192, 3), 0)])
def test_replicas_are_divided_evenly_in_whole_rows_where_that_is_even(shape: tuple[int, int], dim: int) -> None:
    item = WriteItem(Region("weight", "a", whole_box(shape), 0, math.prod(shape)), torch.empty(shape))
    shares = [item.divide(at, 2) for at in range(2)]
    assert {share.region.length for share in shares if share} == {math.prod(shape) // 2}
    assert all(box_shape(share.region.box)[1 - dim] == shape[1 - dim] for share in shares if share)


def test_equal_values_in_another_order_are_other_values() -> None:
    tensor = torch.randn(6, 4)
    assert value_sum(tensor, "float32") == value_sum(tensor.flip(0), "float32")
    assert value_sum(tensor, "float32", in_order=True) != value_sum(tensor.flip(0), "float32", in_order=True)
    assert value_sum(tensor, "float32", in_order=True) == value_sum(tensor.clone(), "float32", in_order=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0, 2), (2, 2)), None),
        (((0, 2), (3, 1)), "the ranks hold 6 of the 8 elements of w"),
        (((0, 3), (2, 2)), "the ranks hold 10 of the 8 elements of w"),
        (((0, 2), (1, 2)), "the ranks hold some elements of w twice, and others not at all"),
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_named(rows: Sequence[tuple[int, int]], message: str | None) -> None:
    held = [Shard("w", PARAMETER, (4, 2), (part, (0, 2)), 0, torch.zeros(part[1], 2)) for part in rows]
    engine = SimpleNamespace(shards=lambda prepared: held)
    ours: Any = SimpleNamespace(job=SimpleNamespace(engine=engine), accelerator=SimpleNamespace(process_index=0))
    assert wrong_parts(ours) == ([message] if message else [])
