"""The recipe: what `accelerate launch -m toolkit.finetune` runs. Copy it, and change what is yours."""

from __future__ import annotations

# First of all, so that a rank whose launcher is killed while it still imports torch ends with it.
from toolkit.lifetime import die_with_parent, tee_output

if __name__ == "__main__":
    die_with_parent()

import argparse
import dataclasses
import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import measuring
from toolkit.adapting import check_quantized, require_libraries
from toolkit.cache import cache_folder
from toolkit.data import (
    Rows,
    batches,
    check_batch,
    check_source,
    embedded_tokenizer,
    eval_batches,
    hash_ids,
    prepare_data,
    sample_ids,
)
from toolkit.devices import Device, hardware
from toolkit.engines import cpu
from toolkit.engines.job import Job, Prepared, resolve
from toolkit.errors import StrategyError, ToolkitError
from toolkit.exporting import save, verify
from toolkit.folder import Folder, enter, run_token, supervised, write_json
from toolkit.loading import embedded_checkpoint, load, load_tokenizer
from toolkit.model import EMBEDDED, ModelSpec, describe, require_weights
from toolkit.preparing import Audit, audit, prepare, prepared
from toolkit.runtime import accelerator as make_accelerator
from toolkit.runtime import agree, check_trackers, job
from toolkit.strategy import Loop, Parser, Strategy, add_flags, from_dict, given
from toolkit.training import Step, adamw, evaluate, train, warmup_cosine
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from tqdm import tqdm

ALONE = 3.0
"""Seconds after which a rank that found a mistake is the only one that did."""

LIBRARIES = ("accelerate-toolkit", "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes")
"""Whose versions `run.json` records."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and on what."""

    model: str = field(default=EMBEDDED, metadata={"help": "Hub id, folder, or the embedded 5M-parameter Llama"})
    """A Hub id or a folder with weights."""
    data: str = field(default=EMBEDDED, metadata={"help": "text, JSONL, folder, dataset, or the embedded text"})
    """As `data.check_source` says."""
    eval_data: str | None = field(default=None, metadata={"help": "data whose loss is reported"})
    """Evaluated every `eval_every` steps, and at the end."""
    eval_every: int = field(default=0, metadata={"help": "steps between evaluations; 0: at the end alone"})
    """In optimizer steps."""
    mask_prompts: bool = field(default=True, metadata={"help": "train on completions and assistant turns alone"})
    """Plain text has no prompts."""
    chat_template: str | None = field(default=None, metadata={"help": "a Jinja file, where the tokenizer has none"})
    """In place of the tokenizer's own."""
    text_column: str = field(default="text", metadata={"help": "column of JSONL and dataset rows that holds a text"})
    """Of JSONL and dataset rows."""
    packing: bool = field(default=True, metadata={"help": "several documents a row, where the model keeps them apart"})
    """Otherwise one document a row, padded."""
    tracker: str | None = field(default=None, metadata={"help": "tensorboard, trackio, wandb, …; several by commas"})
    """Accelerate's trackers by name."""
    memory_window: bool = field(default=True, metadata={"help": "measure peaks on a CPU through the third step"})
    """On CUDA measuring costs nothing and is always on."""
    allow_unquantized: bool = field(default=False, metadata={"help": "QLoRA with most weights unquantized"})
    """Where fused experts stay in the compute dtype."""
    save: bool = field(default=True, metadata={"help": "save and check the trained model at the end"})
    """Into the run's folder, `export/`."""

    def __post_init__(self) -> None:
        if self.eval_every < 0:
            raise StrategyError(f"eval_every {self.eval_every}: expected a whole number of at least 0.")


@dataclass(frozen=True, kw_only=True)
class Ready:
    """All that can be known, and refused, before an engine is set up or a process started."""

    job: Job
    tokenizer: Any
    rows: Rows
    eval_rows: Rows | None


