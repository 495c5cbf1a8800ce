"""Ways to read a checkpoint's weights: whole, by rank 0 alone, or one at a time."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from toolkit.config.tables import ATTENTIONS
from toolkit.core.errors import ModelError
from toolkit.core.units import ceil_div
from toolkit.engines.job import Job
from toolkit.engines.rank_calls import from_main, on_main
from toolkit.engines.states import expert_shapes, packed_shape, persistent_buffers
from toolkit.models import NF4, ModelSpec
from toolkit.models.hf_loading import auto_class, freeze, kept_in_fp32, set_tensor, without_engine
from toolkit.models.varlen import register_varlen
from toolkit.training.streamed_weights import StreamedWeights
from toolkit.transforms.adapters import keep_packing, quantization, read_dtype
from toolkit.transforms.fused_experts import mark_experts, pack_experts

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedModel


class Reader:
    """Ways to read a checkpoint's weights. `Engine.load_model` chooses one."""

    def __init__(self, job: Job, accelerator: Accelerator) -> None:
        self.job, self.spec, self.accelerator = job, cast("ModelSpec", job.spec), accelerator
        self.streamed = False
        """Whether weights are read one at a time."""
        register_varlen()
        self._options = {
            "dtype": _dtype(read_dtype(job)),
            "attn_implementation": ATTENTIONS[job.strategy.attention].transformers,
            "trust_remote_code": self.spec.runs_code,
        }

    def read(self, *, keep: Callable[[Any], None] = lambda model: None, **options: Any) -> PreTrainedModel:
        """Read the whole model on this rank; `options` go to `from_pretrained`. A missing weight is an error.

        `keep` drops from the model what this rank does not hold, while its weights are still views of the file on a CPU.
        """
        if self.spec.quantization == NF4:
            raise ModelError(
                f"model {self.spec.name!r}: its files hold packed weights in a form that is not known, expected nf4 in blocks "
                "of 64, quantized twice. Give its unquantized base."
            )
        try:
            model, info = auto_class(self.spec).from_pretrained(
                self.spec.source,
                quantization_config=quantization(self.job),
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **self._options,
                **options,
            )
        except (OSError, ValueError, RuntimeError) as error:
            # Under ZeRO-3 a wrong shape is such an error; others, say of the network, are no mistake of the user's.
            if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
                raise
            raise ModelError(f"model {self.spec.name!r}: transformers cannot read its weights: {error}") from error
        # transformers would draw missing weights and those of another shape at random, and only warn.
        wrong = [
            *sorted(info["missing_keys"]),
            *sorted(key for key, *_ in info["mismatched_keys"]),
            *info["error_msgs"],
        ]
        if wrong:
            raise ModelError(
                f"model {self.spec.name!r}: {len(wrong)} of its weights are missing in the checkpoint, or have another shape "
                f"than in its config. The first: {wrong[0]}. Copy the checkpoint again, or give another."
            )
        if self.job.strategy.adapter == "qlora":
            pack_experts(model, self.spec, _dtype(self.job.compute_dtype))
        # Saving may revert only those that were used. Under ZeRO-3 transformers keeps all (integrations/deepspeed.py).
        used = [conversion for conversion in getattr(model, "_weight_conversions", None) or () if conversion.was_used()]
        if misread := _misread(model, used):
            raise ModelError(
                f"model {self.spec.name!r}: its files hold {misread} in another layout, of which transformers reads wrong rows "
                "where ranks share a matrix. Choose --tp 1 --ep 1."
            )
        self._complete(model, _conversions(model) if self.spec.quantization else used)  # dequantized: saved whole
        keep(model)
        if self.job.device.kind == "cpu":
            _copy_from_file(model)
        return cast("PreTrainedModel", model)

    def read_on_main(self) -> PreTrainedModel:
        """Read on rank 0. The other ranks get the same modules, with shapes and almost no memory. A collective."""
        models: list[PreTrainedModel] = []
        on_main(self.accelerator, lambda: models.append(self.read()))
        model: Any = models[0] if models else self._build_empty()
        for name, buffer in from_main(persistent_buffers(model)).items():
            set_tensor(model, name, buffer.cpu())
        return cast("PreTrainedModel", model)

    def defer(self) -> PreTrainedModel | None:
        """Make the modules without memory. Their `streamed_weights` read one weight at a time.

        None where the files hold the weights in another form than the model.
        """
        from transformers import GenerationConfig

        model = self._build_empty()
        weights = StreamedWeights.of_model(self.accelerator.device, self.spec, model)
        if weights is None:
            self.accelerator.print("loading: the files hold the weights in another form, so they are read whole")
            return None
        with contextlib.suppress(OSError):  # it has none, and transformers has made one from the config
            model.generation_config = GenerationConfig.from_pretrained(self.spec.source)
        self._complete(model, _conversions(model) if weights.renamed else [])
        weights.attach(model)
        self.streamed = True
        return model

    def _complete(self, model: Any, conversions: list[Any]) -> None:
        """Freeze the parameters outside the text part; prepare saving."""
        self._freeze(model)
        # Saving would copy the file of the model's class, and the class may be an engine's by then: `copy_code` knows better.
        type(model)._auto_class = None
        keep_packing(model)
        model._weight_conversions = conversions

    def _freeze(self, model: Any) -> None:
        """Freeze the parameters that are not trained, in the compute dtype. With an adapter all have it.

        Under fp16 some classes keep weights in fp32 (T5's `wo`). FSDP and DeepSpeed cast them, and autocast casts their
        products, so frozen ones are stored in fp16. Those that stay in fp32 under bf16, too (routers), stay here unless they
        are trained: engines train one dtype.
        """
        freeze(model, self.spec)
        adapter = self.job.strategy.adapter != "none"
        dtype = _dtype(self.job.compute_dtype)
        in_fp32, always = kept_in_fp32(model, dtype), kept_in_fp32(model, _dtype("bfloat16"))
        for name, parameter in list(model.named_parameters()):
            if not adapter and self.spec.trains(name):
                _cast(model, name, parameter, self._options["dtype"])
            elif not always(name) and (in_fp32(name) or not adapter):
                _cast(model, name, parameter, dtype)

    def _build_empty(self) -> Any:
        """Build the model without its weights; each parameter has its shape and one element of memory.

        Not on the meta device: Accelerate finds an optimizer's parameters by their addresses (`_prepare_fsdp2`), and there
        all are 0.
        """
        from accelerate import init_empty_weights
        from transformers import AutoConfig
        from transformers.quantizers import AutoHfQuantizer

        config = AutoConfig.from_pretrained(self.spec.source, trust_remote_code=self.spec.runs_code)
        with without_engine(), init_empty_weights():
            model = auto_class(self.spec).from_config(config, **self._options)
        if (packing := quantization(self.job)) is not None:
            quantizer = AutoHfQuantizer.from_config(packing, pre_quantized=False)
            quantizer.preprocess_model(model=model, dtype=self._options["dtype"], device_map=None)
            model.hf_quantizer = quantizer
            quantizer.postprocess_model(model)
            for module in model.modules():
                if type(module).__name__ == "Linear4bit" and module.bias is not None:
                    module.bias.data = module.bias.data.to(self._options["dtype"])  # bitsandbytes makes them in fp32
        if self.job.strategy.adapter == "qlora":
            mark_experts(model, expert_shapes(self.spec), _dtype(self.job.compute_dtype))
        model.tie_weights()  # `init_empty_weights` gives every name its own parameter
        # While a cast takes no memory:
        _widen(model)
        self._freeze(model)
        for name, parameter in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            set_tensor(model, name, _placeholder(model.get_submodule(owner), leaf, parameter))
        model.tie_weights()
        freeze(model, self.spec)
        return model


