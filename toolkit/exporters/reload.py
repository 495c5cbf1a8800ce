"""A saved model, opened again with plain transformers and PEFT, no engine."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from toolkit.config.tables import ATTENTIONS
from toolkit.core.errors import RunError
from toolkit.engines.adapters import import_bitsandbytes, keep_packing, pack_experts, quantization
from toolkit.engines.base import kept_dtype
from toolkit.engines.job import Job
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import auto_class, without_engine


def reopen(job: Job, folder: Path) -> Any:
    """Reopen the model in `folder` on the host, in evaluation mode; an adapter on its base, read (and quantized) again.

    An adapter is in the dtype it was trained in, so that its logits can be compared. PEFT would read it in fp32.

    Raises:
        RunError: for keys that are missing or that the model does not know.
    """
    assert job.spec is not None
    if job.strategy.adapter == "none":
        return reopen_whole(job.spec, folder, dtype=job.weight_dtype, attention=job.strategy.attention)
    import torch

    model = reopen_adapter(read_base(job), folder)
    storage = getattr(torch, kept_dtype(job))
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # PEFT's names of all that LoRA and DoRA add
            parameter.data = parameter.data.to(storage)
    return model


def reopen_adapter(base: Any, folder: Path) -> Any:
    """Reopen the adapter in `folder` on its base, in evaluation mode."""
    import_bitsandbytes()
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT still asks for `is_gradient_checkpointing`, which transformers renamed.
        warnings.simplefilter("ignore", FutureWarning)
        model = PeftModel.from_pretrained(base, folder)
    return model.eval()


def reopen_whole(spec: ModelSpec, folder: Path, *, dtype: str, attention: str) -> Any:
    """Reopen a whole model in `folder`, in evaluation mode, on the host.

    Raises:
        RunError: for keys that are missing or that the model does not know, and for tied parameters that no longer share
            one tensor.
    """
    import torch

    with without_engine():
        model, info = auto_class(spec).from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            trust_remote_code=spec.runs_code,
            attn_implementation=ATTENTIONS[attention].transformers,
            use_safetensors=True,
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise RunError(f"{what.replace('_', ' ')}: {', '.join(map(str, list(info[what])[:3]))}")
    for group in spec.tied:
        if len({id(model.get_parameter(name)) for name in group}) > 1:
            raise RunError(f"tied weights came untied: {', '.join(group)}")
    return model.eval()


def read_base(job: Job, *, on_host: bool = False) -> Any:
    """Read an adapter's frozen base as in training: in the compute dtype, or quantized.

    Args:
        job: of the adapter.
        on_host: quantized on the host, even where there is a GPU to do it on.
    """
    import torch

    assert job.spec is not None
    with without_engine():
        base = auto_class(job.spec).from_pretrained(
            job.spec.source,
            trust_remote_code=job.spec.runs_code,
            dtype=getattr(torch, job.compute_dtype),
            quantization_config=quantization(job),
            device_map={"": "cpu"} if on_host and job.strategy.quantized else None,
            attn_implementation=ATTENTIONS[job.strategy.attention].transformers,
            use_safetensors=True,
        )
    if job.strategy.adapter == "qlora":
        pack_experts(base, job.spec, getattr(torch, job.compute_dtype))
    keep_packing(base)
    return base
