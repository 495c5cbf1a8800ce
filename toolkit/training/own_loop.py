"""A user's own loop: its Accelerator accumulates, clips and checks alike on every engine. No engine calls anything here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from toolkit.core.errors import NotFinite, StrategyError, StrategyMismatch
from toolkit.engines.gradients import check_gradients, watch_gradients
from toolkit.engines.job import Job
from toolkit.training.model_checks import check_hooks
from toolkit.training.run_log import begin, count_step

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator as Upstream
else:
    Upstream = object  # importing this module imports no accelerate


class OwnLoop(Upstream):  # type: ignore[misc]  # accelerate is untyped
    """Backward, clipping and step of prepared models and optimizers. A library that steps has `Engine.own_loop`."""

    def __init__(self, job: Job, **options: Any) -> None:
        self.job = job
        self.own_loop = True
        """A user's loop: prepared weights are compared with the module's, and a line says what differs from Accelerate."""
        self.prepared: WeakSet[torch.nn.Module] = WeakSet()
        """Results of `prepare`; of DDP `_models` has the modules inside."""
        self._norms: dict[int, torch.Tensor] = {}
        """Optimizer id → norm of its gradients before clipping; empty until they are clipped."""
        self.rows_compared = False
        """Ranks that share one data-parallel rank gave the same rows in a first step (`forward_backward`)."""
        self._unscaled = False
        """fp16's scaler has unscaled the gradients of this step."""
        super().__init__(**options)

    def one_optimizer(self) -> str:
        """Return the choice under which one optimizer alone can step; empty where several can."""
        return f"precision {self.job.strategy.precision!r}" if self.scaler is not None else ""

    def model_of(self, optimizer: Any) -> Any:
        """Return the prepared model of an optimizer; None for another's parameters."""
        ids = {id(parameter) for parameter in self.parameters_of(optimizer)}
        return next((model for model in self.prepared if any(id(p) in ids for p in model.parameters())), None)

    def parameters_of(self, optimizer: Any) -> list[torch.nn.Parameter]:
        """Return the trained parameters that an optimizer steps."""
        parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def watch(self, model: Any) -> None:
        """Watch which parameters of a prepared model get gradients."""
        watch_gradients(self.job, model)

    def clip_before_step(self, optimizer: Any) -> None:
        """Replace a prepared optimizer's `step` by one that clips first.

        torch's step hooks run after fp16's scaler, which leaves a fused optimizer's gradients scaled. The new `step` is a
        bound method because torch's schedulers wrap an optimizer's `step`, too, and read its `__func__`.
        """
        upstream: Callable[..., Any] = optimizer.step

        def step(optimizer: Any, closure: Any = None) -> None:
            if closure is not None:
                raise StrategyError(
                    "optimizer.step got a closure: its gradients can be neither clipped nor checked before the step. "
                    "Call accelerator.backward(loss), then optimizer.step() without a closure."
                )
            if not self.sync_gradients:  # Accelerate's step does nothing, either
                upstream()
                return
            self._before_step(optimizer)
            upstream()
            self._norms.pop(id(optimizer), None)
            self._unscaled = False
            if optimizer is self._optimizers[0]:
                count_step()

        optimizer.step = MethodType(step, optimizer)
        begin()

    def _before_step(self, optimizer: Any) -> None:
        """Refuse hooks and rates that the step would not follow; clip, and refuse a norm that is not finite."""
        check_hooks(self.job, self.model_of(optimizer))  # FSDP has its shards back
        for scheduler in self._schedulers if len(self._optimizers) == 1 else ():
            check_rates(optimizer, scheduler.scheduler)
        self.check_step(self.clip(optimizer))

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward as Accelerate does: the loss is divided by `TrainConfig.accumulation`.

        Raises:
            StrategyError: for a parameter without a gradient that would be trained otherwise than in one process.
        """
        # DDP reduces in the last micro-batch alone.
        if self.sync_gradients or not self.job.engine.needs_every_gradient:
            check_gradients(self, loss)
        self._norms.clear()
        self._unscaled = False
        super().backward(loss, **options)

    def run_backwards(self, run: Callable[[], object], optimizer: Any) -> None:
        """Run all backwards of a step (`forward_backward`). Gradients of another call before `optimizer.step()` are added."""
        self._norms.clear()
        self._unscaled = False
        run()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale once a step; `step` unscales what the loop has not."""
        if self.sync_gradients and not self._unscaled:
            super().unscale_gradients(optimizer)
            self._unscaled = self.own_loop

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip to `TrainConfig.max_grad_norm`, as `step` otherwise does. In a micro-batch that only accumulates it does nothing.

        Where the job clips at 0, these parameters are clipped together to `max_norm`, as in Accelerate.

        Returns:
            The global L2 norm before clipping, over all ranks and all optimizers of these parameters. None in a
            micro-batch that only accumulates.

        Raises:
            StrategyError: for another norm than the job's, and then for a part of the parameters.
        """
        import torch

        max_norm, limit = float(max_norm), self.job.train_config.max_grad_norm
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if float(norm_type) != 2 or (limit and max_norm != limit):
            clips = f"the job clips the L2 norm at {limit:g}" if limit else "the L2 norm is clipped"
            raise StrategyError(
                f"clip_grad_norm_ got max_norm {max_norm:g} (norm_type {float(norm_type):g}), and {clips} on every engine. Give "
                f"tk.TrainConfig(max_grad_norm={max_norm:g}){f', or call it with {limit:g}' if limit else ''}."
            )
        return self.clip_all(parameters) if limit else self.clip_together(parameters, max_norm or math.inf)

    def clip_all(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Clip the gradients of each optimizer of these parameters at the job's limit. Refuse a part of them."""
        import torch

        ids = set(map(id, parameters))
        owners = {optimizer: {id(p) for p in self.parameters_of(optimizer)} for optimizer in self._optimizers}
        selection = {optimizer: own for optimizer, own in owners.items() if own & ids} or owners
        every = set().union(*selection.values())
        if not every or every - ids:
            raise StrategyError(
                f"clip_grad_norm_ got {len(every & ids)} of {len(every)} trained parameters, and the norm is that of all "
                "that an optimizer steps. Give model.parameters() of the prepared model."
            )
        norms = [norm for each in selection if self.sync_gradients and (norm := self.clip(each)) is not None]
        return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else next(iter(norms), None)

    def clip_together(self, parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor | None:
        """Clip the gradients of these parameters together. fp16's scaler unscales them once a step."""
        if self.scaler is not None and not self.sync_gradients:
            return None
        self.unscale_gradients()
        norm, ids = self.job.engine.clip(parameters, limit), set(map(id, parameters))
        for optimizer in self._optimizers:
            if ids.issuperset(map(id, self.parameters_of(optimizer))):
                self._norms[id(optimizer)] = norm
        return norm

    def clip(self, optimizer: Any) -> torch.Tensor | None:
        """Clip the gradients that an optimizer steps with, once a step.

        Returns:
            Their norm before; None for sparse gradients without a limit.
        """
        # Outside of a user's loop an engine from elsewhere may clip by this; it calls it once a step.
        if not self.own_loop or id(optimizer) not in self._norms:
            self.unscale_gradients()
            parameters, limit = self.parameters_of(optimizer), self.job.train_config.max_grad_norm
            if not limit and any(each.grad is not None and each.grad.is_sparse for each in parameters):
                return None
            self._norms[id(optimizer)] = self.job.engine.clip(parameters, limit or math.inf)
        return self._norms[id(optimizer)]

    def check_step(self, norm: torch.Tensor | None) -> None:
        """Refuse a step with a norm that is not finite. Under fp16 the scaler skips it."""
        if norm is not None and not (self.job.precision.scaled or math.isfinite(norm)):
            raise NotFinite(
                f"the gradient norm is {norm:g}, and the step was not taken. Weights are those of the step before. "
                "Look at this step's batches, or lower the learning rate."
            )

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> NoReturn:
        """Refuse: the sharding engines cannot clip by value.

        Raises:
            StrategyError: on every engine.
        """
        raise StrategyError(
            f"clip_grad_value_ got clip_value {float(clip_value):g}: DeepSpeed and FSDP cannot clip single values. "
            "Give tk.TrainConfig(max_grad_norm=…), which clips the L2 norm on every engine."
        )


def check_rates(optimizer: Any, scheduler: Any) -> None:
    """Compare the rates that an optimizer steps with and those that a scheduler has set."""
    owner, rates = getattr(scheduler, "optimizer", None), [group["lr"] for group in optimizer.param_groups]
    if owner is not None and rates != (own := [group["lr"] for group in owner.param_groups]):
        raise StrategyMismatch(
            f"the optimizer steps with the learning rates {rates}, and its scheduler has set {own}. Make the "
            "scheduler from the optimizer that is prepared."
        )
