"""A saved model, opened again as anybody would: plain transformers and PEFT, no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.adapting import quantization
from toolkit.engines.job import Job
from toolkit.errors import RunError
from toolkit.reading import attention_word, auto_class, without_engine


def reopen(job: Job, folder: Path) -> Any:
    """The model in `folder`, in evaluation mode, on the host; an adapter over its base, read (and quantized) again.

    Raises:
        RunError: for keys that are missing or that the model does not know.
    """
    import torch

    assert job.spec is not None
    auto = auto_class(job.spec)
    common: dict[str, Any] = {"attn_implementation": attention_word(job.strategy.attention), "use_safetensors": True}
    with without_engine():
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

    base = auto.from_pretrained(
        job.spec.source if job.spec else None,
        dtype=getattr(torch, job.compute_dtype),
        quantization_config=quantization(job),
        **common,
    )
    model = PeftModel.from_pretrained(base, folder)
    return model.eval()
