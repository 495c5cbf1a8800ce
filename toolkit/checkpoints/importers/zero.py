"""DeepSpeed's ZeRO checkpoints: flat fp32 partitions of every rank, put together one parameter at a time, without DeepSpeed.

The layout is that of deepspeed/utils/zero_to_fp32.py, which itself needs DeepSpeed, loads with the whole of pickle, and
under ZeRO-1 and 2 holds the model twice.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers.restricted_unpickler import load
from toolkit.checkpoints.importers.weights import Entry, Weights, as_weights, list_files, require, wrap_errors
from toolkit.checkpoints.importers.whole import checked
from toolkit.core.errors import CheckpointError
from toolkit.core.units import ceil_div, dtype_name, round_up

if TYPE_CHECKING:
    import torch

_OPTIMIZER = re.compile(r"(?P<prefix>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_00_model_states\.pt")
_ANY = re.compile(r".*[_-](?:optim|model)_states\.pt")


def is_zero(names: Iterable[str]) -> bool:
    """Return whether a folder with these files is a ZeRO checkpoint itself, not the folder around it with `latest`."""
    return any(_ANY.fullmatch(name) for name in names)


def open_zero(folder: Path, root: Path) -> Weights:
    """Open the checkpoint of one step: `mp_rank_00_model_states.pt`, `zero_pp_rank_0_mp_rank_00_optim_states.pt`, ….

    Trained parameters are fp32 masters, frozen ones and buffers what the engine held.

    Raises:
        CheckpointError: for a missing rank's file, by its name; for tensor, pipeline or expert parallelism, and ZeRO-0;
            for pickles that hold more than the list allows.
    """
    files = list_files(folder, root)
    states = _optimizer_states(folder, files)
    with wrap_errors(f"{folder} is not laid out as a ZeRO checkpoint"):
        flats = [_flat_groups(state) for state in states]
        third = "fp32_flat_groups" in states[0]
        ranks = [f"zero_pp_rank_{rank}_" for rank in range(len(states))] if third else [""]
        names = [f"{rank}mp_rank_00_model_states.pt" for rank in ranks]
        require(names, files, folder)
        models = [load(files[name]) for name in names]
        first = models[0]
        _check_parallelism(folder, first, states[0])
        tensors = {name: _checked_tensor(name, tensor) for name, tensor in _unpartitioned(first["module"])}
        if third:
            tensors |= _frozen(models)
            tensors |= _partitioned(folder, first["param_shapes"], flats)
        else:
            tensors |= _concatenated(folder, first["param_shapes"], flats, states[0].get("param_alignment_paddings"))
        tensors |= {
            alias: tensors[original]
            for alias, original in (first.get("shared_params") or {}).items()
            if original in tensors
        }
        steps, stage = int(first["global_steps"]), _stage(first, states[0])
    kind = f"DeepSpeed ZeRO-{stage} checkpoint, step {steps:,}, {len(states)} rank{'s' * (len(states) != 1)}"
    return as_weights(kind, folder, {name: _entry(tensor) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class _Flat:
    """Flat tensors that follow each other, and where each begins; the last number is the end of all."""

    tensors: Sequence[torch.Tensor]
    starts: Sequence[int]

    def parts(self, start: int, length: int) -> Iterator[torch.Tensor]:
        """Return views of the tensors in a range."""
        at, end = max(bisect_right(self.starts, start) - 1, 0), start + length
        while start < end:
            upto = min(end, self.starts[at + 1])
            if upto > start:
                yield self.tensors[at][start - self.starts[at] : upto - self.starts[at]]
            start, at = upto, at + 1


@dataclass(frozen=True)
class _Tensor:
    """One parameter: the same range of each of several flat rows, one row after the other, padded at the end."""

    shape: tuple[int, ...]
    rows: Sequence[_Flat]
    start: int
    length: int
    """Elements of the range in each row."""

    def whole(self) -> torch.Tensor:
        """Return the parameter in memory of its own, or a view of the mapped file if it is contiguous there."""
        import torch

        parts = [part for row in self.rows for part in row.parts(self.start, self.length)]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat[: math.prod(self.shape)].view(self.shape)


def _entry(tensor: _Tensor) -> Entry:
    return Entry(tensor.shape, dtype_name(tensor.rows[0].tensors[0].dtype), tensor.whole)


def _flat(tensors: Sequence[Any]) -> _Flat:
    return _Flat(tensors, [0, *accumulate(checked("a flat group", tensor).numel() for tensor in tensors)])


def _checked_tensor(name: str, tensor: Any) -> _Tensor:
    tensor = checked(name, tensor)
    return _Tensor(tuple(tensor.shape), [_flat([tensor.reshape(-1)])], 0, tensor.numel())


def _unpartitioned(module: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the whole tensors of a rank's state dict; ZeRO-3 leaves empty tensors for partitioned parameters."""
    import torch

    for name, tensor in module.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            yield name, tensor


