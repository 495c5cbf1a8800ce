"""A prepared model's stages on this rank: steps by torch's schedules, and forwards along the stages without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from toolkit.core.errors import DataError
from toolkit.core.phases import phase
from toolkit.engines.optimizer_step import average_gradients
from toolkit.engines.pipeline.anatomy import anatomy_of, held
from toolkit.engines.pipeline.schedules import SEVERAL, schedule_class
from toolkit.engines.pipeline.sharding import MESH, bare
from toolkit.engines.pipeline.stages import Stage, hidden_dtype
from toolkit.engines.pipeline.stopwatch import Stopwatch
from toolkit.engines.records import Prepared
from toolkit.engines.states import local_tensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.pipelining import PipelineStage

RUNTIMES: WeakSet[Runtime] = WeakSet()
"""Of all prepared models, which hold them."""


class Runtime:
    """The stages of one rank."""

    def __init__(self, prepared: Prepared) -> None:
        """Cut the model. A collective: all ranks make the groups of a tied weight's two holders."""
        import torch.distributed as dist

        job, rank = prepared.job, prepared.accelerator.process_index
        assert job.spec is not None
        whole = bare(prepared.accelerator.unwrap_model(prepared.model))
        mesh = getattr(whole, MESH)
        self._job, self._device = job, prepared.accelerator.device
        self.group, self.place, self._pp = mesh["pp"].get_group(), job.coordinates(rank).pp, job.parallelism.pp
        self._ranks = dist.get_process_group_ranks(self.group)
        self._replicas = mesh["dp_replicate"].get_group() if job.strategy.sharding == "ddp" else None
        cuts = list(job.settings["stages"])
        self._count = len(cuts)
        parts = anatomy_of(job.spec)
        numbers = range(self.place, self._count, self._pp)
        self.stages = [Stage(prepared, parts, number, cuts) for number in numbers]
        self.stopwatch = Stopwatch(self._device)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._hidden = job.spec.hidden
        self._weight: Callable[[], torch.Tensor] | None = None
        self.trained = [each for each in whole.parameters() if each.requires_grad and not each.is_meta]
        first, last = (held(job, ends) for ends in (0, job.ranks - 1))
        tied = {name for group in job.spec.tied for name in group} & first & last
        named = dict(whole.named_parameters())
        mine = self.place in (0, self._pp - 1) and job.strategy.adapter == "none"
        self.tied = [named[name] for name in sorted(tied) if mine and named[name].requires_grad]
        """Parameters that the first and the last stage both hold."""
        self._ends = None
        each = job.ranks // self._pp
        for one in range(each if tied else 0):
            ends = dist.new_group([one, one + job.ranks - each])
            self._ends = ends if one == rank % each and mine else self._ends
        for parameter in self.tied:  # a script may have written into one of the two
            dist.broadcast(local_tensor(parameter), src=self._ranks[0], group=self._ends)
        RUNTIMES.add(self)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return bool(self.place == self._pp - 1)

    def step(self, batches: Sequence[Mapping[str, Any]], weight: Callable[[], torch.Tensor], *, training: bool) -> Any:
        """Run forward and backward of all micro-batches. Return their loss sums; zeros where another rank has the last stage."""
        import torch
        import torch.distributed as dist

        before = [each.grad for each in self.tied]  # of an earlier call before the same step: summed already
        for each in self.tied:
            each.grad = None
        for stage in self.stages:
            stage.module.train(training)
            stage.batches, stage.sums = list(batches), []
        numbers = torch.arange(len(batches))
        schedule = self._schedule(batches, weight)
        first = [numbers] if self.stages[0].is_first else []
        target = numbers if self.is_last else None
        self.stopwatch.begin_step()
        with phase("backward"):  # each forward marks itself inside
            try:
                schedule.step(*first, target=target, return_outputs=False, number=numbers)
            except RuntimeError as error:  # torch names the stage, and hides what it failed of
                raise error.__cause__ or error from None
            self._weight = None
            self._average()
            parameter: Any
            for parameter, earlier in zip(self.tied, before, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if hasattr(parameter, "placements"):  # DTensor leaves an embedding's gradient whole
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                dist.all_reduce(local_tensor(parameter.grad), group=self._ends)
                if earlier is not None:
                    parameter.grad += earlier
        for stage in self.stages:
            stage.batches = []
        if self.is_last:
            return self.stages[-1].sums
        return [torch.zeros((), device=self._device) for _ in batches]

    def _average(self) -> None:
        """Average gradients over replicas. FSDP has done so."""
        import torch

        if self._replicas is None:
            return
        for parameter in self.trained:
            if parameter.grad is None:  # of an expert without tokens, say, and other replicas may have some
                parameter.grad = torch.zeros_like(parameter)
        average_gradients([parameter.grad for parameter in self.trained], self._replicas)

    def _schedule(self, batches: Sequence[Mapping[str, Any]], weight: Callable[[], torch.Tensor]) -> Any:
        """Return the schedule of a step with micro-batches of this shape, made once.

        With shapes that are known from the beginning torch runs no forward to find them.
        """
        self._weight = weight
        shapes = {tuple(batch["input_ids"].shape) for batch in batches}
        if len(shapes) > 1:
            raise DataError(
                f"the micro-batches of a step have shapes {', '.join(map(str, sorted(shapes)))}: a pipeline's stages exchange "
                "tensors of one shape. Give rows of one length, and as many in each batch (drop_last=True)."
            )
        key = (len(batches), *next(iter(shapes)))
        if key not in self._schedules:
            made = [self._pipeline_stage(stage, key[1:]) for stage in self.stages]
            one = self._job.strategy.pp_schedule not in SEVERAL
            options = {"loss_fn": self._weighted, "scale_grads": False}
            # One alone: each keeps buffers for what all of its micro-batches receive.
            self._schedules = {key: schedule_class(self._job)(made[0] if one else made, key[0], **options)}
        return self._schedules[key]

    def _pipeline_stage(self, stage: Stage, shape: tuple[int, ...]) -> PipelineStage:
        import torch
        from torch.distributed.pipelining import PipelineStage

        hidden = torch.empty((*shape, self._hidden), dtype=hidden_dtype(self._job), device="meta")
        given = torch.empty(1, dtype=torch.long, device="meta") if stage.is_first else hidden.requires_grad_()
        leaving = torch.empty((), device="meta") if stage.is_last else hidden.requires_grad_()
        about = {"input_args": given, "output_args": leaving, "group": self.group}
        made = PipelineStage(stage.module, stage.number, self._count, self._device, **about)
        self.stopwatch.time(made)
        return made

    def _weighted(self, loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None
        return loss * self._weight()

    def forward(self, batch: Mapping[str, Any], *, training: bool, logits: bool = False) -> torch.Tensor:
        """Run one batch along all stages without gradients. Return the loss sum, or the logits, on every rank. A collective."""
        import torch
        import torch.distributed as dist

        hidden = torch.empty(0)
        shape, number = (*batch["input_ids"].shape, self._hidden), torch.zeros(1, dtype=torch.long)
        with torch.no_grad():
            for stage in self.stages:
                stage.module.train(training)
                stage.batches, stage.sums = [batch], []
                if not stage.is_first:
                    hidden = torch.empty(shape, dtype=hidden_dtype(self._job), device=self._device)
                    dist.recv(hidden, self._ranks[(stage.number - 1) % self._pp], self.group)
                hidden = stage.module(hidden, number=number, logits=logits)
                if not stage.is_last:
                    dist.send(hidden, self._ranks[(stage.number + 1) % self._pp], self.group)
                stage.batches = []
            result = hidden.float() if self.is_last else torch.zeros(())
            sizes: list[Any] = [tuple(result.shape)]
            dist.broadcast_object_list(sizes, src=self._ranks[-1], group=self.group, device=self._device)
            result = result if self.is_last else torch.empty(sizes[0], device=self._device)
            dist.broadcast(result, src=self._ranks[-1], group=self.group)
        return result

    def reshard(self) -> None:
        """Free whole parameters that a forward without a backward leaves."""
        from torch.distributed.fsdp import FSDPModule

        for stage in self.stages:
            for module in stage.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
