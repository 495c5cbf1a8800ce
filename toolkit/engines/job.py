"""`Job`: a request without open values. Forecasts and workers make it with `resolution.resolve()`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.config.parallelism import Coordinates, Parallelism
from toolkit.config.strategy import Strategy
from toolkit.config.tables import OPTIMIZERS, PRECISIONS, Optimizer, Precision
from toolkit.config.train_config import TrainConfig
from toolkit.devices.machine import Device
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    from toolkit.engines.base import Engine


@dataclass(frozen=True, kw_only=True)
class Job:
    """A resolved request."""

    strategy: Strategy
    """Without an `auto`."""
    train_config: TrainConfig
    """Without an open value."""
    spec: ModelSpec | None
    """None for a model of the caller's own: the engine then chooses the values that depend on a model."""
    parallelism: Parallelism
    device: Device
    engine: Engine
    """That runs the strategy."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The engine's resolved configuration, word for word."""
    transforms: tuple[Transform, ...] = ()
    """Changes of the model between reading and `prepare`, in order."""
    expert_imbalance: float = 1.0
    """A forecast's assumption: the tokens that the rank's experts get, divided by the mean of its expert-parallel group."""

    @property
    def precision(self) -> Precision:
        """The dtypes of its precision."""
        return PRECISIONS[self.strategy.precision]

    @property
    def optimizer(self) -> Optimizer:
        """The row of its optimizer."""
        return OPTIMIZERS[self.train_config.optimizer]

    @property
    def compute_dtype(self) -> str:
        """torch's name of the dtype that the forward computes in."""
        return self.precision.compute

    @property
    def weight_dtype(self) -> str:
        """torch's name of the dtype that trainable weights are stepped in: fp32, but for `bf16_pure`."""
        return self.precision.master

    @property
    def kept_dtype(self) -> str:
        """torch's name of the dtype in which the engine holds trained parameters, besides any masters."""
        return self.engine.expected_state(self).dtypes["trainable"]

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.parallelism.ranks

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.train_config.micro_batch * self.train_config.accumulation * self.parallelism.dp_size

    def split(self, batch: Mapping[str, Any], rank: int, masked: bool | None = None) -> Mapping[str, Any]:
        """Return the part of a batch that a rank computes, by every transform."""
        for transform in self.transforms:
            batch = transform.split(batch, self, rank, masked)
        return batch

    def communication(self) -> list[Any]:
        """Return all `records.Transfer`s of a step, the engine's and the transforms'."""
        own = [transfer for transform in self.transforms for transfer in transform.communication(self)]
        return [*self.engine.communication(self), *own]

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank."""
        return self.parallelism.coordinates(rank)


class Transform:
    """A change of a model between reading its weights and `prepare`.

    `load` applies a job's transforms in the order of the registry. The trace of a forecast applies the same ones to the shallow
    model on the meta device, so their activations and operations are in the forecast. Subclasses call `register_transform`.
    """

    name: str
    libraries: tuple[str, ...] = ()
    """Packages that `apply` imports. A trace runs in a child process where one of them is not imported yet."""

    def settings(self, job: Job) -> Hashable | None:
        """Return everything of the job that `apply` depends on, or None where the job does without it.

        Traces of equal settings are shared. By default all fields count, so jobs share few traces.
        """
        return job.strategy, job.train_config

    def refuse(self, job: Job) -> None:
        """Refuse a job before any process starts.

        Raises:
            StrategyError: what the transform cannot do, and the fix.
        """

    def apply(self, model: Any, job: Job) -> Any:
        """Change the model in place. Return it, or the module around it that is trained."""
        return model

    def ranks(self, job: Job) -> int:
        """Return how many ranks `apply` and the forward communicate with: the trace's fake process group has so many."""
        return 1

    def split(self, batch: Mapping[str, Any], job: Job, rank: int, masked: bool | None = None) -> Mapping[str, Any]:
        """Return the part of a batch that a rank computes; labels are shifted already.

        Args:
            batch: tensors [b, s] of whole rows.
            job, rank: of the run.
            masked: whether attention gets a mask; None: read it off the batch.
        """
        return batch

    def communication(self, job: Job) -> list[Any]:
        """Return the `records.Transfer`s of a step that the transform adds to the engine's."""
        return []

    def host_bytes(self, job: Job) -> int:
        """Return the bytes that it keeps in a rank's host memory during a step, where that is not the device's."""
        return 0

    def after_prepare(self, prepared: Any) -> None:
        """Finish after `prepare`, before the audit; takes `records.Prepared`."""
