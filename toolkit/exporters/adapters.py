"""An adapter out of a checkpoint: on its own, as PEFT saves it, or merged into the base that it was trained over."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.checkpoints.importers import Entry, Weights
from toolkit.config.flags import from_dict
from toolkit.config.parallelism import Parallelism
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import RunError
from toolkit.core.units import dtype_name
from toolkit.devices.machine import hardware
from toolkit.engines.adapters import adapt, quantized_modules, unpack_experts
from toolkit.engines.job import Job
from toolkit.exporters.results import SavedTensor
from toolkit.exporters.sources import Source
from toolkit.exporters.verification import check_attention
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import torch
    from peft import PeftModel


def job_of(source: Source, spec: ModelSpec) -> Job:
    """Return the checkpoint's job as one process on this host, without its engine and attention kernel."""
    assert source.manifest is not None
    was = source.manifest.strategy
    fields = {name: was[name] for name in ("adapter", "precision", "lora_rank", "lora_targets")}
    return Job(
        strategy=Strategy(**fields, attention=check_attention(spec)),
        train_config=from_dict(TrainConfig, source.manifest.train_config),
        spec=spec,
        parallelism=Parallelism(),
        device=hardware().device,
    )


def with_adapter(base: Any, job: Job, source: Source, dtype: str | None) -> PeftModel:
    """Put the checkpoint's adapter on the base. It computes in fp32, as PEFT lets a loaded adapter do.

    Args:
        base: from `read_base`, or a skeleton.
        job: of the adapter.
        source: the checkpoint.
        dtype: torch's name of the one to round the adapter to first, or None.

    Raises:
        RunError: where its tensors are not this adapter's.
    """
    import torch

    model = adapt(job, base)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = source.weights
    if {name: tuple(p.shape) for name, p in trainable.items()} != weights.shapes:
        raise RunError(f"{source.path} holds another adapter than {job.strategy.adapter} on this model puts there.")
    for name, parameter in trainable.items():
        if parameter.device.type != "meta":
            tensor = weights.tensor(name)
            parameter.data = (tensor.to(getattr(torch, dtype)) if dtype else tensor).float()
    return cast("PeftModel", model.eval())


def write_adapter(model: Any, state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, SavedTensor]:
    """Write `adapter_config.json` and `adapter_model.safetensors` as PEFT does. Return the tensors in the file."""
    from peft import get_peft_model_state_dict

    model.save_pretrained(folder, state_dict=dict(state))
    saved = get_peft_model_state_dict(model, state_dict=dict(state))
    return {name: SavedTensor.of(tensor) for name, tensor in saved.items()}


def merged(model: PeftModel, job: Job, source: Source, dtype: str) -> Weights:
    """Return the base's weights with the adapter merged by PEFT. Takes the model apart.

    Args:
        model: from `with_adapter`; a quantized base is dequantized first, for it is over that that it was trained.
        job: of the adapter.
        source: the checkpoint.
        dtype: torch's name of the one that they will be saved in: where it is fp32, they are merged in that.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    base = model.unload()
    assert job.spec is not None
    # transformers quantizes the transpose of such a module's weight.
    turned = {
        f"{name}.weight"
        for name in quantized_modules(base)
        if issubclass(getattr(base.get_submodule(name), "source_cls", object), Conv1D)
    }
    if job.strategy.quantized:
        unpack_experts(base)
        base = base.dequantize(getattr(torch, job.compute_dtype))
    if dtype == "float32":
        base = base.float()
    gc.collect()
    whole = with_adapter(base, job, source, None).merge_and_unload(safe_merge=True)
    # What text does not pass is taken from its source: the base's may have gone through 4 bits.
    trained = {name: p.detach() for name, p in whole.named_parameters() if job.spec.trains(name)}
    tensors = {name: tensor.T if name in turned else tensor for name, tensor in trained.items()}
    entries = {name: Entry(tuple(t.shape), dtype_name(t.dtype), t.cpu, source=name) for name, t in tensors.items()}
    return Weights("merged model", entries)
