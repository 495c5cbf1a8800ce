"""One process, or torch's DistributedDataParallel: every rank holds all states. bf16 and fp16 run under autocast."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.core.units import BYTES_OF, MiB, dtype_name
from toolkit.engines.base import Engine, read_precision
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.losses import loss_kind, loss_sum, with_trained
from toolkit.engines.optimizer_step import loss_scaler
from toolkit.engines.records import Counters, Prepared, StateMemory, Transfer
from toolkit.engines.simulation import Simulation
from toolkit.engines.states import measured_distributed, trained_elements
from toolkit.engines.timeouts import handlers
from toolkit.engines.traces import Trace

if TYPE_CHECKING:
    from datetime import timedelta


BROADCAST = 250 * MiB
"""Parameters that DDP joins to send them from rank 0 (torch/nn/parallel/distributed.py `broadcast_bucket_size`)."""


class DDP(Engine):
    """`none` and `ddp`."""

    prepares_pair = False
    broadcasts_buffers = True
    needs_every_gradient = True
    hides_every_backward = False

    def settings(self, job: Job) -> dict[str, Any]:
        """Return backend and autocast dtype."""
        return {
            "backend": "gloo" if job.device.kind == "cpu" else "nccl",
            "autocast": job.precision.accelerate if job.precision.mixed else "no",
        }

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return no plugin: Accelerate needs none for DDP. Gradients are views of DDP's buckets."""
        from accelerate.utils import DistributedDataParallelKwargs

        options = DistributedDataParallelKwargs(
            gradient_as_bucket_view=True,
            find_unused_parameters=job.strategy.unused_parameters == "find",
            **_bucket_size(job),
        )
        return {
            "cpu": job.device.kind == "cpu",
            "mixed_precision": job.settings["autocast"],
            "kwargs_handlers": [*handlers(timeout), *loss_scaler(job), options],
        }

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return a config file. `MULTI_GPU` with `use_cpu: false` starts several CPU processes, `MULTI_CPU` one."""
        kind = "NO" if strategy.single_process else "MULTI_GPU"
        return super().to_yaml(strategy, ranks, nodes) | {"distributed_type": kind}

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the fields of `accelerate launch` without DeepSpeed and FSDP; None without `accelerate launch`."""
        other = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
        if "ACCELERATE_MIXED_PRECISION" not in environ or any(environ.get(name) == "true" for name in other):
            return None
        sharding = "ddp" if int(environ.get("WORLD_SIZE", "1")) > 1 else "none"
        return {"sharding": sharding} | read_precision(environ)

    def autocast_dtype(self, job: Job) -> str | None:
        """Return the compute dtype: the weights keep the dtype that they are trained in."""
        return None if job.settings["autocast"] == "no" else job.compute_dtype

    def is_boundary(self, trace: Trace, what: str, name: str) -> bool:
        """Return whether the event is a gradient."""
        return what == "gradient"

    def simulate_load(self, simulation: Simulation) -> None:
        """Simulate loading: every rank reads the whole model."""
        simulation.hold_loaded(simulation.state.parameters)

    def simulate_training(self, simulation: Simulation) -> None:
        """Simulate whole gradients: on several ranks in buckets, which stay between steps."""
        job, ledger, state = simulation.job, simulation.ledger, simulation.state
        if job.parallelism.loss_size > 1:
            ledger.touch("buffers", min(state.parameters, BROADCAST))
            ledger.hold("buffers", state.trainable)
        simulation.train(_Gradients(ledger, job))

    def communication(self, job: Job) -> list[Transfer]:
        """Return one all-reduce of all gradients in the last micro-batch: 2 (N - 1)/N of them (Rajbhandari 2020)."""
        ranks = job.parallelism.loss_size
        size = trained_elements(job) * BYTES_OF[job.weight_dtype]
        transfer = Transfer(2 * (ranks - 1) / ranks * size, 1, "backward", "ring", "gradients, all-reduced")
        return [transfer] if ranks > 1 else []

    def compute_note(self, job: Job) -> str:
        """Return the note that autocast leaves the weights as they are."""
        if job.settings["autocast"] == "no":
            return "on the weights as they are held"
        return f"under autocast: products in {job.compute_dtype}, what needs the range in float32"

    def after_prepare(self, prepared: Prepared) -> None:
        """Keep DDP from sending buffers in every forward: on every rank they are the checkpoint's."""
        if prepared.job.parallelism.loss_size > 1:
            prepared.model.broadcast_buffers = False

    def check(self, prepared: Prepared) -> list[str]:
        """Check that several ranks are wrapped in DDP, and one is not."""
        expected = "DistributedDataParallel" if prepared.job.parallelism.loss_size > 1 else None
        class_name = type(prepared.model).__name__
        wrong = class_name != expected if expected else hasattr(prepared.model, "module")
        return [f"engine is {class_name}, expected {expected or 'the bare model'}"] if wrong else []

    def measure_state(self, prepared: Prepared) -> StateMemory:
        """Measure the storages of the parameters and of the optimizer's state."""
        dtypes = {dtype_name(parameter.dtype) for parameter in prepared.model.parameters() if parameter.requires_grad}
        # DDP's buckets are of their parameters' dtypes (`reducer.cpp`, `initialize_buckets`); one process reduces nothing.
        reduce = "+".join(sorted(dtypes)) if prepared.job.parallelism.loss_size > 1 else ""
        return measured_distributed(prepared.model, prepared.optimizer, reduce)

    def accumulating(self, prepared: Prepared, last: bool) -> AbstractContextManager[None]:
        """Average gradients over the ranks in the last micro-batch only. DDP decides it in the forward."""
        return nullcontext() if last else prepared.accelerator.no_sync(prepared.model)

    def after_restore(self, prepared: Prepared, counters: Counters) -> None:
        """Set the counters; then run DDP through one step of gradients, which are discarded.

        After its first backward DDP sums gradients in buckets of another order (`reducer.cpp`, `rebuild_buckets`), which
        with more than two ranks changes their last bits. A run that goes on has to sum as one that was never stopped.
        """
        import torch

        super().after_restore(prepared, counters)
        if prepared.job.parallelism.loss_size == 1:
            return
        shape = (1, 2 * prepared.job.strategy.token_parts)  # each rank of a sequence has a label to predict
        tokens = torch.zeros(shape, dtype=torch.long, device=prepared.accelerator.device)
        batch = prepared.job.split({"input_ids": tokens, "labels": tokens}, prepared.accelerator.process_index)
        batch, kind = with_trained(batch), loss_kind(prepared.job, prepared.model)
        loss_sum(prepared.model, batch, kind).backward()  # type: ignore[no-untyped-call]
        # The buckets are rebuilt at the head of a second forward. Without `no_sync` DDP would await its backward, and average the
        # gradients of the first micro-batch, too: equal sums with other last bits.
        with self.accumulating(prepared, last=False):
            loss_sum(prepared.model, batch, kind)
        prepared.optimizer.zero_grad()


def _bucket_size(job: Job) -> dict[str, float]:
    """Return DDP's name and unit of a bucket's size; nothing where it is left to DDP."""
    elements = job.strategy.bucket_elements
    return {} if elements is None else {"bucket_cap_mb": elements * BYTES_OF[job.weight_dtype] / MiB}


class _Gradients:
    """Gradients stay until the step has ended; those of later micro-batches are added in place.

    On several ranks the last micro-batch moves each gradient into its bucket (`reducer.cpp`, `mark_variable_ready_dense`).
    """

    grows = True

    def __init__(self, ledger: Ledger, job: Job) -> None:
        self._ledger = ledger
        self._buckets = job.parallelism.loss_size > 1
        self._accumulates = job.train_config.accumulation > 1
        self._grown: set[str] = set()

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        if what != "gradient":
            return
        if name in self._grown:
            self._ledger.hold("gradients", -size if self._buckets else 0)
        elif self._buckets and not self._accumulates:
            self._ledger.touch("gradients", size)
        else:
            self._ledger.hold("gradients", size)
            self._grown.add(name)
