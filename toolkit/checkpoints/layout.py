"""Who writes what: every element of what is trained once, whatever the engine, as flat ranges of named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.engines.job import Piece, Prepared, engine_of
from toolkit.errors import StrategyError
from toolkit.units import BYTES_OF, dtype_name

if TYPE_CHECKING:
    import torch

WEIGHT = "weight"
"""The kind that a checkpoint knows a parameter's values by: its master where the engine keeps one."""

OPTIMIZERS = ("Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam")
"""Classes whose state is two moments and a count of steps."""

GENERATOR = "generator"
"""The kind of the tensors that hold a generator's state."""


@dataclass(frozen=True)
class Range:
    """A flat range of one kind of a named tensor, as some rank holds it."""

    kind: str
    name: str
    start: int
    """In elements of the flattened whole tensor."""
    length: int


@dataclass(frozen=True)
class Part:
    """What this rank writes: a range, and the memory that holds it."""

    range: Range
    tensor: torch.Tensor
    """One-dimensional view of the engine's memory."""

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        return key_of(self.range)


@dataclass(frozen=True)
class Layout:
    """What this rank writes, and what all ranks together do. It stays as it is as long as the ranks do."""

    mine: tuple[Part, ...]
    tensors: dict[str, dict[str, Any]]
    """As `Manifest.tensors`."""
    total_bytes: int
    """Of all ranks' ranges."""


def key_of(range_: Range) -> str:
    """`weight:0:model.embed_tokens.weight`: kind, start and name. The length is the tensor's own."""
    return f"{range_.kind}:{range_.start}:{range_.name}"


def range_of(key: str, length: int) -> Range:
    """The inverse of `key_of`."""
    kind, start, name = key.split(":", 2)
    return Range(kind, name, int(start), length)


def trained_pieces(prepared: Prepared, *, create: bool = False) -> Iterator[tuple[str, Piece]]:
    """The pieces of what is trained, each with the kind that a checkpoint knows it by; compute copies left out."""
    module = prepared.accelerator.unwrap_model(prepared.model)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    found = [p for p in engine_of(prepared.job.strategy).pieces(prepared, create) if p.name in trained]
    job = prepared.job
    # Not by what this rank holds: its part may be all padding, and the others' masters are what is trained.
    kinds = engine_of(job.strategy).account(job).dtypes if job.spec else {piece.kind for piece in found}
    apart = "master" in kinds
    for piece in found:
        if not (apart and piece.kind == "parameter"):
            yield WEIGHT if piece.kind in ("parameter", "master") else piece.kind, piece


def lay_out(prepared: Prepared) -> Layout:
    """Divide what is trained among the ranks: whoever holds a range alone writes it, replicas write equal parts of it.

    A collective.

    Raises:
        StrategyError: for an optimizer that keeps another state than Adam's two moments.
    """
    from accelerate.utils import gather_object

    _check_optimizer(prepared.optimizer)
    held = [(kind, piece) for kind, piece in trained_pieces(prepared, create=True)]
    told = [(Range(kind, p.name, p.start, p.tensor.numel()), p.shape, dtype_name(p.tensor.dtype)) for kind, p in held]
    every: list[list[Any]] = gather_object([told])
    holders: dict[Range, list[int]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for rank, ranges in enumerate(every):
        for range_, shape, dtype in ranges:
            holders.setdefault(range_, []).append(rank)
            tensor = tensors.setdefault(range_.name, {"shape": list(shape), "dtypes": {}})
            tensor["dtypes"][range_.kind] = dtype
    total = sum(range_.length * BYTES_OF[tensors[range_.name]["dtypes"][range_.kind]] for range_ in holders)
    mine = _mine(held, holders, prepared.accelerator.process_index)
    return Layout(mine=tuple(mine), tensors=tensors, total_bytes=total)


def _check_optimizer(optimizer: Any) -> None:
    while hasattr(optimizer, "optimizer"):  # Accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    odd = any(group.get("amsgrad") for group in optimizer.param_groups)
    if type(optimizer).__name__ not in OPTIMIZERS or odd:
        raise StrategyError(
            f"a checkpoint cannot hold the state of {type(optimizer).__name__}{' with amsgrad' if odd else ''}: it keeps "
            f"Adam's two moments. Use one of {', '.join(OPTIMIZERS)}, or train without checkpoints."
        )


def _mine(held: Iterable[tuple[str, Piece]], holders: dict[Range, list[int]], rank: int) -> Iterator[Part]:
    for kind, piece in held:
        length = piece.tensor.numel()
        among = holders[Range(kind, piece.name, piece.start, length)]
        at = among.index(rank)
        begin, end = length * at // len(among), length * (at + 1) // len(among)
        if begin < end:
            yield Part(Range(kind, piece.name, piece.start + begin, end - begin), piece.tensor[begin:end])
