"""torch's FSDP2 (`fully_shard`): full shard, grad-op, and HSDP. Parameters are their own fp32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF
from toolkit.engines.base import Engine
from toolkit.engines.config_file import base_yaml, read_precision
from toolkit.engines.fsdp.loading import streaming
from toolkit.engines.fsdp.simulation import (
    reduce_dtype,
    shard_elements,
    simulate_load,
    simulate_training,
)
from toolkit.engines.job import Job, advice_without_scaling
from toolkit.engines.ledger import Ledger
from toolkit.engines.optimizer_step import loss_scaler
from toolkit.engines.records import Prepared, StateMemory, Transfer
from toolkit.engines.shards import Shard
from toolkit.engines.simulation import host_transfers, streams
from toolkit.engines.states import optimizer_bytes, optimizer_dtypes, parameters_of
from toolkit.engines.timeouts import handlers
from toolkit.engines.traces import Segment, Trace

if TYPE_CHECKING:
    from datetime import timedelta

    import torch


class FSDP(Engine):
    """`fsdp`, `fsdp_grad_op` and `hsdp`."""

    needs_optimizer = True
    model_no_sync = False
    sync_each_batch = True  # without it FSDP holds whole gradients until the last micro-batch

    def settings(self, job: Job) -> dict[str, Any]:
        """Return wrap policy, dtypes and mesh. Refuses fp16 and offload on a CPU, and a single rank without offload."""
        strategy, spec, device = job.strategy, job.spec, job.device
        if job.precision.scaled and device.kind == "cpu":
            raise StrategyError(
                f"sharding {strategy.sharding!r} cannot train in precision {strategy.precision!r} "
                "on a CPU: FSDP has no loss scaling there. " + advice_without_scaling(device, "zero3")
            )
        if strategy.offload != "none" and device.kind == "cpu":
            raise StrategyError(
                f"sharding {strategy.sharding!r} cannot offload on CPU ranks: FSDP's offload needs an accelerator. "
                "Choose offload 'none', or sharding 'zero3'."
            )
        if job.parallelism.shard_size < 2 and strategy.offload == "none":
            raise StrategyError(
                f"sharding {strategy.sharding!r} needs at least 2 ranks to shard over; got 1. Choose 2 processes, or sharding "
                "'none' for one" + (", or offload 'cpu'." if device.kind == "cuda" else ".")
            )
        return {
            "reshard_after_forward": strategy.sharding != "fsdp_grad_op",
            "wrap": list(spec.blocks) if spec else [],
            "param_dtype": job.compute_dtype if job.precision.mixed else None,
            # Accelerate's own default reduces in the compute dtype.
            "reduce_dtype": job.precision.reduce if job.precision.mixed else None,
            "offload": strategy.offload == "cpu",
            "replicate": job.parallelism.dp_replicate,
            "shard": job.parallelism.shard_size,
        }

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return a `FullyShardedDataParallelPlugin` of version 2, the mesh for HSDP, and the shim for CPU ranks."""
        import torch
        from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from toolkit.engines import cpu

        def dtype(name: str | None) -> torch.dtype | None:
            return getattr(torch, name) if name else None

        ours = job.settings
        policy = MixedPrecisionPolicy(
            param_dtype=dtype(ours["param_dtype"]),
            reduce_dtype=dtype(ours["reduce_dtype"]),
        )
        chosen = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=ours["reshard_after_forward"],
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=ours["wrap"] or None,
            mixed_precision_policy=policy,
            cpu_offload=ours["offload"],
            cpu_ram_efficient_loading=not job.strategy.quantized,
            activation_checkpointing=False,
        )
        kwargs: dict[str, Any] = {
            "fsdp_plugin": chosen,
            "mixed_precision": job.precision.accelerate if job.precision.mixed else "no",
            "kwargs_handlers": [*handlers(timeout), *loss_scaler(job)],
        }
        if ours["replicate"] > 1:
            kwargs["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=ours["replicate"], dp_shard_size=ours["shard"]
            )
        if job.device.kind == "cpu":
            cpu.shard_with_fsdp(timeout)
        return kwargs

    def environment(self, job: Job) -> dict[str, str | None]:
        """Return the offload variable: only with it Accelerate adds gloo for tensors on the host (state.py:226).

        The last one tells transformers to read on one rank. Quantized weights cannot be moved to meta (accelerate's
        fsdp_utils.py near 770), so every rank reads those.
        """
        return {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_OFFLOAD_PARAMS": str(job.settings["offload"]).lower(),
            "FSDP_CPU_RAM_EFFICIENT_LOADING": str(not job.strategy.quantized).lower(),
        }

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return a file with `distributed_type: FSDP`, version 2. The worker fills in the model's wrapped classes."""
        config = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": strategy.offload == "cpu",
            "fsdp_reshard_after_forward": strategy.sharding != "fsdp_grad_op",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        content = base_yaml(strategy, ranks, nodes) | {"distributed_type": "FSDP", "fsdp_config": config}
        if strategy.dp_replicate > 1:
            content["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": strategy.dp_replicate,
                "parallelism_config_dp_shard_size": ranks // strategy.dp_replicate,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            }
        return content

    def from_yaml(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return resharding, offload, groups and precision of a file with `distributed_type: FSDP`."""
        if config.get("distributed_type") != "FSDP":
            return None
        ours, mesh = config.get("fsdp_config", {}), config.get("parallelism_config", {})
        return _fields_of_settings(
            str(ours.get("fsdp_reshard_after_forward", True)),
            str(ours.get("fsdp_offload_params", False)),
            str(mesh.get("parallelism_config_dp_replicate_size", 1)),
            config.get("mixed_precision"),
        )

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the fields of `FSDP_*` and `PARALLELISM_CONFIG_*`.

        Raises:
            StrategyError: for FSDP1, which is deprecated and fails on a CPU.
        """
        if environ.get("ACCELERATE_USE_FSDP") != "true":
            return None
        if environ.get("FSDP_VERSION", "1") != "2":
            raise StrategyError("fsdp_version 1 is deprecated upstream and not supported. Write `fsdp_version: 2`.")
        return _fields_of_settings(
            environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"),
            environ.get("FSDP_OFFLOAD_PARAMS", "false"),
            environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"),
            environ.get("ACCELERATE_MIXED_PRECISION"),
        )

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return a shard of everything: each parameter is split along its first dimension, padded to equal parts.

        torch `_fully_shard/_fsdp_param.py`: the padded shard stays allocated. The parameters are the masters.
        """
        states, ranks = list(parameters_of(job)), job.parallelism.shard_size
        trained = sum(shard_elements(state, ranks) for state in states if state.trainable)
        return StateMemory(
            trainable=trained * BYTES_OF[job.weight_dtype],
            frozen=sum(shard_elements(state, ranks) * BYTES_OF[state.dtype] for state in states if not state.trainable),
            optimizer=optimizer_bytes(job, trained),
            dtypes={
                **dict.fromkeys(("trainable", "gradients"), job.weight_dtype),
                "optimizer": optimizer_dtypes(job),
                "reduce": reduce_dtype(job),
            },
        )

    def is_boundary(self, trace: Trace, what: str, name: str) -> bool:
        """Return whether the event is a gradient, the end of the forward, or a gathered module."""
        if what == "gradient" or not name or name in trace.ends:
            return True
        return any(stack.name == name.rpartition(".")[0] for stack in trace.stacks)

    def simulate_load(self, job: Job, ledger: Ledger, *, rank: int) -> None:
        """Enter the load of rank 0, which reads the whole model and broadcasts the shards."""
        simulate_load(job, ledger, self.expected_state(job, rank))

    def simulate_training(
        self, job: Job, trace: Trace, step: Sequence[Segment], ledger: Ledger, *, rank: int, checkpoints: bool
    ) -> None:
        """Enter one step of a rank that holds its shards."""
        simulate_training(job, trace, step, ledger, self.expected_state(job, rank), checkpoints=checkpoints)

    def communication(self, job: Job) -> list[Transfer]:
        """Return all-gathers, reduce-scatters and, between groups, all-reduces: each (N - 1)/N of the tensors.

        Source: Rajbhandari et al. 2020, section 7.
        """
        states, ranks, micro = parameters_of(job), job.parallelism.shard_size, job.train_config.accumulation
        share = (ranks - 1) / ranks
        compute = BYTES_OF[job.compute_dtype]
        whole = sum(state.elements * (compute if state.trainable else BYTES_OF[state.dtype]) for state in states)
        reduced = sum(state.elements for state in states if state.trainable) * BYTES_OF[reduce_dtype(job)]
        sent = [Transfer(share * whole, micro, "forward", "ring", "parameters, all-gathered for the forward")]
        if job.settings["reshard_after_forward"]:
            gathered = "parameters, all-gathered for the backward"
            sent.append(Transfer(share * whole, micro, "backward", "ring", gathered))
        sent.append(Transfer(share * reduced, micro, "backward", "ring", "gradients, reduce-scattered"))
        if (groups := job.parallelism.dp_replicate) > 1:
            size = 2 * (groups - 1) / groups * reduced / ranks
            sent.append(Transfer(size, micro, "backward", "replicas", "gradients, all-reduced between the groups"))
        return [*sent, *host_transfers(job)]

    def compute_note(self, job: Job) -> str:
        """Return the note that the mixed-precision policy casts what an all-gather sends, group by group."""
        cast = job.settings["param_dtype"]
        return f"on copies that each all-gather makes in {cast}" if cast else "on the weights as they are gathered"

    def loading_note(self, job: Job) -> str:
        """Rank 0 reads, a weight at a time where the files hold them as they are."""
        if streams(job):
            return "rank 0 reads each weight, and every rank keeps its shard of it"
        if job.strategy.quantized:
            return "every rank reads and quantizes the whole model, then keeps its shard"
        return "rank 0 reads the whole model and broadcasts each shard; the others start empty"

    def load_model(self, job: Job, reader: Any) -> Any:
        """Leave the weights in the files until `prepare`, if possible. Else rank 0 reads them; of packed ones every rank."""
        if streams(job) and (model := reader.defer()) is not None:
            return model
        return reader.read() if job.strategy.quantized else reader.read_on_main()

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Merge embeddings with one shared weight into one module: FSDP2 takes a weight in one group only.

        Accelerate puts the input and the output embedding into one group, but not the encoder's and the decoder's
        of a T5. Persistent buffers are kept from Accelerate, which would shard them (`hide_buffers`).
        """
        import torch

        from toolkit.engines.fsdp.state import hide_buffers

        hide_buffers(model)
        first: dict[int, torch.nn.Module] = {}
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Embedding):
                owner = first.setdefault(id(module.weight), module)
                if owner is not module:
                    model.set_submodule(name, owner)
        if not job.settings["wrap"]:
            model._no_split_modules = _blocks(model)  # type: ignore[assignment]

    def preparing(self, job: Job, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Read the weights that were left in the files."""
        weights: Any = getattr(model, "streamed_weights", None)
        return nullcontext() if weights is None or weights.closed else streaming(job, model)

    def check(self, prepared: Prepared) -> list[str]:
        """Check for FSDP2 modules with DTensors over the requested mesh."""
        from toolkit.engines.fsdp.state import check

        return check(prepared)

    def measure_state(self, prepared: Prepared) -> StateMemory:
        """Measure the storages of the local shards and of the optimizer's state."""
        from toolkit.engines.fsdp.state import measure

        return measure(prepared)

    def shards(self, prepared: Prepared, create: bool = False) -> Iterable[Shard]:
        """Yield this rank's box of each parameter and its moments; persistent buffers whole."""
        from toolkit.engines.fsdp.state import shards

        return shards(prepared, create)


def _fields_of_settings(reshard: str, offload: str, replicate: str, precision: str | None) -> dict[str, Any]:
    sharding = "hsdp" if int(replicate) > 1 else "fsdp" if reshard.lower() == "true" else "fsdp_grad_op"
    fields = {"sharding": sharding, "offload": "cpu" if offload.lower() == "true" else "none"}
    return fields | ({"dp_replicate": int(replicate)} if int(replicate) > 1 else {}) | read_precision(precision)


def _blocks(model: torch.nn.Module) -> list[str]:
    """Return the classes that a model declares as its blocks; Accelerate shards each of them without a spec.

    Without one around the input embedding (BERT's): Accelerate shards the embedding itself, and a weight is sharded once.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    class_names, blocks = set(getattr(model, "_no_split_modules", None) or ()), set()
    for module in model.modules():
        if type(module).__name__ in class_names and all(part is not embedding for part in module.modules()):
            blocks.add(type(module).__name__)
    return sorted(blocks)