def _misread(model: nn.Module, conversions: list[Any]) -> str | None:
    """Return a parameter of which this rank has other rows than its part; None if all are right.

    transformers 5.23 slices a file's tensor by the parameter's placements and converts the slice: a slice of joined matrices is
    no joint of their slices, except where a plan packs just these (gate and up of experts) and splits each one.
    """
    tensor: Any
    targets = [[re.sub(r"\\\d", ".*", target) for target in each.target_patterns] for each in conversions]
    for name, tensor in model.named_parameters():
        if not hasattr(tensor, "_local_tensor"):
            continue
        places = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        divided = {
            place.dim % tensor.ndim: getattr(place, "split_factor", 1)
            for place, ranks in places
            if ranks > 1 and hasattr(place, "dim")
        }
        for conversion, patterns in zip(conversions, targets, strict=True):
            packed = {dim for dim, matrices in divided.items() if matrices == len(conversion.source_patterns) > 1}
            if any(re.search(pattern, name) for pattern in patterns) and any(
                _moves(step, set(divided), packed, tensor.ndim) for step in getattr(conversion, "operations", ())
            ):
                return name
    return None


def _moves(step: Any, divided: set[int], packed: set[int], dimensions: int) -> bool:
    """Return whether a step of a conversion puts other rows into a rank's slice than the whole tensor has there.

    Unknown steps do. `packed`: the divided dimensions of which a rank has a part of each of the matrices in the files.
    """
    kind = type(step).__name__
    if kind == "Concatenate":
        return step.dim % dimensions in divided - packed
    if kind == "Interleave":
        return step.dim % dimensions in divided
    if kind == "Transpose":
        return bool({step.dim0 % dimensions, step.dim1 % dimensions} & divided)
    # Stacks of experts are sliced as such, and blocks of packed values with their scales.
    return bool(divided) and kind not in ("MergeModulelist", "_IdentityOp") and "quantize" not in kind.lower()


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions with which transformers saves a model of this class."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]


