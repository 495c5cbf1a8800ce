"""The numbers of a run: `StepLog`, `evaluate()`, and `log()` for a loop of your own."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.atomic_io import append_line, cut_events
from toolkit.core.errors import ToolkitError
from toolkit.core.process_lifecycle import StopSignal
from toolkit.core.units import format_bytes
from toolkit.data import hash_ids
from toolkit.engines.base import engine_of
from toolkit.engines.records import Prepared
from toolkit.run_folder.run_lock import RUN_DIR
from toolkit.training.loop import Step, shifted, trained_tokens
from toolkit.training.setup import on_any_rank

if TYPE_CHECKING:
    from toolkit.training.loop import Batch
    from toolkit.training.rank_run import RankRun

_STARTED = time.perf_counter()
OURS = ("bytes", "attempt", "samples", "skipped")
"""Keys of `events.jsonl` that no figure may use."""

STOP_EVERY = 4
"""Batches of an evaluation between two looks at the stop signal of all ranks."""

_last_log: dict[str, float] = {}
_signals = StopSignal()


class StepLog:
    """Writes each step into the run's `events.jsonl` and on a progress bar, both on the main process."""

    def __init__(self, run: RankRun) -> None:
        from tqdm import tqdm

        self._run, self._steps, self._main = run, run.job.train_config.total_steps, run.rank == 0
        label = run.job.strategy.label
        self._bar = tqdm(
            total=self._steps, initial=run.start, desc=label, unit="step", disable=not self._main, mininterval=0.5
        )

    def record(self, step: Step) -> None:
        """Write one step."""
        if not self._main:
            return
        fields = {name: value for name, value in vars(step).items() if name not in ("gradients", "request")}
        samples = hash_ids(self._run.preflight.sample_ids(step.step))
        self._run.folder.append_event({**fields, "attempt": self._run.attempt, "samples": samples})
        sizes = [size for rank in step.bytes for name, size in rank.items() if name in ("rss", "allocated") and size]
        speed, size = f"{step.tokens / step.seconds:,.0f} tokens/s", format_bytes(max(sizes, default=0))
        self._bar.set_postfix_str(f"loss {step.loss:.4f}, {speed}, {size} a rank", refresh=False)
        self._bar.update()
        if step.skipped:
            self._bar.write(f"step {step.step}: fp16 overflowed, and the step was skipped")
        if step.step == self._steps or step.stops:
            self._bar.close()


def evaluate(prepared: Prepared, loader: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> float | None:
    """Return the mean cross-entropy in nats over all trained tokens of all ranks' batches. A collective.

    Args:
        prepared: model and optimizer after `prepare`.
        loader: this rank's batches; every rank has equally many.
        stop: called before every fourth batch, where the host waits for the device. Where any rank's returns true, the
            result is None.
    """
    import torch

    job, accelerator, engine = prepared.job, prepared.accelerator, engine_of(prepared.job.strategy)
    sums, stopped = torch.zeros(2, dtype=torch.float64, device=accelerator.device), False
    prepared.model.eval()
    for number, batch in enumerate(loader):
        if number % STOP_EVERY == 0 and (stopped := on_any_rank(stop())):
            break
        batch = shifted(batch, prepared)
        sums[0] += sum(engine.evaluate(prepared, [batch]))
        sums[1] += trained_tokens(batch)
    prepared.model.train()
    if stopped:
        return None
    coordinates = job.coordinates(accelerator.process_index)
    if coordinates.tp or coordinates.pp:  # another rank of the group counts the same rows
        sums.zero_()
    total, tokens = accelerator.reduce(sums, reduction="sum").tolist()
    return float(total / tokens) if tokens else math.nan


def log(step: int, *, steps: int | None = None, **values: float) -> None:
    """Add a line to the `events.jsonl` of this process's run; rank 0 alone writes.

    For a loop of your own, in a script or function that `tk.launch` started: `loss`, `tokens` and all other values appear in
    the live view, `Run.metrics` and the report. In other processes it does nothing.

    Args:
        step: number of the step that is done, from 1.
        steps: their total number, for the bar and the remaining time.
        values: figures, numbers or tensors of one element. A line with `loss` is a step, one with `eval_loss` an
            evaluation. `tokens` counts all ranks; `seconds` defaults to the time since the last call.

    In a resumed run, the first call drops an earlier attempt's lines from that step on.

    Raises:
        ToolkitError: for a value that is not a number, and for a name that the toolkit uses.
    """
    path = os.environ.get(RUN_DIR)
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    figures = {name: _number(name, value) for name, value in values.items()}
    try:
        step = operator.index(step)
    except TypeError:
        raise ToolkitError(f"log: step {step!r} is not a whole number. Count steps from 1.") from None
    now, events = time.perf_counter(), Path(path, "events.jsonl")
    if not _last_log:
        cut_events(events, step - 1)
    event = {"step": step, "seconds": now - _last_log.get("time", _STARTED)}
    _last_log["time"] = now
    append_line(events, event | ({} if steps is None else {"steps": steps}) | figures)


def _number(name: str, value: Any) -> float:
    if name in OURS:
        raise ToolkitError(f"log: {name!r} is a name of the toolkit's own. Give the figure another one.")
    with contextlib.suppress(ValueError, RuntimeError):  # of several elements
        value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float) or (name == "seconds" and not math.isfinite(value)):
        raise ToolkitError(f"log: {name}={value!r} is not a number. Pass a number, or a tensor of one element.")
    return int(value) if isinstance(value, bool) else value


def should_stop() -> bool:
    """Return whether this run was asked to stop, the same on every rank. Call it on all ranks, once a step.

    For a loop of your own, like `log`. When it is true, save what you need and return. From the first call on, signals wait for
    the loop; ranks that have not ended 30 s later are killed. Without calls, a signal ends a rank at once.
    """
    if RUN_DIR not in os.environ:
        return False
    if not _signals.listening:
        _signals.__enter__()
    return on_any_rank(_signals.number is not None)
