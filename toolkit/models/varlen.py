"""Attention over documents that are joined into one row: torch's `varlen_attn`, and a probe of which models keep them apart."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.core.cache import cache_file, keep, recall
from toolkit.core.errors import ToolkitError, value_or
from toolkit.models.hf_loading import quiet_bars, without_engine
from toolkit.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VARLEN = "varlen"
"""Its name among transformers' attention functions."""

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of transformers' flash kernels: beginnings of documents, and the longest document's tokens."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that the kernel does not take."""


def document_bounds(position_ids: Tensor) -> dict[str, Any]:
    """Return `BOUNDS` of one row [1, tokens] on the host. Each document's positions begin at 0.

    Without them transformers reads the positions from the device in every layer, and waits for it
    (modeling_flash_attention_utils.py, `_is_packed_sequence`, `prepare_fa_kwargs_from_position_ids`).
    """
    import torch
    from torch.nn.functional import pad

    starts = (position_ids[0] == 0).nonzero().flatten()
    ends = pad(starts, (0, 1), value=position_ids.shape[1]).to(torch.int32)
    longest = int(ends.diff().max())
    return dict(zip(BOUNDS, (ends, ends, longest, longest), strict=True))


def register_varlen() -> None:
    """Register `varlen` and its mask with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, _mask)


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each document of a joined row; in rows of one document, padded or not, as `sdpa`.

    Takes [1, heads, tokens, dim], fewer heads for key and value, and returns [1, tokens, heads, dim].

    Raises:
        ValueError: for dropout and other arguments that the kernel does not have, and for joined documents without bounds.
    """
    from torch.nn.functional import pad
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if kwargs.get(BOUNDS[0]) is None:
        if attention_mask is not None and not attention_mask.numel():
            raise ValueError(f"varlen attention needs the bounds of joined documents in the batch: {', '.join(BOUNDS)}")
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    if extra := [name for name in UNSUPPORTED if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0):
        raise ValueError(f"varlen attention has no {extra[0]}")
    size = value.shape[-1]
    if size < query.shape[-1]:
        value = pad(value, (0, query.shape[-1] - size))
    dtype = get_target_dtype(query, module) if query.is_cuda else None
    rows = [tensor[0].transpose(0, 1).to(dtype or tensor.dtype) for tensor in (query, key, value)]
    bounds = [kwargs[name] for name in BOUNDS]
    window = (sliding_window - 1, 0) if sliding_window else (-1, 0)
    output = _kernel(query.is_cuda)(*rows, *bounds, scale=scaling, window_size=window, enable_gqa=True)
    return output[None, ..., :size], None


def _kernel(cuda: bool) -> Any:
    if not cuda:
        return reference
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    *_: Any,
    scale: float | None,
    window_size: Any,
    **__: Any,
) -> Tensor:
    """Compute the same on a CPU, document by document; for tests and for the probe.

    A document's last query sees its last key, as in the flash kernels: there may be more keys than queries.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    outputs = []
    for own, seen in zip(*(map(slice, each[:-1].tolist(), each[1:].tolist()) for each in (queries, keys)), strict=True):
        count = seen.stop - seen.start
        distance = torch.arange(count - (own.stop - own.start), count)[:, None] - torch.arange(count)
        visible = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        q, k, v = (each[part].transpose(0, 1)[None] for each, part in ((query, own), (key, seen), (value, seen)))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _mask(attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """Return an empty mask for joined documents, which have bounds; else the mask of `sdpa`."""
    import torch
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and not allow_is_causal_skip:
        return torch.empty((0, 0, 0, 0))
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **options)
    return mask


DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Fields of a config with the dropout of attention, which `varlen` does not have."""

COUNT_FIELDS, WINDOW_FIELDS = re.compile(r"heads$|experts$|layers$|group"), re.compile(r"sliding_window$|chunk_size$")
"""Fields of a config with counts, which do not change, and with the length of attention windows."""

FIRST, TOKENS, LARGE = 10, 24, 64
"""Tokens of the first of two documents and of both; sizes of a config from which on they are scaled down."""


