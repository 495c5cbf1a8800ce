"""Stand-ins for kernels that a trace would take another way than the device does: they keep what the real ones keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from transformers import masking_utils


@contextmanager
def kernels(device: str, masked: bool) -> Iterator[None]:
    """Within it fake tensors take the stand-ins. Others, say of a thread that trains meanwhile, take what they always do.

    A trace computes on a fake processor, where torch chooses `scaled_dot_product_attention`'s kernel for itself; for a
    GPU that choice is made here. `grouped_mm` has no fake kernel in fp32.

    Whether rows hold several documents is a question of their values, which transformers answers with yes where there
    are none: `masked` answers it.

    A mode for torch functions would be off in what activation checkpointing recomputes.
    """
    with ExitStack() as replaced:
        replaced.enter_context(_replaced(functional, "grouped_mm", _grouped_mm))
        if device == "cuda":
            replaced.enter_context(_replaced(functional, "scaled_dot_product_attention", _attention))
        if not masked:
            replaced.enter_context(_replaced(masking_utils, "find_packed_sequence_indices", lambda positions: None))
        yield


@contextmanager
def _replaced(module: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
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
    """By the rules of torch's CUDA build (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    Flash attention takes half precision without a mask; the memory-efficient kernel what has a mask or is fp32, but no
    grouped heads; else scores are computed and kept.
    """
    flash = attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256
    if not flash and enable_gqa:
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # `convert_boolean_attn_mask` (aten/src/ATen/native/transformers/attention.cpp)
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    return _Fused.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    """A fused kernel's bytes (Dao et al. 2022): the output, and one fp32 figure a query and head."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        batch, heads, length, _ = query.shape
        # Every fused kernel of torch writes [batch, length, heads, width] and gives a transposed view.
        made = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return (*(torch.empty_like(tensor) for tensor in (query, key, value)), None)
