"""Fake kernels for a trace: they allocate, keep and cast what the device's real kernels do."""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from toolkit.engines.simulation import QUANT_BLOCK
from toolkit.engines.traces import TraceConfig
from toolkit.transforms.adapters import import_bitsandbytes

if TYPE_CHECKING:
    import torch


_ONE_AT_A_TIME = threading.RLock()
"""Replaced kernels belong to the process: two threads must not replace and restore them at once."""


@contextmanager
def replaced_kernels(config: TraceConfig) -> Iterator[None]:
    """Replace kernels for fake tensors only. Real tensors, as of a thread that trains, keep the usual kernels.

    - `scaled_dot_product_attention`: a fake tensor is on the CPU, so torch would choose the CPU's kernel.
    - `grouped_mm` has no fake kernel in fp32.
    - bitsandbytes' fake products do not show their temporary tensors.
    - DeepSpeed's stage 3 has a linear product of its own.
    - `find_packed_sequence_indices` needs values: the configuration knows whether rows hold several documents.

    A mode for torch functions would be off while activation checkpointing recomputes.
    """
    from torch.nn import functional
    from transformers import masking_utils

    kernels: list[tuple[Any, str, Callable[..., Any]]] = [(functional, "grouped_mm", _grouped_mm)]
    if config.device == "cuda":
        kernels.append((functional, "scaled_dot_product_attention", partial(_attention, config.flash)))
    if config.saves_inputs:
        kernels.append((functional, "linear", _saving_linear))
    if config.job is not None and config.job.strategy.quantized:
        import_bitsandbytes()
        bitsandbytes = importlib.import_module("bitsandbytes")
        kernels.append((bitsandbytes, "matmul_4bit", _fake_product))
        if config.device == "cuda":
            kernels.append((bitsandbytes, "matmul", _int8_product))
        packing = importlib.import_module("bitsandbytes.functional")
        kernels.append((packing, "dequantize_4bit", lambda packed, state: _fake_dequantize(*state)))
    if not config.masked:
        kernels.append((masking_utils, "find_packed_sequence_indices", lambda positions: None))
    with _ONE_AT_A_TIME, ExitStack() as replaced:
        for module, name, replacement in kernels:
            replaced.enter_context(_fake_operator(module, name, replacement))
        if config.device == "cuda" and config.autocast:
            replaced.enter_context(cuda_casts())
        yield


