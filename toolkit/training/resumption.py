"""`run.json`: what a run is, attempt by attempt, and how it goes on over the same data in the same order."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints import list_checkpoints
from toolkit.checkpoints.manifest import folder_name
from toolkit.config.flags import flag, from_dict
from toolkit.config.parallelism import resolve_parallelism
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import SHARDINGS, Strategy, sharding_word
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import cut_events, last_step, write_json
from toolkit.core.errors import RunError, StrategyError
from toolkit.core.redaction import MARK
from toolkit.core.units import timestamp
from toolkit.devices.machine import Hardware
from toolkit.run_folder.folder import Folder, read_run_json
from toolkit.training.preflight import Preflight, versions

if TYPE_CHECKING:
    from accelerate import Accelerator

    from toolkit.checkpoints import ResumePoint


def merge_config(
    was: Mapping[str, Any],
    run_config: Mapping[str, Any],
    train_config: Mapping[str, Any],
    strategy: Mapping[str, Any],
    ranks: int,
) -> tuple[RunConfig, TrainConfig, dict[str, Any]]:
    """RunConfig, TrainConfig and fields of Strategy with which a run goes on.

    Args:
        was: from `read_run_json`.
        run_config, train_config, strategy: new values of fields; other fields keep their recorded values.
        ranks: that it goes on with.

    Raises:
        StrategyError: where the global batch, on which the data's order stands, cannot be kept.
        RunError: for what a run's folder does not say or may not decide: secrets, and that a model's own code is run.
    """
    fields = {**was["strategy"], **strategy}
    old = _taken(was["run_config"], run_config)
    if (
        "sharding" in strategy
        and "dp_replicate" not in strategy
        and not SHARDINGS[sharding_word(fields["sharding"])].hybrid
    ):
        fields["dp_replicate"] = 1
    before, now = (_dp_size(named, count) for named, count in ((was["strategy"], was["ranks"]), (fields, ranks)))
    taken = keep_global_batch(
        from_dict(TrainConfig, {**was["train_config"], **train_config}),
        from_dict(TrainConfig, was["train_config"]),
        before,
        now,
        train_config,
    )
    return from_dict(RunConfig, {**old, **run_config}), taken, fields


def _dp_size(fields: Mapping[str, Any], ranks: int) -> int:
    return resolve_parallelism(from_dict(Strategy, fields), ranks).dp_size


def _taken(was: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded RunConfig without fields that could run code: the folder may be from a stranger."""
    taken = {name: value for name, value in was.items() if name not in given}
    if revision := taken.pop("trust_remote_code", None):
        raise RunError(
            f"the run trains model {was.get('model')!r} with code of its own, and its folder alone cannot let that run: read "
            f"the code, and give --trust-remote-code {revision} again."
        )
    for name, value in taken.items():
        if MARK in str(value):
            raise RunError(
                f"run.json does not say {name} whole, since there was a secret in it. Give {flag(name)} again."
            )
    return taken


