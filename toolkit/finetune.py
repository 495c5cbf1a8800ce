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
from toolkit.checkpoints import (
    CheckpointWriter,
    ResumePoint,
    check_fits,
    find_resume_point,
    identify,
    quarantine,
    restore,
)
from toolkit.config.flags import Parser, add_flags, from_dict, given
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import write_json
from toolkit.core.errors import CheckpointError, NotFinite, OutOfMemory, StrategyError, ToolkitError, is_out_of_memory
from toolkit.core.phases import phase
from toolkit.core.process_lifecycle import StopSignal
from toolkit.data import sample_ids, spell_samples
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared, on_device
from toolkit.engines.timeouts import limit_all, pg_timeout
from toolkit.exporters import save, spelled, verify
from toolkit.run_folder.folder import Folder, enter, read_run_json
from toolkit.run_folder.heartbeat import Beat
from toolkit.run_folder.run_lock import run_token, supervised
from toolkit.training.assembly import assembled, seed_everything
from toolkit.training.checkpoint_policy import CheckpointPolicy
from toolkit.training.evaluation import Evaluator
from toolkit.training.loop import Step, StepRequest
from toolkit.training.metrics import train_logged
from toolkit.training.oom import out_of_memory
from toolkit.training.preflight import PREPARED, Preflight, run_preflight, versions, with_forecast
from toolkit.training.preparation import Audit, audit
from toolkit.training.resumption import (
    check_not_anew,
    commit_attempt,
    finish,
    merge_config,
    record_attempt,
    resume_hint,
)
from toolkit.training.setup import accelerator as make_accelerator
from toolkit.training.setup import agree, job, launched, on_any_rank

ALONE = 3.0
"""Seconds after which a rank that found a mistake is the only one that did."""


READING_SECONDS = 24 * 3600.0
"""Time limit of collectives until the model is ready: ranks read at different speeds. From then on it is `--timeout`."""


def resolve_flags(flags: argparse.Namespace, path: Path | None = None) -> tuple[RunConfig, TrainConfig, Strategy]:
    """Merge the flags, the launch environment and, for a resumed run, its folder.

    Raises:
        StrategyError: for an invalid value, and for flags that contradict the launch environment.
    """
    run_config, train_config, strategy = (given(flags, owner) for owner in (RunConfig, TrainConfig, Strategy))
    if path is None:
        return from_dict(RunConfig, run_config), from_dict(TrainConfig, train_config), agree(strategy, os.environ)
    recorded, ranks = read_run_json(path), int(os.environ.get("WORLD_SIZE", "1"))
    # The environment alone does not tell `none` with tp, or an engine from elsewhere, from DDP: the run does.
    before = {**recorded["strategy"], **strategy}
    bound = launched(os.environ, before.get("sharding"), before.get("tp"))
    merged_run, merged_train, fields = merge_config(recorded, run_config, train_config, {**bound, **strategy}, ranks)
    # The launcher may bind other values than before: that is how a run resumes under another strategy.
    requested = {name: value for name, value in fields.items() if name in strategy or name not in bound}
    return merged_run, merged_train, agree(requested, os.environ, bound)