@contextmanager
def _fake_operator(module: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensor

    original = getattr(module, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        fake = any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
        return (replacement if fake else original)(*args, **kwargs)

    setattr(module, name, either)
    try:
        yield
    finally:
        setattr(module, name, original)


def _grouped_mm(matrix: torch.Tensor, other: torch.Tensor, *, offs: torch.Tensor) -> Any:
    """Use transformers' own operator, which can be traced, and keep what torch's kernel keeps.

    A gradient needs the other factor (tools/autograd/derivatives.yaml `_grouped_mm`), so frozen experts save no input.
    """
    import torch

    product = torch.ops.transformers.grouped_mm_fallback
    if other.requires_grad:
        return product(matrix, other, offs)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, matrix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(other)  # packed experts are dequantized for this forward
            return cast("torch.Tensor", product(matrix, other, offs))

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            (other,) = ctx.saved_tensors
            return cast("torch.Tensor", product(grad, other.transpose(-2, -1), offs)), None

    return Product.apply(matrix, other)  # type: ignore[no-untyped-call]


def register_exchange(imbalance: float) -> str:
    """Register transformers' exchange of tokens with fixed sizes, which do not depend on values: return its name.

    The rank gets `imbalance` times as many tokens as it sends: 1 with a router that is balanced.
    """
    import torch
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed import expert_parallel

    class FixedSizes(expert_parallel.AllToAllEP):  # type: ignore[misc]
        def _dispatch_tokens(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            tokens = hidden_states.size(0)
            if self.tp_mesh.size() > 1:
                hidden_states, top_k_index, top_k_weights = (
                    DTensor.from_local(each, self.tp_mesh, [Replicate()], run_check=False)
                    .redistribute(self.tp_mesh, [Shard(0)])
                    .to_local()
                    for each in (hidden_states, top_k_index, top_k_weights)
                )
            ranks, flat = self.ep_mesh.size(), top_k_index.reshape(-1)
            order = torch.argsort(flat)
            sent = hidden_states[order // top_k_index.size(-1)]
            sizes = [len(part) for part in flat.chunk(ranks)]
            sizes += [0] * (ranks - len(sizes))
            received = [round(size * imbalance) for size in sizes]
            got = expert_parallel._WaitTensor.apply(
                all_to_all_single_autograd(sent, received, sizes, self.ep_mesh.get_group())
            )
            experts = torch.zeros(len(got), 1, dtype=torch.long)
            state = expert_parallel._AllToAllState(top_k_weights, order, sizes, received, tokens)
            return got, experts, torch.ones_like(experts, dtype=got.dtype), state

    expert_parallel.EPImplementationInterface.register("fixed_sizes", FixedSizes)
    return "fixed_sizes"


def _attention(
    flash_runs: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Follow torch's CUDA build (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cpp).

    Flash attention runs in half precision without a mask, from compute capability 8.0 on. The memory-efficient kernel runs with
    a mask or in fp32, without grouped heads. Otherwise scores are computed and saved. torch's own meta kernels show the bytes.
    torch may prefer cuDNN's kernel, as torch 2.11 did on an H200, where the memory was this (results/gpu-H200-141GB.md).
    """
    import torch
    from torch.nn import functional

    if torch.is_autocast_enabled("cpu"):  # where fake tensors are; of autocast_mode.h `AT_FORALL_LOWER_PRECISION_FP`
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
        attn_mask = attn_mask.to(half) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    width = query.shape[-1]
    if flash_runs and attn_mask is None and query.dtype != torch.float32 and width <= 256:
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


def _saving_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Follow deepspeed/runtime/zero/linear.py `LinearFunctionForZeroStage3`, which saves its input in any case."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            product = x.matmul(weight.t())
            return product if bias is None else product.add_(bias)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (x, weight), (needs_x, needs_weight, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
            rows = grad.reshape(-1, grad.shape[-1])
            return (
                grad.matmul(weight) if needs_x else None,
                rows.t().matmul(x.reshape(-1, x.shape[-1])) if needs_weight else None,
                rows.sum(0) if needs_bias else None,
            )

    return Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]


def _fake_product(x: torch.Tensor, weight: Any, quant_state: tuple[int, int], bias: torch.Tensor | None = None) -> Any:
    """Follow bitsandbytes/autograd/_functions.py `MatMul4Bit`; backends/default/ops.py `_gemm_4bit_default_impl`."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, _fake_dequantize(quant_state, x.dtype), bias)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.matmul(grad, _fake_dequantize(quant_state, grad.dtype))

    return Product.apply(x)  # type: ignore[no-untyped-call]


def _fake_dequantize(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return dequantized weights, made from scales that are dequantized first."""
    import torch

    scales = torch.empty(math.ceil(math.prod(shape) / QUANT_BLOCK))
    scales = scales + 1
    weight = torch.empty(shape, dtype=dtype)
    del scales
    return weight


def _int8_product(x: torch.Tensor, weight: Any, *, bias: torch.Tensor | None, state: Any) -> Any:
    """Follow bitsandbytes/autograd/_functions.py `MatMul8bitLt` without outliers; on a CPU its own `MatMul8bitFp` is traced.

    The integer product of backends/cuda/ops.py `int8_scaled_mm` takes four bytes an element before it is scaled.
    """
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = x
            half = x.to(torch.float16)
            codes = torch.empty(half.shape, dtype=torch.int8)
            product = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int32)
            del half, codes
            return product.to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            whole = state.CB.to(ctx.x.dtype, copy=True)
            return torch.matmul(grad.to(ctx.x.dtype), whole)

    return Product.apply(x)  # type: ignore[no-untyped-call]


FP32_OPERATIONS = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm "
    "logsumexp dist cdist cosine_similarity"
)
"""Operators of ATen/autocast_mode.h `AT_FORALL_FP32` in models' forwards: arguments are cast to fp32."""

SUMS = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
"""`AT_FORALL_FP32_SET_OPT_DTYPE`: computed in fp32 where the call names no dtype."""


@contextmanager
def cuda_casts() -> Iterator[None]:
    """Let autocast on the CPU treat fake tensors as CUDA's treats real ones.

    Entries of both lists (products in half precision, most losses in fp32) do not change.
    """
    import torch

    key = "AutocastCPU"
    with torch.library._scoped_library("aten", "IMPL", key) as library:
        for names, kernel in ((FP32_OPERATIONS, _wide_kernel), (SUMS, _sum)):
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
    """Return whether a value is fake. A thread that trains keeps its own casts."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def _is_half(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _no_autocast() -> Any:
    """Run the kernel below autocast, as C++'s `ExcludeDispatchKeyGuard` does."""
    import torch

    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
