"""A user's own loop under DeepSpeed: Accelerate lets its engine clip and step in `backward`, and `optimizer.step` does nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import StrategyError
from toolkit.engines.upstream import patched

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from accelerate import Accelerator as Upstream
else:
    Upstream = object


class ZeroLoop(Upstream):  # type: ignore[misc]  # accelerate is untyped
    """What is done otherwise than in `training.own_loop.OwnLoop`, which comes next among the bases of the Accelerator."""

    _took_step: bool | None = None
    """Whether DeepSpeed took a step in the last `backward`; None where none was called since the loop's last step."""
    _rates: Sequence[float] = ()
    """Learning rates of that step."""
    _versions: Mapping[str, int] = {}
    """How often a loop has written each weight."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        defer_pretrained()

    def one_optimizer(self) -> str:
        """Return the sharding: DeepSpeed's engine steps one optimizer."""
        return f"sharding {self.job.strategy.sharding!r}"

    def model_of(self, optimizer: Any) -> Any:
        """Return the engine of an optimizer, which holds other tensors than its model."""
        return next((engine for engine in self._models if engine.optimizer is optimizer.optimizer), None)

    def parameters_of(self, optimizer: Any) -> list[torch.nn.Parameter]:
        """Return the trained parameters of the optimizer's model."""
        return [parameter for parameter in self.model_of(optimizer).parameters() if parameter.requires_grad]

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare as Accelerate does; `backward` then uses the engine of the optimizer that came last."""
        earlier = list(self._optimizers)
        result = super().prepare(*objects, **options)
        if any(hasattr(each, "param_groups") for each in objects):
            # Accelerate keeps the engine that was made first, which may be a teacher's.
            self.deepspeed_engine_wrapped.engine = self.model_of(self._optimizers[-1])
        else:
            # Accelerate takes what gathers a teacher's parameters under ZeRO-3 for an optimizer.
            self._optimizers[:] = earlier
        return result

    def watch(self, model: Any) -> None:
        """Watch the weights, too, and who reads gradients."""
        import torch

        super().watch(model)
        self._check_written()
        model._backward_prologue, taken_class().stepped = _only_in_backward(model, model._backward_prologue), False
        for parameter in model.module.parameters() if self.own_loop else ():
            if type(parameter) is torch.nn.Parameter:
                parameter.__class__ = taken_class()

    def load_state(self, *args: Any, **options: Any) -> None:
        """Load as Accelerate does, which writes the weights."""
        super().load_state(*args, **options)
        self._versions = {}

    def end_training(self) -> None:
        """End as Accelerate does, and end DeepSpeed's state of this process."""
        import torch.distributed as dist

        if dist.is_initialized():
            from deepspeed import comm
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            comm.destroy_process_group()  # DeepSpeed's own references to the groups go with them
            unset_hf_deepspeed_config()  # otherwise the next model is made under ZeRO-3
        super().end_training()

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if steps != self.gradient_accumulation_steps:
            raise StrategyError(
                f"gradient_accumulation_steps = {steps}: DeepSpeed takes the number when the Accelerator is made. Give "
                f"tk.accelerator(train_config=tk.TrainConfig(accumulation={steps}))."
            )

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward, in which DeepSpeed takes the step.

        Raises:
            StrategyError: for a second call before `optimizer.step()` where the first one took a step, and for written weights.
        """
        self._stepping(lambda: super(ZeroLoop, self).backward(loss, **options))

    def run_backwards(self, run: Callable[[], object], optimizer: Any) -> None:
        """Run all backwards of a step, and let DeepSpeed take it."""

        def run_and_step() -> None:
            super(ZeroLoop, self).run_backwards(run, optimizer)
            self.model_of(optimizer).step()

        self._stepping(run_and_step)

    def _stepping(self, run: Callable[[], object]) -> None:
        if self._took_step and self.sync_gradients:
            raise StrategyError(
                "accelerator.backward was called twice before optimizer.step(), and DeepSpeed took a step in the first call. "
                "Give tk.TrainConfig(accumulation=…), and write `with accelerator.accumulate(model):` around each micro-batch."
            )
        self._check_written()
        taken_class().stepped = False
        run()
        norm = self.clip(self._optimizers[0])
        # A step that DeepSpeed skipped for its norm is no step, and the loop may leave `step` out.
        finite = norm is None or math.isfinite(norm)
        self._took_step = taken_class().stepped = self.own_loop and self.sync_gradients and finite
        self._rates, self._versions = self._rates_now(), {}
        self._check_written()  # DeepSpeed's own writes count in a single parameter

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `backward` takes no step."""
        return patched(self.gradient_state, sync_gradients=False)

    def clip_together(self, parameters: Sequence[torch.Tensor], limit: float) -> Any:
        """Refuse a limit that is not the job's: the step was taken in `backward`."""
        if math.isfinite(limit):
            raise StrategyError(
                f"clip_grad_norm_ got max_norm {limit:g}, and DeepSpeed has stepped already, without a limit. Give "
                f"tk.TrainConfig(max_grad_norm={limit:g})."
            )
        return self.clip_all(parameters)

    def clip(self, optimizer: Any) -> torch.Tensor | None:
        """Return the norm of the step in `backward` before clipping; None before the first step."""
        import torch

        norm = self.model_of(optimizer).get_global_grad_norm()
        # -1: an overflow
        return None if norm is None else torch.tensor(float(norm) if norm >= 0 else math.inf, device=self.device)

    def check_step(self, norm: torch.Tensor | None) -> None:
        """Refuse a step without `accelerator.backward`, with which nothing would be trained, and one that is not finite."""
        if self._took_step is None:
            raise StrategyError(
                f"optimizer.step() came without accelerator.backward(loss), and sharding {self.job.strategy.sharding!r} trains "
                "nothing after loss.backward(). Write accelerator.backward(loss)."
            )
        if self._took_step and (rates := self._rates_now()) != self._rates:
            raise StrategyError(
                f"the learning rates {rates} were set after accelerator.backward, in which DeepSpeed has stepped with "
                f"{self._rates}. Set them before accelerator.backward, or after optimizer.step()."
            )
        self._took_step = taken_class().stepped = None
        super().check_step(norm)

    def _rates_now(self) -> list[float]:
        return [group["lr"] for group in self._optimizers[0].param_groups]

    def _check_written(self) -> None:
        """Refuse weights that the loop has written: DeepSpeed steps its masters, and copies them over the weights."""
        model = self.unwrap_model(self.model_of(self._optimizers[0]))
        versions = {name: parameter._version for name, parameter in model.named_parameters()}
        before, self._versions = self._versions, versions
        if changed := [name for name in versions if versions[name] != before.get(name, versions[name])]:
            raise StrategyError(
                f"{changed[0]} was written after prepare, and sharding {self.job.strategy.sharding!r} would write over it: it "
                "steps masters of its own. Write weights before prepare, load them with accelerator.load_state, or choose sharding "
                "'ddp' or 'fsdp'."
            )


