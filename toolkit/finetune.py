"""The recipe: what `accelerate launch -m toolkit.finetune` runs. Copy it, and change what is yours."""

from __future__ import annotations

# First of all, so that a rank whose launcher is killed while it still imports torch ends with it.
from toolkit.core.process_lifecycle import die_with_parent, leave_safe_path, tee_output

if __name__ == "__main__":
    die_with_parent()
    leave_safe_path()

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit import measurement
from toolkit.checkpoints import Found, Saver, check_fits, find, identify, restore, set_aside
from toolkit.config.flags import Parser, add_flags, from_dict, given
from toolkit.config.run_config import Recipe
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import Loop
from toolkit.core.atomic_io import write_json
from toolkit.core.errors import CheckpointError, NotFinite, OutOfMemory, StrategyError, ToolkitError, is_out_of_memory
from toolkit.core.phases import phase
from toolkit.core.process_lifecycle import StopSignal
from toolkit.data import sample_ids, spell_samples
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared, on_device
from toolkit.engines.timeouts import limit_all, patience
from toolkit.exporters import save, spelled, verify
from toolkit.run_folder.folder import Folder, enter, read_run_json
from toolkit.run_folder.heartbeat import Beat
from toolkit.run_folder.run_lock import run_token, supervised
from toolkit.training.assembly import assembled, seed_everything
from toolkit.training.checkpoint_policy import Keeper
from toolkit.training.evaluation import Evaluator
from toolkit.training.loop import Step, Wish
from toolkit.training.metrics import follow
from toolkit.training.oom import out_of_memory
from toolkit.training.preflight import PREPARED, Ready, foretold, get_ready, versions
from toolkit.training.preparation import Audit, audit
from toolkit.training.resumption import adopt, begin, check_not_anew, continued, finish, how_to_go_on
from toolkit.training.setup import accelerator as make_accelerator
from toolkit.training.setup import agree, job, launched, on_any_rank

ALONE = 3.0
"""Seconds after which a rank that found a mistake is the only one that did."""


READING_SECONDS = 24 * 3600.0
"""Time limit of collectives until the model is ready: ranks read at different speeds. From then on it is `--timeout`."""


def understand(flags: argparse.Namespace, path: Path | None = None) -> tuple[Recipe, Loop, Strategy]:
    """What the flags, the launch environment and, where a run goes on, its folder say together.

    Raises:
        StrategyError: for a value that cannot be, and where the two contradict each other.
    """
    recipe, loop, strategy = (given(flags, owner) for owner in (Recipe, Loop, Strategy))
    if path is None:
        return from_dict(Recipe, recipe), from_dict(Loop, loop), agree(strategy, os.environ)
    ranks, bound = int(os.environ.get("WORLD_SIZE", "1")), launched(os.environ)
    old, loop_now, fields = continued(read_run_json(path), recipe, loop, {**bound, **strategy}, ranks)
    # What the launcher binds may differ from what was: that is how a run goes on under another strategy.
    return old, loop_now, agree({name: value for name, value in fields.items() if name not in bound}, os.environ)


