"""The `accelerate.Accelerator` of a job: a user's own loop means the same on every engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from toolkit.core.errors import NotFinite, RunError, StrategyError, StrategyMismatch, ToolkitError
from toolkit.core.phases import phase
from toolkit.core.process_lifecycle import freed_at_once
from toolkit.engines.adapters import keep_packing
from toolkit.engines.base import engine_environment, engine_of
from toolkit.engines.gradients import check_gradients, watch_gradients
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared
from toolkit.engines.upstream import patched
from toolkit.exporters.state_dict import whole_state_dict
from toolkit.training import epoch_order
from toolkit.training.given_weights import GivenWeights
from toolkit.training.model_checks import (
    check_adapter,
    check_copies,
    check_divisible,
    check_optimizers,
    check_uniform,
)
from toolkit.training.model_methods import checkpoint_in_training_only, gather_in_methods, refuse_parts
from toolkit.training.preparation import (
    audit,
    broadcast_buffers,
    check_pair,
    models_and_optimizers,
    restore_masters,
    share_statistics,
    unlike_spec,
)
from toolkit.training.run_log import count_step

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator as Upstream
else:
    Upstream = object  # importing this module imports no accelerate


@cache
def accelerator_class() -> Any:
    """Return Accelerate's Accelerator with the methods of `UniformLoop`."""
    import accelerate

    return type("Accelerator", (UniformLoop, accelerate.Accelerator), {})


