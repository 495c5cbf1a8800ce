"""A saved model, opened again as anybody would: plain transformers and PEFT, no engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.engines.job import Job
from toolkit.errors import RunError


def reopen(job: Job, folder: Path) -> Any:
    """The model in `folder`, in evaluation mode, on the host; an adapter over its base, read (and quantized) again.

    Raises:
        RunError: for keys that are missing or that the model does not know.
    """
    import torch
    import transformers

    assert job.spec is not None
    kind = "AutoModelForSeq2SeqLM" if job.spec.kind == "seq2seq" else "AutoModelForCausalLM"
    auto = getattr(transformers, kind)
    common: dict[str, Any] = {"attn_implementation": _spelled(job.strategy.attention), "use_safetensors": True}
    with _without_engine():
        if job.strategy.adapter == "none":
            model, info = auto.from_pretrained(
                folder, dtype=getattr(torch, job.weight_dtype), output_loading_info=True, **common
            )
            for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                if info.get(what):
                    raise RunError(f"{what.replace('_', ' ')}: {', '.join(map(str, list(info[what])[:3]))}")
            return model.eval()
        return _adapted(auto, job, folder, common)


def _adapted(auto: Any, job: Job, folder: Path, common: dict[str, Any]) -> Any:
    import torch
    from peft import PeftModel

    from toolkit.adapting import quantization

    base = auto.from_pretrained(
        job.spec.source if job.spec else None,
        dtype=getattr(torch, job.compute_dtype),
        quantization_config=quantization(job),
        **common,
    )
    model = PeftModel.from_pretrained(base, folder)
    return model.eval()


def _spelled(attention: str) -> str:
    return {"flex": "flex_attention"}.get(attention, attention)


@contextmanager
def _without_engine() -> Iterator[None]:
    """transformers would partition under ZeRO-3, and read on one rank only under FSDP; here one rank opens it whole."""
    from transformers.integrations import deepspeed as integration

    before = getattr(integration, "_hf_deepspeed_config_weak_ref", None)
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP", None)
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before
        if fsdp is not None:
            os.environ["ACCELERATE_USE_FSDP"] = fsdp
