"""DeepSpeed's ZeRO checkpoints: flat fp32 partitions of every rank, joined one parameter at a time, without DeepSpeed.

The layout is that of deepspeed/utils/zero_to_fp32.py, which needs DeepSpeed, unpickles without restriction, and under ZeRO-1
and 2 holds the model twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers.restricted_unpickler import load
from toolkit.checkpoints.importers.weights import (
    Entry,
    Weights,
    as_weights,
    checked,
    require,
    wrap_errors,
)
from toolkit.core.errors import CheckpointError
from toolkit.core.units import ceil_div, dtype_name, round_up

if TYPE_CHECKING:
    import torch

    _Row = Sequence[torch.Tensor]

_OPTIMIZER_FILE = re.compile(r"(?P<prefix>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_00_model_states\.pt")
_ANY = re.compile(r".*[_-](?:optim|model)_states\.pt")


def is_zero(names: Iterable[str]) -> bool:
    """Return whether these are the files of a ZeRO checkpoint of one step."""
    return any(_ANY.fullmatch(name) for name in names)


def open_zero(folder: Path, files: Mapping[str, Path]) -> Weights:
    """Open the checkpoint of one step: `mp_rank_00_model_states.pt`, `zero_pp_rank_0_mp_rank_00_optim_states.pt`, ….

    Trained parameters are fp32 masters, frozen ones and buffers what the engine held.

    Raises:
        CheckpointError: for a missing rank's file, by its name; for tensor, pipeline or expert parallelism, and ZeRO-0;
            for pickles with classes that are not on the list.
    """
    import torch

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
        tensors = {
            name: _entry(tensor.shape, [[checked(name, tensor).reshape(-1)]], 0, tensor.numel())
            for name, tensor in first["module"].items()
            if isinstance(tensor, torch.Tensor)
            and tensor.numel()  # ZeRO-3 leaves empty ones for partitioned parameters
        }
        shapes = first["param_shapes"]
        if third:
            joined = {name: shape for group in shapes for name, shape in group.items()}
            tensors |= _frozen(models) | _trained(folder, [(joined, flats)], None, 1)
        else:
            # Some versions save none of the padding at the end of a group, and some all.
            groups = [(group, [row]) for group, row in zip(shapes, zip(*flats, strict=True), strict=True)]
            tensors |= _trained(folder, groups, states[0].get("param_alignment_paddings"), 2 * len(flats))
        tensors |= {
            alias: tensors[original]
            for alias, original in (first.get("shared_params") or {}).items()
            if original in tensors
        }
        steps, stage = int(first["global_steps"]), _stage(first, states[0])
    kind = f"DeepSpeed ZeRO-{stage} checkpoint, step {steps:,}, {len(states)} rank{'s' * (len(states) != 1)}"
    return as_weights(kind, folder, tensors)


def _entry(shape: Any, rows: Sequence[_Row], start: int, length: int) -> Entry:
    """Return a parameter that consists of the same range of each of several rows, padded at the end.

    Args:
        shape: of the parameter.
        rows: each a sequence of flat tensors that follow each other.
        start: where the range begins in each row.
        length: of the range in each row, in elements.
    """
    sizes = tuple(int(size) for size in shape)

    def read() -> torch.Tensor:
        """Return a copy, or a view of the mapped file if the parameter is contiguous there."""
        import torch

        parts = [part for row in rows for part in _cut(row, start, length)]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat[: math.prod(sizes)].view(sizes)

    return Entry(sizes, dtype_name(rows[0][0].dtype), read)


def _cut(row: _Row, start: int, length: int) -> Iterator[torch.Tensor]:
    """Yield views of the tensors of a row in a range."""
    for tensor in row:
        first, last = max(start, 0), min(start + length, tensor.numel())
        if first < last:
            yield tensor[first:last]
        start -= tensor.numel()


def _elements(row: _Row) -> int:
    return sum(tensor.numel() for tensor in row)


def _optimizer_states(folder: Path, files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return every rank's optimizer state, in the order of ranks."""
    matches = [match for match in map(_OPTIMIZER_FILE.fullmatch, files) if match]
    prefix = matches[0]["prefix"] if matches else ""
    names = [f"{prefix}{rank}_mp_rank_00_optim_states.pt" for rank in range(len(matches) + 1)]
    strange = [name for name in files if _ANY.fullmatch(name) and not _MODEL_FILE.fullmatch(name) and name not in names]
    if strange:
        raise CheckpointError(
            f"{folder} holds {strange[0]}: expected one file a rank of pure data parallelism. "
            "Tensor, pipeline and expert parallel checkpoints: convert them with DeepSpeed first."
        )
    if not matches:
        raise CheckpointError(
            f"{folder} lacks zero_pp_rank_0_mp_rank_00_optim_states.pt: a rank's file, with the fp32 weights, is missing, "
            "or the checkpoint was written without ZeRO. Copy the file there, or take another checkpoint."
        )
    require(names[:-1], files, folder)
    states = []
    for name in names[:-1]:
        with wrap_errors(f"{files[name]} is not an optimizer state of ZeRO"):
            states.append(load(files[name])["optimizer_state_dict"])
            counts = states[-1]["partition_count"]
            count = max(counts) if isinstance(counts, list) else int(counts)
        if count != len(matches):
            lacks = f"{names[-1]} is missing" if count > len(matches) else "too many"
            raise CheckpointError(
                f"{folder} holds the files of {len(matches)} ranks, but {name} was written by one of {count}: {lacks}. "
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


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Return ZeRO-3's frozen parameters from each rank's fragment."""
    tensors = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        rows = [[checked(name, model["frozen_param_fragments"][name]).reshape(-1)] for model in models]
        length = rows[0][0].numel()
        if any(_elements(row) != length for row in rows) or length * len(rows) < math.prod(shape):
            raise ValueError(
                f"{name}: {len(rows)} fragments of {length:,} elements, expected {math.prod(shape):,} in all"
            )
        tensors[name] = _entry(shape, rows, 0, length)
    return tensors


def _trained(
    folder: Path, groups: Sequence[tuple[Mapping[str, Any], Sequence[_Row]]], paddings: Any, multiple: int
) -> dict[str, Entry]:
    """Return the trained parameters, which follow each other in the rows of their group.

    Args:
        folder: for messages.
        groups: shapes by name, and rows. ZeRO-3 cuts each parameter into one equal, padded part a rank, and each rank is a
            row. Under ZeRO-1 and 2 the ranks' partitions, cut anywhere, make up one row.
        paddings: elements behind each parameter, by group; None for none.
        multiple: a row may end with a padding to a multiple of this.
    """
    tensors: dict[str, Entry] = {}
    for at, (shapes, rows) in enumerate(groups):
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings[at] if paddings else [0] * len(shapes), strict=True):
            length = ceil_div(math.prod(shape), len(rows))
            tensors[name] = _entry(shape, rows, start, length)
            start += length + int(padding)
        for stored in map(_elements, rows):
            if stored < start or round_up(stored, multiple) != round_up(start, multiple):
                raise CheckpointError(
                    f"{folder}: group {at} holds {stored:,} elements, expected {start:,}. Copy it again."
                )
    return tensors
