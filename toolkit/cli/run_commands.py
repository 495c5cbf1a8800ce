"""Commands for runs: `train`, `launch`, `resume`, `watch`, `stop`, `runs`, `report`, `compare`, `export`, `generate`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli.planning_commands import print_rows, read, read_batch, strategies
from toolkit.config.fields import from_dict
from toolkit.config.flags import flag, given, spell, to_flags
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result
from toolkit.core.errors import RunError, ToolkitError
from toolkit.core.redaction import MARK, redact, visible

if TYPE_CHECKING:
    from toolkit.launcher.targets import Target

CHOSEN = ("activation_checkpointing", "loss")
"""Fields in which `train` chooses a value in the place of `auto`."""

PLAIN_FIELDS = {"activation_checkpointing": "none", "loss": "whole"}
"""The fields that `--plain` sets."""


def train(flags: argparse.Namespace) -> dict[str, Any]:
    """Train a model in new processes."""
    from toolkit.config.run_config import RunConfig
    from toolkit.devices.machine import hardware
    from toolkit.engines.resolution import accelerate_config
    from toolkit.launcher import RestartPolicy, supervise_with_restarts
    from toolkit.reports import reported
    from toolkit.run_folder.folder import RUNS_FOLDER, check_new, enter, new_path
    from toolkit.run_folder.run_lock import new_token
    from toolkit.training.certificates import guarded
    from toolkit.training.preflight import choose_transforms, run_preflight
    from toolkit.training.setup import choose_ranks, print_default

    restart_policy = read(RestartPolicy, flags)
    if flags.plain:
        for name, value in PLAIN_FIELDS.items():
            if (own := getattr(flags, name)) not in (None, value):
                raise ToolkitError(f"--plain sets {name} {value!r}, and {own!r} is given. Leave one out.")
        vars(flags).update(PLAIN_FIELDS)
    if flags.resume:
        if not flags.run_dir:
            raise ToolkitError("--resume needs --run-dir with the folder of a run.")
        if Path(flags.run_dir, "run.json").exists():
            return _resume(Path(flags.run_dir), flags)
    run_config, strategy, machine = read(RunConfig, flags), read(Strategy, flags), hardware()
    train_config = read_batch(flags, strategy)
    ranks = choose_ranks([strategy], machine, flags.processes)
    check_new(flags.run_dir)
    preflight = run_preflight(run_config, strategy, train_config, ranks, machine.device)
    preflight, strategy = choose_transforms(preflight, run_config, strategy, machine)
    preflight = guarded(preflight, run_config)
    environ = preflight.rank_environment
    path = Path(flags.run_dir) if flags.run_dir else new_path(RUNS_FOLDER, strategy.sharding)
    with enter(path, token=new_token()) as folder, reported(path):
        print_default(ranks, machine, flags.processes)
        print_rows(flags)
        if flags.resume:
            print(f"no run has begun in {path}: starting from step 0", file=sys.stderr)
        words = ["--run-dir", str(path), *to_flags(run_config, strategy, train_config)]
        config = accelerate_config(strategy, ranks)
        options: dict[str, Any] = {"environ": environ, "timeout": run_config.timeout, "restart_policy": restart_policy}
        supervise_with_restarts(folder, "toolkit.finetune", words, [*words, "--resume"], config, **options)
    return _result(path)


def launch(flags: argparse.Namespace) -> Result:
    """Run your own script or module as a supervised run."""
    from toolkit.devices.machine import hardware
    from toolkit.launcher.run_handle import Run
    from toolkit.launcher.script_run import run_script
    from toolkit.run_folder.folder import RUNS_FOLDER, check_new, new_path
    from toolkit.training.setup import choose_ranks, print_default

    strategy, machine = read(Strategy, flags), hardware()
    target = _target([flags.target, *flags.arguments], flags.sha256)
    if ours := [word for word in flags.arguments if word in LAUNCH_FLAGS]:
        print(f"{', '.join(ours)} goes to {target.name}: flags of the toolkit stand before it", file=sys.stderr)
    ranks = choose_ranks([strategy], machine, flags.processes)
    check_new(flags.run_dir)
    path = Path(flags.run_dir) if flags.run_dir else new_path(RUNS_FOLDER, strategy.sharding)
    print_default(ranks, machine, flags.processes)
    run_script(path, target, strategy, ranks, machine, timeout=flags.timeout)
    return Run(path)


def runs(flags: argparse.Namespace) -> Result:
    """List the runs in a folder, newest first."""
    from toolkit.launcher import runs

    return runs(flags.root)


def watch(flags: argparse.Namespace) -> Result:
    """Show a run until it ends; Ctrl-C ends only the view."""
    from toolkit.launcher import attach

    return attach(flags.run).wait()


def stop(flags: argparse.Namespace) -> Result:
    """Stop a run after its current step, with a checkpoint."""
    from toolkit.launcher import attach

    return attach(flags.run).stop()


def resume(flags: argparse.Namespace) -> dict[str, Any]:
    """Resume a run from its newest checkpoint, also under another strategy."""
    return _resume(Path(flags.run), flags)


def _resume(path: Path, flags: argparse.Namespace) -> dict[str, Any]:
    from toolkit.config.run_config import RunConfig
    from toolkit.devices.machine import hardware
    from toolkit.engines.resolution import accelerate_config
    from toolkit.launcher import RestartPolicy, supervise_with_restarts
    from toolkit.launcher.targets import target_of
    from toolkit.reports import reported
    from toolkit.run_folder.folder import enter
    from toolkit.run_folder.run_json import read_run_json
    from toolkit.run_folder.run_lock import new_token
    from toolkit.training.certificates import guarded
    from toolkit.training.preflight import choose_transforms, run_preflight
    from toolkit.training.resumption import finished, merge_config
    from toolkit.training.setup import check_ranks

    recorded, machine = read_run_json(path), hardware()
    ranks = recorded["ranks"] if flags.processes is None else flags.processes
    if target := target_of(recorded):
        return _resume_own(path, target, recorded, ranks, flags)
    for name in ("target", "trust_target"):
        if getattr(flags, name, None):
            raise RunError(f"{flag(name)}: {path} is a run of the recipe, and of no target. Leave it out.")
    restart_policy = read(RestartPolicy, flags)
    new = {owner: given(flags, owner) for owner in (RunConfig, TrainConfig, Strategy)}
    run_config, train_config, fields = merge_config(recorded, new[RunConfig], new[TrainConfig], new[Strategy], ranks)
    strategy = from_dict(Strategy, fields)
    if message := finished(path, recorded, train_config):
        changes = {**new[RunConfig], **new[TrainConfig], **{name: getattr(strategy, name) for name in new[Strategy]}}
        if other := _changed_fields(recorded, {**changes, "processes": flags.processes}):
            raise RunError(f"{message} {' and '.join(other)} would change nothing of it: leave such flags out.")
        print(message, file=sys.stderr)
        return _result(path)
    check_ranks(machine, ranks)
    preflight = run_preflight(run_config, strategy, train_config, ranks, machine.device)
    preflight, strategy = choose_transforms(preflight, run_config, strategy, machine)
    preflight = guarded(preflight, run_config)
    environ = preflight.rank_environment
    new[Strategy] |= {name: getattr(strategy, name) for name in CHOSEN if name in new[Strategy]}
    with enter(path, resume=True, token=new_token()) as folder, reported(path):
        words = ["--run-dir", str(path), "--resume", *spell({**new[RunConfig], **new[TrainConfig], **new[Strategy]})]
        config = accelerate_config(strategy, ranks)
        options: dict[str, Any] = {"environ": environ, "timeout": run_config.timeout, "restart_policy": restart_policy}
        supervise_with_restarts(folder, "toolkit.finetune", words, words, config, **options)
    return _result(path)


def _resume_own(
    path: Path, target: Target, recorded: dict[str, Any], ranks: int, flags: argparse.Namespace
) -> dict[str, Any]:
    """Run a script, module or function again in its folder. It continues from what it saved itself."""
    from toolkit.config.run_config import RunConfig
    from toolkit.devices.machine import hardware
    from toolkit.launcher import RestartPolicy
    from toolkit.launcher.run_handle import Run
    from toolkit.launcher.script_run import run_script
    from toolkit.launcher.targets import OWN, check_target
    from toolkit.run_folder.folder import run_paths

    strategy = read(Strategy, flags, recorded["strategy"])
    fields = [name for owner in (RunConfig, TrainConfig, RestartPolicy) for name in given(flags, owner)]
    if unusable := [flag(name) for name in fields if name not in OWN]:
        raise RunError(
            f"{', '.join(unusable)}: only the recipe takes such flags, and {path} is a run of {target.name}."
        )
    try:
        words = shlex.split(getattr(flags, "target", None) or "")
    except ValueError as error:
        raise RunError(f"--target {flags.target}: {error}. Quote its words as a shell does.") from error
    trusted = getattr(flags, "trust_target", None)
    target = _target(words, flags.sha256) if words else check_target(run_paths(path), target, trusted)
    timeout = given(flags, RunConfig).get("timeout", recorded["run_config"].get("timeout"))
    run_script(path, target, strategy, ranks, hardware(), resume=True, timeout=timeout)
    return Run(path).to_dict()


def _target(words: Sequence[str], sha256: str | None) -> Target:
    """Return the target of a command; with a digest, the function that `tk.launch` wrote."""
    from toolkit.launcher.targets import Target, named

    return Target(kind="function", name=words[0], sha256=sha256) if sha256 else named(words[0], words[1:])


def report(flags: argparse.Namespace) -> Result:
    """Write and print the report of a run."""
    from toolkit.reports import report

    result = report(flags.run)
    print(f"report: {result.write(flags.output)}", file=sys.stderr)
    return result


def compare(flags: argparse.Namespace) -> Result:
    """Train the same work under several strategies; print one table."""
    from toolkit.comparison import compare
    from toolkit.config.run_config import RunConfig
    from toolkit.devices.machine import hardware

    strategies_ = strategies(flags, "ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op")
    run_config, train_config = read(RunConfig, flags), read_batch(flags, strategies_[0])
    if train_config.steps is train_config.epochs is None:
        train_config = dataclasses.replace(train_config, steps=20)
    options = {"machine": hardware(), "root": Path(flags.run_dir or "runs"), "processes": flags.processes}
    return compare(run_config, strategies_, train_config, **options)


def export(flags: argparse.Namespace) -> Result:
    """Export a checkpoint as Hugging Face files and verify them."""
    from toolkit.config.run_config import EMBEDDED
    from toolkit.data.embedded import embedded_model
    from toolkit.exporters import export

    model = str(embedded_model()) if flags.model == EMBEDDED else flags.model
    options = {name: getattr(flags, name) for name in ("merge", "dtype", "trust_remote_code")}
    return export(flags.source, flags.output, model=model, **options)


def generate(flags: argparse.Namespace) -> dict[str, Any]:
    """Answer a prompt with the saved model of a run, or of a folder."""
    from toolkit.exporters import generate

    names = ("max_new_tokens", "temperature", "chat_template", "model", "trust_remote_code")
    prompt = " ".join(flags.prompt)
    text = generate(flags.run, prompt, **{name: getattr(flags, name) for name in names})
    if not text.strip():
        said = "nothing but whitespace" if text else "nothing: the model ended at once"
        print(f"the answer has {said}", file=sys.stderr)
    return {"source": flags.run, "prompt": prompt, "text": text}


LAUNCH_FLAGS = {"--processes", "--run-dir", "--json", *(flag(field.name) for field in dataclasses.fields(Strategy))}
"""Flags of `launch`."""

CARE = ("timeout", "keep", "workers", "tracker", "memory_window", "save_every", "save_seconds")
"""Flags about restarts, which change nothing of the training."""


def _changed_fields(recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Describe the fields with other values than the run's."""
    before = {
        **recorded["run_config"],
        **recorded["train_config"],
        **recorded["strategy"],
        "processes": recorded["ranks"],
    }
    return [
        f"{flag(name)} {value} (it was {before.get(name)})"
        for name, value in changes.items()
        if name not in CARE and value not in (None, "auto", before.get(name)) and MARK not in str(before.get(name))
    ]


def _result(path: Path) -> dict[str, Any]:
    from toolkit.comparison import read_run
    from toolkit.reports import report
    from toolkit.reports.sections import summarize

    print(visible(redact(summarize(report(path)))))
    return dataclasses.asdict(read_run(path))
