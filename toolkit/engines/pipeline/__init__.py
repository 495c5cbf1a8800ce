"""Pipeline parallelism (`--pp N`): each rank holds some layers, and micro-batches pass through the ranks in turn.

torch's schedules (`torch.distributed.pipelining`) order the work. The model's own forward runs on every stage (`stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError
from toolkit.engines.base import Engine
from toolkit.engines.job import Job
from toolkit.engines.losses import with_trained
from toolkit.engines.pipeline.anatomy import anatomy_of, held, local_job, split
from toolkit.engines.pipeline.runtime import RUNTIMES, Runtime
from toolkit.engines.pipeline.schedules import idle_share, refuse, stages_per_rank
from toolkit.engines.pipeline.stages import drop
from toolkit.engines.records import Prepared, StateMemory
from toolkit.engines.shards import BUFFER, Shard

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    Batch = Mapping[str, torch.Tensor]

RUNTIME = "_toolkit_stages"
"""The attribute of a prepared model with its stages: they end with it."""

OWN_LOOP = (
    "a pipeline runs forward and backward of all micro-batches of a step together, and a loop of your own calls them one by one. "
    "Train by `toolkit train`, or choose --pp 1."
)


class PipelineLoop:
    """What a user's own loop calls, refused."""

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Refuse a loop of the user's own.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(f"accelerator.backward: {OWN_LOOP}")


def _refuse_call(*args: Any, **kwargs: Any) -> NoReturn:
    raise StrategyError(
        "no rank of a pipeline holds the whole model, so neither a loop of your own nor `generate` can call it. Train by "
        "`toolkit train`, generate from its export, or choose --pp 1."
    )


class Pipeline(Engine):
    """`--pp N` with `none`. A rank's module has every name of the model; parameters of other ranks are on the meta device."""

    own_loop = PipelineLoop
    no_forecast = "the stages of --pp have no forecast yet. `toolkit train` runs without one. Or choose --pp 1."
    prepares_pair = False
    wraps_model = False
    places_model = False

    def __init__(self, inner: Engine) -> None:
        """Go around `inner`, which runs the bare model of one data-parallel rank."""
        self.inner = inner

    # Configuration ----------------------------------------------------------------------------------------------------

    def settings(self, job: Job) -> dict[str, Any]:
        """Return the inner engine's for one data-parallel rank, the schedule, and the layers (first, end) of each stage."""
        refuse(job)
        each = stages_per_rank(job)
        stages = split(job.spec, each * job.parallelism.pp) if job.spec is not None else []
        about = {"schedule": job.strategy.pp_schedule, "stages_per_rank": each, "stages": stages}
        return {**self.inner.settings(job), "pp": job.parallelism.pp, **about}

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return the inner engine's."""
        return self.inner.accelerator_kwargs(job, timeout)

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return the inner engine's file for several processes: Accelerate knows no stages."""
        return self.inner.to_yaml(strategy, ranks, nodes)

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the fields of DDP's launch environment, which does not tell stages from replicas."""
        fields = self.inner.from_env(environ)
        return None if fields is None else {**fields, "sharding": "none"}

    # Forecast ---------------------------------------------------------------------------------------------------------

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return the states of the parameters that a rank holds."""
        return self.inner.expected_state(local_job(job, rank), rank)

    def autocast_dtype(self, job: Job) -> str | None:
        """Return the inner engine's."""
        return self.inner.autocast_dtype(job)

    def compute_note(self, job: Job) -> str:
        """Add the schedule and the share of a step that a rank waits."""
        about = f"{job.parallelism.pp} stages by {job.strategy.pp_schedule}, idle share {idle_share(job):.0%} with equal stages"
        return f"{self.inner.compute_note(job)}; {about}"

    def loading_note(self, job: Job, streamed: bool = False) -> str:
        """Return the note that a rank keeps its stages."""
        return "every rank reads the whole model, and keeps its own layers"

    # A worker ---------------------------------------------------------------------------------------------------------

    def load_model(self, job: Job, reader: Any) -> Any:
        """Read the model and keep this rank's layers; `reader` is a `loading.Reader`."""
        accelerator = reader.accelerator
        names = held(job, accelerator.process_index)
        model = reader.read(keep=lambda model: drop(model, names))
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(accelerator.device)
        return model

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Refuse a model that `toolkit.load` has not cut.

        Raises:
            StrategyError: for a whole model.
        """
        if job.spec is None or not any(parameter.is_meta for parameter in model.parameters()):
            raise StrategyError(
                f"prepare got a {type(model).__name__} that is not cut into the stages of pp {job.parallelism.pp}. Make the "
                "Accelerator with `toolkit.describe(model)`, and the model with `toolkit.load`."
            )

    def after_prepare(self, prepared: Prepared) -> None:
        """Cut the stages. The whole model's own forward is no longer of use. A collective."""
        vars(prepared.model)[RUNTIME] = Runtime(prepared)
        prepared.model.forward = _refuse_call

    def check(self, prepared: Prepared) -> list[str]:
        """Check that exactly the parameters of this rank's stages have memory."""
        job = prepared.job
        wrong = self.inner.check(prepared)
        if job.spec is None:
            return wrong
        module, names = prepared.accelerator.unwrap_model(prepared.model), held(job, prepared.accelerator.process_index)
        for name, parameter in module.named_parameters():
            if parameter.is_meta == (name in names):
                wrong.append(f"{name} is {'missing on' if parameter.is_meta else 'not of'} this rank's stages")
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

    def evaluate(self, prepared: Prepared, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the loss sum of each batch on every rank; one batch passes through the stages at a time."""
        chunked, training = prepared.job.strategy.loss == "chunked", prepared.model.training
        given = (with_trained(batch) if chunked else batch for batch in batches)
        return [_runtime(prepared).forward(batch, training=training) for batch in given]

    def logits(self, prepared: Prepared, batch: Batch) -> torch.Tensor:
        """Return the last stage's logits on every rank."""
        return _runtime(prepared).forward(batch, training=prepared.model.training, logits=True)

    def clip(self, parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip by the norm over all stages. A weight that two of them hold counts once."""
        import torch
        import torch.distributed as dist

        twice = {id(each) for runtime in RUNTIMES if runtime.rank for each in runtime.tied}
        gradients = [parameter.grad for parameter in parameters if id(parameter) not in twice]
        norm = torch.nn.utils.get_total_norm([each for each in gradients if each is not None])
        squares = norm.double().to(next(iter(parameters)).device) ** 2
        dist.all_reduce(squares)
        total = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total.float())
        return total

    def shards(self, prepared: Prepared, create: bool = False) -> Iterable[Shard]:
        """Yield this rank's parameters, moments and those buffers that its stages use."""
        job = prepared.job
        assert job.spec is not None
        parts = anatomy_of(job.spec)
        mine = {place for name in held(job, prepared.accelerator.process_index) for place in parts.places(name)}
        for shard in super().shards(prepared, create):
            places = set(parts.places(shard.name)) if shard.kind == BUFFER else set()
            if not places or places & mine:
                yield shard


def _runtime(prepared: Prepared) -> Runtime:
    runtime: Runtime = vars(prepared.model)[RUNTIME]
    return runtime
