"""`here()` → `Place`: on what, with what and when something ran. What stands at the head of every notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.core.display import Result, Table
from toolkit.core.units import timestamp
from toolkit.devices.machine import Hardware, hardware
from toolkit.training.preflight import versions


@dataclass(frozen=True, kw_only=True)
class Environment(Result):
    """A machine, its software and a moment: without them no measurement means anything."""

    date: str
    """ISO 8601, with the offset from UTC."""
    hardware: Hardware
    cores: int
    """Of the processor, that this process may use."""
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
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Environment(date=timestamp(), hardware=hardware(), cores=usable, versions=versions())
