"""How long a moved slider takes: `Explorer.set(...)` of every panel, with a warm cache, until its page is written again.

    python benchmarks/sliders.py                       # results into benchmarks/results/sliders.json and .md
    python benchmarks/sliders.py --smoke               # whether it still runs

Moved as a person does it: in a kernel's display, with widgets, back and forth between two values, each seen once before.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.core.display import Table

MOVED: dict[str, dict[str, tuple[Any, Any]]] = {
    "memory": {"devices": (8, 16), "micro_batch": (2, 4), "sharding": ("zero3", "fsdp")},
    "compare": {"devices": (8, 16), "micro_batch": (2, 4), "against_sharding": ("zero2", "fsdp")},
    "timeline": {"devices": (8, 16), "micro_batch": (2, 4), "sharding": ("zero3", "fsdp")},
    "precision": {"precision": ("bf16", "fp32"), "adapter": ("none", "lora")},
}
"""Panel → control → the two values between which it is moved."""

HARDWARE = "8x A100-80GB"
TARGET = 0.1
"""Seconds."""


def measure(kind: str, control: str, values: tuple[Any, Any], moves: int) -> dict[str, Any]:
    """The seconds of each move, and how large a page it writes."""
    with capture_output() as shown:
        panel = tk.explore(kind, hardware=HARDWARE)
        panel._ipython_display_()
        for value in values:
            panel.set(**{control: value})
        seconds = []
        for move in range(moves):
            began = time.perf_counter()
            panel.set(**{control: values[move % 2]})
            seconds.append(time.perf_counter() - began)
            if panel.refusal:
                raise SystemExit(f"{kind}, {control} {values[move % 2]}: {panel.refusal}")
    size = len(shown.outputs[-1].data["text/html"])
    return {"panel": kind, "control": control, "values": values, "seconds": seconds, "page_bytes": size}


def table(found: dict[str, Any]) -> Table:
    """A row for each control that was moved."""
    rows = []
    for one in found["moved"]:
        ms = sorted(1e3 * seconds for seconds in one["seconds"])
        values = " / ".join(map(str, one["values"]))
        words = (f"{statistics.median(ms):.0f}", f"{ms[0]:.0f} to {ms[-1]:.0f}", f"{one['page_bytes'] / 1024:.0f}")
        rows.append((one["panel"], one["control"], values, *words))
    slow = [
        f"{one['panel']} ({one['control']})" for one in found["moved"] if statistics.median(one["seconds"]) > TARGET
    ]
    said = f"missed by {', '.join(slow)}" if slow else "reached by each"
    before, after = found["load"]
    notes = [
        f"ms: of {len(found['moved'][0]['seconds'])} moves each, to the page that the kernel sends.",
        f"Load of the machine (1 minute): {before:.2f} before, {after:.2f} after.",
        f"Target: a median under {1e3 * TARGET:.0f} ms: {said}.",
    ]
    columns = ("panel", "control", "between", "median, ms", "range", "page, KiB")
    return Table(title=f"A moved control, on {HARDWARE}, warm", columns=columns, rows=rows, notes=notes)


def main() -> None:
    """Measure, print the table, write both files."""
    made = parser(__doc__)
    made.add_argument("--moves", type=int, default=20)
    arguments = parse(made, moves=2)
    InteractiveShell.instance()
    before = os.getloadavg()[0]
    moved = [
        measure(kind, control, values, arguments.moves)
        for kind, controls in MOVED.items()
        for control, values in controls.items()
    ]
    found = {**about(), "hardware": HARDWARE, "moved": moved, "load": (before, os.getloadavg()[0])}
    text = table(found).text()
    write_results(arguments.results, "sliders", "A moved slider", found, text)
    print(text)


if __name__ == "__main__":
    main()