def _optimizer_states(folder: Path, files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return every rank's optimizer state, in the order of ranks."""
    by_rank = {int(match["rank"]): match for match in map(_OPTIMIZER.fullmatch, files) if match}
    strange = [
        name for name in files if _ANY.fullmatch(name) and not (_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name))
    ]
    doubled = len(by_rank) != sum(bool(_OPTIMIZER.fullmatch(name)) for name in files)
    if strange or doubled:
        raise CheckpointError(
            f"{folder} holds {strange[0] if strange else 'two optimizer files of one rank'}: expected one file a rank of "
            "pure data parallelism. Tensor, pipeline and expert parallel checkpoints: convert them with DeepSpeed first."
        )
    if not by_rank:
        raise CheckpointError(
            f"{folder} lacks zero_pp_rank_0_mp_rank_00_optim_states.pt: a rank's file, with the fp32 weights, is missing, "
            "or the checkpoint was written without ZeRO. Copy the file there, or take another checkpoint."
        )
    prefix = by_rank[min(by_rank)]["prefix"]
    names = [f"{prefix}{rank}_mp_rank_00_optim_states.pt" for rank in range(len(by_rank))]
    require(names, files, folder)
    states = []
    for name in names:
        with wrap_errors(f"{files[name]} is not an optimizer state of ZeRO"):
            states.append(load(files[name])["optimizer_state_dict"])
            counts = states[-1]["partition_count"]
            count = max(counts) if isinstance(counts, list) else int(counts)
        if count != len(names):
            lacks = f"{prefix}{len(names)}_mp_rank_00_optim_states.pt is missing" if count > len(names) else "too many"
            raise CheckpointError(
                f"{folder} holds the files of {len(names)} ranks, but {name} was written by one of {count}: {lacks}. "
                "Copy the checkpoint again, or take another."
            )
    return states


def _flat_groups(state: Mapping[str, Any]) -> list[Any]:
    """Return a rank's fp32 partitions, one flat tensor a group."""
    key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
    return [checked(key, tensor).reshape(-1) for tensor in state[key]]


def _check_parallelism(folder: Path, model: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if (
        int(model.get("mp_world_size") or 1) > 1
        or state.get("ds_zero_partition_groups")
        or model.get("param_shapes") is None
    ):
        raise CheckpointError(
            f"{folder} was written by ZeRO-0, or under tensor or expert parallelism: expected ZeRO-1, 2 or 3 over data "
            "parallel ranks alone. Convert it with DeepSpeed first (zero_to_fp32.py, or ds_to_universal.py)."
        )


def _stage(model: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """Return the optimizer's ZeRO stage; bf16's optimizer leaves it to the configuration."""
    stage = state.get("zero_stage", model.get("ds_config", {}).get("zero_optimization", {}).get("stage", 1))
    return int(getattr(stage, "args", (stage,))[0])


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, _Tensor]:
    """Return ZeRO-3's frozen parameters, of which each rank has a fragment."""
    tensors = {}
    for name, size in (models[0].get("frozen_param_shapes") or {}).items():
        rows = [_flat([checked(name, model["frozen_param_fragments"][name]).reshape(-1)]) for model in models]
        shape, length = _shape(size), rows[0].starts[-1]
        if any(row.starts[-1] != length for row in rows) or length * len(rows) < math.prod(shape):
            raise ValueError(
                f"{name}: {len(rows)} fragments of {length:,} elements, expected {math.prod(shape):,} in all"
            )
        tensors[name] = _Tensor(shape, rows, 0, length)
    return tensors


def _partitioned(folder: Path, shapes: Sequence[Mapping[str, Any]], flats: Sequence[list[Any]]) -> dict[str, _Tensor]:
    """Return ZeRO-3's parameters: each is cut into one equal, padded part a rank; a rank's parts follow each other."""
    rows, start, entries = [_flat(groups) for groups in flats], 0, {}
    for name, size in ((name, size) for group in shapes for name, size in group.items()):
        shape = _shape(size)
        length = ceil_div(math.prod(shape), len(rows))
        entries[name] = _Tensor(shape, rows, start, length)
        start += length
    ends = {row.starts[-1] for row in rows}
    if ends != {start}:
        raise CheckpointError(
            f"{folder}: the ranks hold {sorted(ends)} elements, expected {start:,} each. Copy it again."
        )
    return entries


def _concatenated(
    folder: Path, shapes: Sequence[Mapping[str, Any]], flats: Sequence[list[Any]], paddings: Sequence[Any] | None
) -> dict[str, _Tensor]:
    """Return the parameters of ZeRO-1 and 2: a group is one row, and the ranks' partitions cut it anywhere."""
    tensors: dict[str, _Tensor] = {}
    for at, (group, partitions) in enumerate(zip(shapes, zip(*flats, strict=True), strict=True)):
        row, start = _flat(partitions), 0
        for (name, size), padding in zip(group.items(), paddings[at] if paddings else [0] * len(group), strict=True):
            shape = _shape(size)
            length = math.prod(shape)
            tensors[name] = _Tensor(shape, [row], start, length)
            start += length + int(padding)
        # The end is padded to a multiple of twice the ranks, of which some versions save none and some all.
        stored, multiple = row.starts[-1], 2 * len(flats)
        if stored < start or round_up(stored, multiple) != round_up(start, multiple):
            raise CheckpointError(f"{folder}: group {at} holds {stored:,} elements, expected {start:,}. Copy it again.")
    return tensors
