"""An optimizer step through Accelerate, for engines without a step of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.core.phases import phase
from toolkit.core.units import dtype_name
from toolkit.engines.job import Job
from toolkit.engines.records import Counters, Prepared, StepResult
from toolkit.engines.states import set_steps, steps_of

if TYPE_CHECKING:
    import torch


def to_device(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy a batch to the device, without waiting."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # the host waits for a copy from pageable memory
        return tensor.to(device, non_blocking=True)

    return {name: copied(tensor) for name, tensor in batch.items()}


def backward_weighted(prepared: Prepared, loss: torch.Tensor) -> None:
    """Run the backward of a weighted loss: Accelerate divides it by the accumulation steps, which is undone."""
    accelerator = prepared.accelerator
    with phase("backward"):
        accelerator.backward(loss * accelerator.gradient_accumulation_steps)


def clip_and_step(prepared: Prepared) -> StepResult:
    """Clip by the global norm over all ranks, then step; a norm that is not finite changes no weight.

    Under fp16 the scaler decides: it skips the step and lowers its scale.
    """
    with phase("step"):
        parameters = list(prepared.model.parameters())
        norm = float(prepared.accelerator.clip_grad_norm_(parameters, prepared.job.train_config.max_grad_norm))
        gradients = _gradient_dtypes(parameters)
        scaled = prepared.accelerator.scaler is not None
        if scaled or math.isfinite(norm):
            prepared.optimizer.step()
        skipped = prepared.accelerator.optimizer_step_was_skipped if scaled else not math.isfinite(norm)
        prepared.optimizer.zero_grad()
    scale = prepared.accelerator.scaler.get_scale() if scaled else 1.0
    return StepResult(norm=norm, skipped=skipped, gradients=gradients, scale=scale)


def clip_norm(parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
    """Clip gradients that are all plain, or all DTensors on one mesh. Returns their L2 norm over all ranks."""
    import torch

    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    local: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return local


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by the device mesh that they are distributed over; plain tensors are one group.

    torch's foreach and fused kernels, and its norm, take tensors of one mesh at a time.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def _gradient_dtypes(parameters: Sequence[torch.nn.Parameter]) -> str:
    kinds = {parameter.grad.dtype for parameter in parameters if parameter.grad is not None}
    return "+".join(sorted(map(dtype_name, kinds)))


def loss_scaler(job: Job) -> list[Any]:
    """Return Accelerate's handler with the job's loss scale; none without scaling."""
    from accelerate.utils import GradScalerKwargs

    config = job.train_config
    options = {"init_scale": config.loss_scale, "growth_interval": config.loss_scale_window}
    return [GradScalerKwargs(**options)] if job.precision.scaled else []


def read_counters(prepared: Prepared) -> Counters:
    """Read the optimizer's steps, and the state of torch's GradScaler."""
    scaler = prepared.accelerator.scaler
    steps = steps_of(prepared.optimizer)
    if scaler is None:
        return Counters(steps=steps)
    state = scaler.state_dict()
    return Counters(steps=steps, scale=state["scale"], good_steps=state["_growth_tracker"])


def write_counters(prepared: Prepared, counters: Counters) -> None:
    """Set what `read_counters` returns."""
    scaler = prepared.accelerator.scaler
    set_steps(prepared.optimizer, counters.steps)
    if scaler is not None and counters.scale is not None:
        # torch doubles the scale when the count reaches the interval, and never once it is beyond.
        good = counters.good_steps % scaler.get_growth_interval()
        scaler.load_state_dict({**scaler.state_dict(), "scale": counters.scale, "_growth_tracker": good})
