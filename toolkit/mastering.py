"""`restore_masters()`: fp32 masters that an engine rounded while loading become exactly the checkpoint's again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from toolkit.engines.job import Job, Piece, Prepared, engine_of
from toolkit.errors import StrategyMismatch
from toolkit.loading import read_whole
from toolkit.model import ModelSpec, local_weights
from toolkit.units import dtype_name

if TYPE_CHECKING:
    import torch


def restore_masters(prepared: Prepared) -> None:
    """Write the checkpoint's fp32 values into separate masters, and check them and the compute copies bit by bit.

    An engine with separate masters makes them from weights that were already rounded to the compute dtype (DeepSpeed's
    bf16 and fp16). Where the checkpoint holds more than that dtype can say, rank 0 reads it again, tensor by tensor, and
    broadcasts each. An adapter's first values are no checkpoint's, and were rounded when they were drawn.

    Raises:
        StrategyMismatch: where a master is not the checkpoint's value, or a compute copy not the rounded master.
    """
    masters: dict[str, list[Piece]] = {}
    copies: dict[str, list[Piece]] = {}
    for piece in engine_of(prepared.job.strategy).pieces(prepared):
        {"master": masters, "parameter": copies}.get(piece.kind, {}).setdefault(piece.name, []).append(piece)
    if prepared.job.spec is not None and _rounded(prepared.job):
        with _source(prepared) as read:
            for parameter in prepared.job.spec.parameters:
                whole = _broadcast(prepared, parameter.shape, read and (lambda name=parameter.name: read(name)))
                _write(parameter.name, whole, masters.get(parameter.name, []))
    for name, found in masters.items():
        _compare(name, found, copies.get(name, []))


def _rounded(job: Job) -> bool:
    """Whether the engine keeps masters apart, and some tensor of the checkpoint is in another dtype than it was read in."""
    kept = engine_of(job.strategy).account(job).dtypes
    if "master" not in kept or kept["master"] == kept["trainable"] or job.strategy.adapter != "none":
        return False
    spec = cast("ModelSpec", job.spec)
    return stored_dtypes(spec) != {job.compute_dtype}


def stored_dtypes(spec: ModelSpec) -> set[str]:
    """torch's names of the dtypes that a checkpoint's tensors have."""
    from safetensors import safe_open

    found = set()
    for path in local_weights(cast("str", spec.source)):
        with safe_open(path, framework="pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}
    names = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    return {names.get(name, name) for name in found}


@contextlib.contextmanager
def _source(prepared: Prepared) -> Iterator[Callable[[str], torch.Tensor] | None]:
    """On rank 0 a function from a parameter's name to its values in fp32; None on the others.

    A tensor at a time where the files use the model's own names. Where transformers converts them (fused experts), the
    model is read whole into host memory.
    """
    import torch
    from safetensors import safe_open

    spec = cast("ModelSpec", prepared.job.spec)
    if not prepared.accelerator.is_main_process:
        yield None
        return
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in local_weights(cast("str", spec.source))]
        where = {name: file for file in files for name in file.keys()}
        if all(
            parameter.name in where and tuple(where[parameter.name].get_slice(parameter.name).get_shape()) == parameter.shape
            for parameter in spec.parameters
        ):
            yield lambda name: where[name].get_tensor(name).float()
        else:
            whole = dict(read_whole(spec, torch.float32).named_parameters())
            yield lambda name: whole[name].detach()


def _broadcast(prepared: Prepared, shape: tuple[int, ...], read: Callable[[], torch.Tensor] | None) -> torch.Tensor:
    """The values of one tensor on every rank, flat."""
    import torch
    from accelerate.utils import broadcast

    device = prepared.accelerator.device
    whole = read().to(device).contiguous() if read else torch.empty(shape, dtype=torch.float32, device=device)
    return cast("torch.Tensor", broadcast(whole, from_process=0)).view(-1)


def _write(name: str, whole: torch.Tensor, masters: list[Piece]) -> None:
    for piece in masters:
        part = whole[piece.start : piece.start + piece.tensor.numel()].to(piece.tensor.device)
        piece.tensor.copy_(part)
        if not _same(piece.tensor, part):
            raise StrategyMismatch(f"the {dtype_name(piece.tensor.dtype)} master of {name} does not hold the checkpoint's values.")


def _compare(name: str, masters: list[Piece], copies: list[Piece]) -> None:
    """Where a master and a compute copy are of the same range, the copy is the master rounded."""
    for master in masters:
        end = master.start + master.tensor.numel()
        for copy in copies:
            start, stop = max(master.start, copy.start), min(end, copy.start + copy.tensor.numel())
            if start >= stop:
                continue
            rounded = master.tensor[start - master.start : stop - master.start].to(copy.tensor.device, copy.tensor.dtype)
            if not _same(rounded, copy.tensor[start - copy.start : stop - copy.start]):
                raise StrategyMismatch(f"{name} in {dtype_name(copy.tensor.dtype)} is not its {dtype_name(master.tensor.dtype)} master, rounded.")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit by bit."""
    import torch

    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

