"""`Engine`: everything about one way of sharding, with defaults where an engine is like the others.

A subclass is one file or folder of this package, or comes from elsewhere and calls `registry.register`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.core.phases import phase
from toolkit.core.units import BYTES_OF
from toolkit.devices.machine import Device
from toolkit.engines.job import Job
from toolkit.engines.losses import loss_kind, loss_sum, with_trained
from toolkit.engines.optimizer_step import OptimizerStep, to_device
from toolkit.engines.records import Prepared, StateMemory, Transfer
from toolkit.engines.shards import Shard
from toolkit.engines.states import (
    State,
    can_stream,
    distributed_shards,
    measured_distributed,
    optimizer_bytes,
    optimizer_dtypes,
    parameters_of,
    snapshot_bytes,
)
from toolkit.engines.traces import Trace, TraceConfig, trace_config
from toolkit.engines.upstream import masks_known_from

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from toolkit.engines.played import Action, Played
    from toolkit.engines.simulation import Simulation

    Batch = Mapping[str, torch.Tensor]


LAUNCHER_PRECISIONS = ("bf16", "fp16", "fp8")
"""Precisions that Accelerate's config file can say: there bf16 and fp16 keep fp32 masters, too."""


class Engine(OptimizerStep):
    """One way of sharding. Methods that take a `Job` build no process group and touch no device.

    Every difference between engines is a method here: no other code compares engines.
    """

    prepares_pair = True
    """Whether model and optimizer have to come in one call of `prepare`."""
    needs_optimizer = False
    """Whether `prepare` takes no model without an optimizer."""
    own_loop: type | None = None
    """A base class of `tk.accelerator`'s: what a user's own loop needs otherwise than with `training.own_loop.OwnLoop`."""
    needs_every_group = False
    """Whether the optimizer has to step all that is trained, element by element: it gets flat parts of many parameters."""
    model_no_sync = True
    """Whether the prepared model has a usable `no_sync`."""
    broadcasts_buffers = False
    """Whether its wrapper gives every rank the buffers of rank 0."""
    sync_each_batch = False
    """Whether gradients are reduced after every micro-batch."""
    wraps_model = True
    """Whether `prepare` wraps the model in another class."""
    no_forecast = ""
    """Why it has no forecast; empty where it has one."""
    places_model = True
    """Whether `prepare` moves the model to the device."""
    scales_on_cpu = False
    """Whether fp16 trains on a CPU that computes it. Accelerate's scaler is silently off there."""
    hides_every_backward = True
    """Whether transfers overlap with the backward of every micro-batch, and not only with the last one's."""

    # Configuration ----------------------------------------------------------------------------------------------------

    def settings(self, job: Job) -> dict[str, Any]:
        """Resolve the engine's configuration; `job.settings` is still empty.

        Raises:
            StrategyError: for what this device, model or number of ranks cannot do.
        """
        raise NotImplementedError

    def requirements(self, job: Job) -> Mapping[str, str]:
        """Return the libraries beyond torch, each with how to install it or what to choose instead."""
        return {}

    def checks(self, strategy: Strategy, device: Device) -> Sequence[str]:
        """Return the checks of `toolkit doctor` that have to pass, in addition to those of torch, transformers and accelerate."""
        return ()

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return the arguments of `Accelerator(...)`; `timeout`: how long a rank waits for another."""
        raise NotImplementedError

    def environment(self, job: Job) -> dict[str, str | None]:
        """Return the environment variables that its libraries read during set-up; None: must not be set."""
        return {}

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return the content of Accelerate's config file. Precisions that Accelerate does not know are written "no"."""
        return {
            "compute_environment": "LOCAL_MACHINE",
            "machine_rank": 0,
            "main_training_function": "main",
            "mixed_precision": strategy.precision if strategy.precision in LAUNCHER_PRECISIONS else "no",
            "num_machines": nodes,
            "num_processes": ranks,
            "rdzv_backend": "static",
            "same_network": True,
            "use_cpu": False,
        }

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the Strategy fields that `accelerate launch --config_file` sets in a worker; None for another engine's."""
        return None

    def train_config_from_env(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the TrainConfig fields that `accelerate launch --config_file` sets in a worker."""
        return {}

    # Forecast ---------------------------------------------------------------------------------------------------------

    def simulated_ranks(self, job: Job) -> Sequence[int]:
        """Return one rank of each kind: the forecast is of the fullest of them."""
        return (0,)

    def snapshot_bytes(self, job: Job, rank: int) -> int:
        """Return the bytes of a rank's share of a checkpoint; by default all have equal ones."""
        return snapshot_bytes(job)

    def rank_elements(self, job: Job, state: State) -> int:
        """Return the elements of a parameter that each rank holds; by default all."""
        return state.elements

    def reduce_dtype(self, job: Job) -> str:
        """Return torch's name of the dtype in which gradients are summed over ranks; empty on one rank."""
        return job.weight_dtype if job.parallelism.loss_size > 1 else ""

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return the bytes of states that a rank holds; by default the parameters are the masters.

        Source: Rajbhandari et al. 2020, section 3.1.
        """
        sizes = [(self.rank_elements(job, state), state) for state in parameters_of(job)]
        trained = sum(elements for elements, state in sizes if state.trainable)
        dtypes = {
            **dict.fromkeys(("trainable", "gradients"), job.weight_dtype),
            "optimizer": optimizer_dtypes(job),
            "reduce": self.reduce_dtype(job),
        }
        return StateMemory(
            trainable=trained * BYTES_OF[job.weight_dtype],
            frozen=sum(elements * BYTES_OF[state.dtype] for elements, state in sizes if not state.trainable),
            optimizer=optimizer_bytes(job, trained),
            dtypes={part: name for part, name in dtypes.items() if name},
        )

    def autocast_dtype(self, job: Job) -> str | None:
        """Return torch's name of the autocast dtype; None where the weights themselves have the compute dtype."""
        return None

    def trace_config(self, job: Job, *, masked: bool, rank: int = 0) -> TraceConfig:
        """Return the inputs of a rank's activations; `masked`: whether attention gets a mask."""
        return trace_config(job, masked=masked, autocast=self.autocast_dtype(job))

    def trace_configs(self, job: Job, *, masked: bool) -> list[TraceConfig]:
        """Return the configuration of each trace; by default one for each simulated rank."""
        return [self.trace_config(job, masked=masked, rank=rank) for rank in self.simulated_ranks(job)]

    def is_boundary(self, trace: Trace, what: str, name: str) -> bool:
        """Return whether the simulation needs this event of a trace: the fewer, the faster a forecast."""
        return True

    def simulate_step(self, simulation: Simulation) -> None:
        """Enter every allocation and release of a rank: load, prepare, one step of all micro-batches."""
        assert simulation.job.spec is not None
        simulation.ledger.hold("buffers", simulation.job.spec.buffer_bytes)
        self.simulate_load(simulation)
        self.simulate_training(simulation)

    def simulate_load(self, simulation: Simulation) -> None:
        """Enter what reading and sharding the weights allocates, until the rank holds its parameters."""
        raise NotImplementedError

    def simulate_training(self, simulation: Simulation) -> None:
        """Enter the rest of `prepare` and one step, of a rank that holds its parameters."""
        raise NotImplementedError

    def communication(self, job: Job) -> list[Transfer]:
        """Return the transfers of a step, in its order."""
        return []

    def play(
        self, job: Job, times: Sequence[tuple[float, float]], send: float = 0.0, after: float = 0.0
    ) -> Played | None:
        """Return the played schedule of a pipeline; None where a rank runs its micro-batches one after the other.

        Args:
            job: of the run.
            times: of the forward and the backward of a micro-batch, by trace.
            send: the time of what two stages exchange.
            after: the time after the last backward.
        """
        return None

    def compute_note(self, job: Job) -> str:
        """Say how the forward gets its compute dtype."""
        return "on the weights as they are held"

    def within_step(self, job: Job) -> str:
        """Say what a rank holds within a step besides the states between steps; empty where nothing needs to be said."""
        return ""

    def streams(self, job: Job) -> bool:
        """Return whether weights are read one at a time: those that are packed as they come."""
        return job.strategy.quantized and can_stream(job)

    def loading_note(self, job: Job, streamed: bool = False) -> str:
        """Return a note about the ranks that read the weights; `streamed`: one at a time."""
        if streamed:
            return "every rank reads and packs all weights, one at a time, and keeps them"
        return "every rank reads the whole model, which it keeps"

    # A worker ---------------------------------------------------------------------------------------------------------

    def load_model(self, job: Job, reader: Any) -> Any:
        """Read the weights; `reader` is a `weight_reader.Reader`. Packed weights are packed one by one as they come."""
        if self.streams(job) and (model := reader.defer()) is not None:
            self.fill(job, model)
            return model
        return reader.read()

    def fill(self, job: Job, model: Any) -> None:
        """Read the weights of a model that `reader.defer` made."""
        model.streamed_weights.fill(model)

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Change the model before `prepare`. May be called twice."""

    def defer_values(self, job: Job, model: torch.nn.Module) -> None:
        """Let a script use parameters that this rank does not hold whole (`deferred`), until `preparing`."""

    def preparing(self, job: Job, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context around `accelerator.prepare`, in which weights that are still in the files are read."""
        return nullcontext()

    def keeps_masters(self, job: Job) -> bool:
        """Return whether it has masters of its own, which it makes from weights in the compute dtype."""
        return False

    def after_prepare(self, prepared: Prepared) -> None:
        """Change the prepared model. Called for models from `toolkit.load` or `toolkit.prepare`."""

    def check(self, prepared: Prepared) -> list[str]:
        """Return a sentence for each difference from the request: class, stage, mesh, offload."""
        return []

    def measure_state(self, prepared: Prepared) -> StateMemory:
        """Measure the bytes of states that this rank holds: the storages of local shards and of the optimizer's state."""
        return measured_distributed(prepared.model, prepared.optimizer, self.reduce_dtype(prepared.job))

    def forward_backward(
        self,
        prepared: Prepared,
        batches: Sequence[Batch],
        weight: Callable[[], torch.Tensor],
        on_last_forward: Callable[[Sequence[torch.Tensor]], None],
    ) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches of a step. Nothing here waits for the host.

        Args:
            prepared: the model.
            batches: micro-batches on the host, with shifted labels.
            weight: multiplies every loss sum. It is called once the first backward needs it.
            on_last_forward: takes the loss sum of each micro-batch between the last forward and its backward.

        Returns:
            The loss sum of each micro-batch, on every rank.
        """
        sums: list[torch.Tensor] = []
        for batch in batches:
            last = len(sums) == len(batches) - 1
            with self.accumulating(prepared, last):
                with phase("forward"):
                    loss = self._loss_sum(prepared, batch)
                sums.append(loss.detach())
                if last:
                    on_last_forward(sums)
                with phase("backward"):
                    self.backward(prepared, loss * weight(), last)
                del loss
        return sums

    def timed_actions(self, prepared: Prepared) -> list[list[tuple[Action, float, float]]]:
        """Return this rank's last steps: each action of a pipeline's schedule with its begin and end. Empty without one."""
        return []

    def accumulating(self, prepared: Prepared, last: bool) -> AbstractContextManager[None]:
        """Return a context around forward and backward of one micro-batch; `last` ends the accumulation."""
        return nullcontext()

    def evaluate(self, prepared: Prepared, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the loss sum of each batch, on every rank, without gradients."""
        import torch

        with torch.no_grad():
            return [self._loss_sum(prepared, batch) for batch in batches]

    def _loss_sum(self, prepared: Prepared, batch: Batch) -> torch.Tensor:
        """Copy a batch to the device and run the forward."""
        kind = loss_kind(prepared.job, prepared.model)
        if prepared.job.strategy.loss == "chunked":
            batch = with_trained(batch)
        with masks_known_from(batch):
            return loss_sum(prepared.model, to_device(batch, prepared.accelerator.device), kind)

    def logits(self, prepared: Prepared, batch: Batch) -> torch.Tensor:
        """Return the logits [b, s, vocabulary] of a batch on every rank, without gradients."""
        import torch

        with torch.no_grad(), masks_known_from(batch):
            output = prepared.model(**to_device(batch, prepared.accelerator.device), use_cache=False)
        logits: torch.Tensor = output.logits
        return logits

    def shards(self, prepared: Prepared, create: bool = False) -> Iterable[Shard]:
        """Yield every parameter, buffer, master and moment of this rank; `create` makes moments that do not exist yet."""
        model = prepared.accelerator.unwrap_model(prepared.model)
        return distributed_shards(prepared.job, model, prepared.optimizer, create)


def read_precision(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the precision that the launch environment sets: "no" leaves it open."""
    word = environ.get("ACCELERATE_MIXED_PRECISION")
    return {"precision": word} if word in LAUNCHER_PRECISIONS else {}


@contextmanager
def engine_environment(job: Job) -> Iterator[None]:
    """Set the variables that an engine's libraries read, and restore `os.environ` later: Accelerate writes into it, too."""
    before = dict(os.environ)
    try:
        # The job has the degrees of a `parallelism_config`, and Accelerate would shard by them again.
        variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": None, **job.engine.environment(job)}
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
