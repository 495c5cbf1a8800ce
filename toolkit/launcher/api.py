"""`launch()` and `resume()` start a supervisor in its own session. `attach()` and `runs()` open runs of other processes."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import differing, from_dict
from toolkit.config.flags import spell, to_flags
from toolkit.config.run_config import EMBEDDED, SECTIONS
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import pipeline_rows
from toolkit.config.unknown_names import unknown_arguments
from toolkit.core.atomic_io import expand_user
from toolkit.core.display import Result, Table
from toolkit.core.errors import RunError, StrategyError, value_or
from toolkit.core.process_lifecycle import SAFE_PATH
from toolkit.core.redaction import shorten
from toolkit.devices.machine import hardware
from toolkit.engines.resolution import resolve
from toolkit.forecasting import Candidate
from toolkit.launcher.restarts import RestartPolicy
from toolkit.launcher.run_handle import Run
from toolkit.launcher.targets import (
    OWN,
    RECIPE,
    Target,
    check_target,
    dump_function,
    named,
    target_of,
    write_function,
)
from toolkit.models import ModelSpec
from toolkit.run_folder.folder import CLAIM, RUNS_FOLDER, Folder, check_new, claim, new_path
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import RUN_DIR, SUPERVISOR, TOKEN, is_lock, new_token, sign
from toolkit.run_folder.status import Progress
from toolkit.training.setup import STRATEGY, choose_ranks, print_default

CLAIM_SECONDS = 1.0
"""Time limit for another run's processes to leave the folder."""

LAUNCH_OWNERS: Mapping[str, type[Any]] = {**SECTIONS, "restart_policy": RestartPolicy}
"""Owners of the fields that `launch` takes."""

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "GROUP_", "ROLE_")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", RUN_DIR, STRATEGY, TOKEN)
"""Environment variables of a launcher, by prefix and by name: the rank of a process, and its sharding."""


