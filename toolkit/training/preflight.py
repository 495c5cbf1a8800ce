"""Preflight checks before any process starts: model, job, weights and data."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import differing
from toolkit.config.run_config import EMBEDDED, RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import DataError, StrategyError, ToolkitError, value_or
from toolkit.data import (
    Contents,
    Rows,
    batches,
    check_batch,
    embedded_tokenizer,
    find_rows,
    ingest,
    one_document,
    prepare_data,
    resolve_spec,
    sample_ids,
)
from toolkit.data.tokenization import read_template
from toolkit.devices.machine import Device, Hardware, hardware
from toolkit.engines.job import Job
from toolkit.engines.losses import choose_loss
from toolkit.engines.resolution import resolve
from toolkit.engines.upstream import set_deepspeed_cpu
from toolkit.exporters.generation import encode
from toolkit.forecasting import Forecast, forecast_job
from toolkit.forecasting.memory import traced
from toolkit.forecasting.prediction import across_nodes, fastest_checkpointing
from toolkit.models import ModelSpec, describe, require_weights
from toolkit.models.chat_template import spell_remarks
from toolkit.models.hf_loading import auto_class, load_tokenizer, quiet_bars
from toolkit.training.setup import check_trackers
from toolkit.transforms.adapters import check_quantized, require_libraries
from toolkit.transforms.checkpointing import FASTEST_FIRST

LIBRARIES = ("accelerate-toolkit", "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes")
"""Libraries. `run.json` records their versions."""

PREPARED = "TOOLKIT_PREPARED_DATA"
"""The environment variable with the rows that the parent prepared for its ranks."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The model, data and forecast of a run, known before an engine is set up."""

    job: Job
    tokenizer: Any
    rows: Rows
    eval_rows: Rows | None
    forecast: Forecast | None = None
    """The run's forecast; None without one."""
    unforecast: str | None = None
    """The reason for a missing forecast."""
    notes: tuple[str, ...] = ()
    """The files of a folder that are data and those that are left out; fields without effect."""
    guard: dict[str, Any] | None = None
    """The certificate of a model that is cut over ranks: `Certificate.to_dict()`."""

    @property
    def rank_environment(self) -> dict[str, str]:
        """Environment of the ranks: they open the same rows, and read no data."""
        rows = {"data": self.rows, "eval_data": self.eval_rows}
        return {
            PREPARED: json.dumps(
                [{name: each.fingerprint for name, each in rows.items() if each}, self.notes, self.guard]
            )
        }

    @property
    def spec(self) -> ModelSpec:
        """The model that is trained."""
        assert self.job.spec is not None, "the preflight describes the model"
        return self.job.spec

    def batches(self, rank: int, *, start: int = 0, workers: int = 0) -> Any:
        """Return the loader of a rank's micro-batches, from step `start` + 1 to the last one."""
        return batches(
            self.rows,
            self.job.train_config,
            dp_rank=self.job.coordinates(rank).dp_rank,
            dp_size=self.job.parallelism.dp_size,
            start_step=start,
            attention=self.job.strategy.attention,
            workers=workers,
        )

    def sample_ids(self, step: int) -> list[int]:
        """Return the row ids of a step's global batch; steps count from 1."""
        dp_size = self.job.parallelism.dp_size
        return sample_ids(self.rows, self.job.train_config, dp_size=dp_size, step=step - 1)


def run_preflight(
    run_config: RunConfig,
    strategy: Strategy,
    train_config: TrainConfig,
    ranks: int,
    device: Device,
    *,
    prepared: str | None = None,
) -> Preflight:
    """Describe the model, resolve the job, read and tokenize the data, unless the parent process did.

    Args:
        run_config, strategy, train_config: the request.
        ranks: number of processes.
        device: of a rank.
        prepared: in a rank, the value of `PREPARED`.

    Raises:
        ToolkitError: for a strategy, model, weights or data that cannot run.
    """
    if device.kind == "cpu":
        set_deepspeed_cpu()
    if prepared is None:
        _refuse_without_effect(strategy)
        _refuse_sample(run_config, strategy)
    check_trackers(run_config.tracker)
    require_libraries(resolve(strategy, train_config, None, ranks, device))
    fingerprints, notes, certificate = json.loads(prepared) if prepared else ({}, [], None)
    rows = {name: find_rows(fingerprint) for name, fingerprint in fingerprints.items()}
    # Mistakes in the data are found before anything heavy is imported.
    contents = _read_data(run_config, train_config.seed, {name for name, each in rows.items() if each})
    spec = resolve_spec(run_config.model, run_config.trust_remote_code)
    resolved = resolve(strategy, train_config, spec, ranks, device)
    if strategy.quantized:
        check_quantized(spec, strategy.adapter, run_config.allow_unquantized)
    require_weights(spec)
    tokenizer = load_tokenizer(spec)
    for name, each in contents.items():
        with _naming_flag(name, run_config):
            rows[name] = _rows(each, tokenizer, resolved, run_config)
        notes += [f"{name}: {each.notes}"] if each.notes else []
    if run_config.chat_template:  # saved with the model, which answers prompts in its form alone
        tokenizer.chat_template = read_template(run_config.chat_template)
    if run_config.sample and prepared is None:
        encode(tokenizer, spec, run_config.sample)
        if not run_config.eval_every:
            notes.append("sample: printed after the last step alone; --eval-every N prints one every N steps")
    data = rows["data"]
    assert data is not None, "the data were prepared by the parent, or read here"
    dp_size = resolved.parallelism.dp_size
    check_batch(data, resolved.train_config, dp_size=dp_size)
    train_config = resolved.train_config.with_steps(data.count, dp_size, embedded=run_config.data == EMBEDDED)
    resolved = dataclasses.replace(resolved, train_config=train_config)
    if prepared is None:
        for name, known in ((name, each) for name, each in rows.items() if each):
            notes += [f"{name}: {warning}" for warning in spell_remarks(known.remarks, known.documents)]
        notes += _summary(data, resolved)
    eval_rows = rows.get("eval_data")
    return Preflight(
        job=resolved, tokenizer=tokenizer, rows=data, eval_rows=eval_rows, notes=tuple(notes), guard=certificate
    )