def separates_documents(spec: ModelSpec, *, joined: bool) -> bool:
    """Return whether the model keeps documents of a row apart where `position_ids` restart at 0.

    Args:
        spec: the model. The answer is False, so that rows are padded, for a model of several parts (images and text), with
            own code, or without a small version.
        joined: whether a kernel keeps documents apart by bounds that the model passes on; else the mask that transformers
            derives from the positions. Some models pass on neither (OPT, Falcon), GPT-J only positions, Persimmon and
            GPTBigCode only bounds. States (Mamba, linear attention) ignore documents.

    The answer is for a KV cache that is off, as `load` sets it: with `use_cache` transformers silently packs no mask.
    """
    composed = any(isinstance(part, dict) and "model_type" in part for part in spec.config.values())
    if spec.kind != "causal" or spec.runs_code or composed or not spec.config.get("is_causal", True):
        return False
    key = json.dumps([spec.architecture, spec.config], sort_keys=True, default=str).encode()
    answers: dict[str, bool] | None = value_or(None, lambda: recall(cache_file("packing", key), dict))
    if answers is None:
        try:
            answers = _probe(spec)
        except MemoryError:
            return False  # not cached: a later call may have memory
        except Exception:  # each family fails in its own way on unexpected sizes
            answers = {}
        with contextlib.suppress(ToolkitError):
            keep(cache_file("packing", key), answers)
    return bool(answers.get("joined" if joined else "masked"))


def _probe(spec: ModelSpec) -> dict[str, bool]:
    """Return whether the second document's logits ignore the first document, with a mask and with bounds."""
    import torch
    import transformers

    cls = getattr(transformers, spec.architecture)
    if spec.stateful:
        return {}
    config = small_config(spec)
    tokens = torch.Generator().manual_seed(0)
    first_row, second_row = torch.randint(LARGE // 2, config.vocab_size, (2, 1, TOKENS), generator=tokens)
    second_row[:, FIRST:] = first_row[:, FIRST:]
    positions = torch.cat([torch.arange(FIRST), torch.arange(TOKENS - FIRST)])[None]
    register_varlen()
    kernel = "sdpa" if "sdpa" in spec.attentions else "eager"
    with without_engine(), quiet_bars(shown=False), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = cls._from_config(config, dtype=torch.float32, attn_implementation=kernel).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # large enough that attention matters
                torch.nn.init.normal_(parameter, std=0.2)

        def logits(ids: torch.Tensor, **bounds: Any) -> torch.Tensor:
            result: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **bounds).logits[0]
            return result

        first_logits, second_logits = logits(first_row), logits(second_row)
        limit = 1e-4 * (first_logits - second_logits)[:FIRST].abs().max()
        masked = bool((first_logits - second_logits)[FIRST:].abs().max() < limit)
        answers = {"masked": masked, "joined": False}
        with contextlib.suppress(Exception):  # a kernel of its own, or arguments that it does not take
            model.set_attn_implementation(VARLEN)
            bounded = (logits(first_row, **document_bounds(positions)) - first_logits).abs().max()
            # Without bounds the kernel refuses a packed mask or mixes both documents, unless the model does not call it.
            try:
                called = bool((logits(first_row) - first_logits).abs().max() > limit)
            except ValueError:
                called = True
            answers["joined"] = masked and called and bool(bounded < limit)
    return answers


def small_config(spec: ModelSpec) -> Any:
    """Return the model's config with one layer of each kind, at least two, and sizes divided by one power of two.

    Counts of heads and small numbers do not change, so that divisors still divide.
    """
    import transformers

    kind = transformers.CONFIG_MAPPING[spec.config["model_type"]]
    names = {their_name: our_name for our_name, their_name in getattr(kind, "attribute_map", {}).items()}
    types = spec.config.get("layer_types") or []
    layers = sorted({types.index(word) for word in types} | {0, min(1, spec.layers - 1)})
    dim = spec.config.get("head_dim") or spec.hidden // max(spec.heads, 1)
    factor = 1 << max(0, min(spec.hidden // LARGE, dim // 8).bit_length() - 1)

    def smaller(values: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in values.items():
            our_name = names.get(name, name)
            if isinstance(value, dict) and name not in ("id2label", "label2id"):
                result[name] = smaller(value)
                # A factor for each of the positions' dimensions.
                if any(isinstance(each, list) for each in value.values()):
                    result[name] = {"rope_type": "default", "rope_theta": value.get("rope_theta", 10_000.0)}
            elif our_name.endswith("token_id"):
                result[name] = 0 if isinstance(value, int) else None
            elif isinstance(value, list) and len(value) == spec.layers:
                result[name] = [value[index] for index in layers]
            elif our_name in ("num_hidden_layers", "num_layers"):
                result[name] = len(layers)
            elif WINDOW_FIELDS.search(our_name) and value:
                result[name] = FIRST // 2  # so that it matters
            elif isinstance(value, int) and value >= LARGE and not COUNT_FIELDS.search(our_name):
                result[name] = value // factor
            else:
                result[name] = value
        return result

    return kind.from_dict(smaller(spec.config))
