"""One process, or torch's DistributedDataParallel: every rank holds all states. bf16 and fp16 run under autocast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from toolkit.devices import Device
from toolkit.engines.job import Counters, Holdings, Job, Piece, Prepared, Update, base_yaml, bound_precision
from toolkit.engines.states import holdings, moment_pieces, moments, parameters_of
from toolkit.engines.stepping import backward_weighted, clip_and_step, read_counters, write_counters
from toolkit.engines.waiting import handlers
from toolkit.errors import StrategyError
from toolkit.model import ModelSpec
from toolkit.strategy import Loop, Strategy
from toolkit.units import BYTES_OF, dtype_name

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch


def settings(strategy: Strategy, loop: Loop, spec: ModelSpec | None, ranks: int, device: Device) -> dict[str, Any]:
    """Backend and autocast dtype. Refuses a wrong number of ranks, and fp16 on a CPU, where it is silently fp32."""
    if strategy.sharding == "none" and ranks != 1:
        raise StrategyError(f"sharding 'none' is one process; got {ranks} ranks. Choose sharding 'ddp', or 1 process.")
    if strategy.sharding == "ddp" and ranks < 2:
        raise StrategyError(
            f"sharding 'ddp' needs at least 2 ranks; got {ranks}. Choose sharding 'none', or 2 processes."
        )
    if strategy.precision == "fp16" and device.kind == "cpu":
        raise StrategyError(
            f"sharding {strategy.sharding!r} cannot train in precision 'fp16' on a CPU, where loss scaling does not exist "
            "and Accelerate would run fp32. Choose precision 'bf16', or sharding 'zero2'."
        )
    return {
        "backend": "gloo" if device.kind == "cpu" else "nccl",
        "autocast": {"bf16": "bf16", "fp16": "fp16"}.get(strategy.precision, "no"),
    }


def require_library(strategy: Strategy) -> None:
    """torch alone."""


def plugin(job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
    """No plugin: Accelerate's own DDP."""
    return {
        "cpu": job.device.kind == "cpu",
        "mixed_precision": job.settings["autocast"],
        "kwargs_handlers": handlers(timeout),
    }


def variables(job: Job) -> dict[str, str | None]:
    """None."""
    return {}


def to_yaml(strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
    """`MULTI_GPU` with `use_cpu: false` starts several processes on a CPU too; `MULTI_CPU` starts one."""
    kind = "NO" if strategy.sharding == "none" else "MULTI_GPU"
    return base_yaml(strategy, ranks, nodes) | {"distributed_type": kind}


def from_yaml(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A file without DeepSpeed and FSDP."""
    kinds = {"NO": "none", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}
    sharding = kinds.get(str(config.get("distributed_type", "NO")))
    return {"sharding": sharding} | bound_precision(config.get("mixed_precision")) if sharding else None


def from_env(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """`accelerate launch` without DeepSpeed and FSDP; nothing where it was not `accelerate launch`."""
    other = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
    if "ACCELERATE_MIXED_PRECISION" not in environ or any(environ.get(name) == "true" for name in other):
        return None
    sharding = "ddp" if int(environ.get("WORLD_SIZE", "1")) > 1 else "none"
    return {"sharding": sharding} | bound_precision(environ["ACCELERATE_MIXED_PRECISION"])


def loading(job: Job) -> AbstractContextManager[str]:
    """Every rank needs all of it, so every rank reads it."""
    return nullcontext("every rank reads the whole model, which it keeps")


def arrange(job: Job, model: torch.nn.Module) -> None:
    """Nothing: DDP takes a model as it is."""


def account(job: Job) -> Holdings:
    """All parameters, and two moments of each trained one in its own dtype (Rajbhandari et al. 2020, section 3.1)."""
    found = list(parameters_of(job))
    trained = sum(state.elements for state in found if state.trainable)
    return Holdings(
        trainable=sum(state.bytes for state in found if state.trainable),
        frozen=sum(state.bytes for state in found if not state.trainable),
        optimizer=2 * trained * BYTES_OF[job.weight_dtype],
        dtypes=dict.fromkeys(("trainable", "gradients", *_reduced(job), "optimizer"), job.weight_dtype),
    )


def _reduced(job: Job) -> tuple[str, ...]:
    """One process reduces nothing."""
    return ("reduce",) if job.strategy.sharding == "ddp" else ()


def computing(job: Job) -> str:
    """Under autocast the weights stay as they are."""
    if job.settings["autocast"] == "no":
        return "on the weights as they are held"
    return f"under autocast: products in {job.compute_dtype}, what needs the range in float32"


def check(prepared: Prepared) -> list[str]:
    """Several ranks are wrapped in DDP, one is not."""
    expected = "DistributedDataParallel" if prepared.job.strategy.sharding == "ddp" else None
    found = type(prepared.model).__name__
    if expected and found != expected:
        return [f"engine is {found}, expected {expected}"]
    return [f"engine is {found}, expected the bare model"] if not expected and hasattr(prepared.model, "module") else []


def audit(prepared: Prepared) -> Holdings:
    """What the parameters' storages and the optimizer's state hold."""
    size, kinds = moments(prepared.optimizer)
    found = [(parameter, parameter.requires_grad) for parameter in prepared.model.parameters()]
    # DDP's buckets are of their parameters' dtypes (`reducer.cpp`, `initialize_buckets`).
    sent = "+".join(sorted({dtype_name(parameter.dtype) for parameter, trained in found if trained}))
    return holdings(found, optimizer=size, dtypes={"optimizer": kinds, **dict.fromkeys(_reduced(prepared.job), sent)})


def backward(prepared: Prepared, loss: torch.Tensor, last: bool) -> None:
    """Gradients are averaged over the ranks with the last micro-batch only."""
    with nullcontext() if last else prepared.accelerator.no_sync(prepared.model):
        backward_weighted(prepared, loss)


def update(prepared: Prepared) -> Update:
    """Clip by the global norm, then step."""
    return clip_and_step(prepared)


def pieces(prepared: Prepared, create: bool = False) -> Iterator[Piece]:
    """Every parameter and moment, whole."""
    for name, parameter in prepared.accelerator.unwrap_model(prepared.model).named_parameters():
        piece = Piece(name, "parameter", tuple(parameter.shape), 0, parameter.detach().view(-1))
        yield piece
        if parameter.requires_grad:
            yield from moment_pieces(prepared.optimizer, parameter, piece, lambda tensor: tensor.view(-1), create)


def counters(prepared: Prepared) -> Counters:
    """The optimizer's and the scaler's."""
    return read_counters(prepared)


def restored(prepared: Prepared, counters: Counters) -> None:
    """Counters; then DDP goes through one step's worth of gradients that are thrown away.

    After its first backward DDP sums gradients in buckets of another order (`reducer.cpp`, `rebuild_buckets`), which
    with more than two ranks changes their last bits. A run that goes on has to sum as one that was never stopped.
    """
    import torch

    write_counters(prepared, counters)
    if prepared.job.strategy.sharding != "ddp":
        return
    tokens = torch.zeros((1, 2), dtype=torch.long, device=prepared.accelerator.device)
    for last in (False, True):  # the buckets are rebuilt at the head of the second forward
        loss = prepared.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if not last:
            loss.backward()
    prepared.optimizer.zero_grad()