def run(flags: argparse.Namespace, folder: Folder, beat: Beat) -> int:
    """One rank's part of a run, from the description of the model to the saved result. Its exit code."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    recipe, loop, strategy = understand(flags, folder.path if flags.resume else None)
    machine = hardware()
    window = measurement.start(machine.device.kind, recipe.memory_window)
    # The model is described before an engine is set up: afterwards every model is born partitioned.
    ready = get_ready(recipe, strategy, loop, ranks, machine.device, prepared=os.environ.pop(PREPARED, None))
    if rank == 0:
        ready = foretold(ready, recipe, machine)

    accelerator = make_accelerator(
        strategy,
        loop,
        ready.job.spec,
        log_with=recipe.tracker,
        project_dir=str(folder.path),
        timeout=max(recipe.timeout, READING_SECONDS),
    )
    seed_everything(accelerator)
    asked = job(accelerator)
    beat.stage = asked.coordinates(accelerator.process_index).pp
    accelerator.print("\n".join((_headline(asked), *ready.notes)))
    found = find(accelerator, folder.checkpoints) if flags.resume else Found.nothing()
    with accelerator.local_main_process_first():  # the others find the base's hashes in the cache
        identity = identify(ready.spec, asked.strategy, ready.rows.fingerprint)
    check_fits(found, asked, identity)
    set_aside(accelerator, found)
    if flags.resume:
        accelerator.print(str(found))
        check_not_anew(folder.path, read_run_json(folder.path), found.step)
    attempt = begin(accelerator, folder, ready, recipe, machine, found)
    ours, tokenizer, loader, schedule = assembled(accelerator, ready, recipe, start=found.step)
    if found.manifest is not None:
        restore(ours, schedule, found, identity)
    limit_all(patience(recipe.timeout))
    if accelerator.is_main_process and (changed := adopt(folder, ready, recipe, machine, found)):
        accelerator.print(f"changed since the last attempt: {', '.join(changed)}")
    saver = None
    if recipe.checkpoints:
        saver = Saver(
            ours,
            schedule,
            folder.checkpoints,
            identity,
            versions=versions(),
            keep=recipe.keep,
            patience=recipe.timeout,
        )
    if recipe.tracker:
        accelerator.init_trackers("accelerate-toolkit", config={"sharding": asked.strategy.sharding})

    beat.note("between", step=found.step)
    with StopSignal() as stop, beat.listening():
        keeper = Keeper(saver, recipe, window, folder, stop, steps=asked.loop.steps, attempt=attempt)
        held, stopped = _steps(ours, tokenizer, loader, schedule, ready, recipe, keeper, beat, start=found.step)
        if stopped:
            accelerator.print(
                f"stopped after step {stopped}, as asked" + ("" if supervised() else f". {how_to_go_on(folder)}")
            )
            accelerator.end_training()  # still listening: the launcher signals the others when the first has ended
            return 128 + (stop.number or signal.SIGTERM)
    window.close()
    _publish(ours, tokenizer, folder, window, held, ready, recipe)
    accelerator.end_training()
    return 0


def _publish(
    ours: Prepared,
    tokenizer: Any,
    folder: Folder,
    window: measurement.Window,
    held: Audit,
    ready: Ready,
    recipe: Recipe,
) -> None:
    """The result, reopened and checked, and what the run took."""
    planned, export = {}, None
    if recipe.save:
        with window.saving():
            planned = save(ours, tokenizer, folder.export)
    _record(ours.accelerator, folder, window, held, ready)
    if recipe.save:
        probe = ready.rows.batch([0])
        about = {"data": f"fingerprint {ready.rows.fingerprint}", "versions": spelled(versions())}
        with phase("save"):
            export = verify(ours, folder.export, planned, probe, about=about)
        ours.accelerator.print(export or "")
    if ours.accelerator.is_main_process:
        finish(folder, export=export.to_dict() if export else None)


def _steps(
    ours: Prepared,
    tokenizer: Any,
    loader: Any,
    schedule: Any,
    ready: Ready,
    recipe: Recipe,
    keeper: Keeper,
    beat: Beat,
    *,
    start: int,
) -> tuple[Audit, int]:
    """The steps that are left. The last audit, and the step after which a signal stopped the run, or 0."""
    asked, accelerator = ours.job, ours.accelerator
    held: Audit | None = None
    evaluator = Evaluator(ours, ready.eval_rows, recipe, keeper.folder, keeper.stop, attempt=keeper.attempt)
    if evaluator.left_out(start):
        beat.note("evaluate")
        if not evaluator.evaluate(start):
            return audit(ours), start

    logged = logged_steps(ours, tokenizer, loader, schedule, ready, keeper, beat, start=start)
    for step in _rescued(logged, keeper, beat, start):
        if held is None and not step.skipped:  # a step that fp16's scaler skips makes no moments
            held = audit(ours, gradients=step.gradients)
        if recipe.tracker:
            accelerator.log({"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}, step=step.step)
        if Wish.STOP in step.wish:
            beat.note("save")  # however long it takes, the supervisor waits for it
        keeper.step_done(step)  # before an evaluation, which may take long
        if Wish.STOP in step.wish:
            return held or audit(ours), step.step
        if evaluator.due(step.step):
            beat.note("evaluate")
            if not evaluator.evaluate(step.step):
                beat.note("save")
                keeper.rescue(step.step)  # another step would leave this one without its evaluation for good
                return held or audit(ours), step.step
            beat.note("between")
    return held or audit(ours), asked.loop.steps if on_any_rank(accelerator, Wish.STOP in keeper.wish()) else 0


def logged_steps(
    ours: Prepared, tokenizer: Any, loader: Any, schedule: Any, ready: Ready, keeper: Keeper, beat: Beat, *, start: int
) -> Iterator[Step]:
    """Train from step `start`. Each step is in `events.jsonl`, on the progress bar, in the heartbeat and in the memory window."""

    def begins(step: int) -> None:
        beat.note("begin", step=step)

    def samples(step: int) -> list[int]:
        return sample_ids(ready.rows, ours.job.loop, dp_size=ours.job.parallelism.dp_size, step=step - 1)

    for step in follow(
        ours,
        loader,
        schedule,
        folder=keeper.folder,
        samples=samples,
        spelled=partial(spell_samples, ready.rows, tokenizer),
        start=start,
        begin=begins,
        wish=keeper.wish,
        attempt=keeper.attempt,
    ):
        beat.note("between")
        keeper.window.step_done(step.step)
        yield step


def _rescued(steps: Iterator[Step], keeper: Keeper, beat: Beat, start: int) -> Iterator[Step]:
    """The same steps. Where numbers that are not finite end them, the weights of the step before are published first."""
    done = start
    try:
        for step in steps:
            yield step
            done = step.step
    except NotFinite as error:
        beat.note("save")
        try:
            keeper.rescue(done)
        except CheckpointError as failed:
            raise NotFinite(f"{error} The weights could not be saved: {failed}") from failed
        raise


def _headline(asked: Job) -> str:
    strategy, spec = asked.strategy, asked.spec
    assert spec is not None
    return (
        f"{spec.architecture}, {spec.elements:,} parameters; sharding {strategy.label} on {asked.ranks} "
        f"{asked.device.kind} rank(s); precision {strategy.precision}, attention {strategy.attention}, "
        f"adapter {strategy.adapter}, activation checkpointing {strategy.activation_checkpointing}, lr {asked.loop.lr:g}"
    )


def _record(accelerator: Any, folder: Folder, window: measurement.Window, found: Audit, ready: Ready) -> None:
    """`memory.json`: every rank's peaks and holdings, beside the forecast."""
    from accelerate.utils import gather_object

    memory = measurement.collect(window.result(), on_device(job(accelerator), found.held), gather_object)
    audits = gather_object([found.to_dict()])
    if accelerator.is_main_process:
        beside = {"forecast": ready.forecast.to_dict() if ready.forecast else None, "unforecast": ready.unforecast}
        write_json(folder.memory, {**memory.to_dict(), **beside, "audits": audits})
        accelerator.print(f"\n{found}\n\n{memory}\n")