def _dtype(name: str) -> torch.dtype:
    import torch

    return cast("torch.dtype", getattr(torch, name))


def _cast(model: Any, name: str, parameter: Any, dtype: Any) -> None:
    """Cast a parameter. A DTensor's local tensor does not follow its `data`, so it is replaced."""
    import torch

    if hasattr(parameter, "_local_tensor") and parameter.dtype != dtype:
        set_tensor(model, name, torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))
    else:
        parameter.data = parameter.data.to(dtype)


def _widen(model: Any) -> None:
    """Cast to fp32 the parameters and buffers that transformers keeps so."""
    in_fp32 = kept_in_fp32(model, model.dtype)
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model).items()):
        if in_fp32(name):
            tensor.data = tensor.data.float()


def _copy_from_file(model: nn.Module) -> None:
    """Copy views of the mapped file into memory that torch allocates, on CPU ranks.

    They take memory as soon as the optimizer writes them; only torch's allocator, and so every measurement, would miss it.
    """
    tensor: Any
    for tensor in (*model.parameters(), *model.buffers()):
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "cpu" or local.untyped_storage().resizable():
            continue
        if local is tensor:
            tensor.data = tensor.data.clone()
        else:  # in place: whoever has the DTensor keeps it
            tensor._local_tensor = local.clone()


def _placeholder(module: Any, leaf: str, parameter: Any) -> Any:
    """Return a parameter with one element of memory; of a packed weight with the shape that it has then."""
    import torch

    experts = getattr(module, "packed_experts", None)
    if experts is not None and leaf in experts.shapes:
        column = packed_shape(parameter.numel(), experts.dtype.itemsize)
        return torch.nn.Parameter(torch.zeros(1, 1, dtype=experts.dtype).expand(column), requires_grad=False)
    if type(parameter).__name__ != "Params4bit":
        return torch.nn.Parameter(torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape))
    storage: torch.dtype = parameter.quant_storage
    packed = ceil_div(module.in_features * module.out_features, 2 * storage.itemsize)
    options = {**parameter.__dict__, "bnb_quantized": True, "module": module}
    return type(parameter)(torch.zeros(1, 1, dtype=storage).expand(packed, 1), requires_grad=False, **options)
