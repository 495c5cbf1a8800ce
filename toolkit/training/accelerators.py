"""The `accelerate.Accelerator` of a job: what it prepares is audited, and a user's own loop means the same on every engine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

from toolkit.config.fields import differing
from toolkit.config.flags import spell
from toolkit.core.errors import RunError, StrategyError, ToolkitError
from toolkit.core.phases import phase
from toolkit.core.process_lifecycle import freed_at_once
from toolkit.engines.base import engine_environment
from toolkit.engines.job import Job
from toolkit.engines.rank_calls import from_main
from toolkit.engines.records import Prepared
from toolkit.engines.upstream import patched, without_deepspeed
from toolkit.exporters.state_dict import whole_state_dict
from toolkit.training import epoch_order
from toolkit.training.given_weights import GivenWeights
from toolkit.training.model_checks import check_model, check_optimizers, check_requested
from toolkit.training.model_methods import gather_in_methods, refuse_parts
from toolkit.training.own_loop import OwnLoop
from toolkit.training.preparation import (
    audit,
    broadcast_buffers,
    check_pair,
    models_and_optimizers,
    restore_masters,
    share_statistics,
    unlike_spec,
)
from toolkit.transforms.adapters import keep_packing
from toolkit.transforms.checkpointing import checkpoint_in_training_only

if TYPE_CHECKING:
    import torch


CUT = (
    *("sharding", "dp_replicate", "tp", "tp_sequence", "cp", "cp_attention", "ep", "pp", "pp_schedule", "pp_stages_per_rank"),
    *("adapter", "lora_rank", "lora_alpha", "lora_targets"),
)  # fmt: skip
"""Fields of a strategy that say how ranks cut a model, and into what."""


def guard_command(job: Job) -> str:
    """Return the command that compares a job's cut of its model with one process; empty for a job that cuts nothing."""
    strategy = job.strategy
    if strategy.tp * strategy.cp * strategy.ep * strategy.pp == 1:
        return ""
    if job.spec is not None and job.spec.own_tp_plan:
        return "tk.guard(spec, strategy)"
    model = job.spec.name if job.spec is not None else "MODEL"
    fields = {"sharding": strategy.sharding, **differing(strategy)}
    return shlex.join(["toolkit", "guard", model, *spell({name: fields[name] for name in CUT if name in fields})])


@cache
def accelerator_class(own_loop: type | None) -> Any:
    """Return Accelerate's Accelerator with the methods of `AuditedPrepare`, of `OwnLoop`, and an engine's before these."""
    import accelerate

    bases = (AuditedPrepare, *([own_loop] if own_loop else []), OwnLoop, accelerate.Accelerator)
    return type("Accelerator", bases, {})


