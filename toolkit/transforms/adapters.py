"""Adapters over frozen weights: PEFT's LoRA and DoRA, and the 4 and 8 bits of bitsandbytes beneath them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import math
import sys
import warnings
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from toolkit.config.strategy import Strategy
from toolkit.core.errors import MissingLibrary, ModelError, StrategyError
from toolkit.core.units import format_count
from toolkit.engines.job import Job, Transform
from toolkit.engines.registry import register_transform
from toolkit.engines.states import adapted, packed_names
from toolkit.engines.upstream import patched
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import kept_in_fp32
from toolkit.transforms.adapter_shards import split_adapters, whole_sizes
from toolkit.transforms.fused_experts import packed_experts

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

QLORA_FIX = "Install it with `pip install 'accelerate-toolkit[qlora]'`, or choose adapter 'lora'."

MOST_UNQUANTIZED = 0.5
"""The largest share of unquantized weights for QLoRA: above it, it saves little memory."""


def unquantized_share(spec: ModelSpec, adapter: str) -> float:
    """Return the share of weights, by elements, that is not quantized: embeddings, norms, head; in 8 bits fused experts."""
    packed = packed_names(spec, adapter)
    return 1 - sum(parameter.elements for parameter in spec.parameters if parameter.name in packed) / spec.elements


def check_quantized(spec: ModelSpec, adapter: str, allow_unquantized: bool) -> None:
    """Refuse QLoRA where more than half of the weights would stay unquantized. Reads nothing.

    Raises:
        ModelError: with the share, and how to go on all the same.
    """
    share, packed = unquantized_share(spec, adapter), packed_names(spec, adapter)
    if share > MOST_UNQUANTIZED and not allow_unquantized:
        left = (parameter for parameter in spec.parameters if parameter.name not in packed)
        fused = sum(parameter.elements for parameter in left if parameter.role == "expert") / spec.elements
        why = f"fused experts, {fused:.0%}, are no linear modules" if fused else "embeddings and head are left out"
        raise ModelError(
            f"adapter {adapter!r} would leave {share:.0%} of {spec.name}'s {format_count(spec.elements)} weights "
            f"unquantized: {why}. Choose adapter 'lora', or allow it with --allow-unquantized."
        )


def require_libraries(job: Job) -> None:
    """Refuse an engine or an adapter without its library.

    Raises:
        MissingLibrary: with the command that installs it.
    """
    for library, fix in job.engine.requirements(job).items():
        if importlib.util.find_spec(library) is None:
            raise MissingLibrary(f"sharding {job.strategy.sharding!r} needs {library}, which is not installed. {fix}")
    require_adapter(job.strategy)


def require_adapter(strategy: Strategy) -> None:
    """Refuse an adapter without its library.

    Raises:
        MissingLibrary: with the command that installs it.
    """
    for library, needed, fix in (
        ("peft", strategy.adapter != "none", "Install it with `pip install peft`."),
        ("bitsandbytes", strategy.quantized, QLORA_FIX),
    ):
        if needed and importlib.util.find_spec(library) is None:
            raise MissingLibrary(f"adapter {strategy.adapter!r} needs {library}, which is not installed. {fix}")


def import_bitsandbytes() -> None:
    """Import bitsandbytes, where it is installed, before PEFT or transformers do: without the compiled kernel from the Hub.

    On a CPU with AVX512-BF16 it would fetch one and run it where the library `kernels` is installed (bitsandbytes 0.50,
    backends/cpu/ops.py:242). Nothing of ours uses that kernel: see `keep_packing`.
    """
    if "bitsandbytes" in sys.modules or importlib.util.find_spec("bitsandbytes") is None:
        return
    modules: dict[str, Any] = sys.modules
    kernels = modules.get("kernels")
    modules["kernels"] = None  # importing it raises ImportError, which bitsandbytes catches
    try:
        importlib.import_module("bitsandbytes")
    finally:
        del modules["kernels"]
        if kernels is not None:
            modules["kernels"] = kernels


def save_packed_weights() -> None:
    """Let a 4-bit product save its weight as autograd does.

    bitsandbytes keeps a view of it in the graph (0.50, autograd/_functions.py `MatMul4Bit`), which activation checkpointing does
    not let go. Under ZeRO-3 every gathered weight then stays from the forward to the backward: 34 GiB of a 70B.
    """
    from bitsandbytes.autograd import _functions

    theirs: Any = _functions.MatMul4Bit
    if theirs.__module__ == __name__:
        return

    class MatMul4Bit(theirs):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, A: Any, B: Any, *more: Any) -> Any:
            result = theirs.forward(ctx, A, B, *more)
            if not ctx.is_empty:
                ctx.save_for_backward(*(() if ctx.tensors[1] is None else (B,)))
                ctx.tensors = (None, None)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if not ctx.is_empty and (saved := ctx.saved_tensors):  # a checkpointed one is unpacked once
                ctx.tensors = (None, saved[0].view(-1, 1))
            result = theirs.backward(ctx, gradient)
            ctx.tensors = (None, None)  # the graph lives until all of the backward has ended
            return result

    _functions.MatMul4Bit = MatMul4Bit


def keep_input_dtype(peft_model: nn.Module) -> None:
    """Let each LoRA module take its input as it is under autocast, which casts it for the products in any case.

    PEFT casts the input of each adapted module to the adapter's fp32, and autocast casts it back (0.21, tuners/lora/layer.py). The
    bits are the same. Over quantized modules PEFT leaves the cast out under CUDA's autocast only (tuners/lora/bnb.py). DoRA takes
    norms in the input's dtype, so its cast stays.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    def cast_input(layer: Any, x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        if x is None or x.is_meta or layer.lora_variant or not torch.is_autocast_enabled(x.device.type):
            return cast("torch.Tensor | None", type(layer)._cast_input_dtype(layer, x, dtype))
        return x

    for module in peft_model.modules():
        if isinstance(module, LoraLayer):
            module._cast_input_dtype = MethodType(cast_input, module)


