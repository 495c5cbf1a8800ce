"""A finished run from its folder: settings, measurements, and the audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.flags import from_dict
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.devices.gpu_catalog import GPUSpec
from toolkit.devices.machine import Device, Hardware
from toolkit.run_folder.run_json import open_finished_run

MATTER = (
    *("sharding", "offload", "adapter", "precision", "attention", "activation_checkpointing", "dp_replicate"),
    *("lora_rank", "lora_targets", "micro_batch", "accumulation", "seq_len", "ranks"),
)
"""Fields on which a run's bytes depend."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run that ended."""

    path: Path
    model: str
    strategy: Strategy
    train_config: TrainConfig
    ranks: int
    hardware: Hardware | None
    """The run's machine; None for a run without a forecast."""
    checkpoints: bool
    """Whether it wrote any."""
    phases: Mapping[str, int] | None
    """Phase → the highest bytes of a rank; None where it measured nothing."""
    why: str
    """Why it measured nothing."""
    dtypes: Mapping[str, str]
    """The ledger of its first rank's audit."""

    def differences(self, strategy: Strategy, train_config: TrainConfig, ranks: int) -> list[str]:
        """Describe the differences between the run and these values."""
        mine, now = (
            {**dataclasses.asdict(one), **dataclasses.asdict(other), "ranks": count}
            for one, other, count in ((self.strategy, self.train_config, self.ranks), (strategy, train_config, ranks))
        )
        return [f"{name} {mine[name]}, not {now[name]}" for name in MATTER if mine[name] != now[name]]


def read_finished_run(run: str | Path) -> FinishedRun:
    """Read run.json and memory.json of a run's folder.

    Raises:
        RunError: where there is no run, or none that came to its end.
    """
    path = Path(run)
    with open_finished_run(path) as (about, memory, _):
        measured, forecast, run_config = memory["measured"], memory["forecast"], about["run_config"]
        return FinishedRun(
            path=path,
            model=run_config.get("model", EMBEDDED),
            strategy=from_dict(Strategy, about["strategy"]),
            train_config=from_dict(TrainConfig, about["train_config"]),
            ranks=about["ranks"],
            hardware=_hardware(forecast["hardware"]) if forecast else None,
            checkpoints=bool(run_config.get("save_every") or run_config.get("save_seconds")),
            phases=measured["phases"] if measured else None,
            why=memory["reason"] or "it does not say why",
            dtypes=memory["audits"][0]["measured"]["dtypes"],
        )


def _hardware(values: Mapping[str, Any]) -> Hardware:
    """Return the hardware in the spelling of a forecast's JSON."""

    def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    device = plain(values["device"])
    card = device["card"] and GPUSpec(**plain(device["card"]))
    return Hardware(**{**plain(values), "device": Device(**{**device, "card": card})})