def keep_global_batch(
    train_config: TrainConfig, before: TrainConfig, dp_before: int, dp_size: int, given: Mapping[str, Any]
) -> TrainConfig:
    """`train_config` with micro_batch and accumulation such that a step takes as many samples as before.

    The largest micro-batch that divides a rank's share, and is not above what it was (or what is given).

    Raises:
        StrategyError: where the global batch does not divide by the data-parallel ranks, or by what is given.
    """
    size = before.micro_batch * before.accumulation * dp_before
    if size % dp_size:
        able = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 8 * dp_size)
        raise StrategyError(
            f"{dp_size} data-parallel ranks: the run's global batch of {size} samples does not divide by them, and the order "
            f"of the data stands on it. Choose --processes such that they divide it: {able}."
        )
    share = size // dp_size
    if "accumulation" in given and "micro_batch" not in given:
        micro = share // train_config.accumulation
    elif "micro_batch" in given:
        micro = train_config.micro_batch
    else:
        micro = max(n for n in range(1, min(before.micro_batch, share) + 1) if share % n == 0)
    accumulation = given.get("accumulation", share // micro if micro else 0)
    if not micro or micro * accumulation != share:
        raise StrategyError(
            f"micro_batch {micro} × accumulation {accumulation} × {dp_size} ranks is not the run's global batch of {size} "
            f"samples, on which the order of its data stands. A rank's share is {share}: leave --accumulation out, "
            "and choose a --micro-batch that divides it."
        )
    return dataclasses.replace(train_config, micro_batch=micro, accumulation=accumulation)


def record_attempt(
    accelerator: Accelerator,
    folder: Folder,
    preflight: Preflight,
    run_config: RunConfig,
    machine: Hardware,
    found: ResumePoint,
) -> int:
    """Note the attempt in `run.json` before anything is loaded; its number.

    Of a run that goes on the rest stays as it was until `commit_attempt`: an attempt that is refused changes nothing. A
    collective: rank 0 writes, and the others learn the number.
    """
    from accelerate.utils import broadcast_object_list

    told: list[Any] = [0]
    if accelerator.is_main_process:
        old = read_run_json(folder.path) if folder.run_json.exists() else {}
        attempts = old.get("attempts", [])
        about = describe_run(preflight, run_config, machine)
        attempts.append({key: about[key] for key in ("strategy", "ranks", "started")} | {"from_step": found.step})
        write_json(folder.run_json, {**about, **old, "attempts": attempts, "finished": None})
        told = [len(attempts) - 1]
    if accelerator.num_processes > 1:
        broadcast_object_list(told)
    return int(told[0])


def commit_attempt(
    folder: Folder, preflight: Preflight, run_config: RunConfig, machine: Hardware, found: ResumePoint
) -> list[str]:
    """Once the run can go on: `run.json` says how, and `events.jsonl` is cut back to where it does.

    Returns the changed fields as text.
    """
    old, new = read_run_json(folder.path), describe_run(preflight, run_config, machine)
    kept = {name: old[name] for name in ("started", "attempts", "finished")}
    write_json(folder.run_json, {**new, **kept})
    cut_events(folder.events, found.step)
    cut_events(folder.published, found.step)
    pairs = [
        (name, old[part].get(name), value)
        for part in ("strategy", "train_config", "run_config")
        for name, value in new[part].items()
    ]
    return [f"{name} {was} → {is_}" for name, was, is_ in (*pairs, ("ranks", old["ranks"], new["ranks"])) if was != is_]


def resume_hint(folder: Folder) -> str:
    """A sentence on what a stopped run has left, and the command that goes on with it."""
    if not folder.run_json.exists():
        return "It had not begun, and there is nothing to go on with."
    about = read_run_json(folder.path)
    if about["finished"]:
        return "It had finished."
    command = f"`toolkit resume {shlex.quote(str(folder.path))}`"
    if about.get("target"):
        return f"Code of your own goes on from what it saved itself: {command} runs it again."
    newest = next(iter(list_checkpoints(folder.checkpoints)), None)
    if newest:
        done = last_step(folder.events)
        whole = newest.name == folder_name(done)
        said = f"Published: {newest}" if whole else f"The step did not end; the newest checkpoint is {newest}"
        return f"{said}. {command} goes on from it."
    off = (
        ""
        if from_dict(RunConfig, about["run_config"]).checkpoints
        else " (they are off: --save-every 0 --save-seconds 0)"
    )
    return f"There is no checkpoint{off}. {command} starts again from step 0."


def finished(path: Path, was: Mapping[str, Any], train_config: TrainConfig) -> str | None:
    """A sentence, where there is nothing left to do.

    Raises:
        RunError: as `check_not_anew`.
    """
    done = int(was["train_config"].get("steps", 0))
    if not was.get("finished"):
        return None
    newest = next(iter(list_checkpoints(path / "checkpoints")), None)
    if train_config.steps != done:
        check_not_anew(path, was, 0 if newest is None else 1)
        return None
    export = path / "export"
    left = f"; the trained model is in {export}" if export.exists() else ""
    more = f" For more steps: --steps with more than {done}." if newest else ""
    return f"{path} had finished after step {done}{left}.{more}"


def check_not_anew(path: Path, was: Mapping[str, Any], from_step: int) -> None:
    """Refuse to train a finished run from step 0: its steps, and its export, would be others.

    Args:
        path: of the run.
        was: its `run.json`.
        from_step: where it would go on; 0 where no checkpoint can be taken.

    Raises:
        RunError: with what to do instead.
    """
    if was.get("finished") and not from_step:
        raise RunError(
            f"{path} had finished, and has no checkpoint from which it could go on: its steps would be trained again, its export "
            f"replaced. To train on with new optimizer states: `toolkit train --model {shlex.quote(str(path / 'export'))}`; with "
            "--save-every, a run can go on after its end."
        )


def finish(folder: Folder, *, export: Mapping[str, Any] | None) -> None:
    """Note in `run.json` that the run is done, and what was exported and how it was checked."""
    about = read_run_json(folder.path)
    write_json(folder.run_json, {**about, "export": export, "finished": timestamp()})


def describe_run(preflight: Preflight, run_config: RunConfig, machine: Hardware) -> dict[str, Any]:
    """What `run.json` says of an attempt."""
    asked = preflight.job
    return {
        "strategy": dataclasses.asdict(asked.strategy),
        "train_config": dataclasses.asdict(asked.train_config),
        "run_config": dataclasses.asdict(run_config),
        "ranks": asked.ranks,
        "parallelism": dataclasses.asdict(asked.parallelism),
        "settings": dict(asked.settings),
        "forecast": preflight.forecast.to_dict() if preflight.forecast else None,
        "versions": versions(),
        "hardware": machine.to_dict(),
        "seed": asked.train_config.seed,
        "data": preflight.rows.to_dict(),
        "started": timestamp(),
    }
