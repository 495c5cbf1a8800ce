"""`forecast()` → `Forecast`: memory and speed of a run before its launch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from toolkit.config.fields import from_dict
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig, pipeline_rows
from toolkit.config.unknown_names import by_name
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import MiB, ceil_div, format_bytes
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines import resolution
from toolkit.engines.job import Job
from toolkit.engines.ledger import PARTS, Ledger
from toolkit.engines.records import on_device
from toolkit.engines.resolution import default_ranks
from toolkit.engines.states import checkpoint_bytes, snapshot_bytes
from toolkit.engines.traces import Segment
from toolkit.forecasting.expert_placement import check_imbalance, placements
from toolkit.forecasting.finished_run import FinishedRun
from toolkit.forecasting.memory import SOURCES, all_steps, check_forecast, context_memory, replay, replay_ranks, traced
from toolkit.forecasting.memory_advice import NEW_RUN, changed, changes
from toolkit.forecasting.result import MARGIN, Forecast
from toolkit.forecasting.stages import build_pipeline
from toolkit.forecasting.timing import checkpoint_stall, communication, operations, step_time
from toolkit.models import ModelSpec, describe
from toolkit.transforms.adapters import check_quantized
from toolkit.transforms.checkpointing import FASTEST_FIRST


@by_name
def forecast(
    model: ModelSpec | str,
    strategy: Strategy | None = None,
    on: Hardware | str | None = None,
    train_config: TrainConfig | None = None,
    *,
    ranks: int | None = None,
    one_document: bool = False,
    save: bool = True,
    num_checkpoints: int = 1,
    allow_unquantized: bool = False,
    expert_imbalance: float = 1.0,
    advice: bool = True,
) -> Forecast:
    """Forecast a run on its fullest rank, without launching it or touching a device.

    Args:
        model: a spec, or what `describe` takes.
        strategy: by default `Strategy()`.
        on: the machine, or its name; by default this one.
        train_config: batch and lengths.
        ranks: processes; by default `default_ranks`.
        one_document: every row holds one document and no padding, so attention needs no mask.
        save: whether the run exports its result. Rank 0 needs copies.
        num_checkpoints: checkpoints that the run writes. Each is copied to host memory first. CPU ranks keep that copy for the next
            one: with 2 or more it is counted in every step.
        allow_unquantized: QLoRA even where more than half of the weights stay unquantized.
        expert_imbalance: with expert parallelism, the tokens of the rank with most, divided by the mean of the ranks, in every
            layer. A run's `events.jsonl` has it: `layer_imbalance` for a run with full activation checkpointing, where the fullest
            layer makes the peak; `imbalance` for one that keeps the activations of all layers.
        advice: whether to search for the smallest change that fits, if this does not fit.

    Raises:
        StrategyError: for what this device, model or number of ranks cannot do, or what has no forecast yet.
        ModelError: for a model that a run would refuse.
        ToolkitError: for an unknown model or machine, or a negative number of checkpoints.
    """
    if type(num_checkpoints) is not int or num_checkpoints < 0:
        raise ToolkitError(f"num_checkpoints {num_checkpoints!r}: expected an integer of at least 0.")
    job, machine = resolve_request(model, strategy, on, train_config, ranks=ranks)
    assert job.spec is not None
    if job.strategy.quantized:
        check_quantized(job.spec, job.strategy.adapter, allow_unquantized)
    check_imbalance(job, expert_imbalance)
    options: dict[str, Any] = {"one_document": one_document, "save": save, "num_checkpoints": num_checkpoints}
    options["expert_imbalance"] = expert_imbalance
    result = forecast_job(job, machine, others=True, **options)
    notes = [*_assumptions(job, one_document, num_checkpoints), *_across_nodes(result, **options)]
    result = dataclasses.replace(result, unknown=(*notes, *result.unknown))
    if expert_imbalance > 1:
        even = forecast_job(job, machine, **{**options, "expert_imbalance": 1.0})
        result = dataclasses.replace(result, placements=placements(result.job, result.step_seconds, even.step_seconds))
    return result if result.fits or not advice else _with_advice(result, job, **options)


@by_name
def resolve(
    model: ModelSpec | str,
    strategy: Strategy | None = None,
    on: Hardware | str | None = None,
    train_config: TrainConfig | None = None,
    *,
    ranks: int | None = None,
) -> Job:
    """Resolve a request to a job, without an `auto`: its precision, mesh and the engine's settings. Nothing is traced or launched.

    Args:
        model: a spec, or what `describe` takes.
        strategy: by default `Strategy()`.
        on: the machine, or its name; by default this one.
        train_config: batch and lengths.
        ranks: processes; by default `default_ranks`.

    Raises:
        StrategyError: for what this device, model or number of ranks cannot do.
        ToolkitError: for a model or a machine that is not known.
    """
    return resolve_request(model, strategy, on, train_config, ranks=ranks)[0]


def resolve_request(
    model: ModelSpec | str | None,
    strategy: Strategy | None = None,
    on: Hardware | str | None = None,
    train_config: TrainConfig | None = None,
    *,
    ranks: int | None = None,
    run: FinishedRun | None = None,
) -> tuple[Job, Hardware]:
    """Resolve the arguments of `forecast` to a job and a machine. A finished run's own values fill the gaps.

    Raises:
        StrategyError: for what this device, model or number of ranks cannot do.
        ToolkitError: for a model or a machine that is not known.
    """
    if isinstance(on, TrainConfig | Strategy):
        raise StrategyError(
            f"on: a {type(on).__name__}, expected a machine or its name. Give train_config=TrainConfig(…) by name."
        )
    check_type("strategy", strategy, Strategy)
    check_type("train_config", train_config, TrainConfig)
    if run is not None:
        model = run.model if model is None else model
        strategy, train_config = strategy or run.strategy, train_config or run.train_config
        if on is None:
            on, ranks = run.hardware, run.ranks if ranks is None else ranks
    spec = model if isinstance(model, ModelSpec) else describe(model)
    machine = on if isinstance(on, Hardware) else hardware(on)
    strategy = strategy or Strategy()
    count = default_ranks(strategy, machine) if ranks is None else ranks
    if count < 1:
        raise StrategyError(f"ranks {count}: expected at least 1.")
    if machine.device.kind == "cuda" and count > machine.ranks:
        raise StrategyError(
            f"ranks {count}: expected at most {machine.ranks}, one a GPU of {machine.label}. Choose fewer, or a larger machine."
        )
    train_config = train_config or from_dict(TrainConfig, pipeline_rows(strategy.pp))
    return resolution.resolve(strategy, train_config, spec, count, machine.device), machine


def check_type(name: str, value: Any, kind: type[Any]) -> None:
    """Check the type of an argument that may be left out.

    Raises:
        StrategyError: for another type.
    """
    if value is not None and not isinstance(value, kind):
        raise StrategyError(f"{name} {value!r}: expected {kind.__name__}. See help(toolkit.{kind.__name__}).")


def _with_advice(forecast: Forecast, job: Job, **options: Any) -> Forecast:
    """Add the smallest change that fits: single ones first, then several together. `options` are those of `forecast_job`."""
    assert job.spec is not None
    for change in (*_idle_devices(forecast), *_smaller_requests(forecast)):
        try:
            strategy, train_config = changed(forecast.strategy, forecast.train_config, change)
            other = resolution.resolve(strategy, train_config, job.spec, change.get("processes", job.ranks), job.device)
            if strategy.quantized and not forecast.strategy.quantized:
                check_quantized(job.spec, strategy.adapter, allow_unquantized=False)
            if permanent_bytes(other) > forecast.limit_bytes:
                continue  # too large without any activation: no trace is needed
            smaller = forecast_job(other, forecast.hardware, **options)
        except ToolkitError:
            continue
        if smaller.fits:
            return dataclasses.replace(forecast, change=change, changed_bytes=smaller.needed_bytes)
    return forecast


def _idle_devices(forecast: Forecast) -> list[dict[str, Any]]:
    """Return the changes that shard over all devices of a GPU machine, if the request uses one of several."""
    devices = forecast.hardware.ranks
    if forecast.hardware.device.kind == "cpu" or forecast.strategy.sharding != "none" or devices <= forecast.ranks:
        return []
    return [{"sharding": "fsdp", **offload, "processes": devices} for offload in ({}, {"offload": "cpu"})]


def permanent_bytes(job: Job) -> int:
    """Return the bytes that stay on the device after the first step: a lower bound of every peak."""
    state = on_device(job, job.engine.expected_state(job))
    return state.parameters + state.master + (state.optimizer or 0)


def _smaller_requests(forecast: Forecast) -> list[dict[str, Any]]:
    """Return changes of engine and batch, single ones before combinations; changes that need a new run come last."""
    in_a_step = forecast.peak_phase in ("forward", "backward", "step")
    on_cpu = forecast.hardware.device.kind == "cpu"
    requests = list(changes(forecast.strategy, forecast.train_config, in_a_step=in_a_step, on_cpu=on_cpu))
    total: dict[str, Any] = {}
    smaller: tuple[Strategy, TrainConfig] | None = forecast.strategy, forecast.train_config
    while smaller is not None:
        steps, smaller = changes(*smaller, in_a_step=in_a_step, on_cpu=on_cpu), None
        for step in steps:
            with contextlib.suppress(StrategyError):
                smaller = changed(forecast.strategy, forecast.train_config, total | step)
                total |= step
                requests.append(dict(total))
                break
    return sorted(requests, key=lambda change: bool(NEW_RUN & change.keys()))


def forecast_job(
    job: Job,
    machine: Hardware,
    *,
    one_document: bool = False,
    save: bool = True,
    num_checkpoints: int = 1,
    expert_imbalance: float = 1.0,
    others: bool = False,
    rank: int | None = None,
) -> Forecast:
    """Forecast a job, on its fullest rank.

    Args:
        job: with a spec.
        machine: where it runs.
        one_document, save, num_checkpoints, expert_imbalance: as in `forecast`.
        others: as in `traced`.
        rank: of a pipeline, forecast the memory of this rank's stages.
    """
    assert job.spec is not None, "a forecast needs a model"
    job = dataclasses.replace(job, expert_imbalance=expert_imbalance)
    trace = traced(job, masked=not one_document, others=others)
    steps = all_steps(job, trace)
    ledgers: list[Ledger] = replay_ranks(job, trace, steps[0], save=save, num_checkpoints=num_checkpoints)
    own = None if rank is None or job.parallelism.pp == 1 else ledgers[job.coordinates(rank).pp]
    result = build_forecast(job, machine, steps, ledgers, own)
    if num_checkpoints and result.host_lacks:
        bare: Ledger = replay(job, trace, steps[0], save=save, num_checkpoints=0)
        without = bare.node_peak(ceil_div(job.ranks, machine.nodes))
        result = dataclasses.replace(result, host_checkpoint_bytes=result.host_bytes - without)
    return result


def fastest_checkpointing(job: Job, machine: Hardware, **options: Any) -> Job | None:
    """Return the job with the fastest activation checkpointing that leaves 5% of the memory, or None where none does.

    `options` are those of `forecast_job`. Policies are tried in the order of their time, so most jobs need one trace.

    Raises:
        StrategyError: for an engine without a forecast.
    """
    check_forecast(job.engine)
    for policy in FASTEST_FIRST:
        with contextlib.suppress(ToolkitError):
            strategy = dataclasses.replace(job.strategy, activation_checkpointing=policy)
            other = resolution.resolve(strategy, job.train_config, job.spec, job.ranks, job.device)
            if forecast_job(other, machine, **options).leaves(MARGIN):
                return other
    return None


def build_forecast(
    job: Job,
    machine: Hardware,
    steps: Sequence[Sequence[Segment]],
    ledgers: Sequence[Ledger],
    own: Ledger | None = None,
) -> Forecast:
    """Build a forecast from the segments of a step, of each trace, and the ledgers of their simulation, of each rank.

    Its memory is that of the ledger `own`, by default the fullest.
    """
    ledger, (step, *others) = own or max(ledgers, key=lambda each: each.peak), steps
    others = others if job.parallelism.pp > 1 else []
    return Forecast(
        job=job,
        hardware=machine,
        limit_bytes=_limit(job, machine),
        peak_bytes=ledger.peak,
        peak_phase=ledger.peak_phase,
        parts={part: ledger.parts.get(part, 0) for part in PARTS},
        context=context_memory(job, ledger.peak),
        phases=dict(ledger.phases),
        host_bytes=ledger.node_peak(ceil_div(job.ranks, machine.nodes)),
        checkpoint_bytes=checkpoint_bytes(job),
        checkpoint_stall_seconds=checkpoint_stall(job, machine),
        operations=operations(job, step, others),
        communication_bytes=communication(job),
        timing=step_time(job, machine, step, others),
        pipeline=build_pipeline(job, machine, steps, ledgers),
        unknown=(*_uncertainties(job), *machine.notes),
    )


PROCESS = 300 * MiB
"""A CPU rank's own memory: Python with torch, transformers and DeepSpeed imported has 287 MiB that no other process shares."""

