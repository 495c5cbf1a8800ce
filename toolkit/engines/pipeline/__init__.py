"""Pipeline parallelism (`--pp N`): each rank holds some layers, and micro-batches pass through the ranks in turn.

torch's schedules (`torch.distributed.pipelining`) order the work. The model's own forward runs on every stage (`stages`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError, StrategyMismatch
from toolkit.engines.base import Engine, read_precision
from toolkit.engines.job import Job
from toolkit.engines.optimizer_step import scale_gradients, total_norm
from toolkit.engines.pipeline.anatomy import anatomy_of, held, local_job, name_in_spec, places_of
from toolkit.engines.pipeline.balance import balanced
from toolkit.engines.pipeline.runtime import RUNTIMES, Runtime
from toolkit.engines.pipeline.schedules import check_adapted, idle_share, refuse, stages_per_rank
from toolkit.engines.pipeline.sharding import MESH, bare, make_mesh, shard_stages, sharded, spread, tie
from toolkit.engines.pipeline.simulation import SimulatedPipeline
from toolkit.engines.pipeline.stages import drop
from toolkit.engines.played import Action
from toolkit.engines.records import Prepared, StateMemory
from toolkit.engines.shards import BUFFER, Shard
from toolkit.engines.timeouts import handlers
from toolkit.engines.upstream import patched

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    Batch = Mapping[str, torch.Tensor]

RUNTIME = "_toolkit_stages"
"""The attribute of a prepared model with its stages: they end with it."""


class PipelineLoop:
    """What a user's own loop calls otherwise, refused with what to call."""

    def backward(self, loss: torch.Tensor, **options: Any) -> NoReturn:
        """Refuse a backward of one micro-batch.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "accelerator.backward: a pipeline runs forward and backward of all micro-batches of a step together. Write "
            "loss = tk.forward_backward(accelerator, model, batches) in the place of both, which works on every engine."
        )

    def save_state(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse Accelerate's files, which would hold one rank's layers.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "accelerator.save_state: Accelerate would save the layers of rank 0 alone. Write the model with tk.save, or train by "
            "`toolkit train`, which saves whole checkpoints."
        )


def _refuse_call(*args: Any, **kwargs: Any) -> NoReturn:
    raise StrategyError(
        "no rank of a pipeline holds the whole model, so neither a loop of your own nor `generate` can call it. Train with "
        "tk.forward_backward(accelerator, model, batches), evaluate with tk.evaluate(tk.prepared(accelerator, (model, "
        "optimizer)), loader), generate from the export, or choose --pp 1."
    )


class Pipeline(SimulatedPipeline):
    """`--pp N` around the engine of one stage. A rank's module has every name of the model; others' parameters are on meta."""

    own_loop = PipelineLoop
    needs_optimizer = True
    wraps_model = False
    places_model = False

    def __init__(self, inner: Engine) -> None:
        """Go around `inner`, which answers for the ranks of one stage."""
        self.inner = inner

    def inside(self, job: Job, rank: int | None = None) -> tuple[Job, int]:
        """Return the job that the inner engine answers for, and a rank of it: one stage, with the parameters that a rank holds."""
        spec = job.spec if rank is None or job.spec is None else local_job(job, rank).spec
        one = dataclasses.replace(job.parallelism, pp=1)
        strategy = dataclasses.replace(job.strategy, pp=1, pp_schedule="1f1b", pp_stages_per_rank=None)
        return dataclasses.replace(job, strategy=strategy, parallelism=one, spec=spec, engine=self.inner), (
            rank or 0
        ) % one.ranks

    # Configuration ----------------------------------------------------------------------------------------------------

    def settings(self, job: Job) -> dict[str, Any]:
        """Return the inner engine's for one stage, the schedule, and the layers (first, end) of each stage."""
        refuse(job)
        each = stages_per_rank(job)
        stages = balanced(job) if job.spec is not None else []
        if job.spec is not None:
            check_adapted(job, anatomy_of(job.spec), stages)
        about = {"schedule": job.strategy.pp_schedule, "stages_per_rank": each, "stages": stages}
        about["splits_backward"] = job.strategy.pp_schedule == "zero_bubble"
        inner = self.inner.settings(self.inside(job)[0])
        if sharded(job):
            inner |= {"autocast": "no", "reshard_after_forward": False}
        return {**inner, "pp": job.parallelism.pp, **about}

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return those of bare ranks: the stages are sharded while the model is loaded, and their schedules average gradients."""
        return {
            "cpu": job.device.kind == "cpu",
            "mixed_precision": job.settings["autocast"],
            "kwargs_handlers": handlers(timeout),
        }

    def environment(self, job: Job) -> dict[str, str | None]:
        """Return no launcher's FSDP: Accelerate would make a plugin of its own."""
        return {"ACCELERATE_USE_FSDP": None}

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return a file for several processes: Accelerate knows no stages."""
        return super().to_yaml(strategy, ranks, nodes) | {"distributed_type": "MULTI_GPU"}

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the precision, which is all that this launch environment tells; None for another one."""
        others = any(environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("DEEPSPEED", "FSDP"))
        return None if others or "ACCELERATE_MIXED_PRECISION" not in environ else read_precision(environ)

    # Forecast ---------------------------------------------------------------------------------------------------------

    def reduce_dtype(self, job: Job) -> str:
        """Return the inner engine's."""
        return self.inner.reduce_dtype(self.inside(job)[0])

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return the states of the parameters that a rank holds between steps."""
        return self.inner.expected_state(*self.inside(job, rank))

    def autocast_dtype(self, job: Job) -> str | None:
        """Return the inner engine's."""
        return self.inner.autocast_dtype(self.inside(job)[0])

    def compute_note(self, job: Job) -> str:
        """Add the schedule, the share of a step that a rank waits, and what is whole within a step."""
        about = f"{job.parallelism.pp} stages by {job.strategy.pp_schedule}"
        if job.strategy.pp_schedule != "zero_bubble":
            about += f", idle share {idle_share(job):.0%} with equal stages"
        return "; ".join(filter(None, (self.inner.compute_note(self.inside(job)[0]), about, self.within_step(job))))

    def within_step(self, job: Job) -> str:
        """Say that FSDP shards between steps alone."""
        return "a stage's parameters and gradients are whole within a step (ZeRO-1)" if sharded(job) else ""

    def loading_note(self, job: Job, streamed: bool = False) -> str:
        """Return the note that a rank keeps its stages."""
        return "every rank reads its own part of its layers"

    # A worker ---------------------------------------------------------------------------------------------------------

    def streams(self, job: Job) -> bool:
        """Return false: each rank reads its layers."""
        return False

    def load_model(self, job: Job, reader: Any) -> Any:
        """Read this rank's layers, of them its tensor-parallel part, and of that its shard; `reader` is a `weight_reader.Reader`.

        transformers asks for devices once the modules are there and before it reads: the stages are cut and sharded then. What
        the map gives to `meta` stays in the files. FSDP2 waits for an adapter.
        """
        from transformers import modeling_utils

        assert job.spec is not None
        rank, mesh, own = reader.accelerator.process_index, make_mesh(job), held(job, reader.accelerator.process_index)
        names = {name: each.name for each in job.spec.parameters for name in job.spec.names_of(each.name)}
        mine = {name for name, first in names.items() if first in own}

        def cut(model: Any, device_map: Any, *args: Any) -> Any:
            vars(model)[MESH] = mesh
            if job.parallelism.tp > 1:
                self.inner.split(job, model, mesh["tp"], mine)  # type: ignore[attr-defined]
            if sharded(job) and job.strategy.adapter == "none":
                shard_stages(job, model)
            return device_map

        def keep(model: Any) -> None:
            drop(model, own)
            tie(job, model, rank)

        # It would put hooks around a model with two devices.
        with patched(modeling_utils, _get_device_map=cut, accelerate_dispatch=lambda *args: None):
            model = reader.read(keep=keep, device_map={"": "cpu", **dict.fromkeys(names.keys() - mine, "meta")})
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and tensor.device.type != reader.accelerator.device.type:
                tensor.data = tensor.data.to(reader.accelerator.device)
        return model

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Shard the stages between steps, if asked. Refuse a model that `toolkit.load` has not cut.

        Raises:
            StrategyError: for a whole model.
        """
        if job.spec is None or not hasattr(bare(model), MESH):
            raise StrategyError(
                f"prepare got a {type(model).__name__} that is not cut into the stages of pp {job.parallelism.pp}. Make the "
                "Accelerator with `toolkit.describe(model)`, and the model with `toolkit.load`."
            )
        if sharded(job):
            shard_stages(job, model)
        else:
            spread(job, model)

    def after_prepare(self, prepared: Prepared) -> None:
        """Cut the stages. The whole model's own forward is no longer of use. A collective.

        Raises:
            StrategyError: for a stage without a trained parameter, on every rank.
            StrategyMismatch: where ranks know other stages.
        """
        from accelerate.utils import gather_object

        job = prepared.job
        trains = any(each.requires_grad and not each.is_meta for each in prepared.model.parameters())
        everywhere = gather_object(
            [(job.coordinates(prepared.accelerator.process_index).pp, trains, job.settings["stages"])]
        )
        if any(stages != job.settings["stages"] for *_, stages in everywhere):
            raise StrategyMismatch(
                f"pp {job.parallelism.pp}: ranks cut the model differently. Give all ranks equal devices."
            )
        if idle := sorted({place for place, trains, _ in everywhere if not trains}):
            raise StrategyError(
                f"pp {job.parallelism.pp}: nothing is trained on rank {idle[0]} of the pipeline, so it has no backward. Train a "
                "parameter of each stage, or choose --pp 1."
            )
        vars(prepared.model)[RUNTIME] = Runtime(prepared)
        prepared.model.forward = _refuse_call

    def check(self, prepared: Prepared) -> list[str]:
        """Check that exactly the parameters of this rank's stages have memory, each over the ranks that share it."""
        job, rank = prepared.job, prepared.accelerator.process_index
        if job.spec is None:
            return []
        wrong, names = [], held(job, rank)
        for name, parameter in prepared.accelerator.unwrap_model(prepared.model).named_parameters():
            if parameter.is_meta == (name_in_spec(name) in names):
                wrong.append(f"{name} is {'missing on' if parameter.is_meta else 'not of'} this rank's stages")
            elif sharded(job) and not parameter.is_meta and not hasattr(parameter, "device_mesh"):
                wrong.append(f"{name} is not sharded between steps")
        return wrong[:3]

    def forward_backward(
        self,
        prepared: Prepared,
        batches: Sequence[Batch],
        weight: Callable[[], torch.Tensor],
        on_last_forward: Callable[[Sequence[torch.Tensor]], None],
    ) -> list[torch.Tensor]:
        """Run all micro-batches by the schedule. The loss sums are on the rank of the last stage, and zeros elsewhere."""
        sums: list[torch.Tensor] = _runtime(prepared).step(batches, weight, training=prepared.model.training)
        on_last_forward(sums)
        return sums

    def timed_actions(self, prepared: Prepared) -> list[list[tuple[Action, float, float]]]:
        """Return the last steps of this rank, where it is of those that are simulated: those of one pipeline."""
        mine = prepared.accelerator.process_index in self.simulated_ranks(prepared.job)
        return _runtime(prepared).stopwatch.steps() if mine else []

    def evaluate(self, prepared: Prepared, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the loss sum of each batch on every rank; one batch passes through the stages at a time."""
        runtime, training = _runtime(prepared), prepared.model.training
        sums = [runtime.forward(batch, training=training) for batch in batches]
        runtime.reshard()
        return sums

    def logits(self, prepared: Prepared, batch: Batch) -> torch.Tensor:
        """Return the last stage's logits on every rank."""
        runtime = _runtime(prepared)
        logits = runtime.forward(batch, training=prepared.model.training, logits=True)
        runtime.reshard()
        return logits

    def clip(self, parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip by the norm over all stages. A weight that two of them hold counts once."""
        import torch.distributed as dist

        ids = set(map(id, parameters))
        runtime = next(each for each in RUNTIMES if any(id(own) in ids for own in each.trained))
        twice = {id(each) for each in runtime.tied if runtime.place}
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        once = [each.grad for each in parameters if each.grad is not None and id(each) not in twice]
        squares = total_norm(once).double().to(gradients[0].device) ** 2
        dist.all_reduce(squares, group=runtime.group)
        total = squares.sqrt()
        scale_gradients(gradients, total, limit)
        return total.float()

    def shards(self, prepared: Prepared, create: bool = False) -> Iterable[Shard]:
        """Yield this rank's parameters, moments and those buffers that its stages use."""
        job = prepared.job
        assert job.spec is not None
        parts, mine = anatomy_of(job.spec), places_of(job, prepared.accelerator.process_index)
        for shard in super().shards(prepared, create):
            places = set(parts.places(shard.name)) if shard.kind == BUFFER else set()
            if not places or places & mine:
                yield shard


def _runtime(prepared: Prepared) -> Runtime:
    runtime: Runtime = vars(prepared.model)[RUNTIME]
    return runtime
