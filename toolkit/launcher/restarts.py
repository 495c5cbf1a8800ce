"""`supervise_with_restarts()`: after a rank died or hung, a new process group resumes the newest checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoints import list_checkpoints
from toolkit.config.fields import amount, choice, from_dict, validate
from toolkit.config.flags import spell
from toolkit.config.train_config import TrainConfig
from toolkit.config.unknown_names import by_name
from toolkit.core.atomic_io import last_step
from toolkit.core.errors import OutOfMemory, value_or
from toolkit.forecasting.memory_advice import halved
from toolkit.launcher.failures import RankDied
from toolkit.launcher.supervisor import supervise
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import IN_A_STEP, read_beats
from toolkit.run_folder.run_json import read_run_json
from toolkit.training.resumption import resume_hint

ON_OOM = ("stop", "shrink")

IN_VAIN = 2
"""Restarts in a row without a new step, after which no further restart follows."""


@by_name
@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Restarts after the failure of a rank."""

    restarts: int = amount(0, "automatic restarts after a rank died or hung", least=0)
    """From the newest complete checkpoint, in a fresh process group. Not after a user's mistake or numbers not finite."""
    on_oom: str = choice("stop", ON_OOM, "after a rank ran out of memory; shrink: continue with half the micro-batch")
    """Whether to halve the micro-batch, with the same global batch."""

    def __post_init__(self) -> None:
        validate(self)


def supervise_with_restarts(
    folder: Folder,
    module: str,
    first: Sequence[str],
    again: Sequence[str],
    config: Mapping[str, Any],
    *,
    timeout: float,
    restart_policy: RestartPolicy,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Call `supervise`, again after failures as `restart_policy` allows.

    Args:
        folder: the run's, entered by the caller with a `new_token()`.
        module: the Python module that each rank runs: the recipe, or one that writes the same files.
        first: its command line.
        again: the command line that continues after `first`.
        config: content of the Accelerate config file.
        timeout: seconds after which a rank without a heartbeat has hung.
        restart_policy: how often, and when.
        environ: added to the environment of the ranks.

    Raises:
        ToolkitError: as `supervise`, for an error after which no restart follows.
        Stopped: after SIGINT or SIGTERM.
    """
    arguments, smaller = list(first), list[str]()
    restarts = idle = 0
    furthest = value_or(0, last_step, folder.events)
    while True:
        try:
            return supervise(folder, module, arguments, config, environ=environ, timeout=timeout)
        except OutOfMemory as error:
            if restart_policy.on_oom != "shrink" or not (
                fewer := value_or(dict[str, int](), _halved_micro_batch, folder)
            ):
                raise
            smaller = spell(fewer)
            _report(folder, f"{error}\nContinuing with {' '.join(smaller)}, the same global batch")
        except RankDied as error:
            done = value_or(furthest, last_step, folder.events)
            idle = idle + 1 if restarts and done <= furthest else 0
            furthest = max(furthest, done)
            in_vain = idle == IN_VAIN
            if in_vain or restarts == restart_policy.restarts:
                why = f"{IN_VAIN} restarts in a row made no new step, so no further restart follows." if in_vain else ""
                lines = filter(None, [str(error), why, value_or("", resume_hint, folder)])
                raise type(error)("\n".join(lines)) from None
            restarts += 1
            _report(folder, f"{error}\nRestart {restarts} of {restart_policy.restarts}")
        arguments = [*again, *smaller] if folder.run_json.exists() else list(first)


def _halved_micro_batch(folder: Folder) -> dict[str, int]:
    """Return half the micro-batch if a rank ran out of memory in a step and the micro-batch is above 1."""
    beats = read_beats(folder.logs).values()
    if not folder.run_json.exists() or not any(beat.step and beat.phase in IN_A_STEP for beat in beats):
        return {}
    return halved(from_dict(TrainConfig, read_run_json(folder.path)["train_config"]))


def _report(folder: Folder, text: str) -> None:
    """Print a line, and write it into the logs before the next attempt's lines."""
    newest = next(iter(list_checkpoints(folder.checkpoints)), None)
    origin = f"from {newest}" if newest else "from step 0, since there is no checkpoint yet"
    print(f"toolkit: {text}, {origin}.", file=sys.stderr, flush=True)
    for log in folder.rank_files("log"):
        with log.open("a") as file:
            file.write(f"\n--- {text.splitlines()[-1]}, {origin} ---\n")
