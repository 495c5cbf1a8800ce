"""The text part of a model of several parts: what text training trains. All other parts (vision tower, projector) are frozen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import ModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def class_with_text(values: Mapping[str, Any]) -> str | None:
    """Return the class that reads images and text and writes text, for a config with its defaults; or None.

    None too where `architectures` names the text model alone, as of a Llama 4 that was saved without its vision tower.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind, listed = str(values.get("model_type")), values.get("architectures")
    composed = any(isinstance(part, dict) and "model_type" in part for part in values.values())
    if not composed or values.get("is_encoder_decoder"):
        return None
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    return None if whole is None or (listed and listed[0] == text != whole) else str(whole)


def check_text_part(name: str, module: PreTrainedModel) -> None:
    """Refuse a model of several parts that does not train on text alone.

    Raises:
        ModelError: for one without a language-model head, that needs more than tokens in each forward, or is not causal.
    """
    parameters = inspect.signature(module.forward).parameters
    named = {name: each.default for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    needed = [name for name, default in named.items() if default is inspect.Parameter.empty and name != "input_ids"]
    why = None
    if needed:
        why = f"each forward needs {', '.join(needed)}"
    elif "labels" not in named or module.get_output_embeddings() is None:
        why = "it has no language-model head"
    elif getattr(module.config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        why = "its tokens attend to later ones (use_bidirectional_attention), so they would see what they predict"
    if why:
        raise ModelError(
            f"model {name!r} ({type(module).__name__}) does not train on text alone: {why}. "
            "Expected a model with a causal text part, such as Qwen3-VL or Gemma 3."
        )


def frozen_modules(module: PreTrainedModel) -> tuple[str, ...]:
    """Return the outermost modules and parameters outside the text part: decoder, embeddings and head.

    Empty for a model of one part. Layers of the decoder that attend to images are no text part either: without an image
    they are skipped (Mllama).
    """
    config = module.config
    if config.get_text_config() is config or config.is_encoder_decoder or (decoder := module.get_decoder()) is module:
        return ()
    parts = (decoder, module.get_input_embeddings(), module.get_output_embeddings())
    used = {part for part in parts if part is not None}
    holders = {outer for outer in module.modules() if outer not in used and used & set(outer.modules())}

    def outside(owner: nn.Module, prefix: str) -> Iterator[str]:
        yield from (f"{prefix}{leaf}" for leaf, _ in owner.named_parameters(recurse=False))
        for leaf, child in owner.named_children():
            if child in holders:
                yield from outside(child, f"{prefix}{leaf}.")
            elif child not in used and any(True for _ in child.parameters()):
                yield f"{prefix}{leaf}"

    prefix = next(name for name, child in module.named_modules() if child is decoder)
    crossed = [f"{prefix}.layers.{index}" for index in getattr(decoder.config, "cross_attention_layers", None) or ()]
    return (*outside(module, ""), *crossed)
