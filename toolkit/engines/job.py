"""A job: what was asked, with nothing left open. And the words in which every engine answers."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.devices import Device, Hardware
from toolkit.errors import StrategyError
from toolkit.model import ModelSpec
from toolkit.show import Shown, Table
from toolkit.strategy import Loop, Strategy
from toolkit.units import DTYPE_OF, format_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch
    from accelerate import Accelerator


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a forecast computes and a worker runs. Both make it with `resolve`, so the two cannot drift."""

    strategy: Strategy
    """Without an `auto`."""
    loop: Loop
    """Without an open value."""
    spec: ModelSpec | None
    """None where the caller brings a model of his own: what depends on the model is then left to the engine."""
    ranks: int
    device: Device
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own configuration, resolved: what it will be given, word for word."""

    @property
    def compute_dtype(self) -> str:
        """torch's name of the dtype that the forward computes in."""
        return DTYPE_OF[self.strategy.precision]

    @property
    def weight_dtype(self) -> str:
        """torch's name of the dtype that trainable weights are trained in: fp32, but for `bf16_pure`."""
        return "bfloat16" if self.strategy.precision == "bf16_pure" else "float32"

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.loop.micro_batch * self.loop.accumulation * self.ranks

    @property
    def shard_ranks(self) -> int:
        """How many ranks share one copy."""
        return self.ranks // self.strategy.replicate


@dataclass(frozen=True)
class Prepared:
    """What `accelerator.prepare` gave back, with the job that it was made for."""

    job: Job
    model: Any
    """The module that is called: bare, DDP, a DeepSpeedEngine, or an FSDPModule."""
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer step did."""

    norm: float
    """The global L2 norm of the gradients before clipping, over all ranks."""
    skipped: bool
    """Whether the weights stayed as they were: fp16's scaler met an overflow, or the norm is not finite."""
    gradients: str
    """torch's names of the dtypes of the gradients that were stepped with."""
    scale: float = 1.0
    """What the loss was multiplied by, under fp16."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What an optimizer counts beside its moments; the same words under every engine, so that one's go on in another's."""

    steps: int
    """Steps that were taken: those that fp16's scaler skipped do not count."""
    scale: float | None = None
    """What fp16 multiplies the loss by; None where nothing is scaled."""
    good_steps: int = 0
    """Steps without an overflow since the scale last changed."""
    hysteresis: int | None = None
    """Overflows that DeepSpeed's scaler still bears before it lowers the scale; torch's lowers it at the first."""


@dataclass(frozen=True)
class Piece:
    """A flat range of a named tensor, as this rank holds it. Writing into `tensor` writes into the engine's own memory."""

    name: str
    """The canonical parameter name."""
    kind: str
    """`parameter`, `master`, `exp_avg` or `exp_avg_sq`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Offset of this range in the flattened whole tensor, in elements."""
    tensor: torch.Tensor
    """One-dimensional view of this rank's memory."""


@dataclass(frozen=True, kw_only=True)
class Holdings(Shown):
    """Bytes of the states that one rank holds, by part: as an engine's `account` says, or as its `audit` found."""

    trainable: int
    """Parameters that are trained: this rank's shard, persistent ones whole, tied ones once."""
    frozen: int
    """Parameters that are not."""
    master: int = 0
    """A separate fp32 copy of the trained weights, where the engine keeps one."""
    optimizer: int | None = 0
    """Moments. None before the first step, when they do not exist."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """The ledger: part → torch's dtype name, several joined by `+`."""

    @property
    def parameters(self) -> int:
        """All parameters' bytes."""
        return self.trainable + self.frozen

    def tables(self) -> list[Table]:
        rows = [
            (name, "–" if (size := getattr(self, name)) is None else format_bytes(size), self.dtypes.get(name, "–"))
            for name in ("trainable", "frozen", "master", "optimizer")
        ]
        return [Table(title="Held by this rank", columns=("part", "bytes", "dtype"), rows=rows)]


def on_device(job: Job, held: Holdings) -> Holdings:
    """What of a rank's holdings lives on its device: offloaded states do not. On CPU ranks everything does."""
    if job.device.kind == "cpu" or job.strategy.offload == "none":
        return held
    moved = {"master": 0, "optimizer": 0} | ({"trainable": 0, "frozen": 0} if job.strategy.offload == "cpu" else {})
    return dataclasses.replace(held, **moved)  # type: ignore[arg-type]


