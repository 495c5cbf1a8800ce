"""A prepared model's stages on this rank: steps by torch's schedules, and forwards along the stages without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from toolkit.core.errors import DataError
from toolkit.core.phases import phase
from toolkit.engines.pipeline.anatomy import anatomy_of, held
from toolkit.engines.pipeline.schedules import schedule_class
from toolkit.engines.pipeline.stages import Stage
from toolkit.engines.records import Prepared

if TYPE_CHECKING:
    import torch
    from torch.distributed.pipelining import PipelineStage

RUNTIMES: WeakSet[Runtime] = WeakSet()
"""Of all prepared models, which hold them."""


class Runtime:
    """The stages of one rank."""

    def __init__(self, prepared: Prepared) -> None:
        """Cut the model. A collective: all ranks make the group of a tied weight's two holders."""
        import torch.distributed as dist

        job = prepared.job
        assert job.spec is not None
        self._job, self._device = job, prepared.accelerator.device
        self.rank, self._pp = prepared.accelerator.process_index, job.parallelism.pp
        cuts = list(job.settings["stages"])
        self._count = len(cuts)
        parts = anatomy_of(job.spec)
        numbers = range(self.rank, self._count, self._pp)
        self.stages = [Stage(prepared, parts, number, cuts) for number in numbers]
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._hidden = job.spec.hidden
        self._weight: Callable[[], torch.Tensor] | None = None
        holders = [held(job, rank) for rank in range(self._pp)]
        twice = {name for name in holders[0] & holders[-1] if sum(name in names for names in holders) == 2}
        named = dict(prepared.accelerator.unwrap_model(prepared.model).named_parameters())
        ends = dist.new_group([0, self._pp - 1]) if twice else None
        mine = self.rank in (0, self._pp - 1)
        self.tied = [named[name] for name in sorted(twice) if mine and named[name].requires_grad]
        """Parameters that the first and the last rank both hold."""
        for parameter in self.tied:  # a script may have written into one of the two
            dist.broadcast(parameter.data, src=0, group=ends)
        self._ends = ends
        RUNTIMES.add(self)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return bool(self.rank == self._pp - 1)

    def step(self, batches: Sequence[Mapping[str, Any]], weight: Callable[[], torch.Tensor], *, training: bool) -> Any:
        """Run forward and backward of all micro-batches. Return their loss sums; zeros where another rank has the last stage."""
        import torch
        import torch.distributed as dist

        for stage in self.stages:
            stage.module.train(training)
            stage.batches, stage.sums = list(batches), []
        numbers = torch.arange(len(batches))
        schedule = self._schedule(batches, weight)
        first = [numbers] if self.stages[0].is_first else []
        target = numbers if self.is_last else None
        with phase("backward"):  # each forward marks itself inside
            try:
                schedule.step(*first, target=target, return_outputs=False, number=numbers)
            except RuntimeError as error:  # torch names the stage, and hides what it failed of
                raise error.__cause__ or error from None
            self._weight = None
            for parameter in self.tied:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._ends)
        for stage in self.stages:
            stage.batches = []
        if self.is_last:
            return self.stages[-1].sums
        return [torch.zeros((), device=self._device) for _ in batches]

    def _schedule(self, batches: Sequence[Mapping[str, Any]], weight: Callable[[], torch.Tensor]) -> Any:
        """Return the schedule of a step with micro-batches of this shape, made once.

        With shapes that are known from the beginning torch runs no forward to find them.
        """
        self._weight = weight
        shapes = {tuple(batch["input_ids"].shape) for batch in batches}
        if len(shapes) > 1:
            raise DataError(
                f"the micro-batches of a step have shapes {', '.join(map(str, sorted(shapes)))}: a pipeline's stages exchange "
                "tensors of one shape. Give rows of one length."
            )
        key = (len(batches), *next(iter(shapes)))
        if key not in self._schedules:
            made = [self._pipeline_stage(stage, key[1:]) for stage in self.stages]
            one = self._job.strategy.pp_schedule != "interleaved"
            options = {"loss_fn": self._weighted, "scale_grads": False}
            # One alone: each keeps buffers for what all of its micro-batches receive.
            self._schedules = {key: schedule_class(self._job)(made[0] if one else made, key[0], **options)}
        return self._schedules[key]

    def _pipeline_stage(self, stage: Stage, shape: tuple[int, ...]) -> PipelineStage:
        import torch
        from torch.distributed.pipelining import PipelineStage

        dtype: torch.dtype = getattr(torch, self._job.weight_dtype)
        hidden = torch.empty((*shape, self._hidden), dtype=dtype, device="meta")
        given = torch.empty(1, dtype=torch.long, device="meta") if stage.is_first else hidden.requires_grad_()
        leaving = torch.empty((), device="meta") if stage.is_last else hidden.requires_grad_()
        return PipelineStage(
            stage.module, stage.number, self._count, self._device, input_args=given, output_args=leaving
        )

    def _weighted(self, loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None
        return loss * self._weight()

    def forward(self, batch: Mapping[str, Any], *, training: bool, logits: bool = False) -> torch.Tensor:
        """Run one batch along all stages without gradients. Return the loss sum, or the logits, on every rank. A collective."""
        import torch
        import torch.distributed as dist

        hidden: torch.Tensor | None = None
        shape = (*batch["input_ids"].shape, self._hidden)
        mine = {stage.number: stage for stage in self.stages}
        with torch.no_grad():
            for number, stage in mine.items():
                stage.module.train(training)
                if number:
                    hidden = torch.empty(shape, dtype=getattr(torch, self._job.weight_dtype), device=self._device)
                    dist.recv(hidden, (number - 1) % self._pp)
                hidden = stage.compute(batch, hidden, logits=logits)
                if not stage.is_last:
                    dist.send(hidden, (number + 1) % self._pp)
            result = hidden.float() if self.is_last and hidden is not None else torch.zeros(())
            sizes: list[Any] = [tuple(result.shape)]
            dist.broadcast_object_list(sizes, src=self._pp - 1, device=self._device)
            result = result if self.is_last else torch.empty(sizes[0], device=self._device)
            dist.broadcast(result, src=self._pp - 1)
        return result
