"""`describe()`: a model's modules on the meta device → `ModelSpec`."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.run_config import EMBEDDED
from toolkit.core.atomic_io import expand_user
from toolkit.core.errors import ModelError
from toolkit.models.hub import first_line
from toolkit.models.remote_code import check_links
from toolkit.models.resolution import check_generates, check_known, config_text, find
from toolkit.models.spec import ModelSpec, MoE, Parameter
from toolkit.models.spec_cache import recall, remember
from toolkit.models.text_part import check_text_part, class_with_text, frozen_modules

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERT_NAMES = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}
_FIXED_ACTIVE = {"switch_transformers": 1, "nllb-moe": 2}
"""Architectures that route by a fixed rule: Fedus et al. 2021 (top 1), NLLB team 2022 (top 2)."""
_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")


def describe(
    model: str | Path | PretrainedConfig | nn.Module | None = None, *, trust_remote_code: str | None = None
) -> ModelSpec:
    """Describe a model's architecture from its config: no weight is read, and no untrusted code runs.

    Args:
        model: a Hub id, a folder, a `config.json`, a transformers config or model. None and `"embedded"`
            name the embedded model (a folder of that name is `"./embedded"`).
        trust_remote_code: run the model's own code if it has exactly this revision: the full commit of a model on the
            Hub, or the sha256 of a folder that the refusal names.

    Raises:
        ModelError: for a model that cannot be found, that transformers cannot build as a causal or sequence-to-sequence
            language model, or whose own code is needed and not trusted.
    """
    if model is None or isinstance(model, str | Path):
        # Before torch and transformers are imported: a wrong name is refused at once.
        name = EMBEDDED if model is None else str(model)
        if len(name) > 1000:
            raise ModelError(
                f"model {name[:40]!r}…: {len(name):,} characters name no model. Give a folder or a Hub id."
            )
        if name != EMBEDDED and os.path.isfile((folder := expand_user(name)) / "config.json"):
            check_links(folder)
        source, text = config_text(name) if trust_remote_code is None else (None, None)
        if text is not None and (cached_spec := recall(text)) is not None:
            return dataclasses.replace(cached_spec, name=name, source=source)
        source, config = find(name, trust_remote_code)
    else:
        from torch import nn

        if trust_remote_code is not None:
            raise ModelError(
                "trust_remote_code goes with a folder or a Hub id: a model in memory has run its code already."
            )
        if isinstance(model, nn.Module):
            module = _language_model(model)
            return _spec(module, module.config, name=type(model).__name__, source=None)
        name, source, text, config = type(model).__name__, None, None, model
    values = config.to_dict()
    own = values.get("auto_map") if trust_remote_code else None
    if not own:
        check_known(name, values)
        check_generates(name, values)
    built = _build(name, config, own or {})
    spec = _spec(built, config, name=name, source=source, trusted=trust_remote_code)
    if text is not None:
        remember(text, spec)
    return spec


def _build(name: str, config: PretrainedConfig, own: Mapping[str, Any]) -> PreTrainedModel:
    """Build the model's modules on the meta device, without memory or initialisation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    generates = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in own
    causal = generates and not getattr(config, "is_encoder_decoder", False)
    whole = not own and class_with_text(config.to_dict()) is not None
    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM
    try:
        with torch.device("meta"):
            # Building writes into the config (dtype, attention), and this one may be the caller's.
            copied = copy.deepcopy(config)
            built: PreTrainedModel = auto.from_config(copied, trust_remote_code=bool(own))
    except Exception as error:  # each model class fails in its own way on values that do not fit together
        raise ModelError(
            f"model {name!r}: transformers cannot build {type(config).__name__}: {first_line(error)}"
        ) from error
    if whole:
        check_text_part(name, built)
    return built


