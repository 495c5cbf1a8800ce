"""Adapters over frozen weights: PEFT's LoRA and DoRA, and bitsandbytes' 4 and 8 bits beneath them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, cast

from toolkit.engines.job import Job, engine_of
from toolkit.engines.states import adapted
from toolkit.errors import MissingLibrary, ModelError
from toolkit.model import ModelSpec
from toolkit.units import format_count

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedModel

MOST_UNQUANTIZED = 0.5
"""Over this share of unquantized weights QLoRA is refused: it would save little of what it is asked for."""


def unquantized_share(spec: ModelSpec) -> float:
    """The share of all weights, by elements, that 4 or 8 bits leave as they are: embeddings, norms, head, fused experts."""
    packed = {f"{name}.weight" for name in spec.linears}
    return 1 - sum(parameter.elements for parameter in spec.parameters if parameter.name in packed) / spec.elements


def check_quantized(spec: ModelSpec, allow_unquantized: bool) -> None:
    """Refuse QLoRA where more than half of the weights would stay unquantized. Reads nothing: it can be asked before a launch.

    Raises:
        ModelError: with the share, and how to go on all the same.
    """
    share = unquantized_share(spec)
    if share > MOST_UNQUANTIZED and not allow_unquantized:
        fused = spec.elements_of("expert")
        why = f"fused experts, {fused / spec.elements:.0%}, are no linear modules" if fused else "embeddings and head are no part of it"
        raise ModelError(
            f"4 and 8 bits would leave {share:.0%} of {spec.name}'s {format_count(spec.elements)} weights unquantized ({why}). "
            "Choose adapter 'lora', or --allow-unquantized to go on."
        )


def require_libraries(job: Job) -> None:
    """Refuse an adapter whose library is not installed.

    Raises:
        MissingLibrary: with the command that installs it.
    """
    adapter = job.strategy.adapter
    needed = {"peft": adapter != "none", "bitsandbytes": job.strategy.quantized}
    extra = {"peft": "pip install peft", "bitsandbytes": "pip install 'accelerate-toolkit[qlora]'"}
    for library, wanted in needed.items():
        if wanted and importlib.util.find_spec(library) is None:
            fix = ", or choose adapter 'lora'" if library == "bitsandbytes" else ""
            raise MissingLibrary(f"adapter {adapter!r} needs {library}, which is not installed. Install it with `{extra[library]}`{fix}.")


def quantization(job: Job) -> BitsAndBytesConfig | None:
    """nf4 with double quantization (Dettmers et al. 2023), packed into floating storage so that engines can shard it; or LLM.int8."""
    import torch
    from transformers import BitsAndBytesConfig

    compute = getattr(torch, job.compute_dtype)
    if job.strategy.adapter == "qlora":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
            # A sharding engine casts parameters to the compute dtype, which would destroy weights packed into any other.
            bnb_4bit_quant_storage=compute,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if job.strategy.adapter == "qlora8" else None


def packed_elements(model: nn.Module) -> int:
    """Weights that are quantized, counted before they were packed."""
    return sum(
        child.in_features * child.out_features
        for child in model.modules()
        if type(getattr(child, "weight", None)).__name__ in ("Params4bit", "Int8Params")
    )


def adapt(job: Job, model: PreTrainedModel) -> PeftModel:
    """Freeze a model and put an adapter on it, equal on every rank and under every engine.

    The base keeps its dtypes: PEFT's own `prepare_model_for_kbit_training` would cast every weight that is not packed to
    fp32. First values are rounded to the compute dtype, so that an engine which trains on a rounded copy begins where
    one that does not begins.
    """
    import torch
    from peft import LoraConfig, TaskType, get_peft_model

    strategy, spec = job.strategy, cast("ModelSpec", job.spec)
    config = LoraConfig(
        r=strategy.lora_rank,
        lora_alpha=2 * strategy.lora_rank,
        lora_dropout=0.0,
        use_dora=strategy.adapter == "dora",
        target_modules=adapted(spec, strategy.lora_targets),
        task_type=TaskType.CAUSAL_LM if spec.kind == "causal" else TaskType.SEQ_2_SEQ_LM,
    )
    with torch.random.fork_rng(devices=[]):
        # PEFT draws on the CPU, whatever the device: module by module, in the model's order.
        torch.default_generator.manual_seed(job.loop.seed)
        made = get_peft_model(cast("Any", model), config, autocast_adapter_dtype=False)
    compute, kept = getattr(torch, job.compute_dtype), getattr(torch, kept_dtype(job))
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(compute).to(kept)
    return cast("PeftModel", made)


def kept_dtype(job: Job) -> str:
    """torch's name of the dtype in which the engine holds trained parameters: with a separate master the compute dtype, else the master's."""
    return engine_of(job.strategy).account(job).dtypes["trainable"]