def job_of(accelerator: Accelerator) -> Job:
    """The job that an Accelerator was made for.

    Raises:
        StrategyError: for an Accelerator that `toolkit.accelerator()` did not make.
    """
    job: Job | None = getattr(accelerator, "job", None)
    if job is None:
        raise StrategyError(
            "this Accelerator was not made by the toolkit, so nothing says what it was made for. "
            "Make it with `toolkit.accelerator(strategy, loop, spec)`."
        )
    return job


class Engine(Protocol):
    """The functions that every module in `toolkit.engines` has: everything about one way of sharding, in one file."""

    def settings(
        self, strategy: Strategy, loop: Loop, spec: ModelSpec | None, ranks: int, device: Device
    ) -> dict[str, Any]:
        """The resolved configuration; refuses what this device, model or number of ranks cannot do."""

    def require_library(self, strategy: Strategy) -> None:
        """Refuse where the engine's library is not installed. A forecast needs none, so `settings` does not ask."""

    def plugin(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Arguments for `Accelerator(...)`; `timeout`: after which a rank gives up waiting for another."""

    def variables(self, job: Job) -> dict[str, str | None]:
        """Environment variables that its libraries read while they are set up; None: must not be set."""

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """The Accelerate config file's content."""

    def from_yaml(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Fields of Strategy that a config file binds; None where the file is another engine's."""

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """The same, from what `accelerate launch --config_file` makes of it in a worker."""

    def loading(self, job: Job) -> AbstractContextManager[str]:
        """The context in which weights are read; yields in words which way is taken."""

    def arrange(self, job: Job, model: torch.nn.Module) -> None:
        """What must be set on the model before `prepare`."""

    def account(self, job: Job) -> Holdings:
        """Bytes of states that the fullest rank holds."""

    def computing(self, job: Job) -> str:
        """In words, how the forward gets the dtype that it computes in."""

    def check(self, prepared: Prepared) -> list[str]:
        """Sentences about what the engine itself is otherwise than asked: its class, stage, mesh, offload."""

    def audit(self, prepared: Prepared) -> Holdings:
        """Bytes of states that this rank really holds."""

    def backward(self, prepared: Prepared, loss: torch.Tensor, last: bool) -> None:
        """One micro-batch; `last` closes the accumulation."""

    def update(self, prepared: Prepared) -> Update:
        """Global norm, finiteness, clip, step."""

    def pieces(self, prepared: Prepared, create: bool = False) -> Iterable[Piece]:
        """Every parameter, master and moment of this rank; `create` makes moments that do not exist yet."""

    def counters(self, prepared: Prepared) -> Counters:
        """How far the optimizer is, and fp16's scaler."""

    def restored(self, prepared: Prepared, counters: Counters) -> None:
        """After masters (else parameters) and moments were written: counters and compute copies follow them."""


def engine_of(strategy: Strategy) -> Engine:
    """The module in `toolkit.engines` that runs a strategy."""
    module: Engine = importlib.import_module(f"toolkit.engines.{strategy.engine}")
    return module


def resolve(strategy: Strategy, loop: Loop, spec: ModelSpec | None, ranks: int, device: Device) -> Job:
    """What was asked, with nothing left open: precision, attention, learning rate, the engine's settings.

    Raises:
        StrategyError: for what this device, model or number of ranks cannot do, before any process starts.
    """
    precision = resolve_precision(strategy.precision, device)
    attention = resolve_attention(strategy.attention, precision, spec, device)
    if device.kind == "cuda" and precision in ("bf16", "bf16_pure") and "bf16" not in device.dtypes:
        raise StrategyError(
            f"precision {precision!r}: {device.name} does not compute bf16. Choose precision 'fp16', or 'fp32'."
        )
    strategy = dataclasses.replace(strategy, precision=precision, attention=attention)
    if loop.lr is None:
        loop = dataclasses.replace(loop, lr=default_lr(strategy, spec))
    check_model(strategy, loop, spec)
    settings = engine_of(strategy).settings(strategy, loop, spec, ranks, device)
    return Job(strategy=strategy, loop=loop, spec=spec, ranks=ranks, device=device, settings=settings)


def default_ranks(strategy: Strategy, hardware: Hardware) -> int:
    """Number of ranks where none is given: 1 for `none`, else one a device; on a CPU the fewest that shard, at least.

    On a CPU that is 2, and 2 per replica for `hsdp`, unless the hardware names more ("8x cpu").
    """
    if strategy.sharding == "none":
        return 1
    return max(2 * strategy.replicate, hardware.ranks) if hardware.device.kind == "cpu" else hardware.ranks


def resolve_precision(precision: str, device: Device) -> str:
    """`auto`: bf16 where the device has it natively, else fp16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    if device.kind == "cpu":
        return "fp32"
    return "bf16" if "bf16" in device.dtypes else "fp16"


def resolve_attention(attention: str, precision: str, spec: ModelSpec | None, device: Device) -> str:
    """`auto`: the first of the device's kernels that takes this dtype and that the model's class supports.

    Raises:
        StrategyError: for a named kernel that is not there or does not take this dtype, with those that do.
    """
    half_only = ("flash_attention_2", "flash_attention_3")
    able = [
        kernel
        for kernel in device.attentions
        if (spec is None or kernel in spec.attentions) and (precision != "fp32" or kernel not in half_only)
    ]
    if attention == "auto":
        return next((kernel for kernel in able if kernel != "flex"), "eager")
    if attention in able:
        return attention
    if attention not in device.attentions:
        why = "is not installed or does not run on this device"
        fix = {
            "flash_attention_2": " Install it with `pip install flash-attn` on a GPU of compute capability 8.0 or more.",
            "flash_attention_3": " Install FlashAttention-3 on a GPU of compute capability 9.0.",
        }.get(attention, "")
    elif spec is not None and attention not in spec.attentions:
        why, fix = f"is not supported by {spec.architecture}", ""
    else:
        why, fix = f"computes in half precision only, and precision is {precision!r}", " Or choose precision 'bf16'."
    raise StrategyError(f"attention {attention!r} {why}.{fix} Works here: {', '.join(able)}.")


def default_lr(strategy: Strategy, spec: ModelSpec | None) -> float:
    """1e-3 for the embedded model, 2e-4 for an adapter (Dettmers et al. 2023), 2e-5 for all weights."""
    if spec is not None and spec.name == "embedded":
        return 1e-3
    return 2e-4 if strategy.adapter != "none" else 2e-5


def check_model(strategy: Strategy, loop: Loop, spec: ModelSpec | None) -> None:
    """Refuse what this model cannot do, whatever the engine.

    Raises:
        StrategyError: for a sequence over the model's limit, for LoRA targets that the model does not have, and for activation
            checkpointing of a class without it.
    """
    if spec is None:
        return
    if spec.max_positions is not None and loop.seq_len > spec.max_positions:
        raise StrategyError(
            f"seq_len {loop.seq_len} is over the limit of {spec.name}: {spec.max_positions} positions. "
            f"Choose --seq-len {spec.max_positions} or less."
        )
    if strategy.activation_checkpointing == "full" and not spec.checkpointed:
        raise StrategyError(
            f"{spec.architecture} has no activation checkpointing. Choose --activation-checkpointing none."
        )
    if strategy.adapter != "none" and strategy.lora_targets != "all-linear":
        text = [name for name in spec.linears if spec.trains(name)]
        ends = {name.rpartition(".")[2] for name in text}
        for word in strategy.lora_targets.split(","):
            if not any(name == word.strip() or name.endswith("." + word.strip()) for name in text):
                raise StrategyError(
                    f"lora_targets {word.strip()!r} names no linear module of {spec.name}. "
                    f"Known: {', '.join(sorted(ends))}; or 'all-linear'."
                )


def base_yaml(strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
    """What every Accelerate config file of ours begins with. Precisions that Accelerate cannot spell are written "no"."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": strategy.precision if strategy.precision in ("bf16", "fp16", "fp8") else "no",
        "num_machines": nodes,
        "num_processes": ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def bound_precision(written: str | None) -> dict[str, str]:
    """What a config file's `mixed_precision` binds: "no" leaves it open."""
    return {"precision": written} if written in ("bf16", "fp16", "fp8") else {}
