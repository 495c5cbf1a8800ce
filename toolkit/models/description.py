"""`describe()`: a model's modules on the meta device → `ModelSpec`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.run_config import EMBEDDED
from toolkit.core.atomic_io import expand_user
from toolkit.core.errors import ModelError
from toolkit.models.files import first_line
from toolkit.models.remote_code import check_links
from toolkit.models.resolution import check_generates, check_known, config_text, locate, read_config
from toolkit.models.spec import ModelSpec, Parameter, complete_plan, recall, remember
from toolkit.models.structure import (
    Routed,
    check_text_part,
    class_with_text,
    frozen_modules,
    mixture,
    module_lists,
    routed_blocks,
    stateful_layers,
    unadapted_names,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")


def describe(
    model: str | Path | PretrainedConfig | nn.Module | None = None,
    *,
    trust_remote_code: str | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Describe a model's architecture from its config: no weight is read, and no untrusted code runs.

    Args:
        model: a Hub id, a folder, a `config.json`, a transformers config or model. None and `"embedded"`
            name the embedded model (a folder of that name is `"./embedded"`).
        trust_remote_code: run the model's own code if it has exactly this revision: the full commit of a model on the
            Hub, or the sha256 of a folder that the refusal names.
        tp_plan: your own tensor-parallel plan in place of its class's: module names, with `*` for a layer's number, to
            transformers' styles. A module without a rule is whole on every rank.

    Raises:
        ModelError: for an unknown model, one that transformers cannot build as a causal or sequence-to-sequence language
            model, one that needs its own untrusted code, and a rule of `tp_plan` that names nothing in the model.
    """
    spec = _described(model, trust_remote_code)
    return spec if tp_plan is None else spec.with_tp_plan(tp_plan)


def _described(model: str | Path | PretrainedConfig | nn.Module | None, trust_remote_code: str | None) -> ModelSpec:
    text = None
    if model is None or isinstance(model, str | Path):
        # Before torch and transformers are imported: a wrong name is refused at once.
        name = EMBEDDED if model is None else str(model)
        if len(name) > 1000:
            raise ModelError(f"model {name[:40]!r}…: {len(name):,} characters are no name. Give a folder or a Hub id.")
        if name != EMBEDDED and os.path.isfile((folder := expand_user(name)) / "config.json"):
            check_links(folder)
        source, path, hub = locate(name, trust_remote_code)
        text = config_text(path) if trust_remote_code is None else None
        if text is not None and (cached_spec := recall(text)) is not None:
            return dataclasses.replace(cached_spec, name=name, source=source)
        config = read_config(name, path, trust_remote_code, hub=hub)
    elif trust_remote_code is not None:
        raise ModelError("trust_remote_code goes with a folder or a Hub id: a model in memory has run its code.")
    else:
        from torch import nn

        name, source, config = type(model).__name__, None, model
        if isinstance(model, nn.Module):
            _check_language_model(name, model)
            return dataclasses.replace(_spec(model, model.config, name=name, source=None), untrained=())  # by its user
    values = config.to_dict()
    own = values.get("auto_map") if trust_remote_code else None
    if not own:
        check_known(name, values)
        check_generates(name, values)
    spec = _spec(_build(name, config, own or {}), config, name=name, source=source, trusted=trust_remote_code)
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
            built: PreTrainedModel = auto.from_config(copy.deepcopy(config), trust_remote_code=bool(own))
    except Exception as error:  # each model class fails in its own way on values that do not fit together
        raise ModelError(
            f"model {name!r}: transformers cannot build {type(config).__name__}: {first_line(error)}"
        ) from error
    if whole:
        check_text_part(name, built)
    return built


