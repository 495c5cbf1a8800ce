"""Results of the checks, the support for a Strategy's values that follows from them, and the environment of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolkit.config.strategy import ADAPTERS, ATTENTION_WORDS, LATER, OFFLOADS, PRECISION_WORDS, SHARDINGS, Strategy
from toolkit.config.tables import PRECISIONS
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import timestamp
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines.registry import engine_for
from toolkit.engines.resolution import resolve
from toolkit.training.preflight import versions


class Outcome(Exception):
    """Raised by a check that is not ok: a status (`missing`, `broken`, `n/a`), a detail, and a fix if there is one."""

    def __init__(self, status: str, detail: str, fix: str = "") -> None:
        super().__init__(status, detail, fix)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. A child process sends it as JSON."""

    check: str
    status: str
    """`ok`; `missing`: not there, and something cannot be done without it; `broken`: there and not working; `n/a`."""
    detail: str
    fix: str = ""
    """The fix, if there is one."""

    @property
    def failed(self) -> bool:
        """Whether something cannot be done."""
        return self.status in ("missing", "broken")


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Whether a value of a Strategy's field can run on this machine, as far as that field decides."""

    field: str
    value: str
    runs: bool
    reason: str
    """Why not, or under which condition; else empty."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Result):
    """The checks of this machine, and its support for a Strategy's values."""

    findings: tuple[Finding, ...]
    abilities: tuple[Ability, ...]

    def status(self, check: str) -> str:
        """Return the status of a check."""
        return next(finding.status for finding in self.findings if finding.check == check)

    def ability(self, field: str, value: str) -> Ability:
        """Return whether a value of a Strategy's field can run here."""
        return next(ability for ability in self.abilities if (ability.field, ability.value) == (field, value))

    def headline(self) -> str:
        """Return how many checks failed, and the shardings that run here."""
        failed = ", ".join(finding.check for finding in self.findings if finding.failed)
        count = sum(finding.failed for finding in self.findings)
        checks = f"{count} of {len(self.findings)} checks failed: {failed}." if failed else "All checks passed."
        shardings = [ability.runs for ability in self.abilities if ability.field == "sharding"]
        return f"{checks} {sum(shardings)} of {len(shardings)} shardings run here."

    def tables(self) -> list[Table]:
        """Return the checks with their fixes, and the values of a Strategy that run here."""
        checks = [(finding.check, finding.status, finding.detail) for finding in self.findings]
        fixes = [f"{finding.check}: {finding.fix}" for finding in self.findings if finding.fix]
        values = [(row.field, row.value, "yes" if row.runs else "no", row.reason) for row in self.abilities]
        return [
            Table(title="This machine", columns=("check", "status", "detail"), rows=checks, notes=fixes),
            Table(title="Values of a Strategy on this machine", columns=("field", "value", "runs", "why"), rows=values),
        ]


@dataclass(frozen=True, kw_only=True)
class Environment(Result):
    """A machine, its software and a moment: without them no measurement means anything."""

    date: str
    """ISO 8601, with the offset from UTC."""
    hardware: Hardware
    cores: int
    """Processor cores of this process."""
    versions: Mapping[str, str | None]
    """Versions of Python and the libraries; None for a library that is not installed."""

    def tables(self) -> list[Table]:
        """Return the machine and the versions."""
        (machine,) = self.hardware.tables()
        rows = [("date", self.date), ("processor cores", str(self.cores)), *machine.rows]
        installed = [(name, version or "not installed") for name, version in self.versions.items()]
        return [
            Table(title="Where this ran", columns=("figure", "value"), rows=rows, notes=machine.notes),
            Table(title="Versions", columns=("library", "version"), rows=installed),
        ]


def environment() -> Environment:
    """Return this machine and its installed libraries. Imports nothing heavy and touches no device.

    Raises:
        ToolkitError: for a GPU with a driver that does not answer.
    """
    cores = len(os.sched_getaffinity(0))
    return Environment(date=timestamp(), hardware=hardware(), cores=cores, versions=versions())


# Support for each value of a Strategy ------------------------------------------------------------------------------------


