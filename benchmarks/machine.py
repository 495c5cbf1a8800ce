"""Where and with what a benchmark ran: every result carries it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from toolkit.devices import hardware
from toolkit.readying import versions
from toolkit.units import format_bytes


def about() -> dict[str, Any]:
    """Versions, machine and date."""
    here = hardware()
    return {
        "versions": versions(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {format_bytes(here.host_bytes)}; {here.device.name}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
