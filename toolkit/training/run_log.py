"""Lines of a run of your own: `log()`, and the steps that its optimizer takes."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import time
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import append_line, cut_events
from toolkit.core.errors import ToolkitError
from toolkit.run_folder.run_lock import RUN_DIR

OURS = ("bytes", "attempt", "samples", "skipped")
"""Keys of `events.jsonl` that no figure may use."""

_STARTED = time.perf_counter()
_times: dict[str, float] = {}
"""When `log` was called and a line was written last; steps that were counted."""


def log(step: int, *, steps: int | None = None, **values: float) -> None:
    """Add a line to the `events.jsonl` of this process's run; rank 0 alone writes.

    For a loop of your own, in a script or function that `tk.launch` started: `loss`, `tokens` and all other values appear in
    the live view, `Run.metrics` and the report. In other processes it does nothing.

    Args:
        step: number of the step that is done, from 1.
        steps: their total number, for the bar and the remaining time.
        values: figures, numbers or tensors of one element. A line with `loss` is a step, one with `eval_loss` an
            evaluation. `tokens` counts all ranks; `seconds` defaults to the time since the last call.

    Until the first call, the steps of a prepared optimizer are counted, without figures. In a resumed run, the first call drops
    an earlier attempt's lines from that step on.

    Raises:
        ToolkitError: for a value that is not a number, and for a name that the toolkit uses.
    """
    figures = {name: _number(name, value) for name, value in values.items()}
    try:
        step = operator.index(step)
    except TypeError:
        raise ToolkitError(f"log: step {step!r} is not a whole number. Count steps from 1.") from None
    first, _times["log"] = "log" not in _times, time.perf_counter()
    _write({"step": step} | ({} if steps is None else {"steps": steps}) | figures, first=first)


def count_step() -> None:
    """Count a step of a user's own loop, as a line without figures, until the loop gives its own with `log`."""
    if "log" not in _times:
        _times["count"] = _times.get("count", 0) + 1
        _write({"step": int(_times["count"]), "loss": None}, first=_times["count"] == 1)


def _write(event: dict[str, Any], first: bool) -> None:
    """Add a line with the seconds since the last one. The first drops an earlier attempt's lines from its step on."""
    path = os.environ.get(RUN_DIR)
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    now, events = time.perf_counter(), Path(path, "events.jsonl")
    if first:
        cut_events(events, event["step"] - 1)
    seconds, _times["line"] = now - _times.get("line", _STARTED), now
    append_line(events, {"step": event["step"], "seconds": seconds} | event)


def _number(name: str, value: Any) -> float:
    if name in OURS:
        raise ToolkitError(f"log: {name!r} is a name of the toolkit's own. Give the figure another one.")
    with contextlib.suppress(ValueError, RuntimeError):  # of several elements
        value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float) or (name == "seconds" and not math.isfinite(value)):
        raise ToolkitError(f"log: {name}={value!r} is not a number. Pass a number, or a tensor of one element.")
    return int(value) if isinstance(value, bool) else value