def _refuse_sample(run_config: RunConfig, strategy: Strategy) -> None:
    why = f"tp_sequence divides tokens over tp {strategy.tp}, and an answer has one at a time"
    if strategy.pp > 1:
        why = f"no rank of pp {strategy.pp} holds the whole model, which answers"
    if run_config.sample and (strategy.pp > 1 or strategy.tp_sequence):
        raise StrategyError(f"sample: {why}. Leave --sample out.")


def _refuse_without_effect(strategy: Strategy) -> None:
    for name, value in differing(strategy).items():
        if name.startswith("lora_") and strategy.adapter == "none":
            raise StrategyError(f"{name} {value}: without effect, since adapter is none. Give --adapter lora too.")
        degree = name.partition("_")[0]
        if name in ("cp_attention", "pp_schedule", "pp_stages_per_rank") and getattr(strategy, degree) == 1:
            raise StrategyError(f"{name} {value}: without effect, since {degree} is 1. Give --{degree} 2 too.")


def _read_data(run_config: RunConfig, seed: int, known: set[str]) -> dict[str, Contents]:
    """Read training and evaluation data, except those with known rows."""
    options = {name: getattr(run_config, name) for name in ("text_column", "columns", "data_format")}
    paths = {"data": run_config.data} | ({"eval_data": run_config.eval_data} if run_config.eval_data else {})
    contents = {}
    for name in [each for each in paths if each not in known]:
        with _naming_flag(name, run_config):
            contents[name] = ingest(paths[name], seed=seed, **options)
    return contents


def _rows(contents: Contents, tokenizer: Any, job: Job, run_config: RunConfig) -> Rows:
    """Tokenize what was read."""
    assert job.spec is not None
    return prepare_data(
        contents,
        tokenizer,
        job.spec,
        seq_len=job.train_config.seq_len,
        mask_prompts=run_config.mask_prompts,
        chat_template=run_config.chat_template,
        packing=None if run_config.packing else False,
        attention=job.strategy.attention,
        train_on=run_config.train_on,
        add_end_token=run_config.add_end_token,
        too_long=run_config.too_long,
    )


@contextlib.contextmanager
def _naming_flag(name: str, run_config: RunConfig) -> Iterator[None]:
    """Name --eval-data in the messages about its data: they are written for --data, and for the embedded model."""
    try:
        yield
    except DataError as error:
        if name == "data":
            end = ", or leave --data out" * (run_config.model != EMBEDDED)
            raise DataError(str(error).replace(end, "")) from error
        path = str(run_config.eval_data)
        text = re.sub(r"^data ", "", re.sub(r"--data(?![\w-])", "--eval-data", str(error)))
        raise DataError(f"--eval-data {'' if text.startswith(path) else f'{path}: '}{text}") from error


def _summary(rows: Rows, job: Job) -> list[str]:
    """Return lines: the rows, the trained part of them, the epochs of the steps, and the cost of a group over nodes."""
    config, size = job.train_config, rows.count * rows.seq_len * (2 if rows.kind == "seq2seq" else 1)
    batch = config.micro_batch * config.accumulation * job.parallelism.dp_size
    lines = [
        f"rows: {rows.count:,} of {rows.seq_len} tokens, {1 - rows.tokens / size:.1%} of them padding, from"
        f" {rows.documents:,} documents of up to {rows.longest:,} tokens",
        f"tokens: {rows.tokens:,}, {rows.trained_tokens / rows.tokens:.1%} of them trained; {rows.truncated:,} documents"
        f" cut, {rows.too_long:,} left out as too long, {rows.dropped:,} rows dropped without a trained label",
        f"epochs: {config.total_steps * batch / rows.count:.2f} ({config.total_steps:,} steps of {batch:,} rows)",
    ]
    cost = across_nodes(job, hardware().count) if job.device.kind == "cuda" else ""
    return [*lines, cost] if cost else lines


