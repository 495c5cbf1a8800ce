"""torch's FSDP2 (`fully_shard`): full shard, grad-op, and HSDP. Parameters are their own fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError
from toolkit.engines.base import read_precision
from toolkit.engines.fsdp.simulation import (
    FSDPForecast,
)
from toolkit.engines.fsdp.state import FSDPState
from toolkit.engines.job import Job, advice_without_scaling
from toolkit.engines.optimizer_step import loss_scaler
from toolkit.engines.simulation import streams
from toolkit.engines.timeouts import handlers

if TYPE_CHECKING:
    from datetime import timedelta

    import torch


class FSDP(FSDPForecast, FSDPState):
    """`fsdp`, `fsdp_grad_op` and `hsdp`."""

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
        content = super().to_yaml(strategy, ranks, nodes) | {"distributed_type": "FSDP", "fsdp_config": config}
        if strategy.dp_replicate > 1:
            content["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": strategy.dp_replicate,
                "parallelism_config_dp_shard_size": ranks // strategy.dp_replicate,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            }
        return content

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the fields of `FSDP_*` and `PARALLELISM_CONFIG_*`.

        Raises:
            StrategyError: for FSDP1, which is deprecated and fails on a CPU.
        """
        if environ.get("ACCELERATE_USE_FSDP") != "true":
            return None
        if environ.get("FSDP_VERSION", "1") != "2":
            raise StrategyError("fsdp_version 1 is deprecated upstream and not supported. Write `fsdp_version: 2`.")
        replicate = int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        sharding = "fsdp" if environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true" else "fsdp_grad_op"
        groups = {"sharding": "hsdp", "dp_replicate": replicate} if replicate > 1 else {"sharding": sharding}
        offload = "cpu" if environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true" else "none"
        return {**groups, "offload": offload} | read_precision(environ)

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