class UniformLoop(Upstream):  # type: ignore[misc]  # accelerate is untyped
    """Accumulation, clipping and the audit follow the job on every engine. Everything else is Accelerate's.

    - The gradient is the mean over `TrainConfig.accumulation` micro-batches. A loader's incomplete rest is one step too, and
      its sum is divided by `accumulation`, as Accelerate does.
    - A prepared optimizer's `step` clips the norm of all gradients that it steps with to `TrainConfig.max_grad_norm` once, with
      and without a call of `clip_grad_norm_`, and takes no step where the norm is not finite. At 0, as without a TrainConfig,
      it clips where the loop calls `clip_grad_norm_`.
    - A prepared scheduler steps as Accelerate's: once for every rank, and neither in a micro-batch that only accumulates nor
      after a step that was skipped. A line says so.
    - Every rank gets rank 0's buffers.
    - `prepare` raises `StrategyMismatch` where its result differs from the request.
    """

    def __init__(self, job: Job, timeout: timedelta | None = None, **options: Any) -> None:
        from accelerate.state import AcceleratorState
        from accelerate.utils import GradientAccumulationPlugin

        self.job = job
        self.ended = False
        self.from_checkpoint: WeakSet[torch.nn.Module] = WeakSet()
        """Models with the checkpoint's values. `prepare` makes their fp32 masters exact."""
        self.unlike_spec: str | None = None
        """The difference of the prepared model from the job's spec."""
        self.own_loop = True
        """A user's loop: prepared weights are compared with the module's, and a line says what differs from Accelerate."""
        self._given: WeakKeyDictionary[torch.nn.Module, GivenWeights] = WeakKeyDictionary()
        self._prepared: WeakSet[torch.nn.Module] = WeakSet()
        self.sharded: dict[torch.nn.Module, Prepared] = {}
        """Unwrapped models of which each rank holds parts."""
        self._norms: dict[int, torch.Tensor] = {}
        """Optimizer id → norm of its gradients before clipping; empty until they are clipped."""
        self._unscaled = False
        """fp16's scaler has unscaled the gradients of this step."""
        self._took_step = False
        """DeepSpeed took a step in `backward`, and the loop has not called `step` since."""
        self._versions: dict[str, int] = {}
        """How often a loop under DeepSpeed has written each weight."""
        self._has_gradients = False
        """The loop called `backward` since the last step."""
        with engine_environment(job):
            super().__init__(
                **engine_of(job.strategy).accelerator_kwargs(job, timeout),
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=job.train_config.accumulation,
                    sync_each_batch=engine_of(job.strategy).sync_each_batch,
                ),
                **options,
            )
        AcceleratorState._shared_state.setdefault("owners", WeakSet()).add(self)
        self.register_save_state_pre_hook(self._save_orders)
        self.register_load_state_pre_hook(self._load_orders)

    def _save_orders(self, models: list[Any], weights: list[Any], folder: str) -> None:
        epoch_order.save(self._dataloaders, folder, self.process_index)

    def _load_orders(self, models: list[Any], folder: str) -> None:
        if not epoch_order.load(self._dataloaders, folder, self.process_index):
            self.print(
                f"load_state: {folder} has no order of rows. An epoch that is resumed in its middle sees other rows."
            )

    def prepare_data_loader(self, *args: Any, **options: Any) -> Any:
        """Prepare as Accelerate does. `save_state` saves what the order of the rows is drawn from."""
        loader = super().prepare_data_loader(*args, **options)
        if name := epoch_order.follow(loader):
            self.print(
                f"prepare: {name} has no torch.Generator as `generator`, and no `set_epoch`. An epoch that is resumed in its "
                "middle sees the same rows only where their order is drawn before its first row."
            )
        return loader

    @property
    def _deepspeed(self) -> bool:
        return engine_of(self.job.strategy).steps_in_backward

    def end_training(self) -> None:
        """End as Accelerate does. Afterwards this process can make another Accelerator."""
        import torch.distributed as dist

        if self._deepspeed and dist.is_initialized():
            from deepspeed import comm
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            comm.destroy_process_group()  # DeepSpeed's own references to the groups go with them
            unset_hf_deepspeed_config()  # otherwise the next model is made under ZeRO-3
        super().end_training()
        self.ended = True

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does; then restore exact fp32 masters of a model of `toolkit.load()`, and audit.

        Raises:
            StrategyError: for a second optimizer under DeepSpeed and fp16.
            StrategyMismatch: where the engine, the world size, bytes, dtypes or tied weights differ from the request.
        """
        models, optimizers = models_and_optimizers(objects)
        self._check(models, optimizers)
        for model in models:
            self._before_prepare(model)
            if optimizers or not engine_of(self.job.strategy).prepares_pair:
                self._given[model] = GivenWeights(self.job, model, hashed=self.own_loop)
        with phase("prepare"), engine_environment(self.job), freed_at_once():
            result = self._prepare_upstream(objects, models, optimizers, device_placement)
            self._prepared.update(models_and_optimizers(result)[0])
            prepared = self._completed_by(result)
            for model in models_and_optimizers(result)[0]:
                refuse_parts(self.unwrap_model(model))
            # Of several optimizers the first one completes the model.
            given = self._given.pop(self.unwrap_model(prepared.model), None) if prepared is not None else None
            if prepared is not None and given is not None:
                gather_in_methods(prepared, self.sharded)
                from_checkpoint = any(model in self.from_checkpoint for model in models)
                restore_masters(prepared, given, from_checkpoint=from_checkpoint)
                if from_checkpoint:
                    engine_of(self.job.strategy).after_prepare(prepared)
                self.unlike_spec = unlike_spec(self.job, given.shapes)
                if self.unlike_spec:
                    self.print(f"prepare: bytes and dtypes were not compared, since {self.unlike_spec}")
                audit(prepared)
                given.check(prepared)
                self._check_written()
                watch_gradients(self.job, prepared.model)
                if not engine_of(self.job.strategy).broadcasts_buffers and self.num_processes > 1:
                    share_statistics(prepared.model)
                if not engine_of(self.job.strategy).model_no_sync:
                    prepared.model.no_sync = partial(_refuse_no_sync, self.job.strategy.sharding)
        return result

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return Accelerate's state dict; where each rank holds parts, rank 0 gets whole tensors, as `save` writes them.

        A collective there. The other ranks get an empty dict.
        """
        prepared = self.sharded.get(self.unwrap_model(model))
        return whole_state_dict(prepared, "get_state_dict") if prepared else super().get_state_dict(model, unwrap)

    def _check(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """Refuse half a pair, and a second optimizer under DeepSpeed and under fp16, where only one can step."""
        engine, strategy = engine_of(self.job.strategy), self.job.strategy
        if engine.prepares_pair and (optimizers or engine.needs_optimizer):
            check_pair(models, optimizers)
        new = [item for item in optimizers if item not in self._optimizers]
        count = len(self._optimizers) + len(new)
        check_optimizers(self.job, models, optimizers)
        if new and count > 1 and (self._deepspeed or self.scaler is not None):
            what = f"sharding {strategy.sharding!r}" if self._deepspeed else f"precision {strategy.precision!r}"
            raise StrategyError(
                f"prepare got {count} optimizers in all, and {what} can step one. Give one optimizer with several parameter "
                "groups, or choose sharding 'ddp' or 'fsdp' in precision 'bf16' or 'fp32', each model with its optimizer in a "
                "call of prepare of its own."
            )

    def _before_prepare(self, model: torch.nn.Module) -> None:
        engine = engine_of(self.job.strategy)
        check_adapter(self.job.strategy, model)
        check_uniform(self.job, model)
        check_divisible(self.job, model)
        check_copies(model)
        engine.before_prepare(self.job, model)
        checkpoint_in_training_only(model)
        keep_packing(model)  # a user's own may be quantized, too
        if not engine.broadcasts_buffers and self.num_processes > 1:
            broadcast_buffers(model)

    def _prepare_upstream(
        self, objects: Sequence[Any], models: Sequence[Any], optimizers: Sequence[Any], placement: list[bool] | None
    ) -> Any:
        """Call Accelerate's `prepare`; set up the optimizers and schedulers that it adds."""
        earlier, schedulers = list(self._optimizers), len(self._schedulers)
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(engine_of(self.job.strategy).preparing(self.job, model))
            result = super().prepare(*objects, device_placement=placement)
        for optimizer in self._optimizers:
            if optimizer not in earlier:
                self._clip_before_step(optimizer)
        if self.num_processes > 1 and self.step_scheduler_with_optimizer and len(self._schedulers) > schedulers:
            self.print(
                f"prepare: the scheduler takes {self.num_processes} steps an optimizer step, one for every rank, as in Accelerate. "
                "tk.accelerator(step_scheduler_with_optimizer=False) leaves all its steps to the loop."
            )
        limit = self.job.train_config.max_grad_norm
        if self.own_loop and limit and len(self._optimizers) > len(earlier):
            self.print(
                f"prepare: each step clips the gradient norm at {limit:g}, with and without clip_grad_norm_. "
                "tk.TrainConfig(max_grad_norm=0) clips nothing."
            )
        if self._deepspeed and optimizers:
            # `backward` uses the engine that was made first, which may be a teacher's.
            self.deepspeed_engine_wrapped.engine = self._model_of(self._optimizers[-1])
        elif self._deepspeed:
            # Accelerate takes what gathers a teacher's parameters under ZeRO-3 for an optimizer.
            self._optimizers[:] = [item for item in self._optimizers if item in earlier]
        return result

    def _completed_by(self, result: Any) -> Prepared | None:
        """Return the model and optimizer that this call completes: DDP accepts them in separate calls, too."""
        if not self._optimizers or not self._prepared:
            return None
        optimizer = self._optimizers[-1]
        model = self._model_of(optimizer)
        models, optimizers = models_and_optimizers(result)
        complete = model is not None and (model in models or optimizer in optimizers)
        return Prepared(self.job, model, optimizer, self) if complete else None

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare as Accelerate does. A model distributed while loading gets autocast, and no DDP around it."""
        unwrapped = evaluation_mode or not engine_of(self.job.strategy).wraps_model
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=unwrapped)

    def _model_of(self, optimizer: Any) -> Any:
        """Return the prepared model of an optimizer. DeepSpeed's optimizer holds other tensors than its model."""
        if self._deepspeed:
            return next((engine for engine in self._models if engine.optimizer is optimizer.optimizer), None)
        ids = {id(parameter) for parameter in self._parameters_of(optimizer)}
        return next((model for model in self._prepared if any(id(p) in ids for p in model.parameters())), None)

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
                self._unscaled = self._took_step = False
                if self.own_loop and optimizer is self._optimizers[0]:
                    count_step()

        optimizer.step = MethodType(step, optimizer)

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Load as Accelerate does.

        Raises:
            RunError: for a folder that cannot be loaded under this sharding.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            super().load_state(input_dir, *args, **options)
        except ToolkitError:
            raise
        except (Exception, CheckpointException) as error:  # whatever an engine's reader raises for another one's files
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise RunError(
                f"load_state cannot load {input_dir or 'the last state'} under sharding {self.job.strategy.sharding!r}: "
                f"{reason[:200]}. What save_state wrote loads under the same sharding and model alone; toolkit export makes a "
                "model of it."
            ) from error
        self._versions.clear()

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
        if self._deepspeed and not self._has_gradients:
            raise StrategyError(
                f"optimizer.step() came without accelerator.backward(loss), and sharding {self.job.strategy.sharding!r} trains "
                "nothing after loss.backward(). Write accelerator.backward(loss)."
            )
        self._has_gradients = False

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
        if self.sync_gradients or not engine_of(self.job.strategy).needs_every_gradient:
            check_gradients(self, loss)
        self._check_written()
        self._norms.clear()
        self._unscaled = False
        super().backward(loss, **options)
        self._has_gradients = True
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
        norm, ids = engine_of(self.job.strategy).clip(parameters, limit), set(map(id, parameters))
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
            self._norms[id(optimizer)] = engine_of(self.job.strategy).clip(parameters, limit or math.inf)
        return self._norms[id(optimizer)]

    def _check_finite(self, norm: torch.Tensor | None) -> None:
        """Check a norm. Under fp16 the scaler skips the step, and in the toolkit's own loop the device does."""
        on_device = any(hasattr(optimizer.optimizer, "found_inf") for optimizer in self._optimizers)
        if not (self.job.precision.scaled or on_device or _is_finite(norm)):
            raise NotFinite(
                f"the gradient norm is {norm:g}, and the step was not taken. Weights are those of the step before. "
                "Look at this step's batches, or lower the learning rate."
            )

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Return Accelerate's context. Under DeepSpeed a `backward` within it takes no step."""
        if not self._deepspeed:
            with super().no_sync(model):
                yield
            return
        with patched(self.gradient_state, sync_gradients=False):
            yield


def _is_finite(norm: torch.Tensor | None) -> bool:
    """Return whether a norm is finite; an unknown one counts as finite."""
    return norm is None or math.isfinite(norm)


def _refuse_no_sync(sharding: str) -> NoReturn:
    raise StrategyError(
        f"model.no_sync() does not exist under sharding {sharding!r}. Write accelerator.no_sync(model), which every sharding has."
    )
