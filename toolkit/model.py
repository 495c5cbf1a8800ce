"""What a model is, before a weight is read: `describe()` → `ModelSpec`, on the meta device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from toolkit.show import Shown


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the unsharded model, under its own (canonical) name. Tied parameters appear once."""

    name: str
    shape: tuple[int, ...]
    role: str
    """`embedding`, `head`, `layer`, `norm`, `expert`, `router` or `other`."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class MoE:
    """The shape of a mixture of experts."""

    experts: int
    """Experts of a layer."""
    active: int
    """Experts that a token passes through."""
    block: str
    """Class of the module that routes and holds the experts: the ZeRO-3 leaf."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Shown):
    """A model's architecture, without its weights."""

    name: str
    """As it was given: a Hub id, a folder, a file, or a class name."""
    source: str | None
    """Where the weights are: a Hub id or a folder; None where only a config is known."""
    architecture: str
    """The class that is trained, say `LlamaForCausalLM`."""
    kind: str
    """`causal` or `seq2seq`."""
    config: dict[str, Any] = field(repr=False)
    """The transformers config, as its `to_dict()`."""
    parameters: tuple[Parameter, ...] = field(repr=False)
    """In the model's own order; each storage once."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of names that share one tensor; the first of each is the one in `parameters`."""
    linears: tuple[str, ...] = field(repr=False)
    """Names of the linear modules, the head excepted: what `all-linear` adapts and 4 bits quantize."""
    blocks: tuple[str, ...]
    """Classes of the repeated layers: what FSDP wraps (transformers' `_no_split_modules`)."""
    attentions: tuple[str, ...]
    """Attention kernels that this class supports."""
    layers: int
    hidden: int
    heads: int
    vocab: int
    max_positions: int | None
    """The longest sequence, or None where the model has no limit."""
    moe: MoE | None = None

    @property
    def elements(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.elements for parameter in self.parameters)
