"""`run.json`: a run, attempt by attempt, and how it resumes over the same data in the same order."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints import list_checkpoints
from toolkit.checkpoints.manifest import folder_name
from toolkit.config.fields import from_dict
from toolkit.config.flags import flag
from toolkit.config.parallelism import resolve_parallelism
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import SHARDINGS, Strategy, sharding_word
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import cut_events, last_step, write_json
from toolkit.core.errors import RunError, StrategyError
from toolkit.core.redaction import MARK
from toolkit.core.units import timestamp
from toolkit.devices.machine import Hardware
from toolkit.engines.rank_calls import on_main
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.run_json import read_run_json
from toolkit.training.preflight import Preflight, versions

if TYPE_CHECKING:
    from accelerate import Accelerator


def merge_config(
    recorded: Mapping[str, Any],
    run_config: Mapping[str, Any],
    train_config: Mapping[str, Any],
    strategy: Mapping[str, Any],
    ranks: int,
) -> tuple[RunConfig, TrainConfig, dict[str, Any]]:
    """Return RunConfig, TrainConfig and the fields of Strategy with which a run continues.

    Args:
        recorded: from `read_run_json`.
        run_config, train_config, strategy: new values of fields; other fields keep their recorded values.
        ranks: the number of ranks from now on.

    Raises:
        StrategyError: where the global batch would change: the order of the data depends on it.
        RunError: where a field has to be given again: it held a secret, or allows the model's own code to run.
    """
    fields = {**recorded["strategy"], **strategy}
    if "epochs" in train_config:
        train_config = {"steps": None, **train_config}
    keeps_replicas = "sharding" not in strategy or "dp_replicate" in strategy
    if not keeps_replicas and not SHARDINGS[sharding_word(fields["sharding"])].hybrid:
        fields["dp_replicate"] = 1
    merged = keep_global_batch(
        from_dict(TrainConfig, {**recorded["train_config"], **train_config}),
        from_dict(TrainConfig, recorded["train_config"]),
        _dp_size(recorded["strategy"], recorded["ranks"]),
        _dp_size(fields, ranks),
        train_config,
    )
    safe = _safe_fields(recorded["run_config"], run_config)
    return from_dict(RunConfig, {**safe, **run_config}), merged, fields


def _dp_size(strategy: Mapping[str, Any], ranks: int) -> int:
    return resolve_parallelism(from_dict(Strategy, strategy), ranks).dp_size


def _safe_fields(recorded: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded RunConfig without fields that could run code: the folder may be from a stranger."""
    fields = {name: value for name, value in recorded.items() if name not in explicit}
    if revision := fields.pop("trust_remote_code", None):
        raise RunError(
            f"the run trains model {recorded.get('model')!r} with the model's own code, and a run folder alone cannot allow "
            f"that. Read the code, and give --trust-remote-code {revision} again."
        )
    for name, value in fields.items():
        if MARK in str(value):
            raise RunError(f"run.json has no full value of {name}: it contained a secret. Give {flag(name)} again.")
    return fields


