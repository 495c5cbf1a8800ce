"""`accelerator()`: the Accelerator of a Strategy on the launched ranks."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.config.fields import differing, from_dict
from toolkit.config.flags import flag
from toolkit.config.strategy import Strategy, sharding_word
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import MissingLibrary, RunError, StrategyError, nearest
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines import upstream
from toolkit.engines.job import Job
from toolkit.engines.records import job_of
from toolkit.engines.registry import all_engines, engine_for
from toolkit.engines.resolution import default_ranks, resolve
from toolkit.engines.timeouts import pg_timeout
from toolkit.engines.upstream import wait_at_exit
from toolkit.models import ModelSpec
from toolkit.training.accelerators import accelerator_class

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from accelerate import Accelerator

T = TypeVar("T")
job = job_of

_accelerators = 0
"""Accelerators of this process; equally many on every rank."""

STRATEGY = "TOOLKIT_STRATEGY"
"""The environment variable with the fields of a Strategy that an Accelerate config file cannot hold, as JSON."""


TIMEOUT = "TOOLKIT_TIMEOUT"
"""The environment variable with the limit of a collective in seconds, of `toolkit launch --timeout`."""


def accelerator(
    strategy: Strategy | Mapping[str, Any] | None = None,
    train_config: TrainConfig | None = None,
    spec: ModelSpec | None = None,
    *,
    log_with: str | None = None,
    project_dir: str | Path | None = None,
    timeout: float | None = None,
    step_scheduler_with_optimizer: bool = True,
    **others: Any,
) -> Accelerator:
    """Return the Accelerator that trains as the strategy says, on the launched ranks. `os.environ` does not change.

    Without a strategy, it takes the fields of `accelerate launch --config_file`; with one, both have to agree. A mapping gives
    some fields and leaves the others to the launch environment.

    Args:
        strategy: the request.
        train_config: the step; by default `TrainConfig(max_grad_norm=0)`: as in Accelerate, the loop alone clips. A DeepSpeed
            file of `accelerate launch` sets fields of it, too.
        spec: of the model that will be loaded. Without it, DeepSpeed's buckets stay "auto".
        log_with: Accelerate's trackers by name, separated by commas: `tensorboard`, `trackio`, `wandb`, …
        project_dir: where trackers write.
        timeout: seconds after which a rank gives up waiting for another in a collective; by default torch's (10 minutes
            with NCCL, 30 with gloo), or the limit of `toolkit launch --timeout`.
        step_scheduler_with_optimizer: Accelerate's. A prepared scheduler takes a step for every rank after each optimizer
            step. False: one step a call, in micro-batches that only accumulate, too.

    Raises:
        StrategyError: for a strategy that contradicts the launch environment, or that cannot run here, and for other
            arguments of Accelerate's, with what to write for them.
        RunError: for more ranks than devices on this machine, and while this process has another Accelerator.
        MissingLibrary: for an engine or a tracker that is not installed.
    """
    _refuse_others(others)
    requested, config = agree(strategy, os.environ), agree_train_config(train_config, os.environ)
    trackers = check_trackers(log_with)
    ranks, machine = int(os.environ.get("WORLD_SIZE", "1")), hardware()
    check_ranks(machine, ranks_sharing_devices(os.environ))
    resolved = resolve(requested, config, spec, ranks, machine.device)
    timeout = timeout or float(os.environ.get(TIMEOUT, "0"))
    limit = pg_timeout(timeout) if timeout else None
    _reset_state(resolved, limit)
    upstream.made_by_toolkit = True
    wait_at_exit()
    result: Accelerator = accelerator_class(resolved.engine.own_loop)(
        resolved,
        limit,
        log_with=trackers or None,
        project_dir=project_dir,
        step_scheduler_with_optimizer=step_scheduler_with_optimizer,
    )
    result.requested = requested
    return result


INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(Strategy.__dataclass_fields__, "tk.accelerator({{{name!r}: {value}}})"),
    **dict.fromkeys(TrainConfig.__dataclass_fields__, "tk.accelerator(train_config=tk.TrainConfig({name}={value}))"),
    "gradient_accumulation_steps": "tk.accelerator(train_config=tk.TrainConfig(accumulation={value}, max_grad_norm=0))",
    "gradient_accumulation_plugin": "tk.accelerator(train_config=tk.TrainConfig(accumulation=…, max_grad_norm=0))",
    "mixed_precision": "tk.accelerator({{'precision': {value}}}), or toolkit launch --precision",
    "cpu": "toolkit launch, which runs on the CPU where it finds no GPU, or CUDA_VISIBLE_DEVICES=''",
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "parallelism_config"),
        "tk.accelerator({{'sharding': …}}), or toolkit launch --sharding",
    ),
}
"""Arguments of Accelerate's Accelerator, and fields given as arguments → what says the same here."""


