"""What `gpu.py` asks of CUDA itself: a model drawn on the GPU, and times of single operations."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def draw_model(folder: Path, config: Any) -> None:
    """Write a model of random bf16 weights, drawn on the GPU: on a CPU 8B take minutes."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of ten calls, after two that warm up."""
    import torch

    took = []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def attention_seconds(kind: str, length: int, document: int = 512) -> float:
    """Return the time of forward and backward, 32 query and 8 key heads of 128: `causal`, `masked` or `varlen`."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    rows = [torch.randn(1, n, length, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (32, 8, 8)]
    arguments: dict[str, Any] = dict(zip(("query", "key", "value"), rows, strict=True))
    attend: Callable[..., Any] = partial(sdpa, **arguments, is_causal=True, enable_gqa=True)
    if kind == "masked":
        number = torch.arange(length, device="cuda") // document
        mask = (number[:, None] == number) & (number.new_ones(length, length).tril() > 0)
        attend = partial(sdpa, **arguments, attn_mask=mask, enable_gqa=True)
    elif kind == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        ends = torch.arange(0, length + 1, document, device="cuda", dtype=torch.int32)
        arguments = {name: row[0].transpose(0, 1) for name, row in arguments.items()}
        arguments |= {"cu_seq_q": ends, "cu_seq_k": ends, "max_q": document, "max_k": document}
        attend = partial(varlen_attn, **arguments, window_size=(-1, 0), enable_gqa=True)
    return seconds(lambda: torch.autograd.backward(attend().sum()))


def facts() -> dict[str, Any]:
    """Return times of attention, AdamW and a pinned copy, in seconds; of an operation that fails its error."""
    import torch

    weights = [torch.zeros(4096, 4096, device="cuda", requires_grad=True) for _ in range(16)]
    torch.autograd.backward([weight.sum() for weight in weights])
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    cases = itertools.product(("causal", "masked", "varlen"), (2048, 4096, 8192, 16_384))
    trials = {f"attention {kind}, {length}": partial(attention_seconds, kind, length) for kind, length in cases}
    for way in ("foreach", "fused"):
        optimizer: Any = torch.optim.AdamW([{"params": weights, way: True}])
        trials[f"AdamW {way}, 268M fp32"] = partial(seconds, optimizer.step)
    trials["256 MiB to the device, pinned"] = partial(seconds, lambda: pinned.to("cuda", non_blocking=True))
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, trial in trials.items():
        try:
            result[name] = trial()
        except (RuntimeError, TypeError, ImportError) as error:
            result[name] = str(error).splitlines()[0]
    return result