def keep_global_batch(
    train_config: TrainConfig, before: TrainConfig, dp_before: int, dp_size: int, explicit: Mapping[str, Any]
) -> TrainConfig:
    """Return `train_config` with micro_batch and accumulation such that a step takes as many samples as before.

    Unless given, the micro-batch is the largest that divides a rank's share and is not above the one before.

    Raises:
        StrategyError: where the global batch does not divide by the data-parallel ranks, or by the given values.
    """
    size = before.micro_batch * before.accumulation * dp_before
    if size % dp_size:
        possible = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 8 * dp_size)
        raise StrategyError(
            f"{dp_size} data-parallel ranks do not divide the run's global batch of {size} samples, on which the order of the "
            f"data depends. Choose --processes so that they do: {possible}."
        )
    share = size // dp_size
    if "micro_batch" in explicit:
        micro_batch = train_config.micro_batch
    elif "accumulation" in explicit:
        micro_batch = share // train_config.accumulation
    else:
        micro_batch = max(n for n in range(1, min(before.micro_batch, share) + 1) if share % n == 0)
    accumulation = explicit.get("accumulation", share // micro_batch if micro_batch else 0)
    if not micro_batch or micro_batch * accumulation != share:
        raise StrategyError(
            f"micro_batch {micro_batch} × accumulation {accumulation} × {dp_size} ranks is not the run's global batch of {size} "
            f"samples, on which the order of the data depends. A rank's share is {share}: leave --accumulation out, "
            "and choose a --micro-batch that divides it."
        )
    return dataclasses.replace(train_config, micro_batch=micro_batch, accumulation=accumulation)


def record_attempt(accelerator: Accelerator, folder: Folder, description: Mapping[str, Any], start: int) -> int:
    """Add the attempt to `run.json` before anything is loaded. Return its number. A collective.

    The rest of a resumed run's record stays as it was until `commit_attempt`: a refused attempt changes nothing.

    Args:
        accelerator: rank 0 writes, and the others receive the number.
        folder: of the run.
        description: from `describe_run`.
        start: the last step that was done before.
    """

    def record() -> int:
        recorded = read_run_json(folder.path) if folder.run_json.exists() else {}
        attempt = {key: description[key] for key in ("strategy", "ranks", "started")} | {"from_step": start}
        attempts = [*recorded.get("attempts", ()), attempt]
        write_json(folder.run_json, {**description, **recorded, "attempts": attempts, "finished": None})
        return len(attempts) - 1

    return on_main(accelerator, record)


def commit_attempt(folder: Folder, description: Mapping[str, Any], start: int) -> list[str]:
    """Record how the run continues, and cut `events.jsonl` back to `start`. Call it once the run can continue.

    Returns:
        The changed fields, a text each.
    """
    recorded = read_run_json(folder.path)
    unchanged = {name: recorded[name] for name in ("started", "attempts", "finished")}
    write_json(folder.run_json, {**description, **unchanged})
    cut_events(folder.events, start)
    cut_events(folder.published, start)
    changes = [
        (name, recorded[part].get(name), value)
        for part in ("strategy", "train_config", "run_config")
        for name, value in description[part].items()
    ]
    changes.append(("ranks", recorded["ranks"], description["ranks"]))
    return [f"{name} {before} → {now}" for name, before, now in changes if before != now]


def resume_hint(folder: Folder) -> str:
    """Return the state of a stopped run, and the command that continues it."""
    if not folder.run_json.exists():
        return "It had not begun, and there is nothing to continue."
    recorded = read_run_json(folder.path)
    if recorded["finished"]:
        return "It had finished."
    command = f"`toolkit resume {shlex.quote(str(folder.path))}`"
    if recorded.get("target"):
        return f"Your own code continues from what it saved: {command} runs it again."
    if newest := next(iter(list_checkpoints(folder.checkpoints)), None):
        last = last_step(folder.events)
        complete = newest.name == folder_name(last)
        state = (
            f"Published: {newest}"
            if complete
            else f"The last finished step is {last}, and the newest checkpoint {newest}"
        )
        return f"{state}. {command} continues from it."
    saves = from_dict(RunConfig, recorded["run_config"]).checkpoints
    reason = "" if saves else " (they are off: --save-every 0 --save-seconds 0)"
    return f"There is no checkpoint{reason}. {command} starts again from step 0."


def finished(path: Path, recorded: Mapping[str, Any], train_config: TrainConfig) -> str | None:
    """Return a sentence for a finished run without remaining steps, else None.

    Raises:
        RunError: as `check_not_repeated`.
    """
    done = int(recorded["train_config"].get("steps") or 0)
    if not recorded.get("finished"):
        return None
    newest = next(iter(list_checkpoints(path / "checkpoints")), None)
    if train_config.steps != done:
        check_not_repeated(path, recorded, 0 if newest is None else 1)
        return None
    export = path / "export"
    model = f"; the trained model is in {export}" if export.exists() else ""
    more = f" For more steps: --steps with more than {done}." if newest else ""
    return f"{path} had finished after step {done}{model}.{more}"


def check_not_repeated(path: Path, recorded: Mapping[str, Any], start: int) -> None:
    """Refuse to train a finished run from step 0: it would replace steps and export.

    Args:
        path: of the run.
        recorded: its `run.json`.
        start: the step of its newest checkpoint; 0 without one.

    Raises:
        RunError: with what to do instead.
    """
    if recorded.get("finished") and not start:
        raise RunError(
            f"{path} had finished, and has no checkpoint from which it could continue. Its steps would be trained again, and its "
            "export replaced. To train on with new optimizer states: "
            f"`toolkit train --model {shlex.quote(str(path / 'export'))}`. With --save-every a run can continue after its end."
        )


def finish(folder: Folder, *, export: Mapping[str, Any] | None, steps: int | None = None) -> None:
    """Record in `run.json` that the run is done, and the export's files and checks; `steps` of a run that ended early."""
    recorded = read_run_json(folder.path)
    planned = recorded["train_config"]["steps"] if steps else None
    recorded["train_config"] |= {"steps": steps} if steps else {}
    write_json(folder.run_json, {**recorded, "planned_steps": planned, "export": export, "finished": timestamp()})


def describe_run(preflight: Preflight, run_config: RunConfig, machine: Hardware) -> dict[str, Any]:
    """Return the fields of `run.json` for an attempt."""
    job = preflight.job
    return {
        "strategy": dataclasses.asdict(job.strategy),
        "train_config": dataclasses.asdict(job.train_config),
        "run_config": dataclasses.asdict(run_config),
        "ranks": job.ranks,
        "parallelism": dataclasses.asdict(job.parallelism),
        "settings": dict(job.settings),
        "forecast": preflight.forecast.to_dict() if preflight.forecast else None,
        "guard": preflight.guard,
        "versions": versions(),
        "hardware": machine.to_dict(),
        "seed": job.train_config.seed,
        "data": preflight.rows.to_dict(),
        "started": timestamp(),
    }