def _refuse_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        known = INSTEAD.get(name, "one of strategy, train_config, spec, log_with, project_dir, timeout")
        raise StrategyError(
            f"tk.accelerator has no argument {name!r} (got {value!r}). Write {known.format(name=name, value=repr(value))}."
        )


def _reset_state(job: Job, timeout: timedelta | None) -> None:
    """Forget Accelerate's state of an Accelerator that was ended or dropped: Accelerate keeps one state a process.

    Accelerators of one process each share a state where sharding, precision and accumulation are equal.

    Raises:
        RunError: where the last Accelerator is still in use.
    """
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    global _accelerators
    if (owners := AcceleratorState._shared_state.get("owners")) is not None:
        if any(not owner.ended for owner in owners):
            gc.collect()  # a dropped Accelerator is part of reference cycles
        if used := next((owner.job for owner in owners if not owner.ended), None):
            new, old = (
                (each.strategy.sharding, each.strategy.precision, each.train_config.accumulation)
                for each in (job, used)
            )
            if new == old and job.strategy.single_process:
                return
            raise RunError(
                f"this process already has an Accelerator, with sharding {old[0]!r}, precision {old[1]!r} and "
                f"accumulation {old[2]}, and Accelerate keeps one state a process. Call its end_training() first."
            )
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
    if _accelerators and not job.strategy.single_process and "RANK" in os.environ and not dist.is_initialized():
        _init_group(job, timeout)
    _accelerators += 1


def _init_group(job: Job, timeout: timedelta | None) -> None:
    """Make this process's next process group; Accelerate and DeepSpeed use it as it is.

    The launcher's store still has the addresses of ended groups, and torch gives every group the same name, which
    DTensor's caches need. A prefix keeps their keys apart.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo" if job.device.kind == "cpu" else "nccl" if job.strategy.offload == "none" else "cuda:nccl,cpu:gloo"
    store, rank, size = next(iter(rendezvous("env://")))
    dist.init_process_group(
        backend, store=PrefixStore(f"accelerator-{_accelerators}", store), rank=rank, world_size=size, timeout=timeout
    )


def check_ranks(hardware: Hardware, ranks: int) -> None:
    """Check that each rank has a device of its own; a CPU takes any number of ranks.

    Raises:
        RunError: for more ranks than devices, or none.
    """
    if ranks < 1:
        raise RunError(f"processes {ranks}: expected at least 1.")
    if hardware.device.kind != "cpu" and ranks > hardware.ranks:
        raise RunError(
            f"processes {ranks}: this machine has {hardware.ranks} {hardware.device.kind} device(s) "
            f"({hardware.device.name}), and each takes one rank. Try --processes {hardware.ranks}, or hide the devices "
            "(CUDA_VISIBLE_DEVICES='') to run on the CPU."
        )


def ranks_sharing_devices(environ: Mapping[str, str]) -> int:
    """Return the ranks that see this process's devices: torchrun's workers; a scheduler may give each task its own."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in environ else 1


def choose_ranks(strategies: Iterable[Strategy], hardware: Hardware, processes: int | None) -> int:
    """Return the number of ranks on this machine: the given one, or the default that `print_default` shows.

    Args:
        strategies: that run on this number of ranks; the default is the one of the strategy that needs most.
        hardware: this machine.
        processes: as the user gave it; None for the default.

    Raises:
        RunError: as `check_ranks`.
    """
    ranks = max(default_ranks(strategy, hardware) for strategy in strategies) if processes is None else processes
    check_ranks(hardware, ranks)
    return ranks


def print_default(ranks: int, hardware: Hardware, processes: int | None) -> None:
    """Print the number of ranks where the user gave none. Called behind the checks: a mistake stays one sentence."""
    if processes is None:
        print(f"processes: {ranks}, the default on {hardware.device.name}", file=sys.stderr)


def check_trackers(names: str | None) -> list[str]:
    """Return the trackers in a text with commas. Accelerate silently leaves out those that are not installed.

    Raises:
        StrategyError: for an unknown name, with the nearest one.
        MissingLibrary: for a tracker without its library.
    """
    trackers = [name.strip() for name in (names or "").split(",") if name.strip()]
    if not trackers:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(name) for name in get_available_trackers()]
    for name in trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            supported = ", ".join(LOGGER_TYPE_TO_CLASS)
            raise StrategyError(
                f"tracker {name!r} is unknown.{nearest(name, LOGGER_TYPE_TO_CLASS)} Known: {supported}."
            )
        if name not in installed:
            raise MissingLibrary(
                f"tracker {name!r} needs its library, which is not installed. Install it with `pip install {name}`, "
                f"or choose one that is: {', '.join(installed) or 'none'}."
            )
    return trackers


