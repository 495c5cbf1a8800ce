"""`Finding`, `Diagnosis`: the results of the checks. `Outcome`: the end of a check that is not ok. `Environment`: where it ran."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.core.display import Result, Table
from toolkit.core.units import timestamp
from toolkit.devices.machine import Hardware, hardware
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
        ToolkitError: for a GPU whose driver does not answer.
    """
    cores = len(os.sched_getaffinity(0))
    return Environment(date=timestamp(), hardware=hardware(), cores=cores, versions=versions())