def with_forecast(preflight: Preflight, run_config: RunConfig, machine: Hardware, start: int = 0) -> Preflight:
    """Return the same with a forecast of the steps after `start`.

    Call it before an engine is set up, which would partition the traced model.
    """
    try:
        if preflight.job.strategy.adapter != "none":
            import peft  # noqa: F401 - loading needs it, too, and with it the trace needs no child process
        result = forecast_job(preflight.job, machine, **_forecast_options(preflight, run_config, start))
        return dataclasses.replace(preflight, forecast=result)
    except Exception as error:  # a run trains without a forecast, too
        return dataclasses.replace(preflight, unforecast=str(error))


def choose_transforms(
    preflight: Preflight, run_config: RunConfig, strategy: Strategy, machine: Hardware
) -> tuple[Preflight, Strategy]:
    """Choose loss and activation checkpointing in the place of `auto`: see `choose_loss` and `fastest_checkpointing`."""
    if "auto" not in (strategy.loss, strategy.activation_checkpointing):
        return preflight, strategy
    options = _forecast_options(preflight, run_config)
    if strategy.loss == "auto":
        # The policy that is tried first below: its trace is needed anyway.
        first = FASTEST_FIRST[-1 if strategy.activation_offload else 0]
        policy = first if strategy.activation_checkpointing == "auto" else strategy.activation_checkpointing
        job = _with_loss(preflight.job, policy, masked=not options["one_document"])
        strategy = dataclasses.replace(strategy, loss=job.strategy.loss)
        preflight = dataclasses.replace(preflight, job=job)
    if strategy.activation_checkpointing != "auto":
        return preflight, strategy
    fastest, why = None, "none leaves 5% of a rank's memory by the forecast"
    try:
        fastest = fastest_checkpointing(preflight.job, machine, **options)
    except Exception as error:  # a run trains without a forecast, too
        why = f"without a forecast: {error}"
    job, why = (fastest, "the fastest that leaves 5% of a rank's memory") if fastest else (preflight.job, why)
    policy = job.strategy.activation_checkpointing
    notes = (*preflight.notes, f"activation checkpointing: {policy}, {why}")
    strategy = dataclasses.replace(strategy, activation_checkpointing=policy)
    return dataclasses.replace(preflight, job=job, notes=notes), strategy


def _with_loss(job: Job, policy: str, *, masked: bool) -> Job:
    """Return the job with a loss in the place of `auto`: `whole` where the chosen one does not run with the model.

    `policy`: of activation checkpointing, for the trace that shows it.
    """

    def job_with(**fields: str) -> Job:
        strategy = dataclasses.replace(job.strategy, **fields)  # type: ignore[arg-type]
        return resolve(strategy, job.train_config, job.spec, job.ranks, job.device)

    try:
        if (loss := choose_loss(job)) == "chunked":
            traced(job_with(loss=loss, activation_checkpointing=policy), masked=masked)
    except ToolkitError as error:  # other errors: a run trains without a forecast, too
        loss = "whole" if isinstance(error, StrategyError) else loss
    return job_with(loss=loss)


def _forecast_options(preflight: Preflight, run_config: RunConfig, start: int = 0) -> dict[str, Any]:
    """Return what `forecast_job` takes of the data and the saves of a run."""
    train_config = preflight.job.train_config
    return {
        "one_document": one_document(preflight.rows, train_config, dp_size=preflight.job.parallelism.dp_size),
        "save": run_config.save,
        "num_checkpoints": run_config.count_checkpoints(train_config.total_steps, start),
    }


def random_model(folder: str | Path, config: Any) -> str:
    """Write a folder like one from the Hub: random weights of a transformers config, drawn from seed 0, and the embedded tokenizer.

    Use it to test any shape without a network. The vocabulary needs at least the tokenizer's 4,096 tokens.
    """
    import torch

    if hardware().device.kind == "cpu":
        set_deepspeed_cpu()
    auto = auto_class(describe(config))
    with torch.random.fork_rng(devices=[]), quiet_bars(shown=False):
        torch.default_generator.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
    embedded_tokenizer(Path(folder))
    return str(folder)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of `LIBRARIES`; None for a library that is not installed."""
    from importlib import metadata

    return {"python": sys.version.split()[0], **{name: value_or(None, metadata.version, name) for name in LIBRARIES}}
