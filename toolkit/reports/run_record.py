"""`RunRecord`: what a run's folder says, for the sections of its report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import differing, from_dict
from toolkit.config.flags import spell, to_flags
from toolkit.config.run_config import SECTIONS
from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, read once from its folder and redacted."""

    path: Path
    about: Mapping[str, Any]
    """`run.json`."""
    steps: tuple[Mapping[str, Any], ...]
    """Lines of `events.jsonl` that have a loss."""
    evaluations: tuple[Mapping[str, Any], ...]
    """Lines that have an evaluation's."""
    checkpoints: tuple[Mapping[str, Any], ...]
    """Lines of `checkpoints.jsonl`."""
    memory: Mapping[str, Any]
    """`memory.json`, which a run writes as it finishes; empty before."""
    status: str
    """`running`, `finished`, `not audited`, `stopped` or `failed`."""
    words: str
    """The message at the end, or where its ranks are."""
    then: str
    """How to continue; empty if there is nothing to do."""
    sharding: str
    """As an audit found it; of a run of the recipe, which audits itself, as requested."""

    @property
    def forecast(self) -> Mapping[str, Any] | None:
        """The forecast from before the first step."""
        return self.memory.get("forecast") or self.about.get("forecast")

    @property
    def measured(self) -> Mapping[str, Any] | None:
        """The worst rank's peak, by part and phase."""
        return self.memory.get("measured")

    @property
    def done(self) -> int:
        """The last step that was done; 0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def target(self) -> Mapping[str, Any] | None:
        """The script, module or function that it ran; None of the recipe."""
        return self.about.get("target")

    @property
    def command(self) -> str:
        """The command that repeats the run with all decisions fixed; for a function, a line of Python."""
        about, target = self.about, self.target
        if target is not None:
            return _target_command(target, from_dict(Strategy, about["strategy"]), about["ranks"])
        try:
            words = to_flags(*(from_dict(kind, about[name]) for name, kind in SECTIONS.items()))
        except StrategyError:  # of another version, which had other fields
            words = spell({**about["run_config"], **about["strategy"], **about["train_config"]})
        return " ".join(["toolkit train --processes", str(about["ranks"]), *map(shlex.quote, words)])


def _target_command(target: Mapping[str, Any], strategy: Strategy, ranks: int) -> str:
    if target["kind"] == "function":
        arguments = ", ".join(f"{name}={value!r}" for name, value in differing(strategy).items())
        return f"tk.launch({target['name']}, tk.Strategy({arguments}), processes={ranks})"
    words = [*to_flags(strategy), target["name"], *target["arguments"]]
    return " ".join(["toolkit launch --processes", str(ranks), *map(shlex.quote, words)])
