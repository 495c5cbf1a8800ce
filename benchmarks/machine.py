"""Where and with what a benchmark ran: every result carries it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.devices import hardware
from toolkit.readying import versions
from toolkit.units import format_bytes

RESULTS = Path(__file__).parent / "results"


def about() -> dict[str, Any]:
    """Versions, machine and date."""
    here = hardware()
    return {
        "versions": versions(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {format_bytes(here.host_bytes)}; {here.device.name}",
        "date": time.strftime("%Y-%m-%d"),
    }


def write_results(name: str, title: str, found: Mapping[str, Any], text: str, folder: Path = RESULTS) -> None:
    """`results/NAME.json` and `.md`, headed by versions, machine and date; `found` holds those of `about()`."""
    head = f"{found['date']}, {found['machine']}\n{json.dumps(found['versions'])}"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / f"{name}.md").write_text(f"# {title}\n\n{head}\n\n```\n{text}\n```\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
