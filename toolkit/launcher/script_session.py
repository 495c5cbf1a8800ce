"""`run_script()`: a run of a module, a script or a shipped function, from its folder to the end of its last rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from toolkit.config.flags import differing
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import write_json
from toolkit.core.units import timestamp
from toolkit.devices.machine import Hardware
from toolkit.engines.base import engine_of
from toolkit.engines.job import resolve
from toolkit.launcher.supervisor import supervise
from toolkit.launcher.targets import Target
from toolkit.launcher.trust import note_launch
from toolkit.reports import reported
from toolkit.run_folder.folder import enter
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import new_token
from toolkit.training.preflight import versions
from toolkit.training.setup import STRATEGY, check_ranks


def run_script(
    path: Path, target: Target, strategy: Strategy, ranks: int, machine: Hardware, *, resume: bool = False
) -> None:
    """Run `target` in `ranks` processes, with `tk.accelerator()` in them as the strategy says, to its end.

    Raises:
        ToolkitError, Stopped: as `supervise`.
    """
    check_ranks(machine, ranks)
    job, chosen = resolve(strategy, TrainConfig(), None, ranks, machine.device), dataclasses.asdict(strategy)
    with enter(path, resume=resume, token=new_token()) as entered, reported(path):
        folder = dataclasses.replace(entered, created=False)  # its output explains more than a message, and stays
        earlier = read_run_json(path).get("attempts", []) if resume else []
        record = {
            "strategy": chosen,
            "train_config": {},
            "run_config": {},
            "target": dataclasses.asdict(target),
            "ranks": ranks,
            "parallelism": dataclasses.asdict(job.parallelism),
            "forecast": None,
            "versions": versions(),
            "hardware": machine.to_dict(),
            "started": timestamp(),
            "finished": None,
            "attempts": [*earlier, {"strategy": chosen, "ranks": ranks, "started": timestamp()}],
        }
        write_json(folder.run_json, record)
        note_launch(folder, target)
        arguments = [str(path), target.kind, target.name, target.sha256, *target.arguments]
        config = engine_of(strategy).to_yaml(strategy, ranks, 1)
        environ = {STRATEGY: json.dumps(differing(strategy))}
        supervise(folder, "toolkit.launcher.script_worker", arguments, config, environ=environ)
        write_json(folder.run_json, {**record, "finished": timestamp()})
