"""The records that engines take and return. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError
from toolkit.core.units import format_bytes
from toolkit.engines.job import Job

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

SCHEDULE = "schedule"
"""What a pipeline's transfers overlap with: they lie within the played schedule (`Transfer.overlaps`)."""

STATES = ("trainable", "frozen", "master", "optimizer")
"""The parts of `StateMemory`."""


@dataclass(frozen=True)
class Prepared:
    """The result of `accelerator.prepare`, with the job that it was made for."""

    job: Job
    model: Any
    """The module that is called: bare, DDP, a DeepSpeedEngine, or an FSDPModule."""
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of an optimizer step."""

    norm: float | torch.Tensor
    """The global L2 norm of the gradients before clipping, over all ranks; on the device where the host did not wait."""
    skipped: bool
    """Whether the weights stayed as they were: fp16's scaler met an overflow, or the host saw a norm that is not finite."""
    gradients: str
    """torch's names of the dtypes of the gradients."""
    scale: float = 1.0
    """The loss scale, under fp16."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """An optimizer's counters; the same under every engine, so that a run can change its engine."""

    steps: int
    """Optimizer steps taken. Steps that fp16's scaler skipped do not count."""
    scale: float | None = None
    """The loss scale of fp16; None without scaling."""
    good_steps: int = 0
    """Steps without an overflow since the scale last changed."""
    hysteresis: int | None = None
    """Overflows that DeepSpeed's scaler accepts before it lowers the scale; torch's lowers it at the first."""


@dataclass(frozen=True, kw_only=True)
class StateMemory(Result):
    """Bytes of the states that one rank holds, by part: expected by an engine, or measured in its memory."""

    trainable: int
    """Trained parameters: this rank's shard, persistent ones whole, tied ones once."""
    frozen: int
    """Frozen parameters."""
    master: int = 0
    """A separate fp32 copy of the trained weights, where the engine keeps one."""
    optimizer: int | None = 0
    """Moments. None before the first step, when they do not exist."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Part → torch's dtype name, several joined by `+`."""

    @property
    def parameters(self) -> int:
        """All parameters' bytes."""
        return self.trainable + self.frozen

    def tables(self) -> list[Table]:
        rows = [
            (name, "–" if (size := getattr(self, name)) is None else format_bytes(size), self.dtypes.get(name, "–"))
            for name in STATES
        ]
        return [Table(title="Held by this rank", columns=("part", "bytes", "dtype"), rows=rows)]


class Transfer(NamedTuple):
    """Transfers of one kind in a step."""

    size: float
    """Bytes of one transfer."""
    times: int
    """Transfers in a step."""
    overlaps: str
    """The phase that computes meanwhile: `forward`, `backward`, or `nothing`; `SCHEDULE` between a pipeline's stages."""
    link: str
    """`ring`: among the ranks of a shard; `replicas`: the same shard in other groups; `tp`: a tensor-parallel group; `cp`, `ep`:
    a context-parallel, an expert-parallel one; `pp`: between stages; `host`; `memory`: within the device."""
    what: str
    """The tensors and the collective."""


def on_device(job: Job, state: StateMemory) -> StateMemory:
    """Return the part of a rank's states on its device, without offloaded ones. On CPU ranks it is everything."""
    if job.device.kind == "cpu" or job.strategy.offload == "none":
        return state
    moved = {"master": 0, "optimizer": 0} | ({"trainable": 0, "frozen": 0} if job.strategy.offload == "cpu" else {})
    return dataclasses.replace(state, **moved)  # type: ignore[arg-type]


def job_of(accelerator: Accelerator) -> Job:
    """Return the job that an Accelerator was made for.

    Raises:
        StrategyError: for an Accelerator that `toolkit.accelerator()` did not make.
    """
    job: Job | None = getattr(accelerator, "job", None)
    if job is None:
        raise StrategyError(
            "this Accelerator was not made by the toolkit, so its strategy is unknown. "
            "Make it with `toolkit.accelerator(strategy, train_config, spec)`."
        )
    return job
