"""The recipe: what `accelerate launch -m toolkit.finetune` runs. Copy it, and change what is yours."""

from __future__ import annotations

# First of all, so that a rank whose launcher is killed while it still imports torch ends with it.
from toolkit.lifetime import die_with_parent, tee_output

if __name__ == "__main__":
    die_with_parent()

import argparse
import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit import measuring
from toolkit.data import Rows, batches, eval_batches, hash_ids, sample_ids
from toolkit.devices import hardware
from toolkit.engines.job import Job, Prepared, on_device
from toolkit.errors import ToolkitError
from toolkit.exporting import save, verify
from toolkit.folder import Folder, enter, run_token, supervised, write_json
from toolkit.loading import load
from toolkit.preparing import Audit, audit, prepare, prepared
from toolkit.readying import Recipe, get_ready, versions
from toolkit.runtime import accelerator as make_accelerator
from toolkit.runtime import agree, job
from toolkit.strategy import Loop, Parser, Strategy, add_flags, from_dict, given
from toolkit.training import Step, adamw, evaluate, train, warmup_cosine
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from tqdm import tqdm

ALONE = 3.0
"""Seconds after which a rank that found a mistake is the only one that did."""


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
            if recipe.tracker:
                accelerator.log({"eval_loss": loss}, step=step.step)
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
    return {
        "strategy": dataclasses.asdict(asked.strategy),
        "loop": dataclasses.asdict(asked.loop),
        "recipe": dataclasses.asdict(recipe),
        "ranks": asked.ranks,
        "settings": dict(asked.settings),
        "forecast": None,
        "versions": versions(),
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
    if step.skipped:
        bar.write(f"step {step.step}: fp16 overflowed, and the step was skipped")


def _record(accelerator: Any, folder: Folder, window: measuring.Window, found: Audit) -> None:
    """`memory.json`: every rank's peaks and holdings."""
    from accelerate.utils import gather_object

    memory = measuring.collect(window.result(), on_device(job(accelerator), found.held), gather_object)
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
