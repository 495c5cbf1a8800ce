"""`train_logged()`: training as it is seen: a line a step in `events.jsonl`, and a progress bar."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.atomic_io import append_line, cut_events
from toolkit.core.errors import ToolkitError
from toolkit.core.process_lifecycle import StopSignal
from toolkit.core.units import format_bytes
from toolkit.data import hash_ids
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared
from toolkit.run_folder.folder import Folder
from toolkit.training.loop import Step, StepRequest, no_request, train

if TYPE_CHECKING:
    from tqdm import tqdm

RUN_DIR = "TOOLKIT_RUN_DIR"
"""The environment variable that names the folder of the run to a rank that hosts a script or function."""

_STARTED = time.perf_counter()
OURS = ("bytes", "attempt", "samples", "skipped")
"""Names of a line in `events.jsonl` that say what no figure does."""

_last_log: dict[str, float] = {}
_signals = StopSignal()


def train_logged(
    prepared: Prepared,
    loader: Any,
    schedule: Any,
    *,
    folder: Folder,
    samples: Callable[[int], Sequence[int]],
    spelled: Callable[[Sequence[int]], str],
    start: int = 0,
    begin: Callable[[int], object] = lambda step: None,
    request: Callable[[], StepRequest] = no_request,
    attempt: int = 0,
) -> Iterator[Step]:
    """`train`, with a line a step in the run's `events.jsonl` and a progress bar, both by the main process.

    `samples` gives the ids of a step's samples, and `spelled` says of them in a message what a user can find.
    """

    def told(step: int) -> str:
        return spelled(samples(step))

    main = prepared.accelerator.is_main_process
    with _progress(prepared.job, start, shown=main) as bar:
        for step in train(prepared, loader, schedule, start=start, begin=begin, samples=told, request=request):
            if main:
                folder.append_event({**_event(step), "attempt": attempt, "samples": hash_ids(samples(step.step))})
                _show(bar, step)
            yield step


def log(step: int, *, steps: int | None = None, **values: float) -> None:
    """Add a line to the `events.jsonl` of the run that this process is a rank of; rank 0 alone writes.

    For a loop of your own, in a script or function that was started by `tk.launch`: `loss`, `tokens` and whatever else
    is given appear in the live view, `Run.metrics` and the report. Elsewhere it does nothing.

    Args:
        step: number of the step that was done, from 1.
        steps: how many there will be, for the bar and the time that is left.
        values: its figures, numbers or tensors of one element. A line with `loss` is a step, one with `eval_loss` an
            evaluation. `tokens` are those of all ranks; `seconds` is the time since the last call where it is left out.

    Of a run that goes on the first call says where: what an earlier attempt logged from that step on is dropped.

    Raises:
        ToolkitError: for a figure that is no number, and for a name that the toolkit uses itself.
    """
    path = os.environ.get(RUN_DIR)
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    figures = {name: _number(name, value) for name, value in values.items()}
    try:
        step = operator.index(step)
    except TypeError:
        raise ToolkitError(f"log: step {step!r} is no whole number. Count steps from 1.") from None
    now, events = time.perf_counter(), Path(path, "events.jsonl")
    if not _last_log:
        cut_events(events, step - 1)
    known = {"step": step, "seconds": now - _last_log.get("time", _STARTED)} | (
        {} if steps is None else {"steps": steps}
    )
    _last_log["time"] = now
    append_line(events, known | figures)


def _number(name: str, value: Any) -> float:
    if name in OURS:
        raise ToolkitError(f"log: {name!r} is a name of the toolkit's own. Give the figure another one.")
    with contextlib.suppress(ValueError, RuntimeError):  # of several elements
        value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float) or (name == "seconds" and not math.isfinite(value)):
        raise ToolkitError(f"log: {name}={value!r} is no number. Give a number, or a tensor of one element.")
    return int(value) if isinstance(value, bool) else value


def should_stop() -> bool:
    """Whether this run was asked to stop: the same answer on every rank, so all of them ask, once a step.

    For a loop of your own, as `log`. Where it says so, save what you need and return. From the first call on a signal waits for
    the loop to hear it; ranks that have not ended 30 s later are killed. Before, or where nobody asks, a signal ends a rank
    at once. Elsewhere it is False.
    """
    if RUN_DIR not in os.environ:
        return False
    import torch
    from accelerate import PartialState
    from accelerate.utils import reduce

    if not _signals.listening:
        _signals.__enter__()
    asked = torch.tensor(float(_signals.number is not None), device=PartialState().device)
    return bool(reduce(asked, reduction="sum").item())


def _event(step: Step) -> dict[str, Any]:
    return {name: value for name, value in vars(step).items() if name not in ("gradients", "wish")}


def _progress(asked: Job, start: int, *, shown: bool) -> tqdm[Any]:
    from tqdm import tqdm

    word, steps = asked.strategy.label, asked.train_config.steps
    return tqdm(total=steps, initial=start, desc=word, unit="step", disable=not shown, mininterval=0.5)


def _show(bar: tqdm[Any], step: Step) -> None:
    sizes = [size for rank in step.bytes for name, size in rank.items() if name in ("rss", "allocated") and size]
    bar.set_postfix_str(
        f"loss {step.loss:.4f}, {step.tokens / step.seconds:,.0f} tokens/s, {format_bytes(max(sizes, default=0))} a rank",
        refresh=False,
    )
    bar.update()
    if step.skipped:
        bar.write(f"step {step.step}: fp16 overflowed, and the step was skipped")
