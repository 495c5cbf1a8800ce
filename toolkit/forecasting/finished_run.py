"""A finished run from its folder: settings, measurements and audit; and what it corrects in forecasts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import from_dict
from toolkit.config.run_config import EMBEDDED, RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import RunError
from toolkit.devices.gpu_catalog import GPUSpec
from toolkit.devices.machine import Device, Hardware
from toolkit.run_folder.run_json import open_finished_run

MATTER = (
    *("sharding", "offload", "adapter", "precision", "attention", "activation_checkpointing", "loss"),
    *("dp_replicate", "lora_rank", "lora_targets", "lora_dropout", "micro_batch", "accumulation", "seq_len", "ranks"),
)
"""Fields on which a run's bytes depend."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run that ended."""

    model: str
    strategy: Strategy
    train_config: TrainConfig
    ranks: int
    hardware: Hardware | None
    """The run's machine; None for a run without a forecast."""
    save: bool
    """Whether it exported its result."""
    num_checkpoints: int
    """`RunConfig.count_checkpoints` of its last attempt."""
    phases: Mapping[str, int] | None
    """Phase → the highest bytes of a rank; None where it measured nothing."""
    why: str
    """Why it measured nothing."""
    dtypes: Mapping[str, str]
    """The dtypes of its first rank's audit."""

    def differences(self, strategy: Strategy, train_config: TrainConfig, ranks: int) -> list[str]:
        """Describe the differences between the run and these values."""
        run_fields = {**dataclasses.asdict(self.strategy), **dataclasses.asdict(self.train_config), "ranks": self.ranks}
        fields = {**dataclasses.asdict(strategy), **dataclasses.asdict(train_config), "ranks": ranks}
        return [f"{name} {run_fields[name]}, not {fields[name]}" for name in MATTER if run_fields[name] != fields[name]]


def read_finished_run(run: str | Path) -> FinishedRun:
    """Read run.json and memory.json of a run's folder.

    Raises:
        RunError: for a folder without a finished run.
    """
    with open_finished_run(Path(run)) as (about, memory, _):
        measured, forecast, run_config = memory["measured"], memory["forecast"], about["run_config"]
        saves = RunConfig(**{name: run_config.get(name, 0) for name in ("save_every", "save_seconds")})
        train_config = from_dict(TrainConfig, about["train_config"])
        return FinishedRun(
            model=run_config.get("model", EMBEDDED),
            strategy=from_dict(Strategy, {"loss": "whole", **about["strategy"]}),  # older runs had whole logits
            train_config=train_config,
            ranks=about["ranks"],
            hardware=_hardware(forecast["hardware"]) if forecast else None,
            save=bool(run_config.get("save", True)),
            num_checkpoints=saves.count_checkpoints(train_config.total_steps, about["attempts"][-1]["from_step"]),
            phases=measured["phases"] if measured else None,
            why=memory["reason"] or "no reason is recorded",
            dtypes=memory["audits"][0]["measured"]["dtypes"],
        )


def _hardware(values: Mapping[str, Any]) -> Hardware:
    """Return the hardware in the spelling of a forecast's JSON."""

    def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    device = plain(values["device"])
    card = device["card"] and GPUSpec(**plain(device["card"]))
    return Hardware(**{**plain(values), "device": Device(**{**device, "card": card})})


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What a finished run says about forecasts of its kind of device."""

    more: int
    """Bytes by which its peak was above its forecast's."""
    fragmentation: float | None
    """Reserved bytes for each allocated one; None where they were not measured."""
    outside: int | None
    """Bytes of the device that the allocator did not reserve; None where they were not measured."""
    speed: float
    """Operations a second of a rank."""
    slower: float | None
    """Measured by forecast seconds of a step; None where the forecast has none."""


RANK_BYTES = ("peak_bytes", "reserved_bytes", "device_bytes")
"""The measured bytes of a rank."""

SLOWED_STEPS = 3
"""First steps, which the memory window slows; they count for speed only in runs without other steps."""


def read_correction(path: Path, expected_device: Device) -> Correction:
    """Read what a run measured, beside its own forecast.

    Args:
        path: the run's folder, with `memory.json`, `events.jsonl` and `run.json`.
        expected_device: the kind of device that it must have run on.

    Raises:
        RunError: for a folder without a finished run, for a run that measured nothing or was not forecast, for one on
            another kind of device, and for a figure that is not a positive number.
    """
    with open_finished_run(path) as (_, memory, steps):
        expected, measured = memory["forecast"], memory["measured"]
        if not expected or not measured:
            why = memory.get("unforecast") or memory.get("reason") or "it has no forecast, or no measurement"
            raise RunError(f"Cannot calibrate with {path}: {why}. Name a run that has both in its memory.json.")
        if not steps:
            raise RunError(
                f"Cannot calibrate with {path}: events.jsonl has no steps. Name the folder of a finished run."
            )
        _check_device(expected_device, expected["hardware"]["device"], path)
        _check_figures(memory, steps, path)
        fullest = max(measured["per_rank"], key=lambda rank: rank["peak_bytes"])
        reserved, device = fullest.get("reserved_bytes"), fullest.get("device_bytes")
        seconds = [event["seconds"] for event in steps]
        took = statistics.median(seconds[SLOWED_STEPS:] or seconds)
        return Correction(
            more=measured["peak_bytes"] - expected["device"]["peak_bytes"],
            fragmentation=reserved / fullest["peak_bytes"] if reserved else None,
            outside=device - reserved if reserved and device else None,
            speed=expected["operations"] / took,
            slower=took / expected["step_seconds"] if expected["step_seconds"] else None,
        )


def _check_device(wanted: Device, device: Mapping[str, Any], path: Path) -> None:
    """Refuse a device of another kind or memory. Speeds are not compared: a later catalog may correct them."""
    if (wanted.kind, wanted.card and wanted.card.gib) != (device["kind"], device["card"] and device["card"]["gib"]):
        raise RunError(f"{path} ran on another kind of device than {wanted.name}. Name a run on that kind.")


def _check_figures(memory: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Refuse times, bytes and operations that are not positive numbers. None is an unknown one."""
    measured, forecast = memory["measured"], memory["forecast"]
    figures = [
        ("measured.peak_bytes", measured["peak_bytes"]),
        ("forecast.device.peak_bytes", forecast["device"]["peak_bytes"]),
        *((f"forecast.{name}", forecast[name]) for name in ("operations", "step_seconds")),
        *((f"measured.per_rank.{name}", rank.get(name)) for rank in measured["per_rank"] for name in RANK_BYTES),
        *((f"seconds of step {event['step']}", event["seconds"]) for event in steps),
    ]
    for name, value in figures:
        if value is not None and not (type(value) in (int, float) and 1e-9 <= value <= 1e30):
            problem = f"{name} is {value!r:.40}, expected a positive number"
            raise RunError(f"Cannot calibrate with {path}: {problem}. Name the folder of another run.")
