"""A model's config made small: the same classes, kinds of layers, ratio of heads and extras, with few and narrow layers."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from toolkit.core.units import ceil_div
from toolkit.models.spec import ModelSpec

LAYERS, HIDDEN, VOCABULARY, WINDOW = 4, 64, 4104, 8
"""Layers at most, least hidden size, tokens (the embedded tokenizer's and a class's own), positions of a window."""

NARROW = {
    "intermediate_size": 2, "ffn_dim": 2, "moe_intermediate_size": 1, "shared_expert_intermediate_size": 1,
    "word_embed_proj_dim": 1, "hidden_size_per_layer_input": 0.25,
}  # fmt: skip
"""Sizes of modules, as multiples of the hidden size."""

FIXED = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_d_state": 16,
}  # fmt: skip
"""Sizes of latent attention, groups of experts, token ids, and heads of states."""

RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of rates: each rank draws masks and noise of its own."""


def shrink(spec: ModelSpec, unit: int, ep: int = 1, stages: int = 0) -> Any:
    """Return a transformers config of the model's class with few layers and a hidden size from 64 on.

    Args:
        spec: a causal language model.
        unit: ranks that share the heads. Where these divide the model's heads, they divide the copy's.
        ep: ranks that share the experts.
        stages: of a pipeline, which need a layer each.
    """
    from transformers import AutoConfig

    values = copy.deepcopy(spec.config)
    part = values.get("text_config") or values
    if overrides := part.get("per_layer_config"):  # of layers of other sizes; without the key the class draws its own
        part["per_layer_config"] = {}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    text = config.get_text_config(decoder=True)
    heads, groups = _heads(text, unit)
    width = max(8, HIDDEN // heads)
    depth = text.num_hidden_layers
    all_kinds = list(getattr(text, "layer_types", None) or ())
    kinds = list(dict.fromkeys(all_kinds))
    layers = min(depth, max(LAYERS, stages))
    for name, value in list(vars(text).items()):
        if isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(text, name, 0.0)
        if isinstance(value, list) and len(value) == depth and name != "layer_types":
            setattr(text, name, value[:layers])
    if kinds:
        with contextlib.suppress(AttributeError):  # Bamba derives them from the layers' indices
            text.layer_types = (kinds * layers)[:layers]
    text.num_hidden_layers, text.hidden_size, text.num_attention_heads = layers, heads * width, heads
    text.vocab_size = VOCABULARY + text.vocab_size % unit
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = groups
    if getattr(text, "head_dim", None):
        with contextlib.suppress(AttributeError):  # Falcon derives it
            text.head_dim = width
    for name, times in NARROW.items():
        if getattr(text, name, None):
            setattr(text, name, int(times * text.hidden_size))
    for name, value in FIXED.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, value)
    if getattr(text, "qk_rope_head_dim", None) and getattr(text, "head_dim", None):  # the heads that are rotated
        text.head_dim = text.qk_rope_head_dim
    if getattr(text, "mamba_d_head", None):
        text.mamba_d_head = (
            getattr(text, "mamba_d_ssm", None) or text.mamba_expand * text.hidden_size
        ) // text.mamba_n_heads
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(text, name, None):
            setattr(text, name, min(getattr(text, name), ceil_div(8, ep) * ep))
            text.num_experts_per_tok = min(text.num_experts_per_tok, 2)
    if getattr(text, "output_router_logits", False):  # the balance loss is another for other micro-batches
        text.output_router_logits = False
    if getattr(text, "sliding_window", None):
        text.sliding_window = WINDOW
    if getattr(text, "num_kv_shared_layers", 0):  # each kind of layers has one with keys of its own
        text.num_kv_shared_layers = max(0, layers - max(1, len(kinds)))
    if getattr(text, "vocab_size_per_layer_input", None):
        text.vocab_size_per_layer_input = text.vocab_size
    text.max_position_embeddings = min(getattr(text, "max_position_embeddings", 512), 512)
    text.rope_parameters = _plain_rope(getattr(text, "rope_parameters", None))
    if overrides:
        first = {
            kind: overrides.get(str(all_kinds.index(kind)), overrides.get(all_kinds.index(kind))) for kind in kinds
        }
        sizes = {"head_dim": 2 * width, "num_key_value_heads": groups, "num_attention_heads": heads}
        text.per_layer_config = {
            layer: {name: sizes.get(name, value) for name, value in first[kind].items()}
            for layer, kind in enumerate(text.layer_types)
            if first[kind]
        }
    return config


def _heads(text: Any, unit: int) -> tuple[int, int]:
    """Return few heads of queries and of keys, in the model's ratio."""
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    while heads > 8 and not heads % 2 and not groups % 2 and groups // 2 >= min(groups, unit) and not heads // 2 % unit:
        heads, groups = heads // 2, groups // 2
    return heads, groups


def _plain_rope(rope: Any) -> Any:
    """Return rotary parameters without lists, which would have the length of another head."""
    if not isinstance(rope, dict):
        return rope
    if "rope_type" not in rope:  # one for each kind of layers
        return {name: _plain_rope(value) for name, value in rope.items()}
    kept = {name: value for name, value in rope.items() if not isinstance(value, list)}
    return kept if len(kept) == len(rope) else {**kept, "rope_type": "default"}