def _check_language_model(name: str, module: Any) -> None:
    """Refuse a module that is no transformers model with a language-model head."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        raise ModelError(
            f"model of class {name}: expected a transformers model. Give its transformers config, its folder or its Hub id."
        )
    if module.get_output_embeddings() is None:
        raise ModelError(f"model of class {name} has no language-model head: expected one such as LlamaForCausalLM.")
    check_generates(name, module.config.to_dict())


def _spec(
    module: PreTrainedModel, config: PretrainedConfig, *, name: str, source: str | None, trusted: str | None = None
) -> ModelSpec:
    text = config.get_text_config()
    values = text.to_dict()
    # Some families have names of their own: GPT-2's `hidden_size` is `n_embd`.
    figures = {
        our_name: values.get(their_name) for our_name, their_name in getattr(text, "attribute_map", {}).items()
    } | values
    kind = "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"
    frozen = frozen_modules(module)
    blocks = _blocks(module, frozen)
    routed = routed_blocks(module)
    moe = mixture(name, module, figures, routed)
    depth, heads = figures.get("num_hidden_layers"), figures.get("num_attention_heads")
    stacked = sum(type(layer).__name__ in blocks for _, stack in module_lists(module) for layer in stack.children())
    embedding: Any = module.get_input_embeddings()
    linears = _linears(module, routed)
    groups: dict[int, list[str]] = {}
    for parameter_name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(parameter_name)
    return ModelSpec(
        name=name,
        source=source,
        architecture=type(module).__name__,
        kind=kind,
        # Through JSON, which turns keys into text: a described spec equals its cached one.
        config=json.loads(json.dumps(config.to_dict(), default=str)),
        parameters=_parameters(module, blocks, routed if moe else []),
        tied=tuple(tuple(group) for group in groups.values() if len(group) > 1),
        linears=linears,
        blocks=blocks,
        attentions=_attentions(module),
        layers=depth if depth and kind == "causal" else stacked,
        hidden=int(figures.get("hidden_size") or embedding.weight.shape[1]),
        heads=heads if isinstance(heads, int) else 0,
        vocab=embedding.weight.shape[0],
        max_positions=next((value for key in _POSITIONS if isinstance(value := figures.get(key), int)), None),
        checkpointed=bool(module.supports_gradient_checkpointing),
        moe=moe,
        unadapted=unadapted_names(linears, str(figures.get("model_type"))) if moe else (),
        unquantized=_unquantized(module, linears),
        frozen=frozen,
        untrained=tuple(name for name, parameter in module.named_parameters() if not parameter.requires_grad),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        copied=_copied(module) if moe else 0,
        tp_plan=_tp_plan(module),
        ep_plan=dict(getattr(module, "ep_plan", None) or {}),
        stateful=stateful_layers(module),
        takes_positions="position_ids" in inspect.signature(module.forward).parameters,
        trusted=trusted,
    )


def _tp_plan(module: PreTrainedModel) -> dict[str, str]:
    """Return the class's plan, whole."""
    return complete_plan(module.tp_plan or {}, (name for name, _ in module.named_parameters()))


