"""A model as shallow as can be: three layers of each kind that it has, from which any depth follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.engines.traces import LayerStack
from toolkit.models import ModelSpec
from toolkit.models.experts import module_lists

if TYPE_CHECKING:
    from torch import nn


def truncate_layers(model: nn.Module, spec: ModelSpec) -> tuple[LayerStack, ...]:
    """Keep three layers of each kind in every stack of the model, in place.

    Layers are of one kind where class, shapes of parameters and the config's `layer_types` agree.
    """
    from torch import nn

    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    text_types = getattr(text, "layer_types", None)
    stacks = []
    for name, stack in module_lists(model):
        if not any(type(layer).__name__ in spec.blocks for layer in stack.children()):
            continue
        types = text_types if spec.trains(name) else None
        kinds_: list[Any] = []
        for index, layer in enumerate(stack.children()):
            shapes = tuple((key, tuple(parameter.shape)) for key, parameter in layer.named_parameters())
            kinds_.append((type(layer), shapes, types[index] if types and index < len(types) else None))
        distinct = list(dict.fromkeys(kinds_))
        kinds = tuple(distinct.index(kind) for kind in kinds_)
        kept_layers = _kept_layers(kinds)
        owner, _, leaf = name.rpartition(".")
        layers = list(stack.children())
        setattr(model.get_submodule(owner), leaf, nn.ModuleList(layers[index] for index in kept_layers))
        if types and len(set(types)) > 1:  # models look their layers' types up by number
            text.layer_types = [types[index] for index in kept_layers]
        stacks.append(LayerStack(name=name, kinds=kinds, indices=kept_layers))
    return tuple(stacks)


def _kept_layers(kinds: Sequence[int]) -> tuple[int, ...]:
    """Return the first two and the last layer of each kind."""
    return tuple(
        index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < 2 or kind not in kinds[index + 1 :]
    )
