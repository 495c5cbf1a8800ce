"""`prepare()`: the `accelerator.prepare` call, exact fp32 masters, and the audit of the result."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.config.parallelism import count_ranks
from toolkit.core.atomic_io import write_json
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyMismatch
from toolkit.core.units import format_bytes
from toolkit.engines.job import Job
from toolkit.engines.rank_calls import from_main
from toolkit.engines.records import STATES, Prepared, StateMemory, job_of
from toolkit.engines.shards import MASTER, PARAMETER, Part, copy, overlaps, parts, whole_box
from toolkit.engines.states import parameters_of
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import read_pretrained
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.run_lock import RUN_DIR
from toolkit.training.given_weights import GivenWeights, bits_of
from toolkit.training.replicas import wrong_parts
from toolkit.training.streamed_weights import StreamedWeights
from toolkit.transforms.adapters import quantization

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

BYTES_TOLERANCE = 0.02
"""The largest difference of measured and expected bytes, as a share: padding and alignment add some."""

SLACK = 16 * 1024
"""Bytes of a difference that is ignored: a model of a few tensors is mostly padding."""


@dataclass(frozen=True, kw_only=True)
class Audit(Result):
    """A rank's real states and the engine's expectation."""

    json_fields = "* parameter_bytes=measured.parameters"

    engine: str
    """Class of the prepared model."""
    ranks: int
    measured: StateMemory
    expected: StateMemory | None
    """None for a job without a spec, and for a model that trains other parameters."""
    note: str = ""
    """What a rank holds besides within a step."""

    def tables(self) -> list[Table]:
        def cell(state: StateMemory | None, part: str) -> str:
            size = getattr(state, part, None)
            return "–" if size is None else format_bytes(size)

        dtypes = self.measured.dtypes
        rows = [(part, cell(self.measured, part), cell(self.expected, part), dtypes.get(part, "–")) for part in STATES]
        notes = [f"{part} in {dtypes[part]}" for part in ("gradients", "reduce") if part in dtypes]
        notes += [self.note] if self.note else []
        title = f"Held by this rank ({self.engine}, {count_ranks(self.ranks)})"
        columns = ("part", "bytes", "expected", "dtype")
        return [Table(title=title, columns=columns, rows=rows, notes=[", ".join(notes)] if notes else [])]


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Call `accelerator.prepare`. The fp32 masters are exactly the checkpoint's, whoever read the model.

    Args:
        accelerator: from `toolkit.accelerator()`.
        objects: model, optimizer, loaders and schedulers in any order; the model and its optimizer in one call.

    Raises:
        StrategyMismatch: where the engine, the world size, bytes, dtypes or tied weights differ from the request.
    """
    job_of(accelerator)
    models, optimizers = models_and_optimizers(objects)
    if models:
        check_pair(models, optimizers)
    accelerator.from_checkpoint.update(models)
    return accelerator.prepare(*objects)


def models_and_optimizers(objects: Any) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """Return the models and the optimizers among the arguments of `accelerator.prepare`, or among its results."""
    import torch

    # accelerate returns a list under FSDP2, a tuple otherwise, and a single object unchanged.
    items = objects if isinstance(objects, list | tuple) else (objects,)
    models = [item for item in items if isinstance(item, torch.nn.Module)]
    return models, [item for item in items if isinstance(item, torch.optim.Optimizer)]


def prepared(accelerator: Accelerator, objects: Any) -> Prepared:
    """Return model and optimizer among the results of `accelerator.prepare`, for engine functions."""
    models, optimizers = models_and_optimizers(objects)
    check_pair(models, optimizers)
    return Prepared(job_of(accelerator), models[0], optimizers[0], accelerator)


