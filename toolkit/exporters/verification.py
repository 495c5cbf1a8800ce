"""Check an export against the trained model: reopen it with plain transformers and PEFT, compare bytes, then logits."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.importers import Entry
from toolkit.config.parallelism import Parallelism
from toolkit.config.strategy import Strategy
from toolkit.config.tables import ATTENTIONS
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import RunError
from toolkit.core.units import BYTES_OF
from toolkit.devices.machine import hardware, host_memory
from toolkit.engines.job import Job
from toolkit.engines.registry import engine_for
from toolkit.engines.resolution import resolve_precision
from toolkit.exporters.results import PROBE_TOKENS, SavedTensor
from toolkit.exporters.state_dict import is_adapter
from toolkit.models import NF4, ModelSpec
from toolkit.models.hf_loading import (
    auto_class,
    config_ties,
    first_names,
    quiet_bars,
    read_pretrained,
    without_engine,
)
from toolkit.transforms.adapters import import_bitsandbytes, keep_packing, quantization, set_compute_dtype
from toolkit.transforms.fused_experts import pack_experts

if TYPE_CHECKING:
    import torch


def reopen(job: Job, folder: Path) -> Any:
    """Reopen the model in `folder` on the host, in evaluation mode; an adapter on its base, read (and quantized) again.

    An adapter has its training dtype, for comparable logits. PEFT would read it in fp32.

    Raises:
        RunError: for missing and unknown keys.
    """
    assert job.spec is not None
    if job.strategy.adapter == "none":
        return reopen_whole(job.spec, folder, dtype=job.weight_dtype, attention=job.strategy.attention)
    import torch

    model = reopen_adapter(read_base(job), folder)
    storage = getattr(torch, job.kept_dtype)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # in PEFT's names of all LoRA and DoRA parameters
            parameter.data = parameter.data.to(storage)
    return model


def reopen_adapter(base: Any, folder: Path) -> Any:
    """Reopen the adapter in `folder` on its base, in evaluation mode."""
    import_bitsandbytes()
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT reads `is_gradient_checkpointing`, which transformers renamed.
        warnings.simplefilter("ignore", FutureWarning)
        model = PeftModel.from_pretrained(base, folder)
    return model.eval()


def reopen_whole(spec: ModelSpec, folder: Path, *, dtype: str, attention: str) -> Any:
    """Reopen a whole model in `folder`, in evaluation mode, on the host. The dtype `auto` is that of the files.

    Raises:
        RunError: for missing and unknown keys, and for tied parameters that no longer share one tensor.
    """
    import torch

    kernel = ATTENTIONS[attention].transformers
    model, info = read_pretrained(
        spec, folder, dtype=getattr(torch, dtype, dtype), output_loading_info=True, attn_implementation=kernel
    )
    _check_keys(info)
    names = first_names(model)
    for name, other in config_ties(model).items():
        if names[name] != names[other]:
            raise RunError(f"tied weights came untied: {other}, {name}")
    return model.eval()


def check_opened(module: Any, folder: Path) -> None:
    """Check that transformers opens a folder with the names and shapes of the model's class. No weight is read.

    Raises:
        RunError: for missing and unknown keys, and for other shapes.
    """
    from torch.distributed.fsdp import FSDPModule

    if is_adapter(module):
        return
    owner: Any = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
    with without_engine(), quiet_bars(shown=False):
        _, info = owner.from_pretrained(
            folder, device_map="meta", ignore_mismatched_sizes=True, use_safetensors=True, output_loading_info=True
        )
    _check_keys(info)


def _check_keys(info: Mapping[str, Any]) -> None:
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise RunError(f"{what.replace('_', ' ')}: {', '.join(map(str, list(info[what])[:3]))}")


def read_base(job: Job, *, on_host: bool = False) -> Any:
    """Read an adapter's frozen base as in training: in the compute dtype, or quantized.

    Args:
        job: of the adapter.
        on_host: quantize on the host, also on a machine with a GPU.
    """
    import torch

    assert job.spec is not None
    packing, is_packed = quantization(job), job.spec.quantization == NF4
    base = read_pretrained(
        job.spec,
        job.spec.source,
        dtype=getattr(torch, job.compute_dtype),
        device_map={"": "cpu"} if on_host and job.strategy.quantized else None,
        attn_implementation=ATTENTIONS[job.strategy.attention].transformers,
        **({} if is_packed else {"quantization_config": packing}),  # None would ignore the files' own
    )
    if is_packed:
        set_compute_dtype(base, getattr(torch, job.compute_dtype))
    if job.strategy.adapter == "qlora":
        pack_experts(base, job.spec, getattr(torch, job.compute_dtype))
    keep_packing(base)
    return base


def check_files(folder: Path, planned: Mapping[str, SavedTensor]) -> None:
    """Compare a folder's safetensors files with the expected tensors, byte by byte; one tensor is in memory at a time.

    Raises:
        RunError: for an unreadable file, and for missing, unknown, empty or different tensors, naming the first three.
    """
    from safetensors import SafetensorError, safe_open

    faults, names = [], set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a dictionary
                    names.add(name)
                    faults += _tensor_faults(name, file.get_tensor(name), planned.get(name))
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path.name} cannot be read: {error}") from error
    faults = [f"{name} is missing" for name in planned if name not in names] + faults
    if faults:
        raise RunError(f"{'; '.join(faults[:3])}{f' and {len(faults) - 3} more' if len(faults) > 3 else ''}")


def _tensor_faults(name: str, tensor: torch.Tensor, planned: SavedTensor | None) -> list[str]:
    """Return the faults of one tensor. Non-finite values are no fault if the bytes are equal."""
    import torch

    saved = SavedTensor.of(tensor)
    if not tensor.numel():
        return [f"{name} is of size zero"]
    if planned is None:
        return [f"{name} does not belong to it"]
    if (saved.dtype, saved.shape) != (planned.dtype, planned.shape):
        return [f"{name} is {saved.dtype} {list(saved.shape)}, expected {planned.dtype} {list(planned.shape)}"]
    if saved == planned:
        return []
    finite = not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
    return [f"{name} has other bytes than were trained" if finite else f"{name} is not finite"]


def compare_whole(spec: ModelSpec, entries: Mapping[str, Entry], folder: Path, dtype: str) -> float | None:
    """Return the logits' error of a saved model against the checkpoint's tensors; None without enough memory.

    One model is in memory at a time.

    Raises:
        RunError: for missing keys, and for tied weights that came untied.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    if not fits(spec, dtype):
        return None
    actual, dtypes = logits_of(spec, folder, dtype)
    gc.collect()
    config = AutoConfig.from_pretrained(spec.source, trust_remote_code=spec.runs_code)
    with init_empty_weights():
        reference = auto_class(spec).from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTIONS[check_attention(spec)].transformers,
            trust_remote_code=spec.runs_code,
        )
    reference.tie_weights()  # `init_empty_weights` gives every name its own parameter
    tensors = {name: entry.read().to(dtypes[name]) for name, entry in entries.items()}
    reference.load_state_dict(tensors, strict=False, assign=True)
    reference.tie_weights()
    empty = [name for name, tensor in reference.state_dict().items() if tensor.device.type == "meta"]
    assert not empty, f"nothing was put into {empty[:3]}"
    return relative_error(actual, logits(reference, spec))


