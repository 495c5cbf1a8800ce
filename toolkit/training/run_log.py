"""Lines of a run of your own: `log()`, and the steps that its optimizer takes."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import time
from pathlib import Path
from types import MethodType
from typing import Any

from toolkit.core.atomic_io import append_line, cut_events, last_step
from toolkit.core.errors import ToolkitError
from toolkit.run_folder.run_lock import RUN_DIR

RESERVED_NAMES = ("bytes", "attempt", "samples", "skipped")
"""Keys of `events.jsonl` that no figure may use."""

_STARTED = time.perf_counter()
_times: dict[str, float] = {}
"""When the first step began (`begin`), when `log` was called and a step was counted last; steps before and with those counted."""


def begin() -> None:
    """Note that an optimizer is prepared: from here on the time is that of steps."""
    _times.setdefault("begun", time.perf_counter())


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
    if (events := _events()) is None:
        return  # before a tensor is read, which waits for the device
    figures = {name: _number(name, value) for name, value in values.items()}
    try:
        step = operator.index(step)
    except TypeError:
        raise ToolkitError(f"log: step {step!r} is not a whole number. Count steps from 1.") from None
    now = time.perf_counter()
    if "log" not in _times:
        cut_events(events, step - 1)
        since = "previous" if step <= _times.get("steps", 0) else "counted"
        _times["log"] = _times.get(since, _times.get("begun", _STARTED))
    seconds, _times["log"] = now - _times["log"], now
    append_line(events, {"step": step, "seconds": seconds} | ({} if steps is None else {"steps": steps}) | figures)


def count_step() -> None:
    """Count a step of a user's own loop, as a line without figures, until the loop gives its own with `log`."""
    if "log" in _times or (events := _events()) is None:
        return
    now = time.perf_counter()
    if "steps" not in _times:  # an earlier attempt's lines stay: which step the loop went on from, it alone knows
        _times["steps"] = last_step(events) if events.exists() else 0
    _times["steps"] += 1
    _times["previous"], _times["counted"] = _times.get("counted", _times.get("begun", _STARTED)), now
    append_line(events, {"step": int(_times["steps"]), "seconds": now - _times["previous"], "loss": None})


def count_steps(optimizer: Any) -> None:
    """Count the steps of an optimizer that an `accelerate.Accelerator` has prepared."""
    upstream = optimizer.step

    def step(optimizer: Any, *args: Any, **options: Any) -> Any:
        result = upstream(*args, **options)
        if optimizer.gradient_state.sync_gradients:
            count_step()
        return result

    optimizer.step = MethodType(step, optimizer)  # a bound method: torch's schedulers read its `__func__`
    begin()


def _events() -> Path | None:
    """Return the file of this process's lines; None where it writes none."""
    path = os.environ.get(RUN_DIR)
    return None if path is None or os.environ.get("RANK", "0") != "0" else Path(path, "events.jsonl")


def _number(name: str, value: Any) -> float:
    if name in RESERVED_NAMES:
        raise ToolkitError(f"log: {name!r} is a name of the toolkit's own. Give the figure another one.")
    with contextlib.suppress(ValueError, RuntimeError):  # of several elements
        value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float) or (name == "seconds" and not math.isfinite(value)):
        raise ToolkitError(f"log: {name}={value!r} is not a number. Pass a number, or a tensor of one element.")
    return int(value) if isinstance(value, bool) else value