def _copied(module: PreTrainedModel) -> int:
    """Return the elements that `save_pretrained` copies, found by transformers' conversion of meta tensors."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    plain = {name: torch.empty_like(parameter, device="meta") for name, parameter in module.named_parameters()}
    originals = {tensor.untyped_storage()._cdata for tensor in plain.values()}
    written: dict[str, torch.Tensor] = revert_weight_conversion(module, dict(plain))
    copies = {tensor.untyped_storage()._cdata: tensor for tensor in written.values()}
    return sum(t.untyped_storage().nbytes() // t.element_size() for key, t in copies.items() if key not in originals)


def _blocks(module: PreTrainedModel, frozen: tuple[str, ...]) -> tuple[str, ...]:
    """Return the repeated classes of `_no_split_modules`; without any, those of the largest stacks of layers.

    Embeddings and poolers, which transformers lists for device maps, are in no module list and do not count. FSDP would gather
    a vision tower without such a class whole, so the layers of its largest stack are added.
    """
    from torch import nn

    members = _layer_classes(child for child in module.modules() if isinstance(child, nn.ModuleList))
    listed = set(getattr(module, "_no_split_modules", None) or ())
    blocks = tuple(name for name in members if name in listed)
    if blocks:
        parts = [child for name, child in module.named_modules() if name in frozen]
        rest = [part for part in parts if not {type(child).__name__ for child in part.modules()} & set(blocks)]
        stacks = [[stack for _, stack in module_lists(part)] for part in rest]
        return blocks + _layer_classes(max(own, key=_size) for own in stacks if own)
    all_stacks = [stack for _, stack in module_lists(module)]
    # Stacks of encoder and decoder may differ in size. Below a hundredth of the largest, a list is no stack of layers.
    return _layer_classes(stack for stack in all_stacks if _size(stack) * 100 >= max(map(_size, all_stacks)))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _layer_classes(stacks: Iterable[nn.Module]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(type(layer).__name__ for stack in stacks for layer in stack.children()))


def _linears(module: PreTrainedModel, routed: list[Routed]) -> tuple[str, ...]:
    """Return all linear modules but the output embedding, as PEFT's `_maybe_include_all_linear_layers` (tuners/tuners_utils.py).

    Without routers that have a class of their own (Llama 4): they return more than a product, which no adapter can add to.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head, routers = module.get_output_embeddings(), {name for layer in routed for name in layer.routers}
    linears = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear | Conv1D)]
    own = {name for name, child in linears if child is head or (name in routers and type(child) is not nn.Linear)}
    return tuple(name for name, _ in linears if name not in own)


def _unquantized(module: PreTrainedModel, linears: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules that the quantizer skips: the class keeps them in fp32, or they have a class of their own (Falcon's).

    Source: quantizers/quantizer_bnb_4bit.py, integrations/bitsandbytes.py `replace_with_bnb_linear`.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    listed = (module.config.to_dict().get("quantization_config") or {}).get("llm_int8_skip_modules")
    skipped = HfQuantizer.get_modules_to_not_convert(module, listed, module._keep_in_fp32_modules)
    plain = {name for name, child in module.named_modules() if type(child) is nn.Linear or isinstance(child, Conv1D)}
    return tuple(name for name in linears if name not in plain or not should_convert_module(name, skipped))


def _attentions(module: PreTrainedModel) -> tuple[str, ...]:
    """Return the attention kernels that the class declares. A list of flash kernels excludes all others."""
    compatible = module._compatible_flash_implementations
    flash: tuple[str, ...] = ("flash_attention_3", "flash_attention_2") if module._supports_flash_attn else ()
    flash = tuple(kernel for kernel in flash if compatible is None or kernel in compatible)
    sdpa = ["sdpa"] if module._supports_sdpa else []
    flex = ["flex"] if module._supports_flex_attn else []
    varlen = ["varlen"] if module._supports_sdpa and module._supports_attention_backend else []
    return (*flash, *varlen, *sdpa, "eager", *flex)


def _parameters(module: PreTrainedModel, blocks: tuple[str, ...], routed: list[Routed]) -> tuple[Parameter, ...]:
    from torch import nn

    roles = {name: "expert" for layer in routed for name in layer.experts}
    roles |= {name: "router" for layer in routed for name in layer.routers}
    for name, child in module.named_modules():
        if child is module.get_output_embeddings():
            roles[name] = "head"
        elif child is module.get_input_embeddings() or isinstance(child, nn.Embedding):
            roles[name] = "embedding"
        elif type(child).__name__ in blocks:
            roles[name] = "layer"

    def role(name: str) -> str:
        """Return the first role in this order that a module around the parameter has."""
        owner = name.rpartition(".")[0]
        around = {
            roles.get(owner[:end]) for end in (*(i for i, letter in enumerate(owner) if letter == "."), len(owner))
        }
        # Some embeddings carry a norm in their class's name.
        if roles.get(owner) != "embedding" and "Norm" in type(module.get_submodule(owner)).__name__:
            around.add("norm")
        return next(
            (role for role in ("expert", "router", "norm", "layer", "embedding", "head") if role in around), "other"
        )

    return tuple(
        Parameter(name=name, shape=tuple(parameter.shape), role=role(name))
        for name, parameter in module.named_parameters()
    )