CPU_NOTE = f"A rank has its share of the host's memory, less {format_bytes(PROCESS)} for Python itself."


def _limit(job: Job, machine: Hardware) -> int:
    if job.device.kind == "cuda":
        return job.device.free_bytes
    return max(0, machine.host_free_bytes // ceil_div(job.ranks, machine.nodes) - PROCESS)


def across_nodes(job: Job, devices: int) -> str:
    """Return the cost of tensor parallelism over nodes of so many devices; empty where no group spans two."""
    tp = job.parallelism.tp
    if job.ranks <= devices or devices % tp == 0:
        return ""
    return f"tp {tp} spans nodes of {devices} devices: every layer waits for the network several times in each pass."


def _across_nodes(result: Forecast, **options: Any) -> list[str]:
    """Return that cost, with the tokens/s of the largest group within a node, by a second forecast."""
    job, machine = result.job, result.hardware
    if machine.nodes == 1 or not (cost := across_nodes(job, machine.count)):
        return []
    tp = math.gcd(job.parallelism.tp, machine.count)
    sharding = "fsdp" if job.strategy.sharding == "none" else job.strategy.sharding
    with contextlib.suppress(ToolkitError):  # an expert-parallel group may need more ranks
        strategy = dataclasses.replace(job.strategy, tp=tp, sharding=sharding)
        within = resolution.resolve(strategy, job.train_config, job.spec, job.ranks, job.device)
        other = forecast_job(within, machine, **options)
        fits = "fits" if other.fits else "does not fit"
        if other.tokens_per_second and result.tokens_per_second:
            cost += (
                f" This: {result.tokens_per_second:,.0f} tokens/s. Within a node, by --tp {tp} --sharding {sharding}: "
                f"{other.tokens_per_second:,.0f} tokens/s, which {fits}."
            )
    return [cost]


def _assumptions(job: Job, one_document: bool, num_checkpoints: int) -> list[str]:
    """Return what `forecast` assumes of the data and of checkpoints. A run knows its data, and its number of checkpoints."""
    assert job.spec is not None, "a forecast needs a model"
    notes = []
    if job.strategy.attention == "sdpa" and job.spec.heads and not one_document:  # eager attention has its own mask
        notes.append(
            "Attention is counted with a mask, for rows of several documents or with padding. Rows of one document need "
            "none, and long ones take less memory: `one_document` (--one-document)."
        )
    if job.device.kind == "cpu" and num_checkpoints == 1:
        snapshot = format_bytes(snapshot_bytes(job))
        notes.append(f"A checkpoint before the last step adds {snapshot} to each later step: `num_checkpoints`.")
    return notes


def _uncertainties(job: Job) -> tuple[str, ...]:
    notes = []
    if job.device.card is None:
        notes.append(f"The catalog has no speed of {job.device.name}. `calibrate` takes it from a run.")
    else:
        notes.append(
            "Time is a roofline over the card's speeds, mostly within a quarter. `calibrate` takes it from a run."
        )
    if job.device.kind == "cpu":
        notes.append(CPU_NOTE)
    if job.device.kind == "cuda":
        terms = "; ".join(f"{term}: {SOURCES[term]}" for term in context_memory(job, 0))
        notes.append(f"CUDA's own memory is estimated from other runs; `calibrate` takes this card's. {terms}.")
    if job.spec is not None and job.spec.moe is not None:
        load = "to be evenly loaded; only a run shows the real routing"
        if job.expert_imbalance > 1:
            load = f"to give this rank {job.expert_imbalance:g} times the mean of the ranks' tokens in every layer"
        notes.append(f"Experts, computed by {job.spec.moe.computed}, are assumed {load}.")
    return tuple(notes)