def parser() -> argparse.ArgumentParser:
    """The recipe's command line: every field of Recipe, Strategy and Loop."""
    made = Parser(prog="toolkit.finetune", description="Train a model on ranks that were launched.")
    made.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: runs/…)")
    made.add_argument(
        "--resume", action="store_true", help="go on with the run in --run-dir, from its newest checkpoint"
    )
    add_flags(made, Recipe, Strategy, Loop)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as one rank. Exit code 2 after a user's mistake."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        flags = parser().parse_args(arguments)
        if flags.resume and not flags.run_dir:
            raise StrategyError("--resume goes on with a run, and no --run-dir names one. Give the run's folder.")
        if not supervised():
            # what is wrong here is said before there is a folder
            understand(flags, Path(flags.run_dir) if flags.resume else None)
        # Without a supervisor and a name the ranks agree on one through what only they share.
        path = flags.run_dir or f"runs/launched-{hashlib.sha256(run_token().encode()).hexdigest()[:8]}"
        folder = enter(path, resume=flags.resume)
    except ToolkitError as error:
        return _tell(rank, error)
    with folder:
        tee_output(folder.log(rank), rank=rank, supervised=supervised())
        with folder.room_for_error(rank):
            return _guarded(flags, folder, rank)


def _guarded(flags: argparse.Namespace, folder: Folder, rank: int) -> int:
    """The run's exit code; what ends it otherwise is written down for the supervisor."""
    beat = Beat(folder.beat(rank), rank)
    try:
        with beat:  # whose last one says where an exception came from
            return run(flags, folder, beat)
    except ToolkitError as error:
        return _refused(folder, rank, error, resumed=flags.resume)
    except BaseException as error:
        if not is_out_of_memory(error):
            folder.record_error(rank, error)
            raise
        return _refused(folder, rank, out_of_memory(error, folder, beat.last), resumed=flags.resume)


def _refused(folder: Folder, rank: int, error: ToolkitError, *, resumed: bool) -> int:
    """Say it to the supervisor, or where there is none to the user. A new run that never began leaves nothing."""
    if supervised():
        folder.record_error(rank, error)
        return error.exit_code
    if not resumed and not isinstance(error, OutOfMemory | NotFinite):
        folder.discard(shared=True)
    return _tell(rank, error)


def _tell(rank: int, error: ToolkitError) -> int:
    """Say what is wrong, once: most mistakes are every rank's, and the launcher ends the others after the first."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(ALONE)
    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
