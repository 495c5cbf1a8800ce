"""Every tensor of a model under its name in the model: trained ones, and what training left as it was."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers import Entry, Weights, safetensors_entries
from toolkit.core.errors import ModelError, RunError
from toolkit.core.units import dtype_name
from toolkit.models import ModelSpec, require_weights
from toolkit.models.hf_loading import auto_class, disk_tensors, without_engine

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


NAME_MODEL = "Name the model that was trained with --model."


def full_state(weights: Weights, model: PreTrainedModel, spec: ModelSpec, fix: str = NAME_MODEL) -> dict[str, Entry]:
    """Return every tensor of a model: trained ones from `weights`, what training left alone from the model's source.

    Args:
        weights: the trained weights.
        model: the skeleton.
        spec: of the model.
        fix: ends the sentence about tensors of another model.

    Raises:
        RunError: where `weights` lack a tensor, hold one of another shape, or one that the model does not know.
        ModelError: where what is not trained has to be read from the model's source, and that has it not.
    """
    base = _BaseWeights(spec, model)
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    tied = {group[0]: group for group in spec.tied}
    # Buffers of a script's own, which the model does not know, are left out.
    unknown = weights.entries.keys() - parameters.keys() - buffers.keys()
    wrong = [f"{name} is unknown to it" for name in sorted(unknown) if weights.entries[name].trained]
    entries: dict[str, Entry] = {}
    for name in [*(p.name for p in spec.parameters), *sorted(set(model.state_dict()) - set(parameters))]:
        meta = parameters[name] if name in parameters else buffers[name]
        source = next((names for names in tied.get(name, (name,)) if names in weights.entries), None)
        if source is None and name in parameters and meta.requires_grad:
            wrong.append(f"{name} is missing")
        elif source is None:
            entries[name] = base.entry(name)
        elif weights.entries[source].shape != tuple(meta.shape):
            wrong.append(f"{name} has the shape {list(weights.entries[source].shape)}, expected {list(meta.shape)}")
        else:
            entry = dataclasses.replace(weights.entries[source], read=partial(weights.tensor, source), source=source)
            entries[name] = entry if entry.trained else _unrounded(entry, base, name)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RunError(
            f"the {weights.kind} does not hold the weights of {spec.name}: {'; '.join(wrong[:3])}{more}. {fix}"
        )
    return entries


def _unrounded(entry: Entry, base: _BaseWeights, name: str) -> Entry:
    """Return the base's own tensor, in its dtype, where `entry` is only that tensor rounded; else `entry` in that dtype."""
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
        """Take the spec, and a skeleton that knows how the files call its tensors."""
        self.spec, self._model = spec, model

    def entry(self, name: str) -> Entry:
        """Return a tensor in its file; where the file holds it in another form, transformers reads the whole model once.

        Raises:
            ModelError: where the source has no weights, or lacks this one.
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
        """Return the tensor's name in the files, if these hold it as it is."""
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
        with without_engine():
            read = auto_class(self.spec).from_pretrained
            model = read(self.spec.source, trust_remote_code=self.spec.runs_code, use_safetensors=True)
        state: Mapping[str, torch.Tensor] = model.state_dict()
        return state
