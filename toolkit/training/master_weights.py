"""`restore_masters()`: fp32 masters that an engine rounded while loading become exactly the checkpoint's again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from toolkit.core.errors import StrategyMismatch
from toolkit.engines.base import engine_of
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared
from toolkit.engines.shards import MASTER, PARAMETER, Part, copy, overlaps, parts, whole_box
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import read_pretrained
from toolkit.training.streamed_weights import StreamedWeights

if TYPE_CHECKING:
    import torch


def restore_masters(prepared: Prepared) -> None:
    """Write the checkpoint's fp32 values into the masters. Check masters and compute copies bit by bit.

    An engine with separate masters makes them from weights that were already rounded to the compute dtype (DeepSpeed's
    bf16 and fp16). Where the checkpoint holds more than that dtype can say, rank 0 reads it again, tensor by tensor,
    and broadcasts each. An adapter's first values are no checkpoint's, and were rounded when they were drawn.

    Raises:
        StrategyMismatch: where a master is not the checkpoint's value, or a compute copy not the rounded master.
    """
    masters: dict[str, list[Part]] = {}
    copies: dict[str, list[Part]] = {}
    for shard in engine_of(prepared.job.strategy).shards(prepared):
        {MASTER: masters, PARAMETER: copies}.get(shard.kind, {}).setdefault(shard.name, []).extend(parts(shard))
    if _may_be_rounded(prepared.job):
        for name, whole in _exact_weights(prepared):
            _write(name, whole, masters.get(name, []))
    for name, master in masters.items():
        _check_copy(name, master, copies.get(name, []))


def _may_be_rounded(job: Job) -> bool:
    """Return whether the engine keeps masters beside weights of another dtype, all of them the checkpoint's."""
    dtypes = engine_of(job.strategy).expected_state(job).dtypes if job.spec is not None else {}
    return "master" in dtypes and dtypes["master"] != dtypes["trainable"] and job.strategy.adapter == "none"


def _exact_weights(prepared: Prepared) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the fp32 values of each trained parameter on every rank; none where no tensor was cast while it was read.

    A tensor at a time where the files use the model's own names. Where transformers converts them (fused experts), rank 0
    reads the model whole into host memory.
    """
    import torch
    from accelerate.utils import broadcast

    accelerator, spec = prepared.accelerator, cast("ModelSpec", prepared.job.spec)
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters if spec.trains(parameter.name)}
    weights = StreamedWeights.of_shapes(accelerator, spec, shapes)
    if weights is not None:
        rounded = set(weights.dtypes.values()) != {prepared.job.compute_dtype}
        yield from ((name, weights.share(name).float()) for name in (shapes if rounded else ()))
        return
    whole = {}
    if accelerator.is_main_process:
        whole = dict(read_pretrained(spec, spec.source, dtype=torch.float32).named_parameters())
    for name, shape in shapes.items():
        tensor = whole[name].detach() if whole else torch.empty(shape)
        yield name, cast("torch.Tensor", broadcast(tensor.to(accelerator.device).contiguous(), from_process=0))


def _write(name: str, whole: torch.Tensor, masters: list[Part]) -> None:
    source = [(whole_box(whole.shape), whole)]
    copy(source, masters)
    for exact, master in overlaps(source, masters):
        if not _equal_bits(master, exact.to(master.device)):
            raise StrategyMismatch(f"the master of {name}, in {master.dtype}, cannot hold the checkpoint's values.")


def _check_copy(name: str, masters: list[Part], copies: list[Part]) -> None:
    """Check that a compute copy is the master rounded, wherever this rank holds both."""
    for exact, rounded in overlaps(masters, copies):
        if not _equal_bits(exact.to(rounded.device, rounded.dtype), rounded):
            raise StrategyMismatch(f"{name} in {rounded.dtype} is not its master in {exact.dtype}, rounded.")


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit by bit."""
    import torch

    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second)))