def launch(
    target: str | Callable[..., object] = RECIPE,
    strategy: Strategy | Candidate | str | None = None,
    *,
    processes: int | None = None,
    run_dir: str | Path | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Run:
    """Start a run in new processes with `accelerate launch`, and return at once.

    Its supervisor has its own session: the run continues when the notebook closes or its kernel restarts, and nothing that the
    kernel has imported or allocated affects it. The ranks end with the supervisor.

    Args:
        target: the recipe (`"toolkit.finetune"`), a module, a script that ends in .py, or a function. A function is sent by
            value and called on every rank.
        strategy: a Strategy, the word of a sharding, or the best one of `plan` (with its batch).
        processes: ranks on this machine. None: 1 for `none`, else one a device, and on a CPU 2 (for `hsdp` 2 a replica).
        run_dir: a new folder; None: `runs/<time>-<sharding>`.
        args: a function's arguments, or the command line of a module or script.
        kwargs: a function's keyword arguments.
        fields: of RunConfig, TrainConfig, RestartPolicy and Strategy: `steps=20`, `data="chat.jsonl"`, `model=spec`. Code of
            your own takes those of Strategy, and `timeout`.

    Raises:
        ToolkitError: for an invalid request, before a process starts. `wait` raises the run's own errors.
    """
    if processes is not None and type(processes) is not int:
        raise StrategyError(f"processes {processes!r}: expected a number of ranks.")
    shipped, function = _ship(target, args, kwargs or {})
    recipe = target == RECIPE
    options = _sort_options(strategy, fields, recipe=recipe)
    strategy_, machine = options["strategy"], hardware()
    ranks = choose_ranks([strategy_], machine, processes)
    resolve(strategy_, options["train_config"], None, ranks, machine.device)
    check_new(run_dir)
    path = expand_user(run_dir) if run_dir else new_path(RUNS_FOLDER, strategy_.sharding)
    with claim(path, resume=False, token=new_token(), wait=CLAIM_SECONDS) as folder:
        words = ["--run-dir", str(path), "--processes", str(ranks)]
        if recipe:
            command = ["train", *words, *to_flags(*options.values())]
        else:
            words += spell({name: fields[name] for name in OWN if name in fields})
            command = ["launch", *words, *to_flags(strategy_), *_digest_flags(shipped), *shipped.words]
        print_default(ranks, machine, processes)
        return _start(folder, command, function, strategy_)


def resume(
    path: str | Path | Run,
    target: str | Callable[..., object] | None = None,
    *,
    trust_target: str | None = None,
    **fields: Any,
) -> Run:
    """Resume a stopped or failed run in new processes, and return at once.

    Args:
        path: the run's folder.
        target: for a run of your own code, the same target again; `fields["args"]` and `["kwargs"]` are its arguments. A
            run that you launched on this machine needs none while its code is unchanged.
        trust_target: the digest of the target in `run.json`, as the refusal prints it: run that.
        fields: new values, as `toolkit resume` takes them, and `processes`.

    Raises:
        RunError: for a folder without a run, a run that another process holds, and untrusted code.
    """
    place = path.folder if isinstance(path, Run) else expand_user(path)
    recorded, function = target_of(read_run_json(place)), b""
    args, kwargs = (fields.pop(name, ()) for name in ("args", "kwargs")) if recorded else ((), ())
    if recorded is None and (target is not None or trust_target):
        raise RunError(f"{place} is a run of the recipe, and no code of yours is part of it. Leave the target out.")
    if recorded is not None and target is not None and callable(target) != (recorded.kind == "function"):
        raise RunError(f"{place} is a run of the {recorded.kind} {recorded.name}. Give that again.")
    command = ["resume", str(place), *spell(fields)]
    with claim(place, resume=True, token=new_token(), wait=CLAIM_SECONDS) as folder:
        if recorded is not None and target is not None:
            shipped, function = _ship(target, args, dict(kwargs))
            command += [*_digest_flags(shipped), "--target", shlex.join(shipped.words)]
        elif recorded is not None:
            check_target(folder, recorded, trust_target)
            command += ["--trust-target", trust_target] if trust_target else []
        return _start(folder, command, function, None)


def _ship(target: str | Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Target, bytes]:
    """Return the target, and the bytes of a function's file. Called before a folder exists."""
    if not isinstance(target, str):
        return dump_function(target, args, kwargs)
    if target == RECIPE and (args or kwargs):
        raise StrategyError("args: the recipe takes its fields by name: launch(steps=20, data='chat.jsonl').")
    if kwargs:
        raise StrategyError("kwargs: a module or script takes a command line. Give it as args=('--name', 'value').")
    return named(target, [str(word) for word in args]), b""


def _digest_flags(target: Target) -> list[str]:
    """Return the flag for the digest of a function's file."""
    return ["--sha256", target.sha256] if target.sha256 else []


def _sort_options(
    strategy: Strategy | Candidate | str | None, fields: Mapping[str, Any], *, recipe: bool
) -> dict[str, Any]:
    """Return Strategy, TrainConfig, RunConfig and RestartPolicy by name, made from these fields."""
    owner_of = {f.name: name for name, owner in LAUNCH_OWNERS.items() for f in dataclasses.fields(owner)}
    known = (*owner_of, "processes", "run_dir")
    if unknown := {name: value for name, value in fields.items() if name not in known}:
        given = {name: value for name, value in fields.items() if name in known}
        raise unknown_arguments("launch has no argument", unknown, known, given)
    for name in fields:
        if not recipe and owner_of[name] != "strategy" and name not in OWN:
            raise StrategyError(
                f"{name}: only the recipe ({RECIPE}) takes it. Give code of your own its args= and kwargs=."
            )
    values: dict[str, Any] = {} if strategy is None else {"sharding": strategy}
    if isinstance(strategy, Candidate):
        if not recipe:
            raise StrategyError(
                f"strategy: a plan's candidate has a batch, too, and only the recipe ({RECIPE}) takes one. "
                "Give its `.strategy`, and its `.train_config` to your own code."
            )
        values = {**dataclasses.asdict(strategy.strategy), **dataclasses.asdict(strategy.train_config)}
    elif isinstance(strategy, Strategy):
        values = differing(strategy)
    values |= fields
    if isinstance(spec := values.get("model"), ModelSpec):
        if spec.source is None and spec.name != EMBEDDED:
            raise StrategyError(
                f"model: the ranks cannot find {spec.name}, which was described from a config or a module in this process. "
                "Save it into a folder (save_pretrained), and name the folder."
            )
        values["model"] = spec.source or EMBEDDED
    owned = {name: {key: value for key, value in values.items() if owner_of[key] == name} for name in LAUNCH_OWNERS}
    if recipe:
        owned["train_config"] |= pipeline_rows(from_dict(Strategy, owned["strategy"]).pp, values, say=True)
    return {name: from_dict(owner, owned[name]) for name, owner in LAUNCH_OWNERS.items()}


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of an Accelerator or a launcher in this process."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIXES) and name not in NAMES}


def _start(folder: Folder, command: Sequence[str], function: bytes, strategy: Strategy | None) -> Run:
    """Start the supervisor in its own session, which survives the kernel and interrupts of its group."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    if function:
        write_function(folder.function, function)
    with open(folder.supervisor_log, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.cli", *command],
            env={
                **without_launchers(os.environ),
                **SAFE_PATH,
                CLAIM: json.dumps([folder.lock, folder.token, folder.created]),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            pass_fds=[folder.lock],
        )
    sign(folder.lock, process.pid, SUPERVISOR)
    return Run(folder.path, strategy, process)


# Runs of other processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Runs(Result):
    """The runs in a folder, the newest first: a sequence of `Run`s."""

    changes = True

    root: str
    entries: tuple[dict[str, Any], ...]
    """A row a run: `Run.to_dict()`."""

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Run]:
        return (Run(Path(entry["folder"])) for entry in self.entries)

    def __getitem__(self, place: int) -> Run:
        return Run(Path(self.entries[place]["folder"]))

    def tables(self) -> list[Table]:
        """Return name, status, strategy and progress of each run."""
        rows = [
            (
                Path(entry["folder"]).name,
                entry["status"],
                entry["strategy"]["sharding"],
                entry["strategy"]["adapter"],
                f"{entry['step']} of {entry['steps'] or '?'}",
                "–" if entry["loss"] is None else f"{entry['loss']:.4f}",
            )
            for entry in self.entries
        ]
        columns = ("run", "status", "sharding", "adapter", "steps", "loss")
        notes = [
            f"{Path(entry['folder']).name}: {entry['message']}"
            for entry in self.entries
            if entry["status"] == "unreadable"
        ]
        notes += [] if rows else [f"No runs in {self.root}."]
        return [Table(title=f"Runs in {self.root}", columns=columns, rows=rows, notes=notes)]


def attach(path: str | Path) -> Run:
    """Return a run of another process, running or ended.

    `path` is its folder, or its name under `runs/`.

    Raises:
        RunError: for a folder without a run.
    """
    folder = expand_user(path)
    if not folder.exists() and (Path(RUNS_FOLDER) / folder).exists():
        folder = Path(RUNS_FOLDER) / folder  # as `runs()` names it
    if not is_lock(folder / "lock"):
        read_run_json(folder)
    return Run(folder)


def runs(root: str | Path = RUNS_FOLDER) -> Runs:
    """Return the runs under `root`, the newest first."""
    place = expand_user(root)
    places = {path.parent for path in place.glob("*/run.json")}
    places |= {path.parent for path in place.glob("*/lock") if is_lock(path)}  # also those that never began
    folders = sorted(places, key=_last_begun, reverse=True)
    return Runs(root=str(root), entries=tuple(_row(Run(path)) for path in folders))


def _last_begun(folder: Path) -> float:
    """Return when a run began or was resumed last; 0 where its files are gone. A report changes the time of the folder alone."""
    return max(value_or(0.0, os.path.getmtime, folder / name) for name in ("run.json", "lock"))


def _row(run: Run) -> dict[str, Any]:
    """Return a row. An unreadable run, as of another version, does not hide others."""
    try:
        return run.to_dict()
    except Exception as error:
        plain = {"strategy": dataclasses.asdict(Strategy()), **dataclasses.asdict(Progress())}
        return {
            "folder": str(run.folder),
            "status": "unreadable",
            "message": shorten(str(error) or type(error).__name__, 1_000),
            **plain,
        }
