"""Every tensor of a model under its name in the model: trained ones, and what training left as it was."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from toolkit.core.errors import ModelError, RunError
from toolkit.exporters.base_weights import BaseWeights, Weights
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


NAME_MODEL = "Name the model that was trained with --model."


class StateDict(Protocol):
    """Every tensor of a model, by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """torch's names."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Of what is read from the trained weights: the name there."""

    @property
    def trained(self) -> Collection[str]:
        """Parameters that training changed."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory."""


class FullStateDict:
    """The `StateDict` of a model whose source is known: what training left alone is read from there."""

    def __init__(self, weights: Weights, model: PreTrainedModel, spec: ModelSpec, fix: str = NAME_MODEL) -> None:
        """Find the source of each tensor of `model`, the skeleton. `fix` ends the sentence about other tensors.

        Raises:
            RunError: where `weights` lack a tensor, hold one of another shape, or one that the model does not know.
            ModelError: where what is not trained has to be read from the model's source, and that has it not.
        """
        self._weights, self._base = weights, BaseWeights(spec, model)
        self.sources: dict[str, str] = {}
        self.trained: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
        tied = {group[0]: group for group in spec.tied}
        # Buffers of a script's own, which the model does not know, are left out.
        names = {*parameters, *buffers, *weights.rounded}
        wrong = [f"{name} is unknown to it" for name in weights.shapes if name not in names]
        for name in [*(p.name for p in spec.parameters), *sorted(set(model.state_dict()) - set(parameters))]:
            meta = parameters[name] if name in parameters else buffers[name]
            source = next((names for names in tied.get(name, (name,)) if names in weights.shapes), None)
            if source is None and name in parameters and meta.requires_grad:
                wrong.append(f"{name} is missing")
            elif source is None:
                self.shapes[name], self.dtypes[name] = self._base.header(name)
            elif tuple(weights.shapes[source]) != tuple(meta.shape):
                wrong.append(f"{name} has the shape {list(weights.shapes[source])}, expected {list(meta.shape)}")
            else:
                self._add(name, source)
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise RunError(
                f"the {weights.kind} does not hold the weights of {spec.name}: {'; '.join(wrong[:3])}{more}. {fix}"
            )

    def _add(self, name: str, source: str) -> None:
        self.sources[name], self.shapes[name] = source, tuple(self._weights.shapes[source])
        self.dtypes[name] = self._weights.dtypes[source]
        if source not in self._weights.rounded:
            self.trained.add(name)
            return
        try:
            shape, dtype = self._base.header(name)
        except ModelError:  # a config and a tokenizer are enough of a source
            return
        if shape == self.shapes[name]:
            self.dtypes[name] = dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor from its source."""
        import torch

        if name not in self.sources:
            return self._base.tensor(name)
        value = self._weights.tensor(self.sources[name])
        if name in self.trained or self.dtypes[name] == self._weights.dtypes[self.sources[name]]:
            return value
        own = self._base.tensor(name)
        return own if torch.equal(own.to(value.dtype), value) else value.to(own.dtype)
