"""Optimizer steps of an `accelerate.Accelerator`: accumulated, clipped and checked alike on every engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from toolkit.core.errors import NotFinite, StrategyError, StrategyMismatch
from toolkit.engines.gradients import check_gradients
from toolkit.engines.job import Job
from toolkit.engines.upstream import patched
from toolkit.training.run_log import begin, count_step

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator as Upstream
else:
    Upstream = object  # importing this module imports no accelerate


class UniformSteps(Upstream):  # type: ignore[misc]  # accelerate is untyped
    """Backward, clipping and step of prepared models and optimizers."""

    def __init__(self, job: Job, **options: Any) -> None:
        self.job = job
        self.own_loop = True
        """A user's loop: prepared weights are compared with the module's, and a line says what differs from Accelerate."""
        self.prepared: WeakSet[torch.nn.Module] = WeakSet()
        """Results of `prepare`; of DDP `_models` has the modules inside."""
        self._norms: dict[int, torch.Tensor] = {}
        """Optimizer id → norm of its gradients before clipping; empty until they are clipped."""
        self._unscaled = False
        """fp16's scaler has unscaled the gradients of this step."""
        self._took_step: bool | None = None
        """Whether DeepSpeed took a step in the last `backward`; None where none was called since the loop's last step."""
        self._versions: dict[str, int] = {}
        """How often a loop under DeepSpeed has written each weight."""
        super().__init__(**options)

    @property
    def _deepspeed(self) -> bool:
        return self.job.engine.steps_in_backward

    def _model_of(self, optimizer: Any) -> Any:
        """Return the prepared model of an optimizer. DeepSpeed's optimizer holds other tensors than its model."""
        if self._deepspeed:
            return next((engine for engine in self._models if engine.optimizer is optimizer.optimizer), None)
        ids = {id(parameter) for parameter in self._parameters_of(optimizer)}
        return next((model for model in self.prepared if any(id(p) in ids for p in model.parameters())), None)

    def _parameters_of(self, optimizer: Any) -> list[torch.nn.Parameter]:
        """Return the trained parameters that an optimizer steps."""
        if self._deepspeed:
            parameters = self._model_of(optimizer).parameters()
        else:
            parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _clip_before_step(self, optimizer: Any) -> None:
        """Replace an optimizer's `step` by one that clips first.

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
            if self.sync_gradients:
                self._check_rates(optimizer)
                self._check_backward()
                self._check_finite(self._clip(optimizer))
            upstream()
            if self.sync_gradients:
                self._norms.pop(id(optimizer), None)
                self._unscaled = False
                if self.own_loop and optimizer is self._optimizers[0]:
                    count_step()

        optimizer.step = MethodType(step, optimizer)
        begin()

    def _check_written(self) -> None:
        """Refuse weights that the loop has written: DeepSpeed steps its masters, and copies them over the weights."""
        if not (self._deepspeed and self.own_loop):
            return
        model = self.unwrap_model(self._model_of(self._optimizers[0]))
        versions = {name: parameter._version for name, parameter in model.named_parameters()}
        before, self._versions = self._versions, versions
        if changed := [name for name in versions if versions[name] != before.get(name, versions[name])]:
            raise StrategyError(
                f"{changed[0]} was written after prepare, and sharding {self.job.strategy.sharding!r} would write over it: it "
                "steps masters of its own. Write weights before prepare, load them with accelerator.load_state, or choose sharding "
                "'ddp' or 'fsdp'."
            )

    def _check_backward(self) -> None:
        """Refuse a step without `accelerator.backward`, with which nothing would be trained under DeepSpeed."""
        if self._deepspeed and self._took_step is None:
            raise StrategyError(
                f"optimizer.step() came without accelerator.backward(loss), and sharding {self.job.strategy.sharding!r} trains "
                "nothing after loss.backward(). Write accelerator.backward(loss)."
            )
        self._took_step = None

    def _check_rates(self, optimizer: Any) -> None:
        """Compare the rates that an optimizer steps with and those that its prepared scheduler has set."""
        rates = [group["lr"] for group in optimizer.param_groups]
        for scheduler in self._schedulers if len(self._optimizers) == 1 else ():
            owner = getattr(scheduler.scheduler, "optimizer", None)
            if owner is not None and rates != (own := [group["lr"] for group in owner.param_groups]):
                raise StrategyMismatch(
                    f"the optimizer steps with the learning rates {rates}, and its scheduler has set {own}. Make the "
                    "scheduler from the optimizer that is prepared."
                )

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return int(super().gradient_accumulation_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if self._deepspeed and steps != self.gradient_accumulation_steps:
            raise StrategyError(
                f"gradient_accumulation_steps = {steps}: DeepSpeed takes the number when the Accelerator is made. Give "
                f"tk.accelerator(train_config=tk.TrainConfig(accumulation={steps}))."
            )
        self.gradient_state.plugin_kwargs["num_steps"] = steps

    # The loop ---------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward as Accelerate does: the loss is divided by `TrainConfig.accumulation`.

        Raises:
            StrategyError: for a second call before `optimizer.step()` where DeepSpeed has taken a step in the first, and for a
                parameter without a gradient that would be trained otherwise than in one process.
        """
        if self._took_step and self.sync_gradients:
            raise StrategyError(
                "accelerator.backward was called twice before optimizer.step(), and DeepSpeed took a step in the first call. "
                "Give tk.TrainConfig(accumulation=…), and write `with accelerator.accumulate(model):` around each micro-batch."
            )
        # DDP reduces in the last micro-batch alone.
        if self.sync_gradients or not self.job.engine.needs_every_gradient:
            check_gradients(self, loss)
        self._check_written()
        self._norms.clear()
        self._unscaled = False
        super().backward(loss, **options)
        # A step that DeepSpeed skipped for its norm is no step, and the loop may leave `step` out.
        self._took_step = self._deepspeed and self.sync_gradients and _is_finite(self._clip(self._optimizers[0]))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale once a step; `step` unscales what the loop has not."""
        if self.sync_gradients and not self._unscaled:
            super().unscale_gradients(optimizer)
            self._unscaled = True

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip to `TrainConfig.max_grad_norm`, as `step` otherwise does. In a micro-batch that only accumulates it does nothing.

        Where the job clips at 0, these parameters are clipped together to `max_norm`, as in Accelerate; DeepSpeed, which has
        stepped in `backward`, refuses.

        Returns:
            The global L2 norm before clipping, over all ranks and all optimizers of these parameters. None in a
            micro-batch that only accumulates.

        Raises:
            StrategyError: for another norm than the job's, and then for a part of the parameters.
        """
        import torch

        max_norm, limit = float(max_norm), self.job.train_config.max_grad_norm
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not limit and not self._deepspeed and float(norm_type) == 2:
            return self._clip_given(parameters, max_norm or math.inf)
        ids = set(map(id, parameters))
        if max_norm not in (limit, limit or math.inf) or float(norm_type) != 2:
            clips = (
                f"the job clips the L2 norm at {limit:g} on every engine" if limit else "DeepSpeed has stepped already"
            )
            raise StrategyError(
                f"clip_grad_norm_ got max_norm {max_norm:g} (norm_type {float(norm_type):g}), and {clips}. Give "
                f"tk.TrainConfig(max_grad_norm={max_norm:g}){f', or call it with {limit:g}' if limit else ''}."
            )
        owners = {optimizer: {id(p) for p in self._parameters_of(optimizer)} for optimizer in self._optimizers}
        selection = {optimizer: own for optimizer, own in owners.items() if own & ids} or owners
        every = set().union(*selection.values())
        if not every or every - ids:
            raise StrategyError(
                f"clip_grad_norm_ got {len(every & ids)} of {len(every)} trained parameters, and the norm is that of all "
                "that an optimizer steps. Give model.parameters() of the prepared model."
            )
        if not self.sync_gradients:
            return None
        norms = [norm for optimizer in selection if (norm := self._clip(optimizer)) is not None]
        if len(norms) < 2:
            return norms[0] if norms else None
        together: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return together

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> NoReturn:
        """Refuse: the sharding engines cannot clip by value.

        Raises:
            StrategyError: on every engine.
        """
        raise StrategyError(
            f"clip_grad_value_ got clip_value {float(clip_value):g}: DeepSpeed and FSDP cannot clip single values. "
            "Give tk.TrainConfig(max_grad_norm=…), which clips the L2 norm on every engine."
        )

    def _clip_given(self, parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor | None:
        """Clip the gradients of these parameters together. fp16's scaler unscales them once a step."""
        if self.scaler is not None and not self.sync_gradients:
            return None
        self.unscale_gradients()
        norm, ids = self.job.engine.clip(parameters, limit), set(map(id, parameters))
        for optimizer in self._optimizers:
            if ids.issuperset(map(id, self._parameters_of(optimizer))):
                self._norms[id(optimizer)] = norm
        return norm

    def _clip(self, optimizer: Any) -> torch.Tensor | None:
        """Clip the gradients that an optimizer steps with, once a step. DeepSpeed has done it in `backward`.

        Returns:
            Their norm before; None where it is not known: DeepSpeed's before the first step, and that of sparse gradients
            without a limit.
        """
        import torch

        if self._deepspeed:
            norm = self._model_of(optimizer).get_global_grad_norm()
            # -1: an overflow
            return None if norm is None else torch.tensor(float(norm) if norm >= 0 else math.inf, device=self.device)
        if id(optimizer) not in self._norms:
            self.unscale_gradients()
            parameters, limit = self._parameters_of(optimizer), self.job.train_config.max_grad_norm
            if not limit and any(each.grad is not None and each.grad.is_sparse for each in parameters):
                return None
            self._norms[id(optimizer)] = self.job.engine.clip(parameters, limit or math.inf)
        return self._norms[id(optimizer)]

    def _check_finite(self, norm: torch.Tensor | None) -> None:
        """Check a norm. Under fp16 the scaler skips the step, and in the toolkit's own loop the device does."""
        on_device = any(hasattr(optimizer.optimizer, "found_inf") for optimizer in self._optimizers)
        if not (self.job.precision.scaled or on_device or _is_finite(norm)):
            raise NotFinite(
                f"the gradient norm is {norm:g}, and the step was not taken. Weights are those of the step before. "
                "Look at this step's batches, or lower the learning rate."
            )

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return Accelerate's context. Under DeepSpeed a `backward` within it takes no step."""
        context: Any = patched(self.gradient_state, sync_gradients=False) if self._deepspeed else super().no_sync(model)
        return context  # type: ignore[no-any-return]


def _is_finite(norm: torch.Tensor | None) -> bool:
    """Return whether a norm is finite; an unknown one counts as finite."""
    return norm is None or math.isfinite(norm)
