"""The begin and the end of every action of a rank's last steps, as its device runs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toolkit.engines.played import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action

if TYPE_CHECKING:
    import torch
    from torch.distributed.pipelining import PipelineStage

KEPT_STEPS = 9
"""Steps that a rank keeps: a few, so that one which something else disturbed is not the one that is shown."""


class Stopwatch:
    """Wraps what torch's schedules call. A CPU's clock is read; on a GPU events lie in the stream, and nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        """Start without a step."""
        self._device = device
        self._steps: deque[list[tuple[Action, Any, Any]]] = deque(maxlen=KEPT_STEPS)

    def begin_step(self) -> None:
        """Begin the next step."""
        self._steps.append([])

    def time(self, stage: PipelineStage) -> None:
        """Time the actions of a stage: its own methods, without the transfers before and after them."""
        for name, kind in (("forward", FORWARD), ("backward", BACKWARD), ("backward_weight", BACKWARD_WEIGHT)):
            call = getattr(stage, f"{name}_one_chunk")
            setattr(stage, f"{name}_one_chunk", self._timed(call, kind, stage.stage_index))

    def _timed(self, call: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def run(micro: int, *args: Any, **options: Any) -> Any:
            begin = self._now()
            result = call(micro, *args, **options)
            action = Action(kind if options.get("full_backward", True) else BACKWARD_INPUT, stage, micro)
            self._steps[-1].append((action, begin, self._now()))
            return result

        return run

    def _now(self) -> Any:
        """Return the instant, or on a GPU an event."""
        import torch

        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def steps(self) -> list[list[tuple[Action, float, float]]]:
        """Return the kept steps, in seconds of the hosts' common clock. On a GPU it waits until they are computed."""
        import torch

        last, cuda = self._now(), self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
            last_at = time.perf_counter()
        epoch = _epoch()

        def seconds(instant: Any) -> float:
            return epoch + (last_at - float(instant.elapsed_time(last)) / 1000 if cuda else float(instant))

        steps = [[(action, seconds(begin), seconds(end)) for action, begin, end in step] for step in self._steps]
        return [step for step in steps if len(step) == max(map(len, steps))]  # one that failed has fewer


def _epoch() -> float:
    """Return the time at which `time.perf_counter` was 0. Of several readings the quickest counts: nothing interrupted it."""
    readings = []
    for _ in range(20):
        before, now, after = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after - before, now - (before + after) / 2))
    return min(readings)[1]
