"""All that can be known, and refused, before an engine is set up or a process started: model, job, weights, tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.adapting import check_quantized, require_libraries
from toolkit.cache import cache_folder
from toolkit.data import Contents, Rows, check_batch, embedded_tokenizer, find_rows, ingest, prepare_data
from toolkit.devices import Device, Hardware, hardware
from toolkit.engines import cpu
from toolkit.engines.job import Job, resolve
from toolkit.errors import StrategyError
from toolkit.flags import amount
from toolkit.forecasting import Forecast, forecast_job
from toolkit.loading import embedded_checkpoint, load_tokenizer, quiet_bars
from toolkit.model import EMBEDDED, ModelSpec, describe, require_weights
from toolkit.reading import auto_class
from toolkit.runtime import check_trackers
from toolkit.strategy import Loop, Strategy

LIBRARIES = ("accelerate-toolkit", "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes")
"""Whose versions `run.json` records."""

PREPARED = "TOOLKIT_PREPARED_DATA"
"""The environment variable in which the parent tells its ranks which rows to open."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and on what."""

    model: str = amount(EMBEDDED, "Hub id, folder, or the embedded 5M-parameter Llama")
    """A Hub id or a folder with weights."""
    trust_remote_code: str | None = amount(
        None, "run the model's own code, of this full commit (of a folder: this sha256)"
    )
    """As `describe` takes it. A run's folder alone never says it: resuming needs the flag again."""
    data: str = amount(EMBEDDED, "text, JSONL, folder, dataset, or the embedded text")
    """As `data.find_source` says."""
    eval_data: str | None = amount(None, "data whose loss is reported")
    """Evaluated every `eval_every` steps, and at the end."""
    eval_every: int = amount(0, "steps between evaluations; 0: at the end alone")
    """In optimizer steps."""
    mask_prompts: bool = amount(True, "train on completions and assistant turns alone")
    """Plain text has no prompts."""
    chat_template: str | None = amount(None, "a Jinja file, where the tokenizer has none")
    """In place of the tokenizer's own."""
    text_column: str = amount("text", "column of JSONL and dataset rows that holds a text")
    """Of JSONL and dataset rows."""
    packing: bool = amount(True, "several documents a row, where the model keeps them apart")
    """Otherwise one document a row, padded."""
    tracker: str | None = amount(None, "tensorboard, trackio, wandb, …; several by commas")
    """Accelerate's trackers by name."""
    memory_window: bool = amount(True, "measure peaks on a CPU through the third step")
    """On CUDA measuring costs nothing and is always on."""
    allow_unquantized: bool = amount(False, "QLoRA with most weights unquantized")
    """Where fused experts stay in the compute dtype."""
    save: bool = amount(True, "save and check the trained model at the end")
    """Into the run's folder, `export/`."""
    save_every: int = amount(0, "steps between checkpoints; 0: by time alone")
    """In optimizer steps."""
    save_seconds: float = amount(1800.0, "seconds between checkpoints; 0: by steps alone")
    """Whichever comes first. Where both are 0 there are no checkpoints at all."""
    keep: int = amount(2, "complete checkpoints to keep")
    """The newest ones."""
    workers: int = amount(0, "processes that a rank loads its batches in; 0: none")
    """Order and values do not depend on it."""
    timeout: float = amount(600.0, "seconds after which a rank that gives no sign has hung")
    """Of a rank's heartbeat, and of every rank in a collective that waits for another."""

    def __post_init__(self) -> None:
        for name, least in (("eval_every", 0), ("save_every", 0), ("keep", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise StrategyError(f"{name} {getattr(self, name)}: expected a whole number of at least {least}.")
        if not (math.isfinite(self.save_seconds) and self.save_seconds >= 0):
            raise StrategyError(f"save_seconds {self.save_seconds}: expected a number of at least 0.")
        if not (math.isfinite(self.timeout) and self.timeout >= 1):
            raise StrategyError(f"timeout {self.timeout}: expected at least 1 second; a rank beats once a second.")

    @property
    def checkpoints(self) -> bool:
        """Whether the run writes any: also at its end, and where it is stopped."""
        return bool(self.save_every or self.save_seconds)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """All that can be known, and refused, before an engine is set up or a process started."""

    job: Job
    tokenizer: Any
    rows: Rows
    eval_rows: Rows | None
    forecast: Forecast | None = None
    """What the run will take; None where nobody asked, and where it cannot be forecast."""
    unforecast: str | None = None
    """Why it cannot be."""
    notes: tuple[str, ...] = ()
    """Which files of a folder are the data, and which are left out."""

    @property
    def handed_over(self) -> dict[str, str]:
        """Environment of the ranks: they open the same rows, and read no data."""
        evaluated = self.eval_rows.fingerprint if self.eval_rows else None
        return {PREPARED: json.dumps([self.rows.fingerprint, evaluated, self.notes])}

    @property
    def spec(self) -> ModelSpec:
        """Of the model that is trained."""
        assert self.job.spec is not None, "get_ready describes the model"
        return self.job.spec


def get_ready(
    recipe: Recipe, strategy: Strategy, loop: Loop, ranks: int, device: Device, *, prepared: str | None = None
) -> Ready:
    """Describe the model, resolve the job, read and tokenize the data, unless the parent did that and says so.

    Args:
        recipe, strategy, loop: what is trained, and how.
        ranks: number of processes.
        device: of a rank.
        prepared: in a rank, the value of `PREPARED`.

    Raises:
        ToolkitError: for everything that would stop the run: strategy, model, weights, data.
    """
    if device.kind == "cpu":
        cpu.say_so_to_deepspeed()
    check_trackers(recipe.tracker)
    require_libraries(resolve(strategy, loop, None, ranks, device))
    rows, eval_rows, notes = _prepared(prepared)
    # Mistakes in the data are found before anything heavy is imported.
    data = None if rows else ingest(recipe.data, text_column=recipe.text_column)
    eval_data = ingest(recipe.eval_data, text_column=recipe.text_column) if recipe.eval_data and not eval_rows else None
    spec = described(recipe.model, recipe.trust_remote_code)
    asked = resolve(strategy, loop, spec, ranks, device)
    if strategy.quantized:
        check_quantized(spec, recipe.allow_unquantized)
    require_weights(spec)
    tokenizer = load_tokenizer(spec)

    def rows_of(contents: Contents) -> Rows:
        return prepare_data(
            contents,
            tokenizer,
            spec,
            seq_len=asked.loop.seq_len,
            mask_prompts=recipe.mask_prompts,
            chat_template=recipe.chat_template,
            packing=None if recipe.packing else False,
            text_column=recipe.text_column,
        )

    rows = rows_of(data) if data else rows
    assert rows is not None, "the data were prepared by the parent, or read here"
    check_batch(rows, asked.loop, dp_size=asked.parallelism.dp_size)
    eval_rows = rows_of(eval_data) if eval_data else eval_rows
    read = {"data": data, "eval_data": eval_data}
    notes += tuple(f"{name}: {each.source.summary}" for name, each in read.items() if each and each.source.summary)
    return Ready(job=asked, tokenizer=tokenizer, rows=rows, eval_rows=eval_rows, notes=notes)


def _prepared(said: str | None) -> tuple[Rows | None, Rows | None, tuple[str, ...]]:
    """Rows, rows for evaluation and notes that the parent handed over; nothing without a parent."""
    if said is None:
        return None, None, ()
    rows, eval_rows, notes = json.loads(said)
    return find_rows(rows), find_rows(eval_rows) if eval_rows else None, tuple(notes)


def foretold(ready: Ready, recipe: Recipe, machine: Hardware) -> Ready:
    """The same, with a forecast. Call before an engine is set up, which would partition what is traced."""
    try:
        if ready.job.strategy.adapter != "none":
            import peft  # noqa: F401 - loading needs it too, and with it the trace needs no process of its own
        found = forecast_job(ready.job, machine, one_document=ready.rows.one_document, checkpoints=recipe.checkpoints)
        return dataclasses.replace(ready, forecast=found)
    except Exception as error:  # a run goes on without a forecast, whatever was in its way
        return dataclasses.replace(ready, unforecast=str(error))


def described(model: str, trust_remote_code: str | None = None) -> ModelSpec:
    """The model's spec; the embedded model is made first, once for this machine."""
    if model != EMBEDDED:
        return describe(model, trust_remote_code=trust_remote_code)
    return dataclasses.replace(describe(None, trust_remote_code=trust_remote_code), source=str(embedded_model()))


def embedded_model() -> Path:
    """The folder of the embedded model and its tokenizer, made once from a seed: where every strategy starts."""
    from importlib import metadata

    from filelock import FileLock

    # The tokenizer comes from this Python's sources, the weights from this torch's generator.
    made_with = [sys.version, *(metadata.version(name) for name in ("torch", "transformers", "tokenizers"))]
    root = cache_folder("embedded")
    folder = root / hashlib.sha256(repr(made_with).encode()).hexdigest()[:16]
    with FileLock(root / f"{folder.name}.lock"):
        if not folder.exists():
            fresh = root / f".{folder.name}.partial"
            shutil.rmtree(fresh, ignore_errors=True)
            embedded_checkpoint(fresh)
            embedded_tokenizer(fresh)
            fresh.rename(folder)
    return folder


def draw_model(folder: str | Path, config: Any) -> str:
    """Write a folder like one from the Hub: random weights of a transformers config, drawn from seed 0, and the embedded tokenizer.

    For trying things out at any shape and without a network. The vocabulary has to hold the tokenizer's 4,096 tokens.
    """
    import torch

    if hardware().device.kind == "cpu":
        cpu.say_so_to_deepspeed()
    auto = auto_class(describe(config))
    with torch.random.fork_rng(devices=[]), quiet_bars(main=True, shown=False):
        torch.default_generator.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
    embedded_tokenizer(Path(folder))
    return str(folder)


def versions() -> dict[str, str | None]:
    """The versions of Python and of `LIBRARIES`; None for what is not installed."""
    from importlib import metadata

    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
