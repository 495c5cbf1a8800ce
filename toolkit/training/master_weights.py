"""`restore_masters()`: fp32 masters that an engine rounded while loading become exactly the checkpoint's again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from toolkit.core.errors import StrategyMismatch
from toolkit.engines.base import engine_of
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared
from toolkit.engines.shards import MASTER, PARAMETER, Part, copy, overlaps, parts, whole_box
from toolkit.models import ModelSpec, Parameter, local_weights
from toolkit.models.hf_loading import auto_class, without_engine

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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
    if prepared.job.spec is not None and _rounded(prepared.job):
        with _source(prepared) as read:
            for parameter in _trained(prepared.job.spec):
                whole = _broadcast(prepared, parameter.shape, read and (lambda name=parameter.name: read(name)))
                _write(parameter.name, whole, masters.get(parameter.name, []))
    for name, master in masters.items():
        _check_copy(name, master, copies.get(name, []))


def _trained(spec: ModelSpec) -> list[Parameter]:
    return [parameter for parameter in spec.parameters if spec.trains(parameter.name)]


def _rounded(job: Job) -> bool:
    """Return whether the engine keeps masters and a tensor of the checkpoint was cast while it was read."""
    dtypes = engine_of(job.strategy).expected_state(job).dtypes
    if "master" not in dtypes or dtypes["master"] == dtypes["trainable"] or job.strategy.adapter != "none":
        return False
    from safetensors import safe_open

    stored = set()
    for path in local_weights(cast("str", cast("ModelSpec", job.spec).source)):
        with safe_open(path, framework="pt") as file:
            stored |= {file.get_slice(name).get_dtype() for name in list(file.keys())}
    return stored != {{"bfloat16": "BF16", "float16": "F16"}[job.compute_dtype]}


@contextlib.contextmanager
def _source(prepared: Prepared) -> Iterator[Callable[[str], torch.Tensor] | None]:
    """Return a function from a parameter's name to its fp32 values on rank 0, and None on the other ranks.

    A tensor at a time where the files use the model's own names. Where transformers converts them (fused experts), the
    model is read whole into host memory.
    """
    from safetensors import safe_open

    spec = cast("ModelSpec", prepared.job.spec)
    if not prepared.accelerator.is_main_process:
        yield None
        return
    with contextlib.ExitStack() as opened:
        paths = local_weights(cast("str", spec.source))
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
        where = {name: file for file in files for name in list(file.keys())}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in where.items()}
        if all(shapes.get(parameter.name) == parameter.shape for parameter in _trained(spec)):
            yield lambda name: where[name].get_tensor(name).float()
        else:
            whole = dict(_read_whole(spec).named_parameters())
            yield lambda name: whole[name].detach()


def _read_whole(spec: ModelSpec) -> PreTrainedModel:
    """Read all weights in fp32 into this process's host memory."""
    import torch

    with without_engine():
        model = auto_class(spec).from_pretrained(
            spec.source, dtype=torch.float32, trust_remote_code=spec.runs_code, use_safetensors=True
        )
    return cast("PreTrainedModel", model)


def _broadcast(prepared: Prepared, shape: tuple[int, ...], read: Callable[[], torch.Tensor] | None) -> torch.Tensor:
    """Return the values of one tensor on every rank."""
    import torch
    from accelerate.utils import broadcast

    device = prepared.accelerator.device
    whole = read().to(device).contiguous() if read else torch.empty(shape, dtype=torch.float32, device=device)
    return cast("torch.Tensor", broadcast(whole, from_process=0))


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
