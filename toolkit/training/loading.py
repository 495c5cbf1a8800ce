"""`load()`: model and tokenizer for training, read in the way that the engine needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from toolkit.config.tables import ATTENTIONS
from toolkit.core.errors import ModelError, StrategyError, StrategyMismatch
from toolkit.core.process_lifecycle import freed_at_once
from toolkit.core.units import format_count
from toolkit.engines.base import engine_environment
from toolkit.engines.job import Job
from toolkit.engines.rank_calls import on_main
from toolkit.engines.records import job_of
from toolkit.engines.states import packed_names
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import (
    SHOWS_PROGRESS,
    check_tied,
    fp32_tensors,
    kept_in_fp32,
    load_tokenizer,
    quiet_bars,
)
from toolkit.training.model_checks import LOADED
from toolkit.training.weight_reader import Reader
from toolkit.transforms.adapters import check_quantized, quantized_weights, require_libraries
from toolkit.transforms.checkpointing import checkpoint_in_training_only

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(accelerator: Accelerator, *, allow_unquantized: bool = False) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load the model and tokenizer of the Accelerator's job, ready for an optimizer and `prepare`.

    The model is in train mode with its KV cache off. Dtypes, attention, activation checkpointing and adapter are the job's.
    The main process prints a line for each.

    Args:
        accelerator: from `toolkit.accelerator(strategy, train_config, spec)`.
        allow_unquantized: QLoRA even where more than half of the weights stay unquantized.

    Returns:
        A transformers model, or PEFT's around it, and the tokenizer with its pad token set.

    Raises:
        StrategyError: for an Accelerator made without a spec, and for a model without activation checkpointing.
        StrategyMismatch: where transformers chose another attention.
        ModelError: for weights or a tokenizer that are missing, do not fit, or would mostly stay unquantized.
        MissingLibrary: for an adapter without its library.
    """
    job = job_of(accelerator)
    spec = job.spec
    if spec is None:
        raise StrategyError(
            "this Accelerator was made without a model, so the model is unknown. "
            "Make it with `toolkit.accelerator(strategy, train_config, toolkit.describe(model))`."
        )
    require_libraries(job)
    if job.strategy.quantized:
        check_quantized(spec, job.strategy.adapter, allow_unquantized)
    on_main(accelerator, lambda: check_tied(spec))
    tokenizer = load_tokenizer(spec)
    engine = job.engine
    reader = Reader(job, accelerator)
    bars = quiet_bars(shown=spec.elements >= SHOWS_PROGRESS)
    with bars, engine_environment(job), freed_at_once():
        model = engine.load_model(job, reader)
    _check(job, model)
    notes = [f"loading: {engine.loading_note(job, reader.streamed)}", *_configure(job, model, tokenizer)]
    if job.weight_dtype == "bfloat16":
        notes += _rounding_note(job, model, on_main(accelerator, lambda: fp32_tensors(spec)))
    for transform in job.transforms:
        model = transform.apply(model, job)
    if job.strategy.adapter != "none":
        notes.append(_adapter_note(job, model))
    engine.before_prepare(job, model)
    accelerator.from_checkpoint.add(model)
    vars(model)[LOADED] = True
    checkpoint_in_training_only(model)
    model.train()  # transformers returns models in eval mode, without dropout and activation checkpointing
    engine.defer_values(job, model)  # last: the lines above use no values
    for note in notes:
        accelerator.print(note)
    return model, tokenizer


def _check(job: Job, model: PreTrainedModel) -> None:
    """Check that the loaded model is the requested one."""
    spec = cast("ModelSpec", job.spec)
    kernel = model.config.get_text_config()._attn_implementation
    if kernel != ATTENTIONS[job.strategy.attention].transformers:
        raise StrategyMismatch(
            f"attention {job.strategy.attention!r} was requested, but {spec.architecture} was loaded with {kernel!r}."
        )
    whole = sorted(packed_names(spec, job.strategy.adapter) - quantized_weights(model).keys())
    if whole:
        raise ModelError(
            f"model {spec.name!r}: {len(whole)} weights of {spec.architecture} cannot be quantized as they are read, "
            f"the first {whole[0]}. Choose adapter 'lora'."
        )


def _configure(job: Job, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Set the cache and the pad token. Return a line for each value of the model."""
    spec = cast("ModelSpec", job.spec)
    text = model.config.get_text_config()
    model.config.use_cache = text.use_cache = False
    model.config.pad_token_id = text.pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    strategy = job.strategy
    recomputed = f"activation checkpointing: {strategy.activation_checkpointing}"
    notes = [f"attention: {strategy.attention}; {recomputed}; loss: {strategy.loss}; KV cache off"]
    if spec.frozen:
        notes.append(f"frozen: {spec.frozen_line}, since only text is trained")
    if spec.moe is not None:
        computed = text._experts_implementation or "eager"
        notes.append(f"experts: {spec.moe.experts} a layer, {spec.moe.active} active, computed by {computed}")
    if spec.quantization and not job.strategy.quantized:
        notes.append(f"dequantized: the files hold {spec.quantization}, and the model is trained and saved without it")
    if job.strategy.quantized:
        bits = "8 bits (LLM.int8)" if job.strategy.adapter == "qlora8" else "4 bits (nf4, double quantization)"
        share = f"{1 - sum(quantized_weights(model).values()) / spec.elements:.0%} of {format_count(spec.elements)}"
        notes.append(f"quantized: {bits}; {share} weights stay unquantized, in {job.compute_dtype}")
    return notes


def _rounding_note(job: Job, model: PreTrainedModel, in_files: list[str]) -> list[str]:
    """Return a line about the weights that `bf16_pure` rounds; `in_files`: the names of those in fp32 in the files."""
    import torch

    sizes = {name: tensor.dtype.itemsize for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    kept = filter(kept_in_fp32(model, getattr(torch, job.compute_dtype)), sizes)
    names = {name for name in (*in_files, *kept) if sizes.get(name, 2) == 2} - quantized_weights(model).keys()
    kinds = sorted({re.sub(r".*?([^.]+(\.(weight|bias))?)$", r"\1", name) for name in names})
    more = f" and {len(kinds) - 6} more" if len(kinds) > 6 else ""
    which = f"{len(names)} weights that the files or {type(model).__name__} keep in fp32"
    return [f"{job.strategy.precision}: {which} are in bf16: {', '.join(kinds[:6])}{more}"] if names else []


def _adapter_note(job: Job, model: PreTrainedModel) -> str:
    spec = cast("ModelSpec", job.spec)
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = f"{format_count(size)} trainable, {size / (spec.elements + size):.2%} of all"
    linear = {f"{name}.weight" for name in spec.linears}
    fused = any(parameter.role == "expert" and parameter.name not in linear for parameter in spec.parameters)
    experts = "; fused experts have none" if fused else ""
    if spec.unadapted and job.strategy.lora_targets == "all-linear":
        names = sorted({name.rpartition(".")[2] for name in spec.unadapted})
        experts += f", nor have {len(spec.unadapted)} modules that PEFT takes for them ({', '.join(names)})"
    return f"adapter: {job.strategy.adapter}, rank {job.strategy.lora_rank}; {share}{experts}"
