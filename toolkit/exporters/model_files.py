"""A whole model's files, written a shard at a time: neither the model nor its state is in memory as a whole."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import ModelError, RunError
from toolkit.core.units import BYTES_OF, dtype_name
from toolkit.exporters.base_weights import BaseWeights, Weights
from toolkit.exporters.results import SavedTensor
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import LONG, auto_class, freeze

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD_BYTES = 5 * 10**9
"""Largest size of a file, which is in memory at once together with one layer: the Hub's recommendation."""


def skeleton(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build the model on the meta device with the configs of its export: the source's, with the pad token."""
    import torch
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(spec.source, trust_remote_code=spec.runs_code)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(spec).from_config(config, trust_remote_code=spec.runs_code)
    freeze(model, spec)
    try:
        model.generation_config = GenerationConfig.from_pretrained(spec.source)
    except OSError:  # it has none, and transformers has made one from its config
        assert model.generation_config is not None
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


class FullStateDict:
    """Every tensor of a model under its saved name: trained ones, and unchanged ones."""

    kind = "model"

    def __init__(self, weights: Weights, model: PreTrainedModel, spec: ModelSpec) -> None:
        """Plan the files of a model; `model` is the skeleton.

        Raises:
            RunError: where `weights` lack a tensor, hold one of another shape, or one that the model does not know.
            ModelError: where what is not trained has to be read from the model's source, and that has it not.
        """
        self._weights, origin = weights, BaseWeights(spec)
        self._held: dict[str, str] = {}
        self._kept: dict[str, torch.Tensor] = {}
        parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
        tied = {group[0]: group for group in spec.tied}
        # Of our checkpoints; some are a script's own, which the model does not know.
        saved: frozenset[str] = getattr(weights, "buffers", frozenset())
        names = {*parameters, *buffers, *saved}
        wrong = [f"{name} is unknown to it" for name in weights.shapes if name not in names]
        for name in [*(p.name for p in spec.parameters), *sorted(set(model.state_dict()) - set(parameters))]:
            meta = parameters[name] if name in parameters else buffers[name]
            source = next((names for names in tied.get(name, (name,)) if names in weights.shapes), None)
            if source is None and name in parameters and meta.requires_grad:
                wrong.append(f"{name} is missing")
            elif source is None:
                self._kept[name] = origin.tensor(name)
            elif tuple(weights.shapes[source]) != tuple(meta.shape):
                wrong.append(f"{name} has the shape {list(weights.shapes[source])}, expected {list(meta.shape)}")
            elif source in saved:
                self._kept[name] = _buffer(weights, origin, source)
            else:
                self._held[name] = source
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise RunError(
                f"the {weights.kind} does not hold the weights of {spec.name}: {'; '.join(wrong[:3])}{more}. "
                "Name the model that was trained with --model."
            )
        self.trained: frozenset[str] = frozenset(self._held)
        items = self._kept.items()
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{name: tuple(weights.shapes[source]) for name, source in self._held.items()},
            **{name: tuple(tensor.shape) for name, tensor in items},
        }
        self.dtypes: Mapping[str, str] = {
            **{name: weights.dtypes[source] for name, source in self._held.items()},
            **{name: dtype_name(tensor.dtype) for name, tensor in items},
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor from its source."""
        return self._kept[name] if name in self._kept else self._weights.tensor(self._held[name])

    @property
    def dtype(self) -> str:
        """torch's name of the dtype that most elements have."""
        counts: dict[str, int] = {}
        for name in self.trained:
            counts[self.dtypes[name]] = counts.get(self.dtypes[name], 0) + math.prod(self.shapes[name])
        return max(counts, key=lambda dtype: counts[dtype])


def _buffer(weights: Weights, origin: BaseWeights, name: str) -> torch.Tensor:
    """Return a buffer of the checkpoint; the source's own if training only rounded it."""
    import torch

    value = weights.tensor(name)
    try:
        own = origin.tensor(name)
    except ModelError:  # a config and a tokenizer are enough of a source
        return value
    return own if own.shape == value.shape and torch.equal(own.to(value.dtype), value) else value


def saved_dtypes(model: PreTrainedModel, weights: FullStateDict, dtype: str | None) -> dict[str, str]:
    """Return the dtype of each saved tensor: its own or the requested one, except for those that stay in fp32."""
    import torch
    from transformers.core_model_loading import build_glob_alternation

    if dtype is None:
        return dict(weights.dtypes)
    plan = list(model._get_dtype_plan(getattr(torch, dtype)))
    keeps_fp32 = build_glob_alternation(plan)[0].search if plan else lambda name: None
    return {
        name: own if name not in weights.trained or keeps_fp32(name) else dtype for name, own in weights.dtypes.items()
    }


def saved_bytes(model: PreTrainedModel, weights: FullStateDict, dtype: str | None) -> int:
    """Return the bytes of the weights on the disk."""
    dtypes = saved_dtypes(model, weights, dtype).items()
    return sum(math.prod(weights.shapes[name]) * BYTES_OF[saved_dtype] for name, saved_dtype in dtypes)


def planned_model(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, SavedTensor]:
    """Yield what `save_pretrained` has to write for a state, a layer at a time: names on the disk, and bytes."""
    import torch

    saved = {name: tensor for name, tensor in state.items() if name not in (model._keys_to_ignore_on_save or ())}
    metas = {name: torch.empty_like(tensor, device="meta") for name, tensor in saved.items()}
    return {
        name: SavedTensor.of(tensor)
        for group in _groups(model, metas)
        for name, tensor in _on_disk(model, {name: saved[name] for name in group}).items()
    }


def write_model(
    model: PreTrainedModel, weights: FullStateDict, dtype: str | None, folder: Path
) -> dict[str, SavedTensor]:
    """Write a model's config and its weights, as `save_pretrained` would. What each tensor on the disk has to be.

    Tensors get the names and shapes that they have on the disk (one expert a tensor, say) by transformers' own
    conversion, one repeated layer at a time. Only where a conversion joins several layers is the model held whole.

    Args:
        model: the skeleton.
        weights: of the model.
        dtype: torch's name of the one to save in, or None for their own.
        folder: that exists.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from tqdm import tqdm
    from transformers.dynamic_module_utils import custom_object_save

    dtypes = {
        name: getattr(torch, name_of_dtype) for name, name_of_dtype in saved_dtypes(model, weights, dtype).items()
    }
    metas = {
        name: torch.empty(weights.shapes[name], dtype=dtypes[name], device="meta") for name in _saved(model, weights)
    }
    groups = _groups(model, metas)
    parts = [_on_disk(model, {name: metas[name] for name in group}) for group in groups]
    # Of a view the size of its whole storage would be counted.
    shapes = {name: torch.empty_like(meta) for part in parts for name, meta in part.items()}
    layout = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_BYTES)
    converted: dict[str, torch.Tensor] = {}
    written: dict[str, SavedTensor] = {}
    waiting = iter(tqdm(groups, desc="writing", unit="layer", disable=model.num_parameters() < LONG))
    for file, names in layout.filename_to_tensors.items():
        while not converted.keys() >= set(names):
            converted |= _on_disk(model, {name: weights.tensor(name).to(dtypes[name]) for name in next(waiting)})
        tensors = {name: converted.pop(name).contiguous() for name in names}
        written |= {name: SavedTensor.of(tensor) for name, tensor in tensors.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors
    if layout.is_sharded:
        about = {"total_parameters": model.num_parameters(), **layout.metadata}
        index = json.dumps({"metadata": about, "weight_map": layout.tensor_to_filename}, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")
    model.config.dtype, model.config.architectures = dtype or weights.dtype, [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return written


def _saved(model: PreTrainedModel, weights: FullStateDict) -> list[str]:
    """Return all tensors but those that the class creates when it is loaded."""
    return [name for name in weights.shapes if name not in (model._keys_to_ignore_on_save or ())]


def _on_disk(model: PreTrainedModel, tensors: dict[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Any] = revert_weight_conversion(model, tensors)
    return reverted


def _groups(model: PreTrainedModel, metas: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return names that are converted together: a repeated layer's, or all where a conversion joins more."""
    by_storage: dict[str, list[str]] = {}
    for name in metas:
        layer = re.match(r"(.*?\.\d+)\.", name)
        by_storage.setdefault(layer[1] if layer else name, []).append(name)

    def shapes(groups: Iterator[list[str]]) -> dict[str, Any]:
        parts = (_on_disk(model, {name: metas[name] for name in group}) for group in groups)
        return {name: meta.shape for part in parts for name, meta in part.items()}

    return (
        list(by_storage.values()) if shapes(iter(by_storage.values())) == shapes(iter([list(metas)])) else [list(metas)]
    )
