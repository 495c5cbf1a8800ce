"""What CUDA's autocast computes in fp32 and the processor's does not, for traces, which run on a fake processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WIDE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm "
    "logsumexp dist cdist cosine_similarity"
)
"""ATen/autocast_mode.h `AT_FORALL_FP32`, of it what stands in models' forwards: arguments are cast to fp32."""

SUMS = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
"""`AT_FORALL_FP32_SET_OPT_DTYPE`: computed in fp32 where the call names no dtype."""


@contextmanager
def cuda_casts() -> Iterator[None]:
    """Let autocast on the CPU treat fake tensors as CUDA's treats real ones.

    What both list alike (products in half precision, most losses in fp32) stays as it is.
    """
    import torch

    key = "AutocastCPU"
    with torch.library._scoped_library("aten", "IMPL", key) as library:
        for names, kernel in ((WIDE, _wide_kernel), (SUMS, _sum)):
            for name in names.split():
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                    packet, _, overload = name.partition(".")
                    library.impl(name, kernel(getattr(getattr(torch.ops.aten, packet), overload or "default")))
        yield


def _wide_kernel(operator: Any) -> Callable[..., Any]:
    from torch.utils._pytree import tree_leaves, tree_map

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_fake, tree_leaves((args, kwargs)))):
            args, kwargs = tree_map(lambda value: value.float() if _is_half(value) else value, (args, kwargs))
        with _no_autocast():
            return operator(*args, **kwargs)

    return kernel


def _sum(operator: Any) -> Callable[..., Any]:
    import torch

    # aten/src/ATen/native/SoftMax.cpp: on CUDA, a softmax of fp16 into fp32 does not copy its input.
    fused = {"aten::softmax": torch.ops.aten._softmax, "aten::log_softmax": torch.ops.aten._log_softmax}
    fused_kernel = fused.get(operator._schema.name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = args[2] if len(args) > 2 and fused_kernel else kwargs.get("dtype")
        with _no_autocast():
            if not _is_fake(args[0]) or not _is_half(args[0]):
                return operator(*args, **kwargs)
            if fused_kernel and args[0].dtype == torch.float16 and dtype in (None, torch.float32):
                return fused_kernel(args[0], args[1], True)
            named = {argument.name for argument in operator._schema.arguments[: len(args)]}
            if dtype is None and "dtype" not in named:
                kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return kernel


def _is_fake(value: Any) -> bool:
    """Return whether a value is fake: a thread that trains meanwhile keeps its own casts."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def _is_half(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _no_autocast() -> Any:
    """Run the kernel below autocast, as C++'s `ExcludeDispatchKeyGuard` does."""
    import torch

    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
