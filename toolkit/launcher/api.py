"""`launch()` and `resume()`: runs whose supervisor has its own session, independent of the notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.flags import from_dict, spell, to_flags
from toolkit.config.run_config import EMBEDDED, RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import expand_user, write_json
from toolkit.core.errors import RunError, StrategyError, ToolkitError, nearest
from toolkit.core.process_lifecycle import SAFE_PATH
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines.job import resolve
from toolkit.forecasting import Candidate
from toolkit.launcher.restarts import RestartPolicy
from toolkit.launcher.run_handle import Run
from toolkit.launcher.run_processes import live_supervisor
from toolkit.launcher.targets import RECIPE, Target, check_call, dump_function, named
from toolkit.launcher.trust import check_target, target_of
from toolkit.models import ModelSpec
from toolkit.run_folder.folder import RUNS, check_new, new_path, refuse_links, run_paths
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import TOKEN, held_by_others, started
from toolkit.training.metrics import RUN_DIR
from toolkit.training.setup import STRATEGY, choose_ranks, print_default

CLAIM_SECONDS = 20.0
"""How long a launch waits for another into the same folder, which only starts a process."""

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "GROUP_", "ROLE_")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", RUN_DIR, STRATEGY, TOKEN)
"""Of variables that say which rank a process is, and how its run is sharded."""


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
        fields: of RunConfig, TrainConfig, RestartPolicy and Strategy: `steps=20`, `data="chat.jsonl"`, `model=spec`.

    Raises:
        ToolkitError: for errors that are found before a process starts; `wait` raises the run's own.
    """
    if processes is not None and type(processes) is not int:
        raise StrategyError(f"processes {processes!r}: expected a number of ranks.")
    _check_target(target, args, kwargs or {})
    options = _sort_options(strategy, fields, run_config=target == RECIPE)
    strategy_, machine = options["strategy"], hardware()
    ranks = choose_ranks([strategy_], machine, processes)
    resolve(strategy_, options["train_config"], None, ranks, machine.device)
    check_new(run_dir)
    path = expand_user(run_dir) if run_dir else new_path(RUNS, strategy_.sharding)
    with _claim_folder(path):
        return _launch_target(path, target, options, ranks, args, kwargs or {}, machine if processes is None else None)


def _launch_target(
    path: Path,
    target: str | Callable[..., object],
    options: Mapping[str, Any],
    ranks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    machine: Hardware | None,
) -> Run:
    """A new run in a folder that is claimed; `machine` where it chose the number of ranks."""
    strategy = options["strategy"]
    words = ["--run-dir", str(path), "--processes", str(ranks)]
    if target == RECIPE:
        command = [
            "train",
            *words,
            *to_flags(options["run_config"], strategy, options["train_config"], options["restart_policy"]),
        ]
    else:
        try:
            shipped = _target(target, args, kwargs, path)
        except ToolkitError:
            with contextlib.suppress(OSError):  # as far as they are empty
                path.rmdir()
                Path(RUNS).rmdir()
            raise
        hashed = ["--sha256", shipped.sha256] if shipped.sha256 else []
        command = ["launch", *words, *to_flags(strategy), *hashed, shipped.name, *shipped.arguments]
    if machine is not None:
        print_default(ranks, machine, None)
    return _started(path, command, strategy)


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
    folder = path.folder if isinstance(path, Run) else expand_user(path)
    was = target_of(read_run_json(folder))
    if was is None and (target is not None or trust_target):
        raise RunError(f"{folder} is a run of the recipe, and no code of yours is part of it. Leave the target out.")
    if was is not None and target is not None and callable(target) != (was.kind == "function"):
        raise RunError(f"{folder} is a run of the {was.kind} {was.name}. Give that again.")
    with _claim_folder(folder):
        words = _rerun_flags(folder, was, target, trust_target, fields)
        return _started(folder, ["resume", str(folder), *spell(fields), *words], None)


def _rerun_flags(
    folder: Path,
    was: Target | None,
    target: str | Callable[..., object] | None,
    trust_target: str | None,
    fields: dict[str, Any],
) -> list[str]:
    """Flags that let a run's own code run again; nothing of the recipe's. `args` and `kwargs` are taken out of `fields`."""
    words: list[str] = []
    if was is not None:
        args, kwargs = fields.pop("args", ()), fields.pop("kwargs", {})
        if isinstance(target, str):
            words = ["--target", shlex.join([target, *map(str, args)])]
        elif target is not None:
            shipped = dump_function(target, args, kwargs, run_paths(folder).function)
            words = ["--sha256", shipped.sha256, "--target", shipped.name]
        else:
            check_target(run_paths(folder), was, trust_target)
            words = ["--trust-target", trust_target] if trust_target else []
    return words