@cache
def taken_class() -> Any:
    """Return the class of parameters with gradients that nobody may read or change after the backward that stepped."""
    import torch

    slot: Any = torch.Tensor.grad

    def grad(parameter: Any) -> Any:
        if taken.stepped:
            raise StrategyError(
                "a gradient was read after accelerator.backward, in which DeepSpeed has stepped: it has none any more, and a "
                "change would be lost. Clip with accelerator.clip_grad_norm_, change gradients in a hook (p.register_hook), or "
                "choose sharding 'ddp' or 'fsdp'."
            )
        return slot.__get__(parameter)

    # `stepped`: until the loop's `optimizer.step()`.
    taken: Any = type("Parameter", (torch.nn.Parameter,), {"stepped": False, "grad": property(grad, slot.__set__)})
    return taken


def _only_in_backward(engine: Any, upstream: Callable[[], None]) -> Callable[[], None]:
    """Return DeepSpeed's beginning of a backward, which refuses one that is not `accelerator.backward`'s."""

    def prologue() -> None:
        if not engine._running_engine_backward:
            raise StrategyError(
                "loss.backward() or torch.autograd.grad goes through the model, and DeepSpeed would reduce gradients in it. Write "
                "accelerator.backward(loss). Gradient penalties need sharding 'none' or 'ddp'."
            )
        upstream()

    return prologue


@cache
def defer_pretrained() -> None:
    """Let models that a script reads under ZeRO-3 have shapes and values until `prepare`, as those of `toolkit.load` have."""
    from accelerate.state import AcceleratorState
    from transformers import PreTrainedModel

    upstream: Any = PreTrainedModel.from_pretrained

    @wraps(upstream)
    def read(cls: Any, *args: Any, **options: Any) -> Any:
        result = upstream.__func__(cls, *args, **options)
        for owner in AcceleratorState._shared_state.get("owners", ()) if isinstance(result, PreTrainedModel) else ():
            if isinstance(owner, ZeroLoop) and not owner.ended:
                owner.job.engine.defer_values(owner.job, result)
        return result

    setattr(PreTrainedModel, "from_pretrained", classmethod(read))  # noqa: B010
