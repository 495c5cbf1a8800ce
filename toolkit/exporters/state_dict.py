"""Every tensor of a model under its name in the model: trained ones from the shards of all ranks, the others from its source."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers import Entry, Weights, safetensors_entries
from toolkit.checkpoints.layout import Region
from toolkit.core.errors import ModelError, RunError
from toolkit.core.units import dtype_name
from toolkit.engines.rank_calls import meet
from toolkit.engines.records import Prepared
from toolkit.engines.shards import BUFFER, MASTER, PARAMETER, Shard, copy, parts, whole_box
from toolkit.engines.states import SEND_CHUNK
from toolkit.models import ModelSpec, require_weights
from toolkit.models.hf_loading import disk_tensors, first_names, read_pretrained

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def is_adapter(module: Any) -> bool:
    """Return whether the model has a PEFT adapter, the toolkit's or the user's."""
    return hasattr(module, "peft_config")


class EngineWeights:
    """Tensors of a running model by canonical name: masters where an engine keeps them, else parameters; and buffers.

    Of an adapter these are the trained tensors, of a model from `load` all but frozen parts, of a user's own model all. A tied
    tensor is there under each of its names.
    """

    def __init__(self, prepared: Prepared, *, frozen: bool = False) -> None:
        """Exchange the regions of all ranks; with `frozen` those of untrained parameters, too. A collective."""
        import torch
        from accelerate.utils import gather_object

        torch.cuda.empty_cache()  # the buffers of collectives lie outside torch's cache
        accelerator, job = prepared.accelerator, prepared.job
        self._rank, self._device = accelerator.process_index, accelerator.device
        module = accelerator.unwrap_model(prepared.model)
        parameters, first = dict(module.named_parameters(remove_duplicate=False)), first_names(module)
        self._mine: dict[tuple[str, str], list[Shard]] = {}
        for shard in job.engine.shards(prepared):
            self._mine.setdefault((shard.name, shard.kind), []).append(shard)
        regions = {key: [Region.of(shard) for shard in shards] for key, shards in self._mine.items()}
        local_facts = {key: (shards[0].shape, shards[0].tensor.dtype) for key, shards in self._mine.items()}
        ranks = gather_object([(regions, local_facts)])
        facts = {key: value for _, part in ranks for key, value in part.items()}
        if frozen:
            names = list(parameters)
        elif is_adapter(module):
            names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        else:
            names = [name for name in parameters if job.spec is None or job.spec.trains(name)]
        keys = {name: (first[name], MASTER if (first[name], MASTER) in facts else PARAMETER) for name in names}
        if not is_adapter(module):
            keys |= {name: (source, BUFFER) for name, source in first.items() if (source, BUFFER) in facts}
        # By tensor: its regions, each with the first rank that holds it and the place among that rank's shards.
        self._senders: dict[str, dict[Region, tuple[int, int]]] = {name: {} for name in keys}
        for name, key in keys.items():
            for owner, (regions, _) in enumerate(ranks):
                for index, region in enumerate(regions.get(key, ())):
                    self._senders[name].setdefault(region, (owner, index))
        self._keys, self._whole = keys, dict[str, torch.Tensor]()
        self._facts = {name: facts[key] for name, key in keys.items()}
        entries = {
            name: Entry(
                tuple(shape),
                dtype_name(dtype),
                partial(self._whole.__getitem__, name),
                trained=getattr(parameters.get(name), "requires_grad", False),
                source=name,
            )
            for name, (shape, dtype) in self._facts.items()
        }
        self.weights = Weights("running model", entries)
        """Rank 0 alone can read them, after `gather`."""

    def gather(self, names: Sequence[str]) -> None:
        """Gather these whole tensors in rank 0's host memory, and drop those gathered before. A collective.

        Equal regions (replicas) are sent once. Broadcasts of at most `SEND_CHUNK` bytes on the main group need no new
        communicator, and no buffer that grows with the tensor.
        """
        import torch

        self._whole.clear()
        for name in names:
            shape, dtype = self._facts[name]
            whole = torch.empty(shape, dtype=dtype) if self._rank == 0 else None
            for region, (owner, index) in self._senders[name].items():
                for shard in self._send(region, owner, index):
                    if whole is not None:
                        copy(parts(shard), [(whole_box(shape), whole)])
            if whole is not None:
                self._whole[name] = whole

    def _send(self, region: Region, owner: int, index: int) -> Iterator[Shard]:
        """Send a region from `owner` to all ranks, and yield it there in parts. Rank 0's own regions are not sent."""
        import torch
        import torch.distributed as dist

        (shape, dtype), key = self._facts[region.name], self._keys[region.name]
        shard = self._mine[key][index] if owner == self._rank else None
        if owner == 0:
            if shard is not None:
                yield shard
            return
        flat = None if shard is None else shard.tensor.detach().reshape(-1)
        step = max(1, SEND_CHUNK // dtype.itemsize)
        for start in range(0, region.length, step):
            length = min(step, region.length - start)
            if flat is None:
                values = torch.empty(length, dtype=dtype, device=self._device)
            else:
                values = flat[start : start + length].to(self._device)
            dist.broadcast(values, owner)
            yield Shard(region.name, region.kind, tuple(shape), region.box, region.start + start, values)


def whole_state_dict(prepared: Prepared, call: str) -> dict[str, torch.Tensor]:
    """Return a prepared model's state dict with whole tensors on rank 0, and nothing on the others. A collective.

    Raises:
        RunError: where not every rank calls `call`, which needs it.
    """
    advice = "Each holds a part of the weights. Call it on every rank, as tk.save: rank 0 writes."
    meet(prepared.accelerator, call, advice)
    engine = EngineWeights(prepared, frozen=True)
    engine.gather(list(engine.weights.entries))
    module = prepared.accelerator.unwrap_model(prepared.model)
    if not prepared.accelerator.is_main_process:
        return {}
    names = first_names(module, buffers=False)
    return {**module.state_dict(), **{name: engine.weights.tensor(first) for name, first in names.items()}}


NAME_MODEL = "Name the model that was trained with --model."


def full_state(weights: Weights, model: PreTrainedModel, spec: ModelSpec, fix: str = NAME_MODEL) -> dict[str, Entry]:
    """Return every tensor of a model: trained ones from `weights`, untrained ones from the model's source.

    Args:
        weights: the trained weights.
        model: the skeleton.
        spec: of the model.
        fix: last sentence of the error about tensors of another model.

    Raises:
        RunError: if `weights` lack a tensor, or hold one with another shape or an unknown name.
        ModelError: if the model's source lacks an untrained tensor.
    """
    base = _BaseWeights(spec, model)
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    names, tied = first_names(model), dict[str, list[str]]()
    for name, first in names.items():
        tied.setdefault(first, []).append(name)
    # Unknown buffers, say of a script, are left out.
    unknown = weights.entries.keys() - parameters.keys() - buffers.keys()
    faults = [f"{name} is unknown to it" for name in sorted(unknown) if weights.entries[name].trained]
    entries: dict[str, Entry] = {}
    for name in [*dict(model.named_parameters()), *sorted(set(model.state_dict()) - set(parameters))]:
        meta = parameters[name] if name in parameters else buffers[name]
        source = next((other for other in tied[names[name]] if other in weights.entries), None)
        if source is None and name in parameters and meta.requires_grad:
            faults.append(f"{name} is missing")
        elif source is None:
            entries[name] = base.entry(name)
        elif weights.entries[source].shape != tuple(meta.shape):
            faults.append(f"{name} has the shape {list(weights.entries[source].shape)}, expected {list(meta.shape)}")
        else:
            entry = dataclasses.replace(weights.entries[source], read=partial(weights.tensor, source), source=source)
            entries[name] = entry if entry.trained else _unrounded(entry, base, name)
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise RunError(
            f"the {weights.kind} does not hold the weights of {spec.name}: {'; '.join(faults[:3])}{more}. {fix}"
        )
    return entries


def _unrounded(entry: Entry, base: _BaseWeights, name: str) -> Entry:
    """Return the base's own tensor if `entry` is that tensor rounded; else `entry` in the base's dtype."""
    try:
        own = base.entry(name)
    except ModelError:  # a config and a tokenizer are enough of a source
        return entry
    if own.shape != entry.shape or own.dtype == entry.dtype:
        return entry

    def read() -> torch.Tensor:
        import torch

        value, untrained = entry.read(), own.read()
        return untrained if torch.equal(untrained.to(value.dtype), value) else value.to(untrained.dtype)

    return dataclasses.replace(entry, dtype=own.dtype, read=read)


class _BaseWeights:
    """The base model's buffers and untrained weights, which no checkpoint holds."""

    def __init__(self, spec: ModelSpec, model: PreTrainedModel) -> None:
        """Take the spec, and a skeleton that knows the tensors' names in the files."""
        self.spec, self._model = spec, model

    def entry(self, name: str) -> Entry:
        """Return a tensor from its file. For a tensor in another form, transformers reads the whole model once.

        Raises:
            ModelError: if the source has no weights, or lacks this one.
        """
        if (place := self._place(name)) is not None:
            return dataclasses.replace(self._stored[place], trained=False)
        if name not in self._state:
            raise ModelError(f"model {self.spec.name!r} has no tensor {name}. Give the model that was trained from.")
        whole = self._state[name]
        return Entry(tuple(whole.shape), dtype_name(whole.dtype), whole.cpu, trained=False)

    @functools.cached_property
    def _stored(self) -> dict[str, Entry]:
        paths = require_weights(self.spec)
        return {name: entry for path in paths for name, entry in safetensors_entries(path).items()}

    def _place(self, name: str) -> str | None:
        """Return the tensor's name in the files, if they hold it in the model's form."""
        import torch

        if name in self._stored:
            return name
        meta: Any = dict(self._model.named_parameters()).get(name)
        if meta is None:
            return None
        try:
            (place, stored), *more = disk_tensors(self._model, {name: torch.empty_like(meta, device="meta")}).items()
        except ValueError:
            return None
        return place if not more and place in self._stored and stored.shape == meta.shape else None

    @functools.cached_property
    def _state(self) -> Mapping[str, torch.Tensor]:
        state: Mapping[str, torch.Tensor] = read_pretrained(self.spec, self.spec.source).state_dict()
        return state
