"""A run of a module, a script or a stored function: `run_script()` supervises it, and `main()` is each of its ranks.

A rank is `python -m toolkit.launcher.script_run FOLDER KIND NAME SHA256 [ARGUMENTS…]`.
"""

from __future__ import annotations

# First, so that a rank ends with its launcher even while it imports torch.
from toolkit.core.process_lifecycle import die_with_parent, import_libraries, leave_safe_path

if __name__ == "__main__":
    die_with_parent()
    leave_safe_path()

import dataclasses
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from toolkit.config.fields import differing, from_dict
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import write_json
from toolkit.core.errors import ToolkitError
from toolkit.core.rank_output import tee_output
from toolkit.core.units import timestamp
from toolkit.devices.machine import Hardware
from toolkit.engines.resolution import accelerate_config, resolve
from toolkit.engines.upstream import wait_for_workers
from toolkit.launcher.supervisor import supervise
from toolkit.launcher.targets import Target, load_function, note_launch
from toolkit.reports import reported
from toolkit.run_folder.folder import Folder, enter
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import RUN_DIR, new_token, supervised
from toolkit.training.plain_accelerate import on_launch
from toolkit.training.preflight import versions
from toolkit.training.setup import STRATEGY, TIMEOUT, check_ranks


def run_script(
    path: Path,
    target: Target,
    strategy: Strategy,
    ranks: int,
    machine: Hardware,
    *,
    resume: bool = False,
    timeout: float | None = None,
) -> None:
    """Run `target` in `ranks` processes to its end. Every Accelerator in them follows the strategy.

    `timeout`: seconds after which a rank gives up waiting for another in a collective; None: torch's own limit.

    Raises:
        ToolkitError, Stopped: as `supervise`.
    """
    check_ranks(machine, ranks)
    run_config = {} if timeout is None else {"timeout": timeout}
    from_dict(RunConfig, run_config)
    train_config, fields = TrainConfig(accumulation=2 * strategy.pp), dataclasses.asdict(strategy)
    job = resolve(strategy, train_config, None, ranks, machine.device)
    with enter(path, resume=resume, token=new_token()) as new_folder, reported(path):
        folder = dataclasses.replace(new_folder, created=False)  # keep a failed run: its output explains the failure
        earlier = read_run_json(path).get("attempts", []) if resume else []
        record = {
            "strategy": fields,
            "train_config": {},
            "run_config": run_config,
            "target": dataclasses.asdict(target),
            "ranks": ranks,
            "parallelism": dataclasses.asdict(job.parallelism),
            "forecast": None,
            "versions": versions(),
            "hardware": machine.to_dict(),
            "started": timestamp(),
            "finished": None,
            "attempts": [*earlier, {"strategy": fields, "ranks": ranks, "started": timestamp()}],
        }
        write_json(folder.run_json, record)
        note_launch(folder, target)
        arguments = [str(path), target.kind, target.name, target.sha256, *target.arguments]
        config = accelerate_config(strategy, ranks)
        environ = {STRATEGY: json.dumps(differing(strategy))} | ({TIMEOUT: str(timeout)} if timeout else {})
        supervise(folder, "toolkit.launcher.script_run", arguments, config, environ=environ)
        write_json(folder.run_json, {**record, "finished": timestamp()})


def host(path: Path, target: Target) -> int:
    """Run the target as this rank and return its exit code. Record its error for the supervisor."""
    rank = int(os.environ.get("RANK", "0"))
    with enter(path, resume=True) as folder:
        tee_output(folder.log(rank), rank=rank, supervised=supervised(), token=folder.token)
        os.environ[RUN_DIR] = str(path.absolute())  # the target may change its working directory
        on_launch()
        with folder.room_for_error(rank):
            try:
                _run(folder, target)
            except SystemExit as error:
                if error.code is None or isinstance(error.code, int):
                    return error.code or 0
                print(error.code, file=sys.stderr)
                return 1
            except BaseException as error:
                traceback.print_exc()
                folder.record_error(rank, error)
                return error.exit_code if isinstance(error, ToolkitError) else 1
    return 0


def _run(folder: Folder, target: Target) -> None:
    if target.kind == "function":
        import_libraries("accelerate")  # and with it torch
        function, args, kwargs = load_function(folder.function, target.sha256)
        function(*args, **kwargs)
    elif target.kind == "script":
        sys.argv = [target.name, *target.arguments]
        sys.path.insert(0, str(Path(target.name).parent))
        runpy.run_path(target.name, run_name="__main__")
    else:
        sys.argv = [target.name, *target.arguments]
        sys.path.append(os.getcwd())  # last: a file there takes no library's place
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)


def main(arguments: list[str]) -> int:
    """Run the target of the module's docstring."""
    path, kind, name, sha256, *rest = arguments
    return host(Path(path), Target(kind=kind, name=name, sha256=sha256, arguments=tuple(rest)))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    wait_for_workers()  # a script may use plain Accelerate
    sys.exit(code)