class AuditedPrepare(OwnLoop):
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

        self.ended, self.requested = False, job.strategy
        """The strategy as it was requested, with its `auto`s, once `toolkit.accelerator` has said so."""
        self.from_checkpoint: WeakSet[torch.nn.Module] = WeakSet()
        """Models with the checkpoint's values. `prepare` makes their fp32 masters exact."""
        self.unlike_spec: str | None = None
        """The difference of the prepared model from the job's spec."""
        self._given: WeakKeyDictionary[torch.nn.Module, GivenWeights] = WeakKeyDictionary()
        """Model → what it held; until its optimizer is prepared, too."""
        self.sharded: dict[torch.nn.Module, Prepared] = {}
        """Unwrapped models of which each rank holds parts."""
        with engine_environment(job):
            super().__init__(
                job,
                **job.engine.accelerator_kwargs(job, timeout),
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=job.train_config.accumulation,
                    sync_each_batch=job.engine.sync_each_batch,
                ),
                **options,
            )
        AcceleratorState._shared_state.setdefault("owners", WeakSet()).add(self)
        self.register_save_state_pre_hook(lambda models, weights, folder: epoch_order.save(self, folder))
        self.register_load_state_pre_hook(lambda models, folder: epoch_order.load(self, folder))

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Prepare as Accelerate does. `save_state` saves what the order of the rows is drawn from."""
        from torch.utils.data import IterableDataset

        divides = self.num_processes > 1 and not getattr(data_loader, "_is_accelerate_prepared", False)
        if divides and data_loader.batch_sampler is None and not isinstance(data_loader.dataset, IterableDataset):
            raise StrategyError(
                "a DataLoader with batch_size=None gives rows, and Accelerate divides batches among the ranks. Give batch_size=1, "
                "with a collate_fn that returns the row."
            )
        if self.job.parallelism.dp_size != self.num_processes:
            _draw_alike(data_loader)
        with self._rows_by_data_rank():
            loader = super().prepare_data_loader(data_loader, *args, **options)
        if name := epoch_order.follow(loader):
            self.print(
                f"prepare: {name} has no torch.Generator as `generator`, and no `set_epoch`. An epoch that is resumed in its "
                "middle sees the same rows only where their order is drawn before its first row."
            )
        return loader

    def _rows_by_data_rank(self) -> AbstractContextManager[None]:
        """Return a context in which Accelerate divides rows over data-parallel ranks: others that share one read the same."""
        import accelerate

        sizes, upstream = self.job.parallelism, accelerate.accelerator.prepare_data_loader
        if sizes.dp_size == self.num_processes:
            return nullcontext()
        place = self.job.coordinates(self.process_index).dp_rank
        rows = {"num_processes": sizes.dp_size, "process_index": place, "dispatch_batches": False}
        return patched(accelerate.accelerator, prepare_data_loader=lambda *a, **options: upstream(*a, **options | rows))

    def end_training(self) -> None:
        """End as Accelerate does. Afterwards this process can make another Accelerator."""
        super().end_training()
        self.ended = True

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does; then restore exact fp32 masters of a model of `toolkit.load()`, and audit.

        Raises:
            StrategyError: for a second optimizer under DeepSpeed and fp16.
            StrategyMismatch: where the engine, the world size, bytes, dtypes or tied weights differ from the request.
        """
        models, optimizers = models_and_optimizers(objects)
        self._refuse(models, optimizers)
        for model in models:
            self._make_ready(model)
            if optimizers or not self.job.engine.prepares_pair:
                self._given[model] = GivenWeights(self.job, model, hashed=self.own_loop)
        with phase("prepare"), engine_environment(self.job), freed_at_once():
            result = self._prepare_upstream(objects, models, device_placement)
            for model in models_and_optimizers(result)[0]:
                self.prepared.add(model)
                refuse_parts(self.unwrap_model(model))
            for optimizer in self._optimizers:
                # DDP accepts both in separate calls, too. Of several optimizers the first one completes the model.
                model = self.model_of(optimizer)
                given = None if model is None else self._given.pop(self.unwrap_model(model), None)
                if given is not None:
                    self._complete(Prepared(self.job, model, optimizer, self), given)
        return result

    def _refuse(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """Refuse what the engine cannot prepare, before any model is changed."""
        engine = self.job.engine
        if engine.prepares_pair and (optimizers or engine.needs_optimizer):
            check_pair(models, optimizers)
        check_optimizers(self.job, models, optimizers)
        new = [optimizer for optimizer in optimizers if optimizer not in self._optimizers]
        count = len(self._optimizers) + len(new)
        if new and count > 1 and (only := self.one_optimizer()):
            raise StrategyError(
                f"prepare got {count} optimizers in all, and {only} can step one. Give one optimizer with several parameter "
                "groups, or choose sharding 'ddp' or 'fsdp' in precision 'bf16' or 'fp32', each model with its optimizer in a "
                "call of prepare of its own."
            )
        for model in models:
            check_requested(self.requested, model, self.job.strategy)
            check_model(self.job, model)

    def _make_ready(self, model: torch.nn.Module) -> None:
        """Change a model as the engine and its forward need it. Every rank gets rank 0's buffers."""
        engine = self.job.engine
        engine.before_prepare(self.job, model)
        checkpoint_in_training_only(model)
        keep_packing(model)  # a user's own may be quantized, too
        if not engine.broadcasts_buffers and self.num_processes > 1:
            broadcast_buffers(model)

    def _prepare_upstream(self, objects: Sequence[Any], models: Sequence[Any], placement: list[bool] | None) -> Any:
        """Call Accelerate's `prepare`. In a user's loop the new optimizers clip; lines say what is done besides."""
        optimizers, schedulers = list(self._optimizers), len(self._schedulers)
        _, own = models_and_optimizers(objects)
        given = [(each, [[*map(ref, group["params"])] for group in each.param_groups]) for each in own]
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.job.engine.preparing(self.job, model))
            result = super().prepare(*objects, device_placement=placement)
        _keep_parameters(models, given)
        new = [optimizer for optimizer in self._optimizers if self.own_loop and optimizer not in optimizers]
        for optimizer in new:
            self.clip_before_step(optimizer)
        if self.num_processes > 1 and self.step_scheduler_with_optimizer and len(self._schedulers) > schedulers:
            self.print(
                f"prepare: the scheduler takes {self.num_processes} steps an optimizer step, one for every rank, as in Accelerate. "
                "tk.accelerator(step_scheduler_with_optimizer=False) leaves all its steps to the loop."
            )
        if new and (limit := self.job.train_config.max_grad_norm):
            self.print(
                f"prepare: each step clips the gradient norm at {limit:g}, with and without clip_grad_norm_. "
                "tk.TrainConfig(max_grad_norm=0) clips nothing."
            )
        if new and (command := guard_command(self.job)):
            self.print(f"prepare: nothing compares this cut with one process, as toolkit train does. `{command}` does.")
        return result

    def _complete(self, prepared: Prepared, given: GivenWeights) -> None:
        """Restore exact masters of a model and its optimizer, audit both, and adapt the model's methods."""
        engine, module = self.job.engine, self.unwrap_model(prepared.model)
        gather_in_methods(prepared, self.sharded)
        from_checkpoint = module in self.from_checkpoint
        restore_masters(prepared, given, from_checkpoint=from_checkpoint)
        if from_checkpoint:
            engine.after_prepare(prepared)
            for transform in self.job.transforms:
                transform.after_prepare(prepared)
        self.unlike_spec = unlike_spec(self.job, given.shapes)
        if self.unlike_spec:
            self.print(f"prepare: bytes and dtypes were not compared, since {self.unlike_spec}")
        audit(prepared)
        given.check(prepared)
        self.watch(prepared.model)
        if not engine.broadcasts_buffers and self.num_processes > 1:
            share_statistics(prepared.model)
        if not engine.model_no_sync:
            prepared.model.no_sync = partial(_refuse_no_sync, self.job.strategy.sharding)

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Return what Accelerate returns, and import DeepSpeed for it only where it is used."""
        with without_deepspeed():
            return super().unwrap_model(model, *args, **options)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return Accelerate's state dict; where each rank holds parts, rank 0 gets whole tensors, as `save` writes them.

        A collective there. The other ranks get an empty dict.
        """
        prepared = self.sharded.get(self.unwrap_model(model))
        return whole_state_dict(prepared, "get_state_dict") if prepared else super().get_state_dict(model, unwrap)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare as Accelerate does. A model distributed while loading gets autocast, and no DDP around it."""
        unwrapped = evaluation_mode or not self.job.engine.wraps_model
        device_placement = device_placement if self.job.engine.places_model else False
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=unwrapped)

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


def _keep_parameters(models: Sequence[Any], given: Sequence[tuple[Any, list[list[Any]]]]) -> None:
    """Give each optimizer's groups the parameters that they had, weak references, where these are still the model's.

    Accelerate finds a parameter by its shard's address (`fsdp2_switch_optimizer_parameters`), and empty shards share one. One of
    them would be stepped several times. The others' gradients, which hold the buffer of their layer's, would never be freed.
    """
    kept = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer, groups in given:
        for group, references in zip(optimizer.param_groups, groups, strict=False):  # DeepSpeed makes groups of its own
            before, now = [reference() for reference in references], group["params"]
            if len(before) == len(now) and kept.issuperset(map(id, (*before, *now))):
                group["params"] = before


def _refuse_no_sync(sharding: str) -> NoReturn:
    raise StrategyError(
        f"model.no_sync() does not exist under sharding {sharding!r}. Write accelerator.no_sync(model), which every sharding has."
    )


def _draw_alike(loader: Any) -> None:
    """Let all ranks draw the order of rows that rank 0 draws: Accelerate does it for data-parallel ranks alone. A collective."""
    import torch

    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, torch.utils.data.RandomSampler):
        generator = sampler.generator or torch.Generator().manual_seed(torch.initial_seed())
        sampler.generator = generator.set_state(from_main(generator.get_state()))
