"""Which values of a Strategy's fields run here, by the checks, and why others do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.config.strategy import ADAPTERS, ATTENTION_WORDS, LATER, OFFLOADS, PRECISION_WORDS, SHARDINGS, Strategy
from toolkit.config.tables import PRECISIONS
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.devices.machine import Hardware, hardware
from toolkit.diagnosis.result import Finding
from toolkit.engines.base import engine_of
from toolkit.engines.job import resolve


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Whether a value of a Strategy's field can run on this machine, as far as that field decides."""

    field: str
    value: str
    runs: bool
    reason: str
    """Why not, or under which condition; else empty."""


def list_abilities(findings: Sequence[Finding]) -> Iterator[Ability]:
    """Yield whether each sharding, offload, adapter, precision and attention can run, in the Strategy's order."""
    by_check = {finding.check: finding for finding in findings}
    try:
        machine = hardware()
    except ToolkitError:  # the check of the GPUs reports the error
        machine = hardware("cpu")
    rules = {
        "sharding": (tuple(SHARDINGS), _sharding),
        "offload": (OFFLOADS, _offload),
        "adapter": (ADAPTERS, _adapter),
        "precision": (PRECISION_WORDS, _precision),
        "attention": (ATTENTION_WORDS, _attention),
    }
    for field, (values, rule) in rules.items():
        for value in values:
            later = value in LATER.get(field, ())
            runs, reason = (False, "not available yet") if later else rule(value, machine, by_check)
            yield Ability(field=field, value=value, runs=runs, reason=reason)


Found = dict[str, Finding]


def _failed_check(by_check: Found, *checks: str) -> str:
    """Return the first of these checks that failed, as a reason."""
    relevant = (by_check[check] for check in checks if check in by_check)
    return next(
        (f"{finding.check}: {finding.detail}" for finding in relevant if finding.status in ("missing", "broken")), ""
    )


def _sharding(word: str, machine: Hardware, by_check: Found) -> tuple[bool, str]:
    strategy = Strategy(sharding=word, dp_replicate=2 if SHARDINGS[word].hybrid else 1)
    needs = ["torch", "transformers", "accelerate", *([] if strategy.single_process else ["processes"])]
    if reason := _failed_check(by_check, *needs, *engine_of(strategy).checks(strategy, machine.device)):
        return False, reason
    if refused := _refusal(strategy, machine):
        return False, refused
    if machine.device.kind != "cuda":
        return True, ""
    return True, "with one process: there is one GPU" if machine.count == 1 and not strategy.single_process else ""


def _refusal(strategy: Strategy, machine: Hardware) -> str:
    """Return why this machine cannot run a strategy on the fewest ranks that shard, or on its own; empty if it can."""
    most = machine.count if machine.device.kind == "cuda" else strategy.least_ranks
    try:
        resolve(strategy, TrainConfig(), None, min(strategy.least_ranks, most), machine.device)
    except StrategyError as error:
        return str(error)
    return ""


def _working_shardings(machine: Hardware, by_check: Found, **fields: str) -> tuple[list[str], str]:
    """Return the shardings that run with these fields, and why the first other one does not."""
    able, reason = [], ""
    for word, row in SHARDINGS.items():
        try:
            strategy = Strategy(sharding=word, dp_replicate=2 if row.hybrid else 1, **fields)  # type: ignore[arg-type]
        except StrategyError:  # the table excludes it on every machine
            continue
        several = () if strategy.single_process else ("processes",)
        lacking = _failed_check(by_check, *several, *engine_of(strategy).checks(strategy, machine.device))
        if why := lacking or _refusal(strategy, machine):
            reason = reason or why
        else:
            able.append(word)
    return able, reason


def _offload(value: str, machine: Hardware, by_check: Found) -> tuple[bool, str]:
    if value == "none":
        return True, ""
    able, reason = _working_shardings(machine, by_check, offload=value)
    return bool(able), f"with {', '.join(able)}" if able else reason


def _adapter(value: str, machine: Hardware, by_check: Found) -> tuple[bool, str]:
    needs = {"none": (), "qlora": ("peft", "bitsandbytes"), "qlora8": ("peft", "bitsandbytes")}.get(value, ("peft",))
    reason = _failed_check(by_check, *needs)
    return not reason, reason


def _precision(value: str, machine: Hardware, by_check: Found) -> tuple[bool, str]:
    device = machine.device
    if value == "auto":
        best = "fp32" if device.kind == "cpu" else "bf16" if "bf16" in device.dtypes else "fp16"
        return True, f"takes {best}"
    row = PRECISIONS.get(value)
    if row and row.scaled and device.kind == "cpu":
        able, reason = _working_shardings(machine, by_check, precision=value)
        return bool(able), f"with {', '.join(able)}: others have no loss scaling on a CPU" if able else reason
    if row and row.accelerate == "bf16":
        reason = _failed_check(by_check, "bf16")
        return not reason, reason or ("" if "bf16" in device.dtypes else "not native: no faster than fp32")
    runs = value in device.dtypes
    return runs, "" if runs else f"{device.name} has no {value}"


def _attention(value: str, machine: Hardware, by_check: Found) -> tuple[bool, str]:
    kernels, kind = machine.device.attentions, machine.device.kind
    if value == "auto":
        return True, f"takes {kernels[0]} where the model and the precision allow it"
    if value in kernels:
        return True, ""
    if kind == "cpu":
        return False, "has no backward on a CPU" if value == "flex" else "needs a GPU"
    return False, "not installed, or not for this GPU"
