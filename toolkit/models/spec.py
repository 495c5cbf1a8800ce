"""`ModelSpec`: a model's architecture without its weights, how it is shown, and its cache."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.core import cache
from toolkit.core.display import Result, Table
from toolkit.core.errors import ModelError, ToolkitError, value_or
from toolkit.core.units import format_bytes, format_count
from toolkit.models.remote_code import COMMIT

CACHE = "specs"
"""The cache's folder."""

NF4 = "4-bit nf4"
"""bitsandbytes' 4 bits with double quantization, as QLoRA packs weights (`ModelSpec.quantization`)."""

ROLES = ("embedding", "layer", "expert", "router", "norm", "head", "other")
"""The roles of parameters. In a repeated layer, all others than experts, routers and norms are `layer`."""


def generic_name(name: str) -> str:
    """Return the name of a module or parameter as plans have it: without PEFT's own parts, and with `*` for a layer's number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("base_model.model.").replace(".base_layer.", "."))


def complete_plan(plan: Mapping[str, str], parameters: Iterable[str]) -> dict[str, str]:
    """Return a tensor-parallel plan with the rule that transformers forgets: of a trained activation (xIELU), which sees a part."""
    whole = dict(plan)
    for name in parameters:
        module = generic_name(name).rpartition(".")[0]
        part, _, leaf = module.rpartition(".")
        if leaf == "act_fn" and f"{part}.down_proj" in plan:
            whole.setdefault(module, "replicated_with_grad_allreduce")
    return whole


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the unsharded model, under its own (canonical) name. Tied parameters appear once."""

    name: str
    shape: tuple[int, ...]
    role: str
    """`embedding`, `head`, `layer`, `norm`, `expert`, `router` or `other`."""

    @property
    def elements(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class MoE:
    """The shape of a mixture of experts."""

    experts: int
    """Experts of a layer."""
    active: int
    """Experts that a token passes through."""
    block: str
    """Class of the module with router and experts: the ZeRO-3 leaf. With several such classes, the layer's."""
    computed: str
    """transformers' implementation of the experts: `grouped_mm`, …; `eager` for a class with a single one."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Result):
    """A model's architecture, without its weights."""

    json_fields = "* elements active_elements"

    name: str
    """The given name: a Hub id, a folder, a file, or a class name."""
    source: str | None
    """Hub id or folder of the weights; None for a config alone."""
    architecture: str
    """The trained class, such as `LlamaForCausalLM`."""
    kind: str
    """`causal` or `seq2seq`."""
    config: dict[str, Any] = field(repr=False)
    """The transformers config, as its `to_dict()` in JSON."""
    parameters: tuple[Parameter, ...] = field(repr=False)
    """In the model's own order; each storage once."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of names that share one tensor; the first of each is the one in `parameters`."""
    linears: tuple[str, ...] = field(repr=False)
    """Names of the linear modules, the head excepted."""
    blocks: tuple[str, ...]
    """Classes of the repeated layers: what FSDP wraps (transformers' `_no_split_modules`)."""
    attentions: tuple[str, ...]
    """Attention kernels that this class supports, best first."""
    layers: int
    """Repeated layers; for `seq2seq` the encoder's and the decoder's together."""
    hidden: int
    heads: int
    """Attention heads of a layer; 0 without attention."""
    vocab: int
    """Rows of the input embedding."""
    max_positions: int | None
    """The longest sequence, or None where the model has no limit."""
    checkpointed: bool = True
    """Whether the class has activation checkpointing."""
    moe: MoE | None = None
    unadapted: tuple[str, ...] = field(default=(), repr=False)
    """Modules of `linears` that `all-linear` leaves out: PEFT mistakes them for a mixture's fused experts."""
    unquantized: tuple[str, ...] = field(default=(), repr=False)
    """Modules of `linears` that transformers does not quantize (T5's `wo`)."""
    buffer_bytes: int = 0
    """Bytes of buffers, which no sharding divides (GPT-Neo's masks)."""
    copied: int = 0
    """Elements that `save_pretrained` copies into another form for the disk (one expert a tensor)."""
    frozen: tuple[str, ...] = ()
    """Modules and parameters outside of the text part (vision tower, projector). They are never trained."""
    untrained: tuple[str, ...] = ()
    """Parameters of the text part that the class itself does not train (ERNIE 4.5's bias of the router)."""
    tp_plan: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Its class's tensor-parallel plan, or a user's: module name, with `*` for a layer's number → style. Empty without a plan."""
    ep_plan: Mapping[str, str] = field(default_factory=dict, repr=False)
    """transformers' expert-parallel plan, in the same form."""
    own_tp_plan: bool = False
    """Whether `tp_plan` is a user's, and not the class's."""
    stateful: tuple[str, ...] = ()
    """Classes of its layers with a state that passes from token to token (Mamba, linear attention)."""
    takes_positions: bool = True
    """Whether its forward takes `position_ids`."""
    trusted: str | None = None
    """The trusted revision of the model's own code: a commit on the Hub, or a folder's sha256. None without own code."""

    def with_tp_plan(self, plan: Mapping[str, str]) -> ModelSpec:
        """Return the same model with another tensor-parallel plan.

        Raises:
            ModelError: for a rule that names no module with parameters.
        """
        parameters = [name for parameter in self.parameters for name in self.names_of(parameter.name)]
        names = dict.fromkeys(generic_name(name).rpartition(".")[0] for name in parameters)
        if unknown := [name for name in plan if name not in names]:
            close = difflib.get_close_matches(generic_name(unknown[0]), names, n=1, cutoff=0)
            raise ModelError(
                f"tp_plan: {unknown[0]!r} names no weights of {self.architecture}: expected a module, with * for "
                f"a layer's number, such as {close[0]!r}."
            )
        return dataclasses.replace(self, tp_plan=complete_plan(plan, parameters), own_tp_plan=True)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of a parameter, its own first: tied weights have several."""
        return next((group for group in self.tied if name in group), (name,))

    @property
    def runs_code(self) -> bool:
        """The value of transformers' `trust_remote_code`."""
        return self.trusted is not None

    @property
    def commit(self) -> str | None:
        """The commit on the Hub at which its code is trusted; `source` is then its snapshot."""
        return self.trusted if self.trusted and COMMIT.fullmatch(self.trusted) else None

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """transformers' `quantization_config` of files with quantized weights; else empty."""
        parts = (self.config, self.config.get("text_config"))
        found = (part.get("quantization_config") for part in parts if isinstance(part, dict))
        return next((values for values in found if isinstance(values, dict) and values), {})

    @property
    def quantization(self) -> str | None:
        """The form of quantized weights in the files: `NF4`, or transformers' name of the method; None without any."""
        values = self.quantization_config
        if not values.get("load_in_4bit"):
            return "8-bit bitsandbytes" if values.get("load_in_8bit") else values.get("quant_method")
        kind = values.get("bnb_4bit_quant_type", "fp4")
        return NF4 if kind == "nf4" and values.get("bnb_4bit_use_double_quant") else f"4-bit {kind}, quantized once"

    def file_bytes(self, parameter: Parameter) -> int:
        """Return a parameter's bytes in half precision, or as `NF4` packs it: half a byte, and a byte for 64 of them."""
        module = parameter.name.removesuffix(".weight")
        packed = self.quantization == NF4 and module in self.linears and module not in self.unquantized
        return parameter.elements * 33 // 64 if packed else 2 * parameter.elements

    @property
    def elements(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.elements for parameter in self.parameters)

    def in_text(self, name: str) -> bool:
        """Return whether a parameter or module is of the text part, which is all of most models."""
        return not any(name == part or name.startswith(f"{part}.") for part in self.frozen)

    def trains(self, parameter: str) -> bool:
        """Return whether a parameter is trained where no adapter is."""
        return parameter not in self.untrained and self.in_text(parameter)

    @property
    def trained_linears(self) -> list[str]:
        """Names of the linear modules that are trained."""
        return [name for name in self.linears if self.trains(f"{name}.weight")]

    @property
    def frozen_line(self) -> str:
        """Return the frozen part and its share of the model."""
        size = sum(parameter.elements for parameter in self.parameters if not self.in_text(parameter.name))
        more = f" and {len(self.frozen) - 4} more" if len(self.frozen) > 4 else ""
        return (
            f"{', '.join(self.frozen[:4])}{more}: {format_count(size)} parameters ({size / self.elements:.0%} of all)"
        )

    @property
    def active_elements(self) -> int:
        """Parameters that a token passes through: of the experts only the active share."""
        if self.moe is None:
            return self.elements
        experts = self.elements_of("expert")
        return self.elements - experts + experts * self.moe.active // self.moe.experts

    def elements_of(self, role: str) -> int:
        """Return the number of parameters with this role."""
        return sum(parameter.elements for parameter in self.parameters if parameter.role == role)

    def tables(self) -> list[Table]:
        """Return the figures, and the parameters by role with their bytes in bf16, or packed in 4 bits."""
        moe = self.moe
        figures = {
            "architecture": f"{self.architecture} ({self.kind})",
            "parameters": f"{format_count(self.elements)} ({self.elements:,})",
            "active parameters": moe and f"{format_count(self.active_elements)} ({self.active_elements:,})",
            "experts": moe
            and f"{moe.experts} a layer, {moe.active} active, in {moe.block}, computed by {moe.computed}",
            "frozen (not text)": self.frozen and self.frozen_line,
            "not trained by its class": self.untrained and f"{len(self.untrained):,} tensors",
            "layers": f"{self.layers} x {', '.join(self.blocks)}",
            "hidden size": self.hidden,
            "attention heads": str(self.heads),
            "vocabulary": f"{self.vocab:,}",
            "longest sequence": "no limit" if self.max_positions is None else f"{self.max_positions:,} tokens",
            "attention kernels": ", ".join(self.attentions),
            "linear modules": f"{len(self.linears):,}, the head excepted",
            "tied": "; ".join(" = ".join(group) for group in self.tied) or "nothing",
            "weights": self.source or "none: a config only",
            "quantized": self.quantization and f"{self.quantization}, in the files",
            "tensor-parallel plan": self.own_tp_plan and f"your own, {len(self.tp_plan)} rules",
            "code of its own": self.trusted and f"is run, revision {self.trusted}",
        }
        members = {role: [parameter for parameter in self.parameters if parameter.role == role] for role in ROLES}
        rows = [
            (role, f"{count:,}", f"{count / self.elements:.1%}", format_bytes(sum(map(self.file_bytes, parameters))))
            for role, parameters in {**members, "total": self.parameters}.items()
            if (count := sum(parameter.elements for parameter in parameters))
        ]
        in_dtype = "in 4 bits" if self.quantization == NF4 else "in bf16"
        shown_figures = [(name, value) for name, value in figures.items() if value]
        return [
            Table(title=self.name, columns=("figure", "value"), rows=shown_figures),
            Table(title="Parameters by role", columns=("role", "count", "share", in_dtype), rows=rows),
        ]


def recall(config: bytes) -> ModelSpec | None:
    """Return the cached spec of this text of a `config.json` under these versions, or None. Imports nothing heavy."""
    return value_or(None, lambda: cache.recall(cache.cache_file(CACHE, config), _decode))


def _decode(values: dict[str, Any]) -> ModelSpec:
    parameters = [Parameter(**{**each, "shape": tuple(each["shape"])}) for each in values["parameters"]]
    moe = MoE(**values["moe"]) if values["moe"] else None
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    tuples = {name: tuple(tuple(i) if isinstance(i, list) else i for i in value) for name, value in lists.items()}
    return ModelSpec(**{**values, **tuples, "parameters": tuple(parameters), "moe": moe})


def remember(config: bytes, spec: ModelSpec) -> None:
    """Cache a spec. Without a writable cache nothing is kept."""
    with contextlib.suppress(ToolkitError):
        cache.keep(cache.cache_file(CACHE, config), dataclasses.asdict(spec))