def list_abilities(findings: Sequence[Finding]) -> Iterator[Ability]:
    """Yield whether each sharding, offload, adapter, precision and attention can run, in the Strategy's order."""
    failed = {finding.check: f"{finding.check}: {finding.detail}" for finding in findings if finding.failed}
    try:
        machine = hardware()
    except ToolkitError:  # the check of the GPUs reports the error
        machine = hardware("cpu")
    support = _Support(machine, failed)
    rules = {
        "sharding": (tuple(SHARDINGS), support.sharding),
        "offload": (OFFLOADS, support.offload),
        "adapter": (ADAPTERS, support.adapter),
        "precision": (PRECISION_WORDS, support.precision),
        "attention": (ATTENTION_WORDS, support.attention),
    }
    for field, (values, rule) in rules.items():
        for value in values:
            runs, reason = (False, "not available yet") if value in LATER.get(field, ()) else rule(value)
            yield Ability(field=field, value=value, runs=runs, reason=reason)


class _Support:
    """One rule a field: whether a value runs here, and why not or under which condition."""

    def __init__(self, machine: Hardware, failed: dict[str, str]) -> None:
        self.machine, self.device = machine, machine.device
        self.failed = failed
        """Failed check → its detail."""

    def sharding(self, word: str) -> tuple[bool, str]:
        strategy = Strategy(sharding=word, dp_replicate=2 if SHARDINGS[word].hybrid else 1)
        if reason := self._failure("torch", "transformers", "accelerate") or self._obstacle(strategy):
            return False, reason
        one_gpu = self.device.kind == "cuda" and self.machine.count == 1 and not strategy.single_process
        return True, "with one process: there is one GPU" if one_gpu else ""

    def offload(self, value: str) -> tuple[bool, str]:
        return (True, "") if value == "none" else self._with_shardings("", offload=value)

    def adapter(self, value: str) -> tuple[bool, str]:
        quantized = ("bitsandbytes",) if value in ("qlora", "qlora8") else ()
        reason = "" if value == "none" else self._failure("peft", *quantized)
        return not reason, reason

    def precision(self, value: str) -> tuple[bool, str]:
        if value == "auto":
            best = "fp32" if self.device.kind == "cpu" else "bf16" if "bf16" in self.device.dtypes else "fp16"
            return True, f"takes {best}"
        row = PRECISIONS[value]
        if row.scaled and self.device.kind == "cpu":
            return self._with_shardings(": others have no loss scaling on a CPU", precision=value)
        if row.accelerate == "bf16":
            reason = self._failure("bf16")
            return not reason, reason or ("" if "bf16" in self.device.dtypes else "not native: no faster than fp32")
        runs = value in self.device.dtypes
        return runs, "" if runs else f"{self.device.name} has no {value}"

    def attention(self, value: str) -> tuple[bool, str]:
        kernels = self.device.attentions
        if value == "auto":
            return True, f"takes {kernels[0]} where the model and the precision allow it"
        if value in kernels:
            return True, ""
        if self.device.kind == "cpu":
            return False, "has no backward on a CPU" if value == "flex" else "needs a GPU"
        return False, "not installed, or not for this GPU"

    def _failure(self, *checks: str) -> str:
        """Return what the first of these checks that failed reports."""
        return next((self.failed[check] for check in checks if check in self.failed), "")

    def _obstacle(self, strategy: Strategy) -> str:
        """Return why this machine cannot run a strategy on the fewest ranks that shard; empty if it can."""
        several = () if strategy.single_process else ("processes",)
        if reason := self._failure(
            *several,
            *engine_for(strategy.sharding, strategy.tp, strategy.ep, strategy.pp).checks(strategy, self.device),
        ):
            return reason
        ranks = strategy.least_ranks
        try:
            most = self.machine.count if self.device.kind == "cuda" else ranks
            resolve(strategy, TrainConfig(), None, min(ranks, most), self.device)
        except StrategyError as error:
            return str(error)
        return ""

    def _with_shardings(self, condition: str, **fields: str) -> tuple[bool, str]:
        """Return the shardings that run with these fields; without any, why the first does not."""
        able: list[str] = []
        reasons: list[str] = []
        for word, row in SHARDINGS.items():
            try:
                strategy = Strategy(sharding=word, dp_replicate=2 if row.hybrid else 1, **fields)  # type: ignore[arg-type]
            except StrategyError:  # the table excludes it on every machine
                continue
            reason = self._obstacle(strategy)
            (reasons if reason else able).append(reason or word)
        return bool(able), f"with {', '.join(able)}{condition}" if able else reasons[0]