def launched(environ: Mapping[str, str], requested: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of Strategy that the launch environment sets; none without `accelerate launch`.

    The engine of the requested sharding and degrees reads the environment first: another may be launched in the same way.
    """
    launched_strategy: dict[str, Any] = _degrees(environ) | json.loads(environ.get(STRATEGY, "{}"))
    fields = {"tp": 1, "cp": 1, "ep": 1, "pp": 1} | launched_strategy | dict(requested or {})
    sharding, degrees = fields.get("sharding"), [fields[name] for name in ("tp", "ep", "pp")]
    first = [engine_for(sharding or "none", *degrees)] if sharding or max(degrees) > 1 else []
    for engine in (*first, *all_engines()):
        bound = engine.from_env(environ)
        if bound is not None:
            if sharding == "none" and fields["cp"] > 1 and bound.get("sharding") == "ddp":
                bound["sharding"] = "none"  # the ranks of a sequence are launched as those of DDP
            return {**launched_strategy, **bound}
    return launched_strategy


def _degrees(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the degrees of an Accelerate config's `parallelism_config`.

    Raises:
        StrategyError: for `parallelism_config_sp_size`, which is DeepSpeed's.
    """
    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return {}
    sizes = {name: int(environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in ("tp", "cp", "sp")}
    if sizes["sp"] > 1:
        raise StrategyError(
            f"parallelism_config_sp_size {sizes['sp']}: DeepSpeed's sequence parallelism is not run here. Write "
            f"parallelism_config_cp_size: {sizes['sp']}, or --cp {sizes['sp']}: its heads are exchanged, too."
        )
    return {name: size for name, size in sizes.items() if size > 1}


def agree(
    requested: Strategy | Mapping[str, Any] | None, environ: Mapping[str, str], bound: Mapping[str, Any] | None = None
) -> Strategy:
    """Merge the requested fields with those of the launch environment.

    Args:
        requested: the request.
        environ: of this process.
        bound: the result of `launched`, if the caller has it.

    Raises:
        StrategyError: for a field with two different values; names both.
    """
    if isinstance(requested, Strategy):
        # An open value contradicts nothing.
        open_values = {f.name: f.default for f in dataclasses.fields(Strategy) if f.default in ("auto", None)}
        values = dataclasses.asdict(requested)
        fields = {
            name: value for name, value in values.items() if name not in open_values or value != open_values[name]
        }
    else:
        fields = dict(requested or {})
    if "sharding" in fields:
        fields["sharding"] = sharding_word(fields["sharding"])
    if bound is None:
        bound = launched(environ, fields)
    return _merge(Strategy, fields, bound)


def agree_train_config(requested: TrainConfig | Mapping[str, Any] | None, environ: Mapping[str, str]) -> TrainConfig:
    """Merge a TrainConfig, or fields of one, with the launch environment: a DeepSpeed file sets a part of the step.

    Without one, nothing is clipped, as in Accelerate.

    Raises:
        StrategyError: for a field with two different values; a default of `requested` is no request.
    """
    fields = differing(requested) if isinstance(requested, TrainConfig) else dict(requested or {})
    bound: dict[str, Any] = {"max_grad_norm": 0.0} if requested is None else {}
    for engine in all_engines():
        bound |= engine.train_config_from_env(environ)
    return _merge(TrainConfig, fields, bound)


def _merge(owner: type[T], fields: Mapping[str, Any], bound: Mapping[str, Any]) -> T:
    """Return a configuration of requested fields and those of the launch environment. Refuse different values."""
    for name, value in fields.items():
        if name in bound and bound[name] != value:
            hint = f" (`toolkit config {flag(name)} {value}` writes it)" if owner is Strategy else ""
            raise StrategyError(
                f"{name} {value!r} was requested, but the Accelerate launch environment has {bound[name]!r}. "
                f"Give `accelerate launch` a config file with {name} {value!r}{hint}, or leave the flag out."
            )
    return from_dict(owner, {**bound, **fields})


def seed_everything(accelerator: Accelerator) -> None:
    """Seed this rank's generators from the job's seed, its place on `dp` and `cp`, and its stage.

    Ranks with the same tokens and layers draw alike.
    """
    from accelerate.utils import set_seed

    job = job_of(accelerator)
    place, sizes = job.coordinates(accelerator.process_index), job.parallelism
    set_seed(job.train_config.seed + place.dp_rank * sizes.cp + place.cp + sizes.loss_size * place.pp)
