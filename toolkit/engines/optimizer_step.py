"""An optimizer step: clipped and taken here, once. Every engine has it unless its library steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.core.phases import phase
from toolkit.core.units import dtype_name
from toolkit.engines.gradients import check_gradients
from toolkit.engines.job import Job
from toolkit.engines.records import Counters, Prepared, StepResult
from toolkit.engines.states import local_tensor, set_steps, steps_of

if TYPE_CHECKING:
    import torch


ROW, CAST_ELEMENTS = 1024, 65_536
"""Elements of which squares are added up in fp32, and elements that are copied to fp32 at once."""


class OptimizerStep:
    """The part of an `Engine` from the backward to the optimizer's counters. It calls nothing of the Accelerator's that steps."""

    needs_every_gradient = False
    """Whether each trained parameter needs a gradient in the backward that ends an accumulation."""

    def backward(self, prepared: Prepared, loss: torch.Tensor, last: bool) -> None:
        """Run the backward of a weighted loss; `last` ends the accumulation."""
        accelerator = prepared.accelerator
        if last or not self.needs_every_gradient:  # DDP reduces in the last micro-batch alone
            check_gradients(accelerator, loss)
        (loss if accelerator.scaler is None else accelerator.scaler.scale(loss)).backward()

    def clip(self, parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip gradients in place and return their global L2 norm over all ranks.

        Args:
            parameters: plain ones and DTensors, on any meshes.
            limit: the largest norm; may be infinite.
        """
        import torch

        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = total_norm(gradients)
        scale_gradients(gradients, norm, limit)
        wide = any(gradient.dtype == torch.float64 for gradient in gradients)
        return norm if wide else norm.float()

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

        optimizer: Any = prepared.optimizer
        scaler = prepared.accelerator.scaler
        take = partial(type(optimizer).step, optimizer)  # Accelerate's: a user's own loop has another one on the object
        with phase("step"):
            if scaler is not None:
                scaler.unscale_(optimizer.optimizer)
            parameters = [parameter for parameter in prepared.model.parameters() if parameter.grad is not None]
            norm: Any = self.clip(parameters, prepared.job.train_config.max_grad_norm or math.inf)
            kinds = {parameter.grad.dtype for parameter in parameters}
            if found_inf is None:
                norm = float(norm)
                finite = math.isfinite(norm)
                if scaler is not None or finite:
                    take()
                skipped = optimizer.step_was_skipped if scaler is not None else not finite
            else:
                found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(norm)).to(found_inf.dtype)))
                optimizer.optimizer.found_inf = found_inf  # torch's fused kernels read it (torch/optim/adam.py `step`)
                try:
                    take()
                finally:
                    del optimizer.optimizer.found_inf
                skipped = False
            optimizer.zero_grad()
        scale = 1.0 if scaler is None else scaler.get_scale()
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
        if device.type == "cuda" and getattr(tensor, "device", device).type == "cpu":
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


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of gradients over any meshes. Each element counts once. A collective of these meshes.

    On a CPU it is in fp64, elsewhere in the gradients' dtype, as torch's is.
    """
    import torch

    gradients = list(gradients)
    if any(gradient.device.type != "cpu" for gradient in gradients):
        norms: list[Any] = [torch.nn.utils.get_total_norm(group) for group in by_mesh(gradients)]
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        over_all: torch.Tensor = torch.linalg.vector_norm(torch.stack(whole))
        return over_all
    total = torch.zeros((), dtype=torch.float64)
    for group in by_mesh(gradients):
        mesh = getattr(group[0], "device_mesh", None)
        total += sum(map(_squares, group)) if mesh is None else _squares_over(mesh, group)
    return total.sqrt()


def _squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a CPU tensor's squares, in fp64.

    torch adds a whole tensor's squares in fp32 there: the norm of 33 million elements of uneven size is 1e-4 too low. Rows of
    1,024 elements are within 2e-7.
    """
    import torch

    flat = tensor.detach().reshape(-1)
    dtype = torch.promote_types(flat.dtype, torch.float32)
    pieces = (flat,) if dtype == flat.dtype else torch.split(flat, CAST_ELEMENTS)  # torch copies what is narrower
    total = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        rows = len(piece) // ROW
        total += (
            torch.linalg.vector_norm(piece[: rows * ROW].view(rows, ROW), dim=1, dtype=dtype).double().square().sum()
        )
        total += torch.linalg.vector_norm(piece[rows * ROW :], dtype=dtype).double().square()
    return total


def _squares_over(mesh: Any, gradients: Iterable[Any]) -> torch.Tensor:
    """Return the sum of squares of DTensors over the ranks of their mesh. A collective.

    Ranks may have gradients of different parameters, so what is sent does not follow from them: a sum for each set of dimensions
    that divide a tensor, added up over one dimension of the mesh after the other.
    """
    import torch
    import torch.distributed as dist

    totals = torch.zeros(2**mesh.ndim, dtype=torch.float64)
    for gradient in gradients:
        divided = sum(2**number for number, place in enumerate(gradient.placements) if not place.is_replicate())
        totals[divided] += _squares(local_tensor(gradient))
    for number in range(mesh.ndim):
        those = [each for each in range(len(totals)) if each >> number & 1]
        part = totals[those].to(mesh.device_type)
        dist.all_reduce(part, group=mesh.get_group(number))
        totals[those] = part.cpu()
    return totals.sum()


def scale_gradients(gradients: Iterable[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale gradients in place to a norm of at most `limit`; `norm` is theirs."""
    import torch

    if math.isfinite(limit):
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        if local := [local_tensor(gradient) for gradient in gradients]:
            torch._foreach_mul_(local, factor)


def average_gradients(gradients: Iterable[torch.Tensor], group: Any) -> None:
    """Average gradients in place over the ranks of a group, all at once. A collective."""
    import torch.distributed as dist

    waiting = []
    for gradient in gradients:
        local = local_tensor(gradient).div_(dist.get_world_size(group))
        waiting.append(dist.all_reduce(local, group=group, async_op=True))
    for each in waiting:
        each.wait()


def loss_scaler(job: Job) -> list[Any]:
    """Return Accelerate's handler with the job's loss scale; none without scaling."""
    from accelerate.utils import GradScalerKwargs

    config = job.train_config
    options = {"init_scale": config.loss_scale, "growth_interval": config.loss_scale_window}
    return [GradScalerKwargs(**options)] if job.precision.scaled else []