def quantization(job: Job) -> QuantizationConfigMixin | None:
    """Return the quantization. 4 bits: nf4 with double quantization (Dettmers et al. 2023). 8 bits: LLM.int8 (2022).

    Files of fp8 and mxfp4 are dequantized.
    """
    import torch
    from transformers import BitsAndBytesConfig, FineGrainedFP8Config, Mxfp4Config

    files = cast("ModelSpec", job.spec)
    if files.quantization in ("fp8", "mxfp4"):
        return (FineGrainedFP8Config if files.quantization == "fp8" else Mxfp4Config)(dequantize=True)
    if job.strategy.quantized:
        import_bitsandbytes()
        save_packed_weights()
    compute = getattr(torch, job.compute_dtype)
    if job.strategy.adapter == "qlora":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            llm_int8_skip_modules=files.quantization_config.get("llm_int8_skip_modules"),
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
            # Engines shard floating parameters only, and cast them to this dtype: any other would be destroyed.
            bnb_4bit_quant_storage=compute,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if job.strategy.adapter == "qlora8" else None


def quantized_modules(model: nn.Module) -> dict[str, int]:
    """Return the quantized modules, each with its number of weights before packing."""
    return {
        name: child.in_features * child.out_features
        for name, child in model.named_modules()
        if type(getattr(child, "weight", None)).__name__ in ("Params4bit", "Int8Params")
    }


def quantized_weights(model: nn.Module) -> dict[str, int]:
    """Return the names of all quantized weights, each with its number of elements before packing."""
    linear = {f"{name}.weight": elements for name, elements in quantized_modules(model).items()}
    return linear | {name: math.prod(shape) for name, shape in packed_experts(model).items()}


class AdapterTransform(Transform):
    """`--adapter`: PEFT's, over weights that are read frozen, and packed with `qlora` and `qlora8`."""

    name = "adapter"
    libraries = ("peft", "bitsandbytes")

    def settings(self, job: Job) -> tuple[str, int, str, float] | None:
        values = job.strategy
        if values.adapter == "none":
            return None
        return values.adapter, values.lora_rank, values.lora_targets, values.lora_dropout

    def refuse(self, job: Job) -> None:
        spec, targets = job.spec, job.strategy.lora_targets
        if spec is None or targets == "all-linear":
            return
        ends = {name.rpartition(".")[2] for name in spec.trained_linears}
        for word in map(str.strip, targets.split(",")):
            if word == "all-linear" or not adapted(spec, word):
                raise StrategyError(
                    f"lora_targets {word!r} names no linear module of {spec.name}. "
                    f"Known: {', '.join(sorted(ends))}; or 'all-linear'."
                )

    def apply(self, model: Any, job: Job) -> Any:
        return adapt(job, model)


register_transform(AdapterTransform())


