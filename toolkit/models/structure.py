"""The parts of a model: stacks of layers, mixtures of experts, and what text training leaves frozen."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import ModelError
from toolkit.models.spec import MoE

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERT_NAMES = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}
_FIXED_ACTIVE = {"switch_transformers": 1, "nllb-moe": 2}
"""Architectures that route by a fixed rule: Fedus et al. 2021 (top 1), NLLB team 2022 (top 2)."""

STATEFUL = re.compile(r"Mamba|Mixer\b|Recurrent|SSM|DeltaNet|Linear\w*Attention|Lightning|Conv|Rwkv|LSTM|KDA")
"""Names of layers with a state, which GPU kernels may carry from document to document, unlike the CPU's."""


@dataclass(frozen=True)
class Routed:
    """A module that routes, and the names of its experts and routers."""

    name: str
    block: nn.Module
    experts: tuple[str, ...]
    routers: tuple[str, ...]


def routed_blocks(module: nn.Module) -> list[Routed]:
    """Return modules with both experts and a router. Shared experts count as layers."""
    routed = []
    for name, child in module.named_modules():
        parts = {key: type(part).__name__ for key, part in child.named_children() if list(part.parameters())}
        experts = [
            key for key, cls in parts.items() if key == "experts" or (cls.endswith("Experts") and "shared" not in key)
        ]
        routers = [
            key
            for key, cls in parts.items()
            if key not in experts and (key in ("gate", "router") or re.search(r"Router|Gat(e|ing)$", cls))
        ]
        if experts and routers:
            paths = (tuple(f"{name}.{key}" for key in keys) for keys in (experts, routers))
            routed.append(Routed(name, child, *paths))
    return routed


def mixture(name: str, module: PreTrainedModel, figures: Mapping[str, Any], routed: list[Routed]) -> MoE | None:
    """Return the mixture of a model with experts and a router, else None: dense models may have the config fields."""
    if not routed:
        return None
    first = routed[0].block.get_submodule(routed[0].experts[0].rpartition(".")[2])
    fused = [parameter.shape[0] for parameter in first.parameters() if parameter.dim() == 3]
    counts = [value for key in _EXPERT_COUNTS if isinstance(value := figures.get(key), int)]
    experts = max(counts, default=fused[0] if fused else len(list(first.children())))
    if experts < 2:
        return None
    kind = str(figures.get("model_type"))
    active = next((value for key in _ACTIVE if isinstance(value := figures.get(key), int)), _FIXED_ACTIVE.get(kind))
    if active is None:
        raise ModelError(
            f"model {name!r} has {experts} experts a layer, and its config does not say in one number how many a token uses: "
            "set num_experts_per_tok."
        )
    classes = {type(layer.block).__name__ for layer in routed}
    if len(classes) > 1:  # attention and MLP route separately: the layer holds both
        stack, child = next(
            (stack, child) for stack, child in module_lists(module) if routed[0].name.startswith(f"{stack}.")
        )
        number = routed[0].name.removeprefix(f"{stack}.").partition(".")[0]
        classes = {type(child.get_submodule(number)).__name__}
    computed = getattr(module.config.get_text_config(), "_experts_implementation", None)
    return MoE(experts=experts, active=active, block=classes.pop(), computed=computed or "eager")


def unadapted_names(linears: tuple[str, ...], model_type: str) -> tuple[str, ...]:
    """Return dense layers, shared experts and routers with names that experts had before transformers fused them.

    PEFT maps such names to the fused experts' parameters (peft/utils/transformers_weight_conversion.py,
    `_MOE_TARGET_MODULE_MAPPING`), and would adapt those instead.
    """
    from transformers import conversion_mapping

    families = {**conversion_mapping._MODEL_TO_CONVERSION_PATTERN, "mixtral": "mixtral"}
    leaves = _EXPERT_NAMES.get(families.get(model_type, ""), ())
    return tuple(name for name in linears if name.rpartition(".")[2] in leaves)


def module_lists(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every outermost module list with its name: the stacks of repeated layers."""
    from torch import nn

    lists: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(child, nn.ModuleList) and len(child) and not inside:
            lists.append((name, child))
    return lists


def stateful_layers(module: PreTrainedModel) -> tuple[str, ...]:
    """Return the classes of layers with a state of their own, of those in the files of the model's class and its parents."""
    files = {kind.__module__ for kind in type(module).__mro__}  # FSDP's class of a model is in a file of its own
    own = {type(part).__name__ for part in module.modules() if type(part).__module__ in files}
    return tuple(sorted(filter(STATEFUL.search, own)))


def class_with_text(values: Mapping[str, Any]) -> str | None:
    """Return the class of an image-text-to-text model, for a config with its defaults; else None.

    It is None too if `architectures` names the text model alone, as for a Llama 4 without its vision tower.
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
        ModelError: for a model without a language-model head, with more required inputs than tokens, or not causal.
    """
    parameters = inspect.signature(module.forward).parameters
    inputs = {name: each.default for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    required = [name for name, default in inputs.items() if default is inspect.Parameter.empty and name != "input_ids"]
    why = None
    if required:
        why = f"each forward needs {', '.join(required)}"
    elif "labels" not in inputs or module.get_output_embeddings() is None:
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

    Empty for a model of one part. Decoder layers that attend to images are frozen too: without an image the model skips
    them (Mllama).
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
