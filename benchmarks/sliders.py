"""How long a moved slider takes: `Explorer.set(...)` of every panel, until its page is written again; and a live view's page.

    python benchmarks/sliders.py                       # results into benchmarks/results/sliders.json and .md
    python benchmarks/sliders.py --notebooks           # every control of every notebook: sliders_notebooks.json and .md
    python benchmarks/sliders.py --smoke               # whether it still runs

Moved as a person does it: in a kernel's display, with widgets, back and forth between two values. Their traces exist
already. Answers that the panel keeps are dropped before each move.

Of a notebook all cells are run, and then each panel that they showed is moved to each value of each control, twice.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.core.display import Table
from toolkit.notebook.answer_panel import AnswerPanel
from toolkit.notebook.variation import Variation
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

        def move_to_new(move: int) -> None:
            panel.forget()
            panel.set(**{control: values[move % 2]})

        timed = time_calls(move_to_new, moves)
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


# The notebooks' own panels ----------------------------------------------------------------------------------------------

LAST_CELL = f"""import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sliders import measure_panels
print(json.dumps(measure_panels(Out.values())))"""
"""Follows a notebook's cells. `Out` has what they returned: a panel is the last line of its cell."""

MOST_VALUES = 6
"""Values of a control that are measured: its ends, and some between."""

COLUMNS = (
    "notebook",
    "panel",
    "control",
    "values",
    "first, ms",
    "CPU",
    "slowest, CPU",
    "again, ms",
    "CPU",
    "slowest, CPU",
)


def measure_panels(results: Iterable[Any]) -> list[dict[str, Any]]:
    """The seconds of each move of each control of the panels among the results of cells."""
    panels = {id(result): result for result in results if isinstance(result, AnswerPanel)}
    return [move_through(panel, name) for panel in panels.values() for name in panel.names]


def move_through(panel: AnswerPanel, name: str) -> dict[str, Any]:
    """The seconds of a move to each value of a control, and of a second move to each. The control returns to its start."""
    (choice,) = (choice for choice in panel.choices() if choice.name == name)
    others = [value for value in choice.values if value != choice.value]
    chosen = others[:: max(1, -(-len(others) // MOST_VALUES))] + others[-1:]
    values = list(dict.fromkeys(chosen))
    first, again = (time_calls(lambda move: panel.set(**{name: values[move]}), len(values)) for _ in range(2))
    panel.set(**{name: choice.value})
    heading = panel._function.__name__ if isinstance(panel, Variation) else panel._name
    about = {"panel": heading, "explorer": not isinstance(panel, Variation), "control": name, "values": len(values)}
    return {**about, "first": first, "again": again}


def lessons() -> Any:
    """`notebooks/execute.py`, which is in no package."""
    sys.path.append(str(Path(__file__).parent.parent / "notebooks"))
    return importlib.import_module("execute")


def measure_notebook(source: Path) -> list[dict[str, Any]]:
    """Run a notebook in a kernel and folder of its own, and move its panels."""
    module = lessons()
    notebook = module.read(source)
    notebook.cells.append(copy.deepcopy(next(cell for cell in notebook.cells if cell.cell_type == "code")))
    notebook.cells[-1].update(source=LAST_CELL, id="controls")
    with tempfile.TemporaryDirectory(prefix="sliders-") as folder:
        module.execute(notebook, Path(folder), limit=1800)
    printed = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    return [{"notebook": source.stem[:2], **one} for one in json.loads(printed.strip().splitlines()[-1])]


def notebooks_table(found: dict[str, Any]) -> Table:
    """A row for each control of each notebook, and which of them miss the target."""
    rows, slow = [], []
    for one in found["moved"]:
        turns = [one[turn] for turn in ("first", "again")]
        figures = [
            f"{figure:.0f}"
            for turn in turns
            for figure in (median_ms(turn["seconds"]), median_ms(turn["cpu_seconds"]), 1e3 * max(turn["cpu_seconds"]))
        ]
        rows.append((one["notebook"], one["panel"], one["control"], str(one["values"]), *figures))
        if statistics.median(turns[one["explorer"]]["cpu_seconds"]) > TARGET:
            slow.append(f"{one['notebook']} {one['panel']} ({one['control']})")
    before, after = found["load"]
    notes = [
        "Medians. first: to each value for the first time; again: a second time, from what the panel keeps; "
        "CPU: without other processes. "
        "Explorers trace a model for some values the first time: "
        "they show that they do, and keep the trace.",
        f"Load of the machine (1 minute): {before:.2f} before, {after:.2f} after.",
        f"Target: a median of the processor's time under {1e3 * TARGET:.0f} ms, the first time, or for an explorer the second: "
        + (f"missed by {', '.join(slow)}." if slow else f"reached by each of {len(rows)}."),
    ]
    return Table(title="Each control of each notebook", columns=COLUMNS, rows=rows, notes=notes)


def main_notebooks(arguments: Any, before: float) -> None:
    """Measure the controls of the chosen notebooks, print the table, write both files."""
    moved = [one for source in lessons().sources(arguments.notebooks) for one in measure_notebook(source)]
    found = {**about(), "moved": moved, "load": (before, os.getloadavg()[0])}
    text = notebooks_table(found).text()
    write_results(arguments.results, "sliders_notebooks", "The controls of the notebooks", found, text)
    print(text)


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
    os.environ["TOOLKIT_BACKGROUND"] = "1"  # lengths are traced ahead, as they are for a person
    made = parser(__doc__)
    made.add_argument("--moves", type=int, default=20)
    made.add_argument(
        "--notebooks", nargs="*", metavar="NN", help="the notebooks' controls instead; by default of each"
    )
    arguments = parse(made, moves=2)
    before = os.getloadavg()[0]
    if arguments.notebooks is not None:
        return main_notebooks(arguments, before)
    InteractiveShell.instance()
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