def adapt(job: Job, model: PreTrainedModel) -> PeftModel:
    """Freeze a model and put an adapter on it, equal on every rank and under every engine.

    The base keeps its dtypes: PEFT's own `prepare_model_for_kbit_training` would cast what is not packed to fp32. First
    values are rounded to the compute dtype, so that engines which train on a rounded copy begin where the others do.

    Raises:
        StrategyError: where PEFT would adapt something else than was asked.
    """
    import torch

    strategy, spec = job.strategy, cast("ModelSpec", job.spec)
    targets = adapted(spec, strategy.lora_targets)
    with _seeded_by_name(model, job.train_config.seed), whole_sizes():
        options: dict[str, Any] = {"alpha": strategy.lora_alpha, "dropout": strategy.lora_dropout}
        peft_model = add_adapter(model, spec.kind, strategy.adapter, strategy.lora_rank, targets, **options)
    compute, storage = getattr(torch, job.compute_dtype), getattr(torch, job.kept_dtype)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(compute).to(storage)
    split_adapters(peft_model)
    return peft_model


@contextlib.contextmanager
def _seeded_by_name(model: nn.Module, seed: int) -> Iterator[None]:
    """Draw an adapter's first values of each module from (seed, name): a rank that holds some modules draws as one with all.

    PEFT draws on the CPU, whatever the device (peft/tuners/lora/layer.py `reset_lora_parameters`).
    """
    import torch

    import_bitsandbytes()
    from peft.tuners.lora import LoraLayer

    names = {id(module): name for name, module in model.named_modules()}
    reset = LoraLayer.reset_lora_parameters

    def seeded(layer: Any, *arguments: Any, **named: Any) -> None:
        text = f"{seed} {names[id(layer.get_base_layer())]}"
        module_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        torch.default_generator.manual_seed(module_seed)
        reset(layer, *arguments, **named)

    with torch.random.fork_rng(devices=[]), patched(LoraLayer, reset_lora_parameters=seeded):
        yield


def add_adapter(
    model: PreTrainedModel,
    kind: str,
    adapter: str,
    rank: int,
    targets: list[str],
    *,
    alpha: int | None = None,
    dropout: float = 0.0,
) -> PeftModel:
    """Put PEFT's adapter on these linear modules; `kind` is the spec's, `adapter` the strategy's word.

    `alpha`: None for twice the rank.

    Raises:
        StrategyError: for modules that PEFT does not adapt in this model, as the output of a Mamba's mixer, and where it
            would adapt others in their place.
    """
    import_bitsandbytes()
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,
        lora_dropout=dropout,
        use_dora=adapter == "dora",
        target_modules=targets,
        task_type=TaskType.CAUSAL_LM if kind == "causal" else TaskType.SEQ_2_SEQ_LM,
    )
    with warnings.catch_warnings():
        # PEFT still asks for `is_gradient_checkpointing`, which transformers renamed.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            peft_model = cast("PeftModel", get_peft_model(cast("Any", model), config, autocast_adapter_dtype=False))
        except ValueError as error:
            leaves = ",".join(sorted({name.rpartition(".")[2] for name in targets}))
            raise StrategyError(
                f"lora_targets: PEFT takes not all of {leaves}: {error} Choose --lora-targets among the others."
            ) from error
    _check_adapted(peft_model, targets)
    keep_input_dtype(peft_model)
    return peft_model


def _check_adapted(model: nn.Module, targets: list[str]) -> None:
    """Check PEFT's targets: it maps some names of linear modules to fused experts and adapts those instead.

    Raises:
        StrategyError: with the names that it leaves alone.
    """
    adapted_modules = {
        name.removeprefix("base_model.model.")
        for name, child in model.named_modules()
        if len(getattr(child, "lora_A", ()))
    }
    if adapted_modules != set(targets):
        missing = sorted({name.rpartition(".")[2] for name in set(targets) - adapted_modules})
        left = sorted({name.rpartition(".")[2] for name in targets} - set(missing))
        raise StrategyError(
            f"lora_targets: PEFT adapts fused experts in the place of {', '.join(missing)}. "
            f"Choose --lora-targets {','.join(left) or 'with names outside of experts'}."
        )


def read_dtype(job: Job) -> str:
    """Return torch's name of the dtype for loading: the engine's own; for frozen weights the compute dtype."""
    return job.kept_dtype if job.strategy.adapter == "none" else job.compute_dtype


def set_compute_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let a base that its files hold packed compute in this dtype: transformers keeps the dtypes of the files."""
    import torch

    always = kept_in_fp32(model, torch.bfloat16)
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = module.weight.quant_state.dtype = dtype
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ != "Params4bit" and not always(name):
            parameter.data = parameter.data.to(dtype)


def keep_packing(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights, which it does on a CPU with AVX512-BF16.

    `Linear4bit.forward` does it in eval mode without gradients: it overwrites the weight and computes in bf16. A sharded
    weight then trains wrong, and logits differ by 1e-2 from those of training (bitsandbytes 0.50, nn/modules.py).
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
