"""Whether documents of one row see each other: shown by forwards of a small model of the family on the CPU."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from toolkit.core.cache import cache_file, keep
from toolkit.core.errors import ToolkitError
from toolkit.models.hf_loading import quiet_bars, without_engine
from toolkit.models.spec import ModelSpec
from toolkit.models.varlen import NAME, document_bounds, register_varlen

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Fields of a config with the dropout of attention, which `varlen` does not have."""

STATEFUL = re.compile(r"Mamba|Mixer\b|Recurrent|SSM|DeltaNet|Linear\w*Attention|Lightning|Conv|Rwkv|LSTM|KDA")
"""Names of layers with a state. Their kernels may carry it from document to document on a GPU, and not on a CPU."""

COUNTS, WINDOW = re.compile(r"heads$|experts$|layers$|group"), re.compile(r"sliding_window$|chunk_size$")
"""Fields of a config with counts, which stay, and with the tokens that attention reaches back."""

FIRST, TOKENS, LARGE = 10, 24, 64
"""Tokens of the first of two documents and of both; sizes of a config from which on they are scaled down."""


def separates_documents(spec: ModelSpec, *, joined: bool) -> bool:
    """Return whether the model keeps documents of a row apart where `position_ids` restart at 0.

    Args:
        spec: the model. One composed of several (images and text), one with code of its own, and one that no small
            model can be made of are padded: that is right for all.
        joined: by a kernel that takes the documents' bounds, which must reach it; else by the mask that transformers
            makes of the positions. Some models pass on neither (OPT, Falcon), GPT-J positions alone, Persimmon and
            GPTBigCode bounds but no positions to the kernel. States (Mamba, linear attention) know no documents.

    It holds with the KV cache off, as `load` sets it, in evaluation too: with `use_cache` the mask is silently not packed.
    """
    composed = any(isinstance(part, dict) and "model_type" in part for part in spec.config.values())
    if spec.kind != "causal" or spec.runs_code or composed or not spec.config.get("is_causal", True):
        return False
    key = json.dumps([spec.architecture, spec.config], sort_keys=True, default=str).encode()
    try:
        shown = json.loads(cache_file("packing", key).read_bytes())
    except (OSError, ValueError, ToolkitError):
        try:
            shown = _probe(spec)
        except MemoryError:
            return False  # of this moment: not kept
        except Exception:  # each family fails in its own way on sizes that it does not expect
            shown = {}
        with contextlib.suppress(OSError, ToolkitError):
            keep(cache_file("packing", key), json.dumps(shown))
    return bool(shown.get("joined" if joined else "masked"))


def _probe(spec: ModelSpec) -> dict[str, bool]:
    """Change the first of two documents: the logits of the second stay, by a mask, and by bounds as by a mask."""
    import torch
    import transformers

    cls = getattr(transformers, spec.architecture)
    family = vars(sys.modules[cls.__module__]).items()
    if any(STATEFUL.search(name) for name, each in family if getattr(each, "__module__", None) == cls.__module__):
        return {}
    config = small_config(spec)
    tokens = torch.Generator().manual_seed(0)
    one, other = torch.randint(LARGE // 2, config.vocab_size, (2, 1, TOKENS), generator=tokens)
    other[:, FIRST:] = one[:, FIRST:]
    positions = torch.cat([torch.arange(FIRST), torch.arange(TOKENS - FIRST)])[None]
    register_varlen()
    kernel = "sdpa" if "sdpa" in spec.attentions else "eager"
    with without_engine(), quiet_bars(True, shown=False), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = cls._from_config(config, dtype=torch.float32, attn_implementation=kernel).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # large enough that attention matters
                torch.nn.init.normal_(parameter, std=0.2)

        def logits(ids: torch.Tensor, **bounds: Any) -> torch.Tensor:
            result: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **bounds).logits[0]
            return result

        first, second = logits(one), logits(other)
        limit = 1e-4 * (first - second)[:FIRST].abs().max()
        masked = bool((first - second)[FIRST:].abs().max() < limit)
        shown = {"masked": masked, "joined": False}
        with contextlib.suppress(Exception):  # a kernel of its own, or arguments that it does not take
            model.set_attn_implementation(NAME)
            bounded = (logits(one, **document_bounds(positions)) - first).abs().max()
            # Without bounds the kernel refuses a packed mask, or sees both documents; else it was not called at all.
            try:
                called = bool((logits(one) - first).abs().max() > limit)
            except ValueError:
                called = True
            shown["joined"] = masked and called and bool(bounded < limit)
    return shown


def small_config(spec: ModelSpec) -> Any:
    """Return the model's config with one layer of each kind, at least two, and sizes divided by one power of two.

    Counts of heads and small numbers stay, so that what divides another still does.
    """
    import transformers

    kind = transformers.CONFIG_MAPPING[spec.config["model_type"]]
    names = {theirs: ours for ours, theirs in getattr(kind, "attribute_map", {}).items()}
    types = spec.config.get("layer_types") or []
    layers = sorted({types.index(word) for word in types} | {0, min(1, spec.layers - 1)})
    dim = spec.config.get("head_dim") or spec.hidden // max(spec.heads, 1)
    factor = 1 << max(0, min(spec.hidden // LARGE, dim // 8).bit_length() - 1)

    def smaller(values: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in values.items():
            ours = names.get(name, name)
            if isinstance(value, dict) and name not in ("id2label", "label2id"):
                result[name] = smaller(value)
                if any(
                    isinstance(each, list) for each in value.values()
                ):  # a factor for each of the positions' dimensions
                    result[name] = {"rope_type": "default", "rope_theta": value.get("rope_theta", 10_000.0)}
            elif ours.endswith("token_id"):
                result[name] = 0 if isinstance(value, int) else None
            elif isinstance(value, list) and len(value) == spec.layers:
                result[name] = [value[index] for index in layers]
            elif ours in ("num_hidden_layers", "num_layers"):
                result[name] = len(layers)
            elif WINDOW.search(ours) and value:
                result[name] = FIRST // 2  # so that it matters
            elif isinstance(value, int) and value >= LARGE and not COUNTS.search(ours):
                result[name] = value // factor
            else:
                result[name] = value
        return result

    return kind.from_dict(smaller(spec.config))
