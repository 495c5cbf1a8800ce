"""An optimizer step through Accelerate, which every engine has unless its library steps."""

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


class OptimizerStep:
    """The part of an `Engine` from the backward to the optimizer's counters."""

    def backward(self, prepared: Prepared, loss: torch.Tensor, last: bool) -> None:
        """Run the backward of a weighted loss; `last` ends the accumulation.

        Accelerate divides the loss by the accumulation steps, which is undone.
        """
        accelerator = prepared.accelerator
        with phase("backward"):
            accelerator.backward(loss * accelerator.gradient_accumulation_steps)

    def clip(self, parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip gradients in place and return their global L2 norm over all ranks.

        Args:
            parameters: all plain, or all DTensors on one mesh.
            limit: the largest norm; may be infinite.
        """
        import torch

        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        local: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return local

    def steps_on_device(self, prepared: Prepared) -> bool:
        """Return whether `step` takes `found_inf`, so that the host need not wait for the gradients: torch's fused kernels do."""
        fused = all(group.get("fused") for group in prepared.optimizer.param_groups)
        return fused and prepared.accelerator.scaler is None and prepared.job.strategy.offload == "none"

    def step(self, prepared: Prepared, found_inf: torch.Tensor | None = None) -> StepResult:
        """Clip by the global norm over all ranks, then step; a norm that is not finite changes no weight.

        Under fp16 the scaler decides: it skips the step and lowers its scale.

        Args:
            prepared: model and optimizer.
            found_inf: where `steps_on_device`, a number on the device. At 1 the kernels change neither weights nor states nor
                step counts, and a norm that is not finite sets it to 1. The host does not wait.
        """
        import torch

        accelerator, optimizer = prepared.accelerator, prepared.optimizer
        with phase("step"):
            parameters = list(prepared.model.parameters())
            norm = accelerator.clip_grad_norm_(parameters, prepared.job.train_config.max_grad_norm)
            kinds = {parameter.grad.dtype for parameter in parameters if parameter.grad is not None}
            scaled = accelerator.scaler is not None
            if found_inf is None:
                norm = float(norm)
                finite = math.isfinite(norm)
                if scaled or finite:
                    optimizer.step()
                skipped = accelerator.optimizer_step_was_skipped if scaled else not finite
            else:
                found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(norm)).to(found_inf.dtype)))
                inner: Any = optimizer.optimizer  # type: ignore[attr-defined]
                inner.found_inf = found_inf  # torch's fused kernels read it (torch/optim/adam.py `step`)
                try:
                    optimizer.step()
                finally:
                    del inner.found_inf
                skipped = False
            optimizer.zero_grad()
        scale = accelerator.scaler.get_scale() if scaled else 1.0
        gradients = "+".join(sorted(map(dtype_name, kinds)))
        return StepResult(norm=norm, skipped=skipped, gradients=gradients, scale=scale)

    def counters(self, prepared: Prepared) -> Counters:
        """Read the optimizer's steps, and the state of torch's GradScaler."""
        scaler = prepared.accelerator.scaler
        steps = steps_of(prepared.optimizer)
        if scaler is None:
            return Counters(steps=steps)
        state = scaler.state_dict()
        return Counters(steps=steps, scale=state["scale"], good_steps=state["_growth_tracker"])

    def after_restore(self, prepared: Prepared, counters: Counters) -> None:
        """Set the counters and update compute copies, after masters (else parameters) and moments were written."""
        scaler = prepared.accelerator.scaler
        set_steps(prepared.optimizer, counters.steps)
        if scaler is not None and counters.scale is not None:
            # torch doubles the scale when the count reaches the interval, and never once it is beyond.
            good = counters.good_steps % scaler.get_growth_interval()
            scaler.load_state_dict({**scaler.state_dict(), "scale": counters.scale, "_growth_tracker": good})


def to_device(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy a batch to the device, without waiting. A mask without padding is left out: it is a model's default."""

    def copied(tensor: torch.Tensor | int) -> Any:
        if isinstance(tensor, int):  # the longest document: kernels take it from the host
            return tensor
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # the host waits for a copy from pageable memory
        return tensor.to(device, non_blocking=True)

    no_padding = "attention_mask" in batch and bool(batch["attention_mask"].all())
    return {name: copied(tensor) for name, tensor in batch.items() if not (no_padding and name == "attention_mask")}


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by the device mesh that they are distributed over; plain tensors are one group.

    torch's foreach and fused kernels, and its norm, take tensors of one mesh at a time.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def loss_scaler(job: Job) -> list[Any]:
    """Return Accelerate's handler with the job's loss scale; none without scaling."""
    from accelerate.utils import GradScalerKwargs

    config = job.train_config
    options = {"init_scale": config.loss_scale, "growth_interval": config.loss_scale_window}
    return [GradScalerKwargs(**options)] if job.precision.scaled else []