def check_pair(models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Refuse a model without its optimizer, and an optimizer without its model.

    Raises:
        StrategyMismatch: where one of them is missing.
    """
    if bool(models) != bool(optimizers):
        given = "a model without its optimizer" if models else "an optimizer without its model"
        raise StrategyMismatch(f"prepare got {given}. Give both in one call: the engine needs them together.")


def restore_masters(prepared: Prepared, given: GivenWeights, *, from_checkpoint: bool) -> None:
    """Write the exact fp32 values into the masters. Check masters and compute copies bit by bit.

    An engine with separate masters makes them from weights that were already rounded to the compute dtype (DeepSpeed's
    bf16 and fp16). The user's own fp32 values are those that the module held. Where the checkpoint holds more than the compute
    dtype can say, it is read again, tensor by tensor; elements that the user changed stay. An
    adapter's first values are no checkpoint's, and were rounded when they were drawn.

    Raises:
        StrategyMismatch: where a master is not the exact value, or a compute copy not the rounded master.
    """
    from accelerate.utils import broadcast

    engine, masters, copies = prepared.job.engine, dict[str, list[Part]](), dict[str, list[Part]]()
    for shard in engine.shards(prepared):
        {MASTER: masters, PARAMETER: copies}.get(shard.kind, {}).setdefault(shard.name, []).extend(parts(shard))
    for name, values in given.wide.items():
        whole = broadcast(values.to(prepared.accelerator.device).contiguous(), from_process=0)
        copy([(whole_box(whole.shape), whole)], masters.get(name, []))
    rounded = from_checkpoint and prepared.job.strategy.adapter == "none" and engine.keeps_masters(prepared.job)
    for name, whole in _exact_weights(prepared, given) if rounded and prepared.job.spec is not None else ():
        source = [(whole_box(whole.shape), _with_changes(whole, copies.get(name, [])))]
        copy(source, masters.get(name, []))
        if any(master.dtype != whole.dtype for _, master in masters.get(name, [])):
            raise StrategyMismatch(
                f"{name}: its master cannot hold the checkpoint's values, which are in {whole.dtype}."
            )
        _check_bits(name, source, masters.get(name, []))
    for name, master in masters.items():
        _check_bits(name, master, copies.get(name, []))


def _with_changes(whole: torch.Tensor, copies: list[Part]) -> torch.Tensor:
    """Return a checkpoint's exact values, with those of the compute copies where these are no rounded ones of the checkpoint."""
    import torch

    box = whole_box(whole.shape)
    pairs = overlaps([(box, whole)], copies)
    if all(torch.equal(exact.to(value.device, value.dtype), value) for exact, value in pairs):
        return whole
    whole = whole.clone()
    for exact, value in overlaps([(box, whole)], copies):
        value = value.to(exact.device)
        exact.copy_(torch.where(exact.to(value.dtype) == value, exact, value.to(exact.dtype)))
    return whole


def _exact_weights(prepared: Prepared, given: GivenWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the fp32 values of each trained parameter on every rank; none where no tensor was cast while it was read.

    Each rank reads a tensor at a time where the files hold them in a known layout (`disk_layouts`). Else rank 0 reads the model
    whole into host memory.
    """
    import torch
    from accelerate.utils import broadcast

    accelerator, spec = prepared.accelerator, cast("ModelSpec", prepared.job.spec)
    model = accelerator.unwrap_model(prepared.model)
    expected = {parameter.name: tuple(parameter.shape) for parameter in spec.parameters}
    shapes = {
        name: shape for name, shape in given.shapes.items() if expected.get(name) == shape and name not in given.wide
    }
    weights = StreamedWeights.of_shapes(accelerator.device, spec, model, shapes)
    if weights is not None:
        rounded = bool(shapes) and weights.dtypes != {prepared.job.compute_dtype}
        yield from ((name, weights.tensor(name).to(accelerator.device).float()) for name in shapes if rounded)
        return
    whole: dict[str, torch.Tensor] = {}
    if accelerator.is_main_process:
        read = read_pretrained(spec, spec.source, dtype=torch.float32, quantization_config=quantization(prepared.job))
        whole.update(read.named_parameters())
    for name, shape in shapes.items():
        tensor = whole[name].detach() if whole else torch.empty(shape)
        yield name, cast("torch.Tensor", broadcast(tensor.to(accelerator.device).contiguous(), from_process=0))


def _check_bits(name: str, sources: list[Part], targets: list[Part]) -> None:
    """Check bit by bit that targets are the sources in their own dtype, wherever this rank holds both."""
    import torch

    for exact, value in overlaps(sources, targets):
        if not torch.equal(bits_of(exact.to(value.device, value.dtype)), bits_of(value)):
            raise StrategyMismatch(f"{name} in {value.dtype} is not its value in {exact.dtype}, rounded.")


def audit(prepared: Prepared, *, gradients: str | None = None) -> Audit:
    """Compare what this rank holds with the request.

    Args:
        prepared: the model, its optimizer and the job.
        gradients: after the first optimizer step, the dtypes of its gradients; then the moments are compared, too, and the
            parameters that several ranks hold alike. A collective then.

    A user's module may train other parameters than the spec (a new head, frozen parts, an adapter of PEFT's). Then bytes and
    dtypes are not compared.

    Raises:
        StrategyMismatch: naming every difference.
    """
    job, engine = prepared.job, prepared.job.engine
    state = engine.measure_state(prepared)
    if gradients is not None:
        state = replace(state, dtypes={**state.dtypes, "gradients": gradients})
    rank = prepared.accelerator.process_index
    known = job.spec is not None and not prepared.accelerator.unlike_spec
    expected = engine.expected_state(job, rank) if known else None
    name, ranks = type(prepared.model).__name__, prepared.accelerator.num_processes
    result = Audit(engine=name, ranks=ranks, measured=state, expected=expected, note=engine.within_step(job))
    wrong = engine.check(prepared)
    if gradients is not None and ranks > 1:
        wrong += wrong_parts(prepared)
    if result.ranks != job.ranks:
        wrong.append(f"world size is {result.ranks}, expected {job.ranks}")
    if expected is not None:
        wrong += _differences(state, expected, stepped=gradients is not None)
    if wrong:
        raise StrategyMismatch(
            f"sharding {job.strategy.sharding!r} was requested, and something else was prepared: {'; '.join(wrong)}. "
            f"{'Nothing was trained' if gradients is None else 'Training ended with its first step'}. "
            "Check versions with `toolkit doctor`."
        )
    if rank == 0 and (run := os.environ.get(RUN_DIR)):
        write_json(Path(run, Folder.audit), {"sharding": job.strategy.sharding, "engine": name, "ranks": ranks})
    return result


def _differences(actual: StateMemory, expected: StateMemory, *, stepped: bool) -> list[str]:
    """Compare bytes and dtypes. Moments and gradients have none before the first step; after it none may be missing."""
    later = () if stepped else ("optimizer", "gradients")
    wrong = []
    for part in STATES:
        size, should = getattr(actual, part) or 0, getattr(expected, part) or 0
        if part not in later and abs(size - should) > max(BYTES_TOLERANCE * should, SLACK):
            wrong.append(f"{part} takes {format_bytes(size)} on this rank, expected {format_bytes(should)}")
    for part, name in expected.dtypes.items():
        if part not in later and actual.dtypes.get(part) != name:
            wrong.append(f"{part} is {actual.dtypes.get(part, 'missing')}, expected {name}")
    return wrong


def unlike_spec(job: Job, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the difference of trained parameters and the spec's. None for equal names and sizes, or with an adapter."""
    if job.spec is None or job.strategy.adapter != "none":
        return None
    expected = {(state.name, state.elements) for state in parameters_of(job) if state.trainable}
    actual = {(name, math.prod(shape)) for name, shape in shapes.items()}
    counts = f"the model trains {len(actual)} parameters and {job.spec.name} {len(expected)}"
    return f"{counts} (the first difference: {min(actual ^ expected)[0]})" if actual != expected else None


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Give every rank the buffers of rank 0, as DDP does: DeepSpeed and FSDP send parameters only."""
    values = from_main([buffer.cpu() for buffer in model.buffers()])
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.data = value.to(buffer.device)  # one that is expanded cannot be written to


def share_statistics(model: torch.nn.Module) -> None:
    """Give every rank rank 0's running statistics of batch norms before each forward that uses them: ranks evaluate alike.

    DDP does so before every forward. Rank 0's values are the same either way.
    """
    import torch

    kind = torch.nn.modules.batchnorm._NormBase
    if statistics := [part for part in model.modules() if isinstance(part, kind) and part.track_running_stats]:
        holder = torch.nn.ModuleList(statistics)

        def share(*_: Any) -> None:
            if not all(part.training for part in statistics):
                broadcast_buffers(holder)

        model.register_forward_pre_hook(share)
