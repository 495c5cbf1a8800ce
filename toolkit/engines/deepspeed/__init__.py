"""DeepSpeed ZeRO, stages 1 to 3, with optimizer and parameter offload."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import RunError, StrategyError
from toolkit.core.units import round_up
from toolkit.devices.machine import Device
from toolkit.engines.base import read_precision
from toolkit.engines.deepspeed.simulation import ZeroForecast
from toolkit.engines.deepspeed.state import ZeroState, announce_build, free_builds
from toolkit.engines.deepspeed.user_config import DEFAULT_LIVE, read_environment
from toolkit.engines.deepspeed.zero3 import accumulation_dtype, stage_of
from toolkit.engines.job import Job
from toolkit.engines.timeouts import handlers
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    from datetime import timedelta


SUM_BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of a sum."""

FLOOR = 2**20
"""Least elements of a bucket. For a small model Accelerate's rule makes a collective for nearly every tensor: with hidden 256
on two gloo ranks ZeRO-3 then trains at 0.4 of the speed, for 4 MiB less."""


class DeepSpeed(ZeroForecast, ZeroState):
    """`zero1`, `zero2` and `zero3`."""

    scales_on_cpu = True

    def settings(self, job: Job) -> dict[str, Any]:
        """Return DeepSpeed's configuration, word for word.

        Buckets follow Accelerate's rule for "auto" (h², 0.9 h², 10 h elements; accelerator.py `hidden_size_based_keys`), the
        first two at least `FLOOR`: DeepSpeed's own defaults are 5e8 elements, allocated whole. Without a spec they stay "auto".
        """
        strategy, train_config, spec, device = job.strategy, job.train_config, job.spec, job.device
        pure = not job.precision.mixed and job.compute_dtype != "float32"
        if strategy.offload != "none" and pure:
            # DeepSpeed asks for a cpu_adam with bf16 states, and Accelerate makes one with fp32 states (base_optimizer.py:514).
            raise StrategyError(
                f"offload {strategy.offload!r} cannot run in precision {strategy.precision!r} under DeepSpeed. "
                "Choose precision 'bf16', or offload 'none'."
            )
        sum_dtype = _grad_accum_dtype(job)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": train_config.micro_batch,
            "gradient_accumulation_steps": train_config.accumulation,
            "gradient_clipping": train_config.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": _zero(strategy, spec, device),
            "bf16": {"enabled": job.precision.accelerate == "bf16", "check_grad_overflow": True},
            "fp16": {"enabled": job.precision.scaled},
        }
        if job.precision.scaled:
            power = int(math.log2(train_config.loss_scale))
            config["fp16"] |= {"initial_scale_power": power, "loss_scale_window": train_config.loss_scale_window}
        if job.precision.mixed:
            # Reduce in fp32, as DDP and FSDP do here; the default is the compute dtype.
            config["communication_data_type"] = "fp32"
            config["data_types"] = {"grad_accum_dtype": sum_dtype}
        if pure:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        if strategy.offload != "none" and device.kind == "cpu":
            config["zero_force_ds_cpu_optimizer"] = False
        return config

    def requirements(self, job: Job) -> Mapping[str, str]:
        """Return DeepSpeed. A forecast does not need it."""
        return {
            "deepspeed": "Install it with `pip install 'accelerate-toolkit[deepspeed]'`, or choose sharding 'fsdp'."
        }

    def checks(self, strategy: Strategy, device: Device) -> Sequence[str]:
        """Return the checks: a CPU needs compiled collectives, a GPU needs a compiled operator for offload only."""
        compiled = device.kind == "cpu" or strategy.offload != "none"
        return ("deepspeed", "deepspeed operators") if compiled else ("deepspeed",)

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return a `DeepSpeedPlugin` with the resolved configuration, and gloo for ranks without a device.

        Raises:
            RunError: in a process that no launcher started.
        """
        import copy
        import logging

        if "RANK" not in os.environ:
            word = job.strategy.sharding
            raise RunError(
                f"sharding {word!r} needs ranks that were launched. Start the script with `accelerate launch "
                f"--config_file accelerate_configs/{word}.yaml`; `toolkit config` writes such a file."
            )
        from accelerate.utils import DeepSpeedPlugin
        from deepspeed.utils import logger

        if os.environ.get("LOCAL_RANK", "0") == "0":
            free_builds()
            announce_build(job)
        logger.setLevel(logging.WARNING)
        # torch 2.13 renamed collectives that DeepSpeed calls, and warns at every call site on every rank.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
        config = copy.deepcopy(dict(job.settings))
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=stage_of(job.strategy) == 3)
        return {
            "deepspeed_plugin": plugin,
            "mixed_precision": job.precision.accelerate,
            "kwargs_handlers": handlers(timeout, "gloo" if job.device.kind == "cpu" else None),
        }

    def environment(self, job: Job) -> dict[str, str | None]:
        """Return a path with ninja, which DeepSpeed calls by name; it lies next to this interpreter.

        Accelerate refuses the launcher's own fields together with a whole configuration.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return {"PATH": path, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": None}

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return a file with `distributed_type: DEEPSPEED`. The worker fills in what depends on the model."""
        offloaded = strategy.offload != "none"
        config = {
            "zero_stage": stage_of(strategy),
            "offload_optimizer_device": "cpu" if offloaded else "none",
            "offload_param_device": "cpu" if strategy.offload == "cpu" else "none",
            "zero3_init_flag": stage_of(strategy) == 3,
            "zero3_save_16bit_model": stage_of(strategy) == 3,
        }
        if nodes > 1:  # otherwise Accelerate starts one node alone, by pdsh
            config["deepspeed_multinode_launcher"] = "standard"
        content = super().to_yaml(strategy, ranks, nodes)
        return content | {"distributed_type": "DEEPSPEED", "deepspeed_config": config}

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the fields of `ACCELERATE_DEEPSPEED_*`.

        A file of one's own (`deepspeed_config_file`) comes in their place.

        Raises:
            StrategyError: for a file with a key that the toolkit would not follow.
        """
        if environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
            return None
        if own := read_environment(environ, Strategy):
            launched = read_precision(environ)
            if own | launched != launched | own:
                raise StrategyError(
                    f"mixed_precision {launched['precision']} of the Accelerate config file contradicts its "
                    f"deepspeed_config_file, which enables {own['precision']}. Change one of them."
                )
            return launched | own
        stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        offload = "optimizer" if environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu" else "none"
        offload = "cpu" if environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE") == "cpu" else offload
        return {"sharding": f"zero{stage}", "offload": offload} | read_precision(environ)

    def train_config_from_env(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of a file of one's own."""
        return read_environment(environ, TrainConfig)

    def compute_note(self, job: Job) -> str:
        """Return the note that DeepSpeed casts the weights before the first step, without autocast."""
        note = f"on the weights as they are {'held' if stage_of(job.strategy) < 3 else 'gathered'}"
        dtype = accumulation_dtype(job)
        if not job.precision.mixed or dtype == "float32":
            return note
        return f"{note}; gradients add up in {dtype}: {SUM_BITS[dtype]} bits round the sum after each micro-batch"

    def loading_note(self, job: Job, streamed: bool = False) -> str:
        """Return the note that stage 3 partitions while it reads: transformers enters `zero.Init`."""
        if stage_of(job.strategy) < 3:
            return super().loading_note(job, streamed)
        if job.strategy.quantized:
            # transformers skips zero.Init for quantized models (modeling_utils.py, `get_init_context`).
            what = "packs one weight after the other" if streamed else "quantizes the whole model"
            return f"every rank reads and {what}, and keeps its shard"
        return "rank 0 reads each parameter, and every rank keeps its shard of it (zero.Init)"


def _grad_accum_dtype(job: Job) -> str:
    """Return DeepSpeed's word for the dtype that gradients are added up in. Refuse one that it cannot add up in.

    Under stage 1 in bf16 fp32 would switch to another optimizer (BF16_Optimizer), which replicates the gradients.
    """
    strategy, accumulation = job.strategy, job.train_config.accumulation
    compute, word = strategy.precision.removesuffix("_pure"), strategy.grad_accum_dtype
    half_only = stage_of(strategy) == 1 and compute == "bf16"
    if word == "auto" and half_only and job.precision.mixed and accumulation > 1:
        raise StrategyError(
            f"sharding {strategy.sharding!r} in precision {strategy.precision!r} adds up "
            "gradients in it, so that several micro-batches would not be one large batch. "
            f"Choose accumulation 1 instead of {accumulation}, sharding 'zero2', which adds up in fp32, or grad_accum_dtype 'bf16'."
        )
    allowed = (compute,) if half_only or not job.precision.mixed else ("fp32", compute)
    if word not in ("auto", *allowed):
        raise StrategyError(
            f"grad_accum_dtype {word!r} does not run with sharding {strategy.sharding!r} in precision {strategy.precision!r}. "
            f"Choose grad_accum_dtype {' or '.join(map(repr, allowed))}."
        )
    return allowed[0] if word == "auto" else word


def _zero(strategy: Strategy, spec: ModelSpec | None, device: Device) -> dict[str, Any]:
    stage = stage_of(strategy)
    square = max(spec.hidden**2, FLOOR) if spec else 0
    overlaps = stage == 3 and device.kind == "cuda"
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": strategy.overlap_comm == "on" if strategy.overlap_comm != "auto" else overlaps,
        "reduce_bucket_size": strategy.bucket_elements or square or "auto",
    }
    gathered = strategy.gather_bucket_elements
    if stage < 3:
        zero["allgather_bucket_size"] = gathered or round_up(square, 2) or int(5e8)
    else:
        kept = strategy.live_elements or DEFAULT_LIVE
        zero |= {
            "stage3_max_live_parameters": kept,
            "stage3_max_reuse_distance": kept,
            "stage3_prefetch_bucket_size": gathered or int(0.9 * square) or "auto",
            "stage3_param_persistence_threshold": 10 * spec.hidden if spec else "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    pinned = device.kind == "cuda"
    if strategy.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if strategy.offload == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return zero
