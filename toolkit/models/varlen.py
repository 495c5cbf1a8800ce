"""Attention over documents that are joined into one row, by torch's `varlen_attn`; their bounds are counted on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NAME = "varlen"
"""Its name among transformers' attention functions."""

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that transformers hands to flash kernels: where documents begin, and the longest one's tokens."""

IGNORED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that the kernel does not take."""


def document_bounds(position_ids: Tensor) -> dict[str, Any]:
    """Return `BOUNDS` of one row [1, tokens] on the host, where each document's positions begin at 0.

    Without them transformers reads the positions on the device in every layer, and waits for it
    (modeling_flash_attention_utils.py, `_is_packed_sequence`, `prepare_fa_kwargs_from_position_ids`).
    """
    import torch
    from torch.nn.functional import pad

    starts = (position_ids[0] == 0).nonzero().flatten()
    ends = pad(starts, (0, 1), value=position_ids.shape[1]).to(torch.int32)
    longest = int(ends.diff().max())
    return dict(zip(BOUNDS, (ends, ends, longest, longest), strict=True))


def register_varlen() -> None:
    """Make `varlen` known to transformers, with the mask that it needs."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, _mask)


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
    if extra := [name for name in IGNORED if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0):
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
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: Any, scale: float | None, window_size: Any, **__: Any
) -> Tensor:
    """Compute the same on a CPU, document by document; for tests and for `packing_probe`."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    outputs = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        visible = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _mask(attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """Return an empty mask for joined documents, which the bounds keep apart; else that of `sdpa`."""
    import torch
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and not allow_is_causal_skip:
        return torch.empty((0, 0, 0, 0))
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **options)
    return mask
