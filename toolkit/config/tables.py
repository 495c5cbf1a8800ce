"""One row a value: everything that depends on a precision, an attention kernel or an optimizer. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a precision on every engine, by torch's names."""

    compute: str
    """Dtype of the forward's matrix products and of frozen weights."""
    master: str
    """Dtype of the trained weights in the optimizer's step, and of its states."""
    reduce: str
    """Dtype in which gradients are summed over ranks."""
    scaled: bool = False
    """Whether the loss is scaled up, so that small gradients do not vanish."""
    agreement: float
    """Largest relative difference of a step's loss between shardings.

    In half precision two computations exist, autocast and cast parameters; in pure bf16 the weights themselves round.
    """

    @property
    def mixed(self) -> bool:
        """Whether the forward computes in another dtype than the optimizer."""
        return self.compute != self.master

    @property
    def accelerate(self) -> str:
        """Accelerate's word for the compute dtype."""
        return {"bfloat16": "bf16", "float16": "fp16"}.get(self.compute, "no")


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(compute="float32", master="float32", reduce="float32", agreement=1e-4),
    "bf16": Precision(compute="bfloat16", master="float32", reduce="float32", agreement=1e-3),
    "fp16": Precision(compute="float16", master="float32", reduce="float32", scaled=True, agreement=1e-3),
    "bf16_pure": Precision(compute="bfloat16", master="bfloat16", reduce="bfloat16", agreement=1e-2),
}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention kernel."""

    transformers: str
    """Its name there (`attn_implementation`)."""
    half_only: bool = False
    """Whether it computes in 16 bits only."""
    joins_rows: bool = False
    """Whether it takes packed rows joined into one, by their positions; then it needs no mask."""
    divides_rows: bool = False
    """Whether it runs where ranks share each row (`--cp`); others read rows in ways of their own."""
    automatic: bool = True
    """Whether `auto` may choose it."""
    install: str = ""
    """How to install it."""


ATTENTIONS: dict[str, Attention] = {
    "eager": Attention(transformers="eager", divides_rows=True),
    "sdpa": Attention(transformers="sdpa", divides_rows=True),
    "flash_attention_2": Attention(
        transformers="flash_attention_2",
        half_only=True,
        joins_rows=True,
        install="Install it with `pip install flash-attn` on a GPU of compute capability 8.0 or more.",
    ),
    "flash_attention_3": Attention(
        transformers="flash_attention_3",
        half_only=True,
        joins_rows=True,
        install="Install FlashAttention-3 on a GPU of compute capability 9.0.",
    ),
    # torch's kernel for packed rows; padded rows are computed by sdpa.
    "varlen": Attention(
        transformers="varlen",
        half_only=True,
        joins_rows=True,
        divides_rows=True,
        install="It needs a GPU of compute capability 8.0 or more, and a torch with varlen_attn for grouped queries.",
    ),
    "flex": Attention(transformers="flex_attention", automatic=False),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """One of the tensors that an optimizer keeps for each trained tensor."""

    name: str
    """Its key in torch's state, and its kind in a checkpoint."""
    dtype: str | None = None
    """torch's name; None: that of the weights that are stepped."""
    reshards: bool = True
    """Whether it has the trained tensor's shape, and so moves from one layout to another. A checkpoint holds no other."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer's states and temporaries."""

    states: tuple[OptimizerState, ...]
    torch: str
    """The class of `torch.optim` that the recipe makes."""
    classes: tuple[str, ...]
    """Upstream's classes that keep exactly these states."""
    default_lr: Mapping[str, float]
    """The peak learning rate of a TrainConfig that names none: of the embedded model, of an adapter, of all weights."""
    passes: int
    """Times that a step, with clipping, reads or writes each element."""
    unfused_temporaries: int
    """Temporary copies of all trained tensors in its step on CUDA without fused kernels."""
    engines: tuple[str, ...] = ()
    """Engines that run it; empty: all."""


OPTIMIZERS: dict[str, Optimizer] = {
    # Without fused kernels torch takes all tensors at once, with the roots of their second moments (`_multi_tensor_adam`).
    "adamw": Optimizer(
        states=(OptimizerState(name="exp_avg"), OptimizerState(name="exp_avg_sq")),
        torch="AdamW",
        classes=("Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam"),
        default_lr={"embedded": 1e-3, "adapter": 2e-4, "all": 2e-5},  # of an adapter: Dettmers et al. 2023
        passes=9,
        unfused_temporaries=1,
    ),
}