def get_ready(recipe: Recipe, strategy: Strategy, loop: Loop, ranks: int, device: Device) -> Ready:
    """Describe the model, resolve the job, tokenize the data. The parent does it first; in ranks the data are cached.

    Raises:
        ToolkitError: for everything that would stop the run: strategy, model, weights, data.
    """
    if device.kind == "cpu":
        cpu.say_so_to_deepspeed()
    check_trackers(recipe.tracker)
    require_libraries(resolve(strategy, loop, None, ranks, device))
    for source in filter(None, (recipe.data, recipe.eval_data)):
        if source != EMBEDDED:
            check_source(source, text_column=recipe.text_column)
    spec = described(recipe.model)
    asked = resolve(strategy, loop, spec, ranks, device)
    if strategy.quantized:
        check_quantized(spec, recipe.allow_unquantized)
    require_weights(spec)
    tokenizer = load_tokenizer(spec)

    def rows(source: str) -> Rows:
        return prepare_data(
            None if source == EMBEDDED else source,
            tokenizer,
            spec,
            seq_len=asked.loop.seq_len,
            mask_prompts=recipe.mask_prompts,
            chat_template=recipe.chat_template,
            packing=None if recipe.packing else False,
            text_column=recipe.text_column,
        )

    trained = rows(recipe.data)
    check_batch(trained, asked.loop, ranks=ranks)
    return Ready(
        job=asked, tokenizer=tokenizer, rows=trained, eval_rows=rows(recipe.eval_data) if recipe.eval_data else None
    )


def described(model: str) -> ModelSpec:
    """The model's spec; the embedded model is made first, once for this machine."""
    if model != EMBEDDED:
        return describe(model)
    return dataclasses.replace(describe(None), source=str(embedded_model()))


