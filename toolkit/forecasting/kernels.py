"""Stand-ins for kernels that a trace would take another way than the device does: they keep what the real ones keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def stand_ins(device: str, masked: bool) -> Iterator[None]:
    """Within it fake tensors take the stand-ins. Others, say of a thread that trains meanwhile, take what they always do.

    A trace computes on a fake processor, where torch chooses `scaled_dot_product_attention`'s kernel for itself; for a
    GPU that choice is made here. `grouped_mm` has no fake kernel in fp32.

    Whether rows hold several documents is a question of their values, which transformers answers with yes where there
    are none: `masked` answers it.

    A mode for torch functions would be off in what activation checkpointing recomputes.
    """
    from torch.nn import functional
    from transformers import masking_utils

    with ExitStack() as replaced:
        replaced.enter_context(_replaced(functional, "grouped_mm", _grouped_mm))
        if device == "cuda":
            replaced.enter_context(_replaced(functional, "scaled_dot_product_attention", _attention))
        if not masked:
            replaced.enter_context(_replaced(masking_utils, "find_packed_sequence_indices", lambda positions: None))
        yield


@contextmanager
def _replaced(module: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensor

    theirs = getattr(module, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        fake = any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
        return (ours if fake else theirs)(*args, **kwargs)

    setattr(module, name, either)
    try:
        yield
    finally:
        setattr(module, name, theirs)


def _grouped_mm(matrix: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> Any:
    """transformers' own operator of the same result, which keeps the same tensors and can be traced."""
    import torch

    return torch.ops.transformers.grouped_mm_fallback(matrix, other, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """By the rules of torch's CUDA build (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cpp).

    Flash attention takes half precision without a mask; the memory-efficient kernel what has a mask or is fp32, but no
    grouped heads; else scores are computed and kept. What each makes and keeps torch's own meta kernels say.
    """
    import torch
    from torch.nn import functional

    width = query.shape[-1]
    if attn_mask is None and query.dtype != torch.float32 and width <= 256:
        query, key, value = (functional.pad(tensor, (0, -width % 8)) for tensor in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale or width**-0.5)[0][..., :width]
    if enable_gqa:
        scores = torch.ops.aten._scaled_dot_product_attention_math
        return scores(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # `convert_boolean_attn_mask`
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        if attn_mask.shape[-1] % 16:  # `pad_bias`: rows begin at multiples of 16
            attn_mask = functional.pad(attn_mask, (0, -attn_mask.shape[-1] % 16))[..., : attn_mask.shape[-1]]
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