def run(flags: argparse.Namespace, folder: Folder, beat: Beat) -> int:
    """One rank's part of a run, from the description of the model to the saved result. Its exit code."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    run_config, train_config, strategy = resolve_flags(flags, folder.path if flags.resume else None)
    machine = hardware()
    window = measurement.start(machine.device.kind, run_config.memory_window)
    # The model is described before an engine is set up: afterwards every model is born partitioned.
    preflight = run_preflight(
        run_config, strategy, train_config, ranks, machine.device, prepared=os.environ.pop(PREPARED, None)
    )
    if rank == 0:
        preflight = with_forecast(preflight, run_config, machine)

    accelerator = make_accelerator(
        strategy,
        train_config,
        preflight.job.spec,
        log_with=run_config.tracker,
        project_dir=str(folder.path),
        timeout=max(run_config.timeout, READING_SECONDS),
    )
    seed_everything(accelerator)
    asked = job(accelerator)
    beat.stage = asked.coordinates(accelerator.process_index).pp
    accelerator.print("\n".join((_headline(asked), *preflight.notes)))
    found = find_resume_point(accelerator, folder.checkpoints) if flags.resume else ResumePoint.nothing()
    with accelerator.local_main_process_first():  # the others find the base's hashes in the cache
        identity = identify(preflight.spec, asked.strategy, preflight.rows.fingerprint)
    check_fits(found, asked, identity)
    quarantine(accelerator, found)
    if flags.resume:
        accelerator.print(str(found))
        check_not_anew(folder.path, read_run_json(folder.path), found.step)
    attempt = record_attempt(accelerator, folder, preflight, run_config, machine, found)
    ours, tokenizer, loader, schedule = assembled(accelerator, preflight, run_config, start=found.step)
    if found.manifest is not None:
        restore(ours, schedule, found, identity)
    limit_all(pg_timeout(run_config.timeout))
    if accelerator.is_main_process and (changed := commit_attempt(folder, preflight, run_config, machine, found)):
        accelerator.print(f"changed since the last attempt: {', '.join(changed)}")
    saver = None
    if run_config.checkpoints:
        saver = CheckpointWriter(
            ours,
            schedule,
            folder.checkpoints,
            identity,
            versions=versions(),
            keep=run_config.keep,
            patience=run_config.timeout,
        )
    if run_config.tracker:
        accelerator.init_trackers("accelerate-toolkit", config={"sharding": asked.strategy.sharding})

    beat.note("between", step=found.step)
    with StopSignal() as stop, beat.listening():
        policy = CheckpointPolicy(
            saver, run_config, window, folder, stop, steps=asked.train_config.steps, attempt=attempt
        )
        held, stopped = _steps(ours, tokenizer, loader, schedule, preflight, run_config, policy, beat, start=found.step)
        if stopped:
            accelerator.print(
                f"stopped after step {stopped}, as asked" + ("" if supervised() else f". {resume_hint(folder)}")
            )
            accelerator.end_training()  # still listening: the launcher signals the others when the first has ended
            return 128 + (stop.number or signal.SIGTERM)
    window.close()
    _publish(ours, tokenizer, folder, window, held, preflight, run_config)
    accelerator.end_training()
    return 0


def _publish(
    ours: Prepared,
    tokenizer: Any,
    folder: Folder,
    window: measurement.Window,
    held: Audit,
    preflight: Preflight,
    run_config: RunConfig,
) -> None:
    """The result, reopened and checked, and what the run took."""
    planned, export = {}, None
    if run_config.save:
        with window.saving():
            planned = save(ours, tokenizer, folder.export)
    _record(ours.accelerator, folder, window, held, preflight)
    if run_config.save:
        probe = preflight.rows.batch([0])
        about = {"data": f"fingerprint {preflight.rows.fingerprint}", "versions": spelled(versions())}
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
    preflight: Preflight,
    run_config: RunConfig,
    policy: CheckpointPolicy,
    beat: Beat,
    *,
    start: int,
) -> tuple[Audit, int]:
    """The steps that are left. The last audit, and the step after which a signal stopped the run, or 0."""
    asked, accelerator = ours.job, ours.accelerator
    held: Audit | None = None
    evaluator = Evaluator(ours, preflight.eval_rows, run_config, policy.folder, policy.stop, attempt=policy.attempt)
    if evaluator.left_out(start):
        beat.note("evaluate")
        if not evaluator.evaluate(start):
            return audit(ours), start

    logged = logged_steps(ours, tokenizer, loader, schedule, preflight, policy, beat, start=start)
    for step in _rescued(logged, policy, beat, start):
        if held is None and not step.skipped:  # a step that fp16's scaler skips makes no moments
            held = audit(ours, gradients=step.gradients)
        if run_config.tracker:
            accelerator.log({"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}, step=step.step)
        if StepRequest.STOP in step.request:
            beat.note("save")  # however long it takes, the supervisor waits for it
        policy.step_done(step)  # before an evaluation, which may take long
        if StepRequest.STOP in step.request:
            return held or audit(ours), step.step
        if evaluator.due(step.step):
            beat.note("evaluate")
            if not evaluator.evaluate(step.step):
                beat.note("save")
                policy.save_last_good(step.step)  # another step would leave this one without its evaluation for good
                return held or audit(ours), step.step
            beat.note("between")
    return held or audit(ours), asked.train_config.steps if on_any_rank(
        accelerator, StepRequest.STOP in policy.request()
    ) else 0


def logged_steps(
    ours: Prepared,
    tokenizer: Any,
    loader: Any,
    schedule: Any,
    preflight: Preflight,
    policy: CheckpointPolicy,
    beat: Beat,
    *,
    start: int,
) -> Iterator[Step]:
    """Train from step `start`. Each step is in `events.jsonl`, on the progress bar, in the heartbeat and in the memory window."""

    def begins(step: int) -> None:
        beat.note("begin", step=step)

    def samples(step: int) -> list[int]:
        return sample_ids(preflight.rows, ours.job.train_config, dp_size=ours.job.parallelism.dp_size, step=step - 1)

    for step in train_logged(
        ours,
        loader,
        schedule,
        folder=policy.folder,
        samples=samples,
        spelled=partial(spell_samples, preflight.rows, tokenizer),
        start=start,
        begin=begins,
        request=policy.request,
        attempt=policy.attempt,
    ):
        beat.note("between")
        policy.window.step_done(step.step)
        yield step


def _rescued(steps: Iterator[Step], policy: CheckpointPolicy, beat: Beat, start: int) -> Iterator[Step]:
    """The same steps. Where numbers that are not finite end them, the weights of the step before are published first."""
    done = start
    try:
        for step in steps:
            yield step
            done = step.step
    except NotFinite as error:
        beat.note("save")
        try:
            policy.save_last_good(done)
        except CheckpointError as failed:
            raise NotFinite(f"{error} The weights could not be saved: {failed}") from failed
        raise


def _headline(asked: Job) -> str:
    strategy, spec = asked.strategy, asked.spec
    assert spec is not None
    return (
        f"{spec.architecture}, {spec.elements:,} parameters; sharding {strategy.label} on {asked.ranks} "
        f"{asked.device.kind} rank(s); precision {strategy.precision}, attention {strategy.attention}, "
        f"adapter {strategy.adapter}, activation checkpointing {strategy.activation_checkpointing}, lr {asked.train_config.lr:g}"
    )


def _record(accelerator: Any, folder: Folder, window: measurement.Window, found: Audit, preflight: Preflight) -> None:
    """`memory.json`: every rank's peaks and holdings, beside the forecast."""
    from accelerate.utils import gather_object

    memory = measurement.collect(window.result(), on_device(job(accelerator), found.held), gather_object)
    audits = gather_object([found.to_dict()])
    if accelerator.is_main_process:
        beside = {
            "forecast": preflight.forecast.to_dict() if preflight.forecast else None,
            "unforecast": preflight.unforecast,
        }
        write_json(folder.memory, {**memory.to_dict(), **beside, "audits": audits})
        accelerator.print(f"\n{found}\n\n{memory}\n")


def build_parser() -> argparse.ArgumentParser:
    """The recipe's command line: every field of Recipe, Strategy and Loop."""
    made = Parser(prog="toolkit.finetune", description="Train a model on ranks that were launched.")
    made.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: runs/…)")
    made.add_argument(
        "--resume", action="store_true", help="go on with the run in --run-dir, from its newest checkpoint"
    )
    add_flags(made, RunConfig, Strategy, TrainConfig)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as one rank. Exit code 2 after a user's mistake."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        flags = build_parser().parse_args(arguments)
        if flags.resume and not flags.run_dir:
            raise StrategyError("--resume goes on with a run, and no --run-dir names one. Give the run's folder.")
        if not supervised():
            # what is wrong here is said before there is a folder
            resolve_flags(flags, Path(flags.run_dir) if flags.resume else None)
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
    """Report an error to the supervisor, or to the user without one. A new run that never began leaves no folder."""
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