@contextlib.contextmanager
def _claim_folder(path: Path) -> Iterator[None]:
    """Before anything is written: no other run is in the folder, or about to be, and no link leads out of it.

    Meanwhile nobody else launches into it: of two at once the second one finds the first one's supervisor.

    Raises:
        RunError: for a folder that is held, or has such a link, and for one that cannot be made.
    """
    refuse_links(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        opened = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise RunError(f"the run folder {path} cannot be made: {error.strerror}. Choose another.") from error
    try:
        _hold_lock(path, opened)
        if held_by_others(path) or live_supervisor(run_paths(path)) is not None:
            raise RunError(
                f"{path} is in use by a run. Wait until it ends, stop it (tk.attach), or choose another folder."
            )
        yield
    finally:
        os.close(opened)


def _hold_lock(path: Path, opened: int) -> None:
    """Keep others from launching into a folder until the file descriptor is closed, where the file system has locks."""
    deadline = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RunError(f"{path} is being launched into by another process. Choose another folder.") from None
            time.sleep(0.05)
        except OSError:
            return None


def _sort_options(
    strategy: Strategy | Candidate | str | None, fields: dict[str, Any], *, run_config: bool
) -> dict[str, Any]:
    """Return Strategy, TrainConfig, RunConfig and RestartPolicy by name, made from these fields."""
    owners: dict[str, type[Any]] = {
        "strategy": Strategy,
        "train_config": TrainConfig,
        "run_config": RunConfig,
        "restart_policy": RestartPolicy,
    }
    fields_of = {name: {f.name for f in dataclasses.fields(owner)} for name, owner in owners.items()}
    if isinstance(spec := fields.get("model"), ModelSpec):
        if spec.source is None and spec.name != EMBEDDED:
            raise StrategyError(
                f"model: the ranks cannot find {spec.name}, which was described from a config or a module in this process. "
                "Save it into a folder (save_pretrained), and name the folder."
            )
        fields = {**fields, "model": spec.source or EMBEDDED}
    for name in fields:
        every = sorted(set().union(*fields_of.values()))
        if name not in every:
            raise StrategyError(f"launch has no argument {name!r}.{nearest(name, every)} Known: {', '.join(every)}.")
        if not run_config and name not in fields_of["strategy"]:
            raise StrategyError(
                f"{name}: only the recipe ({RECIPE}) takes it. Give code of your own its args= and kwargs=."
            )
    values: dict[str, Any] = {}
    if isinstance(strategy, Candidate) and not run_config:
        raise StrategyError(
            f"strategy: a plan's candidate has a batch, too, and only the recipe ({RECIPE}) takes one. "
            "Give its `.strategy`, and its `.train_config` to your own code."
        )
    if isinstance(strategy, Candidate):
        values = {**dataclasses.asdict(strategy.strategy), **dataclasses.asdict(strategy.train_config)}
    elif isinstance(strategy, Strategy):
        values = dataclasses.asdict(strategy)
    elif strategy is not None:
        values = {"sharding": strategy}
    values |= fields
    return {
        name: from_dict(owner, {key: value for key, value in values.items() if key in fields_of[name]})
        for name, owner in owners.items()
    }


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of an Accelerator or a launcher in this process."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIXES) and name not in NAMES}


def _check_target(target: str | Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the target before a folder exists."""
    if not isinstance(target, str):
        check_call(target, args, kwargs)
    elif target == RECIPE and (args or kwargs):
        raise StrategyError("args: the recipe takes its fields by name: launch(steps=20, data='chat.jsonl').")
    elif kwargs:
        raise StrategyError("kwargs: a module or script takes a command line. Give it as args=('--name', 'value').")
    elif target != RECIPE:
        named(target)


def _target(target: str | Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> Target:
    if isinstance(target, str):
        return named(target, [str(word) for word in args])
    return dump_function(target, args, kwargs, run_paths(path).function)


def _started(path: Path, command: Sequence[str], strategy: Strategy | None) -> Run:
    """Start the supervisor in its own session, which survives the kernel and interrupts of its group."""
    folder = run_paths(path)
    folder.logs.mkdir(parents=True, exist_ok=True)
    with open(folder.supervisor_log, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.cli", *command],
            env={**without_launchers(os.environ), **SAFE_PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    about = {"pid": process.pid, "started": started(process.pid), "host": socket.gethostname()}
    write_json(folder.supervisor, about)
    return Run(path, strategy, process)
