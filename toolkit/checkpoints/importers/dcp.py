"""Folders of torch.distributed.checkpoint (DCP): `.metadata` is read without pickle's code, tensors by torch's reader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.checkpoints.importers.restricted_unpickler import (
    OpaqueRecord,
    explain_refusals,
    load_metadata,
    only_listed,
)
from toolkit.checkpoints.importers.weights import (
    Entry,
    Weights,
    as_weights,
    require,
    wrap_errors,
)
from toolkit.core.errors import CheckpointError
from toolkit.core.units import dtype_name
from toolkit.engines.shards import box_elements, subtract, whole_box

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    _Places = dict[MetadataIndex, _StorageInfo]

T = TypeVar("T")

METADATA_FILE = ".metadata"

HOLES = 1000
"""The most holes between sorted chunks of a tensor; a sharded tensor has a few."""

_LEVEL = "model"
"""The level of a state dict under which Accelerate, and most users of DCP, put the model."""


def open_dcp(folder: Path, files: Mapping[str, Path]) -> Weights:
    """Open a folder with `.metadata` and `.distcp` files: only the model's tensors, under their own names.

    Raises:
        CheckpointError: for pickles with classes that are not on the list, names that leave the folder, missing or truncated
            files, and tensors with a missing part.
    """
    raw = load_metadata(files[METADATA_FILE])
    with wrap_errors(f"{folder / METADATA_FILE} is not the metadata of a DCP checkpoint"):
        everything = _state(raw, "Metadata")
        names = _model_names(everything["state_dict_metadata"], everything["planner_data"])
        tensors = {key: _tensor(everything["state_dict_metadata"][key]) for key in names}
        places = _places(everything["storage_data"], tensors)
        count = _check_files(folder, files, places.values())
        for key, stored in tensors.items():
            _check_covered(folder, key, stored)
    entries = {}
    for key, stored in tensors.items():
        read = partial(_read, folder, key, stored, places)
        entries[names[key]] = Entry(tuple(stored.size), dtype_name(stored.properties.dtype), read)
    kind = f"sharded checkpoint (torch.distributed.checkpoint, {count} file{'s' * (count != 1)})"
    return as_weights(kind, folder, entries)


def _read(folder: Path, key: str, stored: TensorStorageMetadata, places: _Places) -> torch.Tensor:
    """Read one tensor with torch's own reader and planner, without a process group."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.overrides import TorchFunctionMode

    class SameType(TorchFunctionMode):
        """The reader would convert to the dtype in `.metadata`: fp32 to int8 is zeros."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_ and args[0].dtype != args[1].dtype:
                raise ValueError(f"it holds {args[1].dtype}, and .metadata names {args[0].dtype}")
            return func(*args, **(kwargs or {}))

    places_of_key = {index: places[index] for index in (MetadataIndex(key, chunk.offsets) for chunk in stored.chunks)}
    files = sorted({place.relative_path for place in places_of_key.values()})
    with explain_refusals(f"{folder}: {key}, in {', '.join(files[:4])},"), only_listed(), SameType():
        target = torch.empty(stored.size, dtype=stored.properties.dtype)
        metadata = Metadata(state_dict_metadata={key: stored}, storage_data=places_of_key)
        reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
        # As `dcp.load`, except for the metadata.
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner.set_up_planner({key: target}, metadata, is_coordinator=True)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return target


def _state(record: Any, kind: str) -> Any:
    """Return the fields of a record of DCP's."""
    if not isinstance(record, OpaqueRecord) or type(record).__name__.rpartition(".")[2] != kind:
        raise TypeError(f"expected {kind}, found {type(record).__name__}")
    return record.state


def _model_names(stored: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None) -> dict[str, str]:
    """Map keys to the model's names: of the level `model`, or of the top level if no such level exists."""

    def is_tensor(record: Any) -> bool:
        return type(record).__name__.endswith(".TensorStorageMetadata")

    where = {key: tuple((paths or {}).get(key, (key,))) for key, record in stored.items() if is_tensor(record)}
    where = {key: path for key, path in where.items() if path and all(isinstance(part, str) for part in path)}
    names = {key: ".".join(path[path.index(_LEVEL) + 1 :]) for key, path in where.items() if _LEVEL in path[:-1]}
    return names or {key: path[0] for key, path in where.items() if len(path) == 1}


def _places(stored: Mapping[Any, Any], tensors: Mapping[str, TensorStorageMetadata]) -> _Places:
    """Return file, offset and length of each chunk of these tensors, as torch's own records with checked values."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    places = {}
    for record, info in stored.items():
        index = _state(record, "MetadataIndex")
        if index["fqn"] in tensors:
            place = _state(info, "_StorageInfo")
            places[MetadataIndex(index["fqn"], index.get("offset"))] = _StorageInfo(
                relative_path=_checked_type(str, place["relative_path"]),
                offset=_checked_type(int, place["offset"]),
                length=_checked_type(int, place["length"]),
                transform_descriptors=[_checked_type(str, word) for word in place.get("transform_descriptors") or []],
            )
    for key, tensor in tensors.items():
        for chunk in tensor.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            needed = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            if place.offset < 0 or (place.length < needed and not place.transform_descriptors):
                raise ValueError(f"{key}: {place.length} bytes at {place.offset}, expected at least {needed}")
    return places


def _tensor(record: Any) -> TensorStorageMetadata:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    fields = _state(record, "TensorStorageMetadata")
    dtype = _checked_type(torch.dtype, _state(fields["properties"], "TensorProperties")[0])
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(fields["size"]),
        chunks=[ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in chunks],
    )


def _checked_type(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _check_files(folder: Path, files: Mapping[str, Path], places: Iterable[_StorageInfo]) -> int:
    """Check that each file of the model lies in the folder and has the stated length. Return their number."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name in ends:
        if Path(name).name != name:
            raise CheckpointError(
                f"{folder / METADATA_FILE} names the file {name!r}, outside of its folder: expected a file next to it. "
                "Nothing was read."
            )
    require(sorted(ends), files, folder)
    for name, end in ends.items():
        size = files[name].stat().st_size
        if size < end:
            raise CheckpointError(f"{files[name]} is cut short: {size:,} bytes, expected {end:,}. Copy it again.")
    return len(ends)


def _check_covered(folder: Path, key: str, tensor: TensorStorageMetadata) -> None:
    """Check that every element lies in exactly one chunk: torch's planner leaves the others uninitialized.

    Chunks that cover the tensor and have its number of elements neither overlap nor reach beyond it.
    """
    boxes = [tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in tensor.chunks if 0 not in chunk.sizes]
    possible = all(offset >= 0 and size > 0 for box in boxes for offset, size in box)
    holes = [whole_box(tensor.size)] if math.prod(tensor.size) else []
    if possible and sum(map(box_elements, boxes)) == math.prod(tensor.size):
        for box in sorted(boxes):
            holes = [rest for hole in holes for rest in subtract(hole, box)]
            if len(holes) > HOLES:
                break
    if holes:
        raise CheckpointError(
            f"{folder / METADATA_FILE}: the {len(tensor.chunks)} chunks of {key} do not make up {tuple(tensor.size)}. "
            "A rank's part is missing or doubled; take another checkpoint."
        )
