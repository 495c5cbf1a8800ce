"""`Candidate`: a strategy and its batch with their forecast, hours and cost, or the reason for a rejection."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config.flags import spell
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.forecasting.result import Forecast

MARGIN = 0.95
"""The largest share of a rank's memory for a plan: unknowns take the rest."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its batch and its forecast, or the reason for its rejection."""

    strategy: Strategy
    train_config: TrainConfig
    forecast: Forecast | None
    reason: str = ""
    """Why it is rejected, in a sentence; empty where it is not."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the plan's request that it changes, and their new values; `hardware`: the machine's name."""
    tokens: float | None = None
    """Tokens of the whole training, for hours."""
    price: float | None = None
    """Of a device for an hour, for costs."""

    @property
    def flags(self) -> str:
        """The change as flags."""
        return shlex.join(spell(self.change))

    @property
    def checkpoint_share(self) -> float:
        """The share of the time in which steps wait for checkpoints."""
        if self.forecast is None:
            return 0.0
        return self.forecast.checkpoint_stall_seconds / RunConfig().save_seconds

    @property
    def hours(self) -> float | None:
        """Hours of a training on `tokens`, with its checkpoints; None without tokens or a known speed."""
        speed = self.forecast.tokens_per_second if self.forecast else None
        return self.tokens / speed / 3600 * (1 + self.checkpoint_share) if self.tokens and speed else None

    @property
    def cost(self) -> float | None:
        """The price of these hours on all devices; None where either is not known."""
        return self.hours * self.price * self.forecast.ranks if self.forecast and self.hours and self.price else None

    @property
    def reason_group(self) -> str:
        """The reason without the figures of this candidate: those with an equal one are rejected together."""
        forecast = self.forecast
        if forecast is None:
            return re.sub(r"\b(accumulation|got|than|micro_batch) \d+", r"\1 n", self.reason)
        if forecast.device_lacks:
            return f"A rank has {format_bytes(forecast.limit_bytes)} and needs more."
        if forecast.host_lacks:
            return f"A node's host has {format_bytes(forecast.hardware.host_free_bytes)} and its ranks need more."
        return f"Less than 5% of the {format_bytes(forecast.limit_bytes)} of a rank are left."

    @property
    def shortfall(self) -> tuple[float, int]:
        """The largest need, of a rank or a node's host: as a share of what there is, and its bytes; infinite without a forecast."""
        forecast = self.forecast
        if forecast is None:
            return math.inf, 0
        needs = [(forecast.needed_bytes, forecast.limit_bytes)]
        if forecast.host_lacks:
            needs.append((forecast.host_bytes, forecast.hardware.host_free_bytes))
        return max((need / max(1, limit), need) for need, limit in needs)

    @property
    def cells(self) -> dict[str, str]:
        """Column of a table → text."""
        strategy, train_config, forecast = self.strategy, self.train_config, self.forecast
        speed, seconds = (forecast.tokens_per_second, forecast.step_seconds) if forecast else (None, None)
        return {
            "change": self.flags,
            "sharding": strategy.sharding,
            "offload": strategy.offload,
            "recompute": strategy.activation_checkpointing,
            "batch": f"{train_config.micro_batch} x {train_config.accumulation}",
            "tokens/s": f"{speed:,.0f}" if speed else "–",
            "step": format_step_seconds(seconds) if seconds else "–",
            "hours": f"{self.hours:,.1f}" if self.hours else "–",
            "cost": f"{self.cost:,.2f}" if self.cost else "–",
            "need": format_bytes(forecast.needed_bytes) if forecast else "–",
            "why": f"needs {format_bytes(self.shortfall[1])}" if forecast else self.reason,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast's JSON, hours, cost and the reason."""
        return {
            "strategy": dataclasses.asdict(self.strategy),
            "train_config": dataclasses.asdict(self.train_config),
            "forecast": self.forecast.to_dict() if self.forecast else None,
            "hours": self.hours,
            "cost": self.cost,
            "reason": self.reason,
        }


def rank_key(candidate: Candidate) -> tuple[float, int]:
    """Order candidates that fit: the fastest first, then the one that needs least."""
    assert candidate.forecast is not None, "what fits has a forecast"
    return -(candidate.forecast.tokens_per_second or 0.0), candidate.forecast.needed_bytes


def rejection(forecast: Forecast) -> str:
    """Return why a plan leaves a forecast out, in a sentence; empty where it does not."""
    if not forecast.fits:
        return forecast.reason
    if forecast.needed_bytes > MARGIN * forecast.limit_bytes:
        need, limit = format_bytes(forecast.needed_bytes), format_bytes(forecast.limit_bytes)
        return f"It needs {need} of {limit}: less than 5% are left."
    return ""
