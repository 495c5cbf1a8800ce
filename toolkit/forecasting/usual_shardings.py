"""`side_by_side()` → `SideBySide`: one training under the usual shardings, beside the planner's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError
from toolkit.devices.machine import Hardware
from toolkit.forecasting.plans import PLAN_COLUMNS, Plan, plan
from toolkit.forecasting.prediction import forecast
from toolkit.forecasting.search import Candidate, rejection
from toolkit.models import ModelSpec

USUAL = ("ddp", "zero2", "zero3", "fsdp")
"""Shardings that are shown."""


@dataclass(frozen=True, kw_only=True)
class SideBySide(Result):
    """The best of a plan with the same global batch, and the request under each usual sharding."""

    plan: Plan
    usual: tuple[Candidate, ...]

    def headline(self) -> str:
        """Return the planner's choice, and how one sharding is forecast alone."""
        return f"No sharding was given. {self.plan.headline()}\n`--sharding WORD` shows one forecast in full."

    def tables(self) -> list[Table]:
        """Return the choice and the usual shardings, a row each."""
        columns = ("", *PLAN_COLUMNS, "tokens/s", "step", "need", "fits")
        rows = [(name, *(one.cells[column] for column in columns[1:-1]), fits) for name, one, fits in self._rows()]
        return [Table(title=f"{self.plan.model} on {self.plan.hardware.label}", columns=columns, rows=rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return each row's JSON; `choice` is null where nothing fits."""
        return {
            "choice": self.plan.ranked[0].to_dict() if self.plan.ranked else None,
            "shardings": {one.strategy.sharding: one.to_dict() for one in self.usual},
        }

    def _rows(self) -> Iterator[tuple[str, Candidate, str]]:
        for one in self.plan.ranked[:1]:
            yield "plan's choice", one, "yes"
        for one in self.usual:
            yield "as given", one, "yes" if not one.reason else "no" if one.forecast else one.reason


def side_by_side(
    spec: ModelSpec, strategy: Strategy, machine: Hardware, train_config: TrainConfig, **options: Any
) -> SideBySide:
    """Forecast a training of which the sharding is left open, on several devices.

    Args:
        spec: of the model.
        strategy: the request; its sharding is replaced.
        machine: with all its ranks.
        train_config: the step. The plan chooses micro-batch and accumulation of the same global batch.
        options: as in `forecast`.
    """
    usual = []
    for word in USUAL:
        one = dataclasses.replace(strategy, sharding=word)
        found, reason = None, ""
        try:
            found = forecast(spec, one, machine, train_config, advice=False, **options)
            reason = rejection(found)
        except StrategyError as error:
            reason = str(error)
        usual.append(Candidate(strategy=one, train_config=train_config, forecast=found, reason=reason))
    batch = machine.ranks * train_config.micro_batch * train_config.accumulation
    kept = {name: options[name] for name in ("one_document", "allow_unquantized") if name in options}
    choice = plan(spec, machine, global_batch=batch, strategy=strategy, train_config=train_config, **kept)
    return SideBySide(plan=choice, usual=tuple(usual))