def embedded_model() -> Path:
    """The folder of the embedded model and its tokenizer, made once from a seed: where every strategy starts."""
    from filelock import FileLock

    # The tokenizer comes from this Python's sources, the weights from this torch's generator.
    versions = [sys.version, *(importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers"))]
    root = cache_folder("embedded")
    folder = root / hashlib.sha256(repr(versions).encode()).hexdigest()[:16]
    with FileLock(root / f"{folder.name}.lock"):
        if not folder.exists():
            fresh = root / f".{folder.name}.partial"
            shutil.rmtree(fresh, ignore_errors=True)
            embedded_checkpoint(fresh)
            embedded_tokenizer(fresh)
            fresh.rename(folder)
    return folder


def understand(flags: argparse.Namespace) -> tuple[Recipe, Loop, Strategy]:
    """What the flags and the launch environment say together.

    Raises:
        StrategyError: for a value that cannot be, and where the two contradict each other.
    """
    recipe, loop = from_dict(Recipe, given(flags, Recipe)), from_dict(Loop, given(flags, Loop))
    return recipe, loop, agree(given(flags, Strategy), os.environ)


def run(flags: argparse.Namespace, folder: Folder) -> None:
    """One rank's part of a run, from the description of the model to the saved result."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    recipe, loop, strategy = understand(flags)
    machine = hardware()
    window = measuring.start(machine.device.kind, recipe.memory_window)
    # The model is described before an engine is set up: afterwards every model is born partitioned.
    ready = get_ready(recipe, strategy, loop, ranks, machine.device)

    accelerator = make_accelerator(
        strategy, loop, ready.job.spec, log_with=recipe.tracker, project_dir=str(folder.path)
    )
    seed_everything(ready.job.loop.seed)
    asked = job(accelerator)
    accelerator.print(_headline(asked))
    model, tokenizer = load(accelerator, allow_unquantized=recipe.allow_unquantized)
    optimizer = adamw(model, asked.loop)
    schedule = warmup_cosine(optimizer, asked.loop)
    loader = batches(ready.rows, asked.loop, rank=rank, ranks=ranks, attention=asked.strategy.attention)
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule)
    ours = prepared(accelerator, (model, optimizer))

    if accelerator.is_main_process:
        write_json(folder.run_json, _about(asked, recipe, ready.rows, machine))
    if recipe.tracker:
        accelerator.init_trackers("accelerate-toolkit", config={"sharding": asked.strategy.sharding})

    def samples(step: int) -> str:
        return hash_ids(sample_ids(ready.rows, asked.loop, ranks=ranks, step=step - 1))

    found: Audit | None = None
    for step in follow(ours, loader, schedule, folder=folder, samples=samples):
        window.step_done(step.step)
        if step.step == 1:
            found = audit(ours, gradients=step.gradients)
        if recipe.tracker:
            accelerator.log({"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}, step=step.step)
        if ready.eval_rows and _due(step.step, asked.loop.steps, recipe.eval_every):
            held_out = eval_batches(
                ready.eval_rows,
                micro_batch=asked.loop.micro_batch,
                rank=rank,
                ranks=ranks,
                attention=asked.strategy.attention,
            )
            loss = evaluate(ours, held_out)
            if accelerator.is_main_process:
                folder.append_event({"step": step.step, "attempt": 0, "eval_loss": loss})
            accelerator.print(f"step {step.step}: evaluation loss {loss:.4f}")
    assert found is not None, "a loop has at least one step"
    window.close()

    if recipe.save:
        with window.saving():
            save(ours, tokenizer, folder.export)
    _record(accelerator, folder, window, found)
    if recipe.save:
        probe = ready.rows.batch([0])
        accelerator.print(verify(ours, folder.export, probe) or "")
    accelerator.end_training()


def follow(
    prepared: Prepared, loader: Any, schedule: Any, *, folder: Folder, samples: Callable[[int], str]
) -> Iterator[Step]:
    """`train`, with a line a step in the run's `events.jsonl` and a progress bar, both by the main process."""
    main = prepared.accelerator.is_main_process
    with _progress(prepared.job, shown=main) as bar:
        for step in train(prepared, loader, schedule, samples=samples):
            if main:
                folder.append_event({**_event(step), "attempt": 0, "samples": samples(step.step)})
                _show(bar, step)
            yield step


def _due(step: int, last: int, every: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def seed_everything(seed: int) -> None:
    """Equal on all ranks: what differs between them is their data."""
    from accelerate.utils import set_seed

    set_seed(seed)


def _headline(asked: Job) -> str:
    strategy, spec = asked.strategy, asked.spec
    assert spec is not None
    return (
        f"{spec.architecture}, {spec.elements:,} parameters; sharding {strategy.sharding} on {asked.ranks} "
        f"{asked.device.kind} rank(s); precision {strategy.precision}, attention {strategy.attention}, "
        f"adapter {strategy.adapter}, activation checkpointing {strategy.activation_checkpointing}, lr {asked.loop.lr:g}"
    )


def _about(asked: Job, recipe: Recipe, rows: Rows, machine: Any) -> dict[str, Any]:
    """What `run.json` says."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "strategy": dataclasses.asdict(asked.strategy),
        "loop": dataclasses.asdict(asked.loop),
        "recipe": dataclasses.asdict(recipe),
        "ranks": asked.ranks,
        "settings": dict(asked.settings),
        "forecast": None,
        "versions": {"python": sys.version.split()[0], **versions},
        "hardware": machine.to_dict(),
        "seed": asked.loop.seed,
        "data": rows.to_dict(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _event(step: Step) -> dict[str, Any]:
    line = dataclasses.asdict(step)
    del line["gradients"]
    return line


def _progress(asked: Job, *, shown: bool) -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(total=asked.loop.steps, desc=asked.strategy.sharding, unit="step", disable=not shown, mininterval=0.25)


def _show(bar: tqdm[Any], step: Step) -> None:
    sizes = [size for rank in step.bytes for name, size in rank.items() if name in ("rss", "allocated") and size]
    bar.set_postfix_str(
        f"loss {step.loss:.4f}, {step.tokens / step.seconds:,.0f} tokens/s, {format_bytes(max(sizes, default=0))} a rank",
        refresh=False,
    )
    bar.update()


def _record(accelerator: Any, folder: Folder, window: measuring.Window, found: Audit) -> None:
    """`memory.json`: every rank's peaks and holdings."""
    from accelerate.utils import gather_object

    memory = measuring.collect(window.result(), found.held, gather_object)
    audits = gather_object([found.to_dict()])
    if accelerator.is_main_process:
        write_json(folder.memory, {**memory.to_dict(), "forecast": None, "audits": audits})
        accelerator.print(f"\n{found}\n\n{memory}\n")


def parser() -> argparse.ArgumentParser:
    """The recipe's command line: every field of Recipe, Strategy and Loop."""
    made = Parser(prog="toolkit.finetune", description="Train a model on ranks that were launched.")
    made.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: runs/…)")
    add_flags(made, Recipe, Strategy, Loop)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as one rank. Exit code 2 after a user's mistake."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        flags = parser().parse_args(arguments)
        if not supervised():
            understand(flags)  # what is wrong here is said before there is a folder
        # Without a supervisor and a name the ranks agree on one through what only they share.
        path = flags.run_dir or f"runs/launched-{hashlib.sha256(run_token().encode()).hexdigest()[:8]}"
        folder = enter(path)
    except ToolkitError as error:
        return _tell(rank, error)
    with folder:
        tee_output(folder.log(rank), rank=rank, supervised=supervised())
        try:
            run(flags, folder)
        except ToolkitError as error:
            if supervised():
                folder.record_error(rank, error)
                return error.exit_code
            folder.discard(shared=True)
            return _tell(rank, error)
        except BaseException as error:
            folder.record_error(rank, error)
            raise
    return 0


def _tell(rank: int, error: ToolkitError) -> int:
    """Say what is wrong, once: most mistakes are every rank's, and the launcher ends the others after the first."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(ALONE)
    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