def _language_model(module: nn.Module) -> PreTrainedModel:
    """Return the module if it is a transformers model with a language-model head."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        raise ModelError(
            f"model of class {type(module).__name__}: expected a transformers model. "
            "Give its transformers config, its folder or its Hub id."
        )
    if _head(module) is None:
        raise ModelError(
            f"model of class {type(module).__name__} has no language-model head: expected one such as LlamaForCausalLM."
        )
    check_generates(type(module).__name__, module.config.to_dict())
    return module


def _spec(
    module: PreTrainedModel, config: PretrainedConfig, *, name: str, source: str | None, trusted: str | None = None
) -> ModelSpec:
    text = config.get_text_config()
    values = text.to_dict()
    # Some families spell it their own way: GPT-2's `hidden_size` is `n_embd`.
    figures = {
        our_name: values.get(their_name) for our_name, their_name in getattr(text, "attribute_map", {}).items()
    } | values
    kind = "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"
    frozen = frozen_modules(module)
    blocks = _blocks(module, frozen)
    routed = _routed(module)
    moe = _moe(name, module, figures, routed)
    depth = figures.get("num_hidden_layers")
    embedding: Any = module.get_input_embeddings()
    groups: dict[int, list[str]] = {}
    for parameter_name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(parameter_name)
    heads = figures.get("num_attention_heads")
    return ModelSpec(
        name=name,
        source=source,
        architecture=type(module).__name__,
        kind=kind,
        # As JSON reads it again (keys are text): a spec equals the one that was kept of it.
        config=json.loads(json.dumps(config.to_dict(), default=str)),
        parameters=_parameters(module, blocks, routed if moe else ()),
        tied=tuple(tuple(group) for group in groups.values() if len(group) > 1),
        linears=_linears(module),
        blocks=blocks,
        attentions=_attentions(module),
        layers=depth if depth and kind == "causal" else _depth(module, blocks),
        hidden=int(figures.get("hidden_size") or embedding.weight.shape[1]),
        heads=heads if isinstance(heads, int) else 0,
        vocab=embedding.weight.shape[0],
        max_positions=next((value for key in _POSITIONS if isinstance(value := figures.get(key), int)), None),
        checkpointed=bool(module.supports_gradient_checkpointing),
        moe=moe,
        unadapted=_unadapted(module, str(figures.get("model_type"))) if moe else (),
        unquantized=_unquantized(module),
        frozen=frozen,
        copied=_copied(module) if moe else 0,
        tp_plan=dict(getattr(module, "tp_plan", None) or {}),
        trusted=trusted,
    )


def _copied(module: PreTrainedModel) -> int:
    """Find tensors that `save_pretrained` creates: run transformers' conversion on meta tensors."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    plain = {name: torch.empty_like(parameter, device="meta") for name, parameter in module.named_parameters()}
    originals = {tensor.untyped_storage()._cdata for tensor in plain.values()}
    written: dict[str, torch.Tensor] = revert_weight_conversion(module, dict(plain))
    copies = {tensor.untyped_storage()._cdata: tensor for tensor in written.values()}
    return sum(t.untyped_storage().nbytes() // t.element_size() for key, t in copies.items() if key not in originals)


def _head(module: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = module.get_output_embeddings()
    return head


def module_lists(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every outermost module list with its name: the stacks of repeated layers."""
    from torch import nn

    lists: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(child, nn.ModuleList) and len(child) and not inside:
            lists.append((name, child))
    return lists


def _blocks(module: PreTrainedModel, frozen: tuple[str, ...]) -> tuple[str, ...]:
    """Return the repeated classes of `_no_split_modules`; without any, those of the largest stacks of layers.

    Embeddings and poolers, which transformers lists too so that no device map splits them, are in no list.
    A vision tower without such a class would be gathered whole by FSDP: of it the layers of its largest stack are taken.
    """
    from torch import nn

    members = [
        type(layer).__name__ for child in module.modules() if isinstance(child, nn.ModuleList) for layer in child
    ]
    named = set(getattr(module, "_no_split_modules", None) or ())
    blocks = tuple(dict.fromkeys(name for name in members if name in named))
    if blocks:
        return blocks + _unlisted(module, frozen, blocks)
    sizes = {stack: sum(parameter.numel() for parameter in stack.parameters()) for _, stack in module_lists(module)}
    # An encoder's and a decoder's stack may differ in size; below a hundredth of the largest it is no stack of layers.
    large = [stack for stack, size in sizes.items() if size * 100 >= max(sizes.values())]
    return tuple(dict.fromkeys(type(layer).__name__ for stack in large for layer in stack.children()))


def _unlisted(module: nn.Module, frozen: tuple[str, ...], blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Yield classes of the largest stack of each part in `frozen` without one of `blocks`."""
    parts = [child for name, child in module.named_modules() if name in frozen]
    bare = [part for part in parts if not {type(child).__name__ for child in part.modules()} & set(blocks)]
    stacks = [[stack for _, stack in module_lists(part)] for part in bare]
    largest = [
        max(own, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters())) for own in stacks if own
    ]
    return tuple(dict.fromkeys(type(layer).__name__ for stack in largest for layer in stack.children()))


def _depth(module: nn.Module, blocks: tuple[str, ...]) -> int:
    return sum(type(layer).__name__ in blocks for _, stack in module_lists(module) for layer in stack.children())


def _linears(module: PreTrainedModel) -> tuple[str, ...]:
    """Return all but the output embedding, by PEFT's `_maybe_include_all_linear_layers` (tuners/tuners_utils.py)."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = _head(module)
    return tuple(
        name for name, child in module.named_modules() if isinstance(child, nn.Linear | Conv1D) and child is not head
    )


def _unadapted(module: PreTrainedModel, model_type: str) -> tuple[str, ...]:
    """Return dense layers, shared experts and routers with names that experts had before transformers fused them.

    Of these families PEFT turns such targets into the fused experts' parameters (peft/utils/transformers_weight_conversion.py,
    `_MOE_TARGET_MODULE_MAPPING`), and would adapt those in their place.
    """
    from transformers import conversion_mapping

    families = {**conversion_mapping._MODEL_TO_CONVERSION_PATTERN, "mixtral": "mixtral"}
    leaves = _EXPERT_NAMES.get(families.get(model_type, ""), ())
    return tuple(name for name in _linears(module) if name.rpartition(".")[2] in leaves)


def _unquantized(module: PreTrainedModel) -> tuple[str, ...]:
    """Return modules that a class keeps in fp32, which the quantizer skips (quantizers/quantizer_bnb_4bit.py)."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = HfQuantizer.get_modules_to_not_convert(module, None, module._keep_in_fp32_modules)
    return tuple(name for name in _linears(module) if not should_convert_module(name, skipped))


def _attentions(module: PreTrainedModel) -> tuple[str, ...]:
    """Return the attention kernels that the class declares. A list of flash kernels excludes all others."""
    compatible = module._compatible_flash_implementations
    flash: tuple[str, ...] = ("flash_attention_3", "flash_attention_2") if module._supports_flash_attn else ()
    flash = tuple(kernel for kernel in flash if compatible is None or kernel in compatible)
    sdpa = ["sdpa"] if module._supports_sdpa else []
    flex = ["flex"] if module._supports_flex_attn else []
    return (*flash, *sdpa, "eager", *flex)


@dataclass(frozen=True)
class _Routed:
    """A module that routes, and the names of those of its children that are experts and routers."""

    name: str
    block: nn.Module
    experts: tuple[str, ...]
    routers: tuple[str, ...]


def _routed(module: nn.Module) -> tuple[_Routed, ...]:
    """Return modules with both experts and a router. Experts that every token passes count as layers."""
    routed = []
    for name, child in module.named_modules():
        parts = [(key, type(part).__name__) for key, part in child.named_children() if list(part.parameters())]
        experts = [key for key, cls in parts if _is_experts(key, cls)]
        routers = [key for key, cls in parts if key not in experts and _is_router(key, cls)]
        if experts and routers:
            paths = (tuple(f"{name}.{key}" for key in keys) for keys in (experts, routers))
            routed.append(_Routed(name, child, *paths))
    return tuple(routed)


def _is_experts(key: str, cls: str) -> bool:
    return key == "experts" or (cls.endswith("Experts") and "shared" not in key)


def _is_router(key: str, cls: str) -> bool:
    return key in ("gate", "router") or re.search(r"Router|Gat(e|ing)$", cls) is not None


def _moe(name: str, module: PreTrainedModel, figures: Mapping[str, Any], routed: tuple[_Routed, ...]) -> MoE | None:
    """Return the mixture of a config with experts and a module with a router; a dense model may have the field."""
    counts = [value for key in _EXPERTS if isinstance(value := figures.get(key), int)]
    experts = max(counts, default=_count_experts(routed))
    if experts < 2 or not routed:
        return None
    kind = str(figures.get("model_type"))
    active = next((value for key in _ACTIVE if isinstance(value := figures.get(key), int)), _FIXED_ACTIVE.get(kind))
    if active is None:
        raise ModelError(
            f"model {name!r} has {experts} experts a layer, and its config does not say how many a token uses: "
            "set num_experts_per_tok."
        )
    classes = {type(layer.block).__name__ for layer in routed}
    block = classes.pop() if len(classes) == 1 else _layer_of(module, routed[0].name)
    computed = getattr(module.config.get_text_config(), "_experts_implementation", None)
    return MoE(experts=experts, active=active, block=block, computed=computed or "eager")


def _count_experts(routed: Iterable[_Routed]) -> int:
    """Count a layer's experts by the module: the first dimension of fused ones, or the members."""
    for layer in routed:
        experts = layer.block.get_submodule(layer.experts[0].rpartition(".")[2])
        fused = [parameter.shape[0] for parameter in experts.parameters() if parameter.dim() == 3]
        return fused[0] if fused else len(list(experts.children()))
    return 0


def _layer_of(module: nn.Module, name: str) -> str:
    stack, child = next((stack, child) for stack, child in module_lists(module) if name.startswith(f"{stack}."))
    return type(child.get_submodule(name.removeprefix(f"{stack}.").partition(".")[0])).__name__


def _parameters(module: PreTrainedModel, blocks: tuple[str, ...], routed: tuple[_Routed, ...]) -> tuple[Parameter, ...]:
    from torch import nn

    head = _head(module)
    embedding = module.get_input_embeddings()
    heads = {name for name, child in module.named_modules() if child is head}
    embeddings = {name for name, child in module.named_modules() if child is embedding}
    layers = {name for name, child in module.named_modules() if type(child).__name__ in blocks}
    experts = {name for layer in routed for name in layer.experts}
    routers = {name for layer in routed for name in layer.routers}

    def role(name: str) -> str:
        owner = name.rpartition(".")[0]
        parents = {owner[:end] for end in (*(i for i, letter in enumerate(owner) if letter == "."), len(owner))}
        if parents & experts:
            return "expert"
        if parents & routers:
            return "router"
        # Some embeddings carry a norm in their class's name.
        if owner not in embeddings and "Norm" in type(owner_module := module.get_submodule(owner)).__name__:
            return "norm"
        if parents & layers:
            return "layer"
        if parents & embeddings or isinstance(owner_module, nn.Embedding):
            return "embedding"
        return "head" if parents & heads else "other"

    return tuple(
        Parameter(name=name, shape=tuple(parameter.shape), role=role(name))
        for name, parameter in module.named_parameters()
    )
