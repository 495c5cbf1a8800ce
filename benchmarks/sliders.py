"""How long a moved slider takes: `Explorer.set(...)` of every panel, until its page is written again; and a live view's page.

    python benchmarks/sliders.py                       # results into benchmarks/results/sliders.json and .md
    python benchmarks/sliders.py --smoke               # whether it still runs

Moved as a person does it: in a kernel's display, with widgets, back and forth between two values. Each was seen once before,
but for sequence lengths: those are ready once the child process behind the first answer has traced them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.core.display import Table
from toolkit.run_folder.status import Progress, page

MOVED: dict[str, dict[str, tuple[Any, Any]]] = {
    "memory": {"devices": (8, 16), "micro_batch": (2, 4), "sharding": ("zero3", "fsdp"), "seq_len": (512, 1024)},
    "compare": {
        "devices": (8, 16),
        "micro_batch": (2, 4),
        "against_sharding": ("zero2", "fsdp"),
        "seq_len": (512, 1024),
    },
    "timeline": {"devices": (8, 16), "micro_batch": (2, 4), "sharding": ("zero3", "fsdp"), "seq_len": (512, 1024)},
    "precision": {"precision": ("bf16", "fp32"), "adapter": ("none", "lora")},
}
"""Panel → control → the two values between which it is moved."""

SMOKE = {"memory": {"seq_len": (512, 1024)}, "precision": MOVED["precision"]}
"""What a smoke test moves."""

HARDWARE = "8x A100-80GB"
TARGET = 0.1
"""Seconds."""


def measure(kind: str, control: str, values: tuple[Any, Any], moves: int) -> dict[str, Any]:
    """The seconds of each move, of a drawing alone, and how large a page it writes."""
    with capture_output() as shown:
        panel = tk.explore(kind, hardware=HARDWARE)
        panel._ipython_display_()
        if control == "seq_len":
            assert panel._ahead is not None
            panel._ahead.wait()
        else:
            for value in values:
                panel.set(**{control: value})
        timed = time_calls(lambda move: panel.set(**{control: values[move % 2]}), moves)
        if (answer := panel.value) is None:
            raise SystemExit(f"{kind}, {control}: {panel.refusal}")
        drawing = time_calls(lambda _: answer.pictures(), moves)
    size = len(shown.outputs[-1].data["text/html"])
    return {"panel": kind, "control": control, "values": values, **timed, "drawing": drawing, "page_bytes": size}


def measure_live(moves: int) -> dict[str, Any]:
    """The seconds in which the page of a running run is made again: a loss of 2,000 steps, the memory of 8 ranks."""
    steps = [{"step": step, "loss": 8 - step / 1000 + step % 13 / 100} for step in range(1, 2001)]
    sizes: dict[str, Any] = {
        "bytes_per_rank": (60 * 2**30,) * 8,
        "forecast_bytes": 62 * 2**30,
        "limit_bytes": 80 * 2**30,
    }
    progress = Progress(step=2000, steps=4000, loss=6.0, bytes_are="allocated", **sizes)
    timed = time_calls(lambda _: page("run", "running", progress, steps, ""), moves)
    size = len(page("run", "running", progress, steps, ""))
    return {"panel": "live view", "control": "step", "values": (2000,), **timed, "drawing": timed, "page_bytes": size}


def time_calls(call: Callable[[int], Any], times: int) -> dict[str, list[float]]:
    """The seconds of each call by the clock, and on a processor: other work on the machine does not count there."""
    seconds, cpu_seconds = [], []
    for number in range(times):
        began, cpu_began = time.perf_counter(), time.process_time()
        call(number)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def table(found: dict[str, Any]) -> Table:
    """A row for each control that was moved."""
    rows = []
    for one in found["moved"]:
        ms = sorted(1e3 * seconds for seconds in one["seconds"])
        values, cpu = " / ".join(map(str, one["values"])), median_ms(one["cpu_seconds"])
        words = (f"{statistics.median(ms):.0f}", f"{ms[0]:.0f} to {ms[-1]:.0f}", f"{cpu:.0f}")
        drawing, size = median_ms(one["drawing"]["cpu_seconds"]), one["page_bytes"] / 1024
        rows.append((one["panel"], one["control"], values, *words, f"{drawing:.0f}", f"{size:.0f}"))
    slow = [
        f"{one['panel']} ({one['control']})" for one in found["moved"] if statistics.median(one["seconds"]) > TARGET
    ]
    said = f"missed by {', '.join(slow)}" if slow else "reached by each"
    before, after = found["load"]
    notes = [
        f"ms: of {len(found['moved'][0]['seconds'])} moves each, to the page that the kernel sends; CPU: without other processes.",
        f"Load of the machine (1 minute): {before:.2f} before, {after:.2f} after.",
        f"Target: a median under {1e3 * TARGET:.0f} ms: {said}.",
    ]
    columns = ("panel", "control", "between", "median, ms", "range", "CPU, ms", "drawing, CPU ms", "page, KiB")
    return Table(title=f"A moved control, on {HARDWARE}, warm", columns=columns, rows=rows, notes=notes)


def median_ms(seconds: list[float]) -> float:
    """The median in milliseconds."""
    return 1e3 * statistics.median(seconds)


def main() -> None:
    """Measure, print the table, write both files."""
    made = parser(__doc__)
    made.add_argument("--moves", type=int, default=20)
    arguments = parse(made, moves=2)
    InteractiveShell.instance()
    before = os.getloadavg()[0]
    moved = [
        measure(kind, control, values, arguments.moves)
        for kind, controls in (SMOKE if arguments.smoke else MOVED).items()
        for control, values in controls.items()
    ]
    moved.append(measure_live(arguments.moves))
    found = {**about(), "hardware": HARDWARE, "moved": moved, "load": (before, os.getloadavg()[0])}
    text = table(found).text()
    write_results(arguments.results, "sliders", "A moved slider", found, text)
    print(text)


if __name__ == "__main__":
    main()
