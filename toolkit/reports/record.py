"""The record of a run, read once from its folder and redacted, also while it runs or after a failure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.config.flags import differing, from_dict, section, spell, to_flags
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import read_events
from toolkit.core.errors import StrategyError
from toolkit.core.redaction import redact, redact_all
from toolkit.run_folder.folder import Folder, run_paths
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.status import read_memory, read_outcome
from toolkit.training.resumption import resume_hint

WARM = 5
"""Steps that do not count for tokens/s: the memory window lies in them."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run, as its folder tells it."""

    path: Path
    about: Mapping[str, Any]
    """`run.json`."""
    steps: tuple[Mapping[str, Any], ...]
    """Lines of `events.jsonl` that have a loss."""
    evaluations: tuple[Mapping[str, Any], ...]
    """Lines that have an evaluation's."""
    checkpoints: tuple[Mapping[str, Any], ...]
    """Lines of `checkpoints.jsonl`."""
    memory: Mapping[str, Any] | None
    """`memory.json`, which a run writes as it finishes."""
    status: str
    """`running`, `finished`, `stopped` or `failed`."""
    words: str
    """The message at the end, or where its ranks are."""
    then: str
    """How to continue; empty where there is nothing to do."""

    @property
    def forecast(self) -> Mapping[str, Any] | None:
        """The forecast from before the first step."""
        return (self.memory or {}).get("forecast") or self.about.get("forecast")

    @property
    def measured(self) -> Mapping[str, Any] | None:
        """The worst rank's peak, by part and phase."""
        return (self.memory or {}).get("measured")

    @property
    def done(self) -> int:
        """The last step that was done; 0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def target(self) -> Mapping[str, Any] | None:
        """The script, module or function that it ran; None of the recipe."""
        target: Mapping[str, Any] | None = self.about.get("target")
        return target

    @property
    def command(self) -> str:
        """The command that repeats the run with all decisions fixed; for a function, a line of Python."""
        about, target = self.about, self.target
        if target is not None:
            return _own_command(target, from_dict(Strategy, about["strategy"]), about["ranks"])
        try:
            owners = (from_dict(kind, about[section(kind)]) for kind in (RunConfig, Strategy, TrainConfig))
            words = to_flags(*owners)
        except StrategyError:  # of another version, which had other fields
            words = spell({**about["run_config"], **about["strategy"], **about["train_config"]})
        return " ".join(["toolkit train --processes", str(about["ranks"]), *map(shlex.quote, words)])


def read_record(path: str | Path) -> Record:
    """Read a run's folder.

    Raises:
        RunError: for a folder that holds no run, and a file in it that cannot be read.
    """
    folder = run_paths(path)
    about = redact_all(read_run_json(folder.path))
    events = redact_all(read_events(folder.events))
    status, words = read_outcome(folder, about)
    return Record(
        path=folder.path,
        about=about,
        steps=tuple(event for event in events if "loss" in event),
        evaluations=tuple(event for event in events if "eval_loss" in event),
        checkpoints=tuple(redact_all(read_events(folder.published))),
        memory=read_memory(folder, about),
        status=status,
        words=redact(words),
        then="" if status in ("finished", "running") else redact(_how_to_resume(folder)),
    )


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of the median step after the fifth."""
    return float(median(event["seconds"] for event in steps[WARM:] or steps))


def throughput(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return tokens a second of all ranks in the median step after the fifth; None without token counts."""
    rates = [rate for event in steps[WARM:] or steps if (rate := pace(event)) is not None]
    return float(median(rates)) if rates else None


def pace(event: Mapping[str, Any]) -> float | None:
    """Return a step's tokens a second; a line of `tk.log` may have none."""
    return event["tokens"] / event["seconds"] if event.get("tokens") and event["seconds"] else None


def _own_command(target: Mapping[str, Any], strategy: Strategy, ranks: int) -> str:
    if target["kind"] == "function":
        arguments = ", ".join(f"{name}={value!r}" for name, value in differing(strategy).items())
        return f"tk.launch({target['name']}, tk.Strategy({arguments}), processes={ranks})"
    words = [*to_flags(strategy), target["name"], *target["arguments"]]
    return " ".join(["toolkit launch --processes", str(ranks), *map(shlex.quote, words)])


def _how_to_resume(folder: Folder) -> str:
    try:
        return resume_hint(folder)
    except StrategyError as error:
        return f"This version cannot resume it: {error}"