def logits_of(spec: ModelSpec, folder: Path, dtype: str) -> tuple[torch.Tensor, dict[str, torch.dtype]]:
    """Return a saved model's logits on the probe, and the dtypes in which transformers opens it.

    Raises:
        RunError: for missing keys, and for tied weights that came untied.
    """
    model = reopen_whole(spec, folder, dtype=dtype, attention=check_attention(spec))
    expected = {parameter.name: parameter.shape for parameter in spec.parameters}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if shapes != expected:
        raise RunError(f"parameters are others than the model's: {sorted(shapes.items() ^ expected.items())[:3]}")
    return logits(model, spec), {name: tensor.dtype for name, tensor in model.state_dict().items()}


def logits(model: Any, spec: ModelSpec) -> torch.Tensor:
    """Return a model's logits on the probe in fp32: tokens drawn from a seed, as many as it takes."""
    import torch

    length = min(PROBE_TOKENS, spec.max_positions or PROBE_TOKENS)
    tokens = torch.randint(spec.vocab, (1, length), generator=torch.Generator().manual_seed(0))
    probe = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if spec.kind == "seq2seq" else {})
    model.eval()
    with torch.no_grad():
        values: torch.Tensor = model(**probe, use_cache=False).logits.float()
    return values


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖actual − expected‖ / ‖expected‖."""
    return float((actual - expected).norm() / expected.norm())


def single_process_job(spec: ModelSpec, strategy: Strategy, train_config: TrainConfig) -> Job:
    """Return the job of one process on this host, without its engine's settings and attention kernel."""
    parallelism, device = Parallelism(), hardware().device
    precision = resolve_precision(strategy.precision, device)
    strategy = dataclasses.replace(strategy, precision=precision, attention=check_attention(spec))
    return Job(
        strategy=strategy,
        train_config=train_config,
        spec=spec,
        parallelism=parallelism,
        device=device,
        engine=engine_for(strategy.sharding, strategy.tp, strategy.ep, strategy.pp),
    )


def check_attention(spec: ModelSpec) -> str:
    """Return an attention kernel that runs without a GPU."""
    return "sdpa" if "sdpa" in spec.attentions else "eager"


def fits(spec: ModelSpec, dtype: str) -> bool:
    """Return whether the host has memory for the whole model in this dtype, with a fifth to spare."""
    gc.collect()
    return host_memory()[1] > 1.2 * BYTES_OF[dtype] * spec.elements
