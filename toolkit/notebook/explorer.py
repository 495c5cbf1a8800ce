"""`explore()` → `Explorer`: controls over a function of the shell's, and its answer as plain HTML beneath them."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core import background
from toolkit.core.display import Result
from toolkit.core.errors import StrategyError, ToolkitError, nearest
from toolkit.core.process_lifecycle import die_with_parent
from toolkit.devices.machine import Hardware
from toolkit.forecasting import forecast
from toolkit.forecasting.diffs import diff_forecasts
from toolkit.forecasting.dtype_reports import dtype_report
from toolkit.forecasting.timelines import timeline
from toolkit.notebook.answer_panel import AnswerPanel, unknown_control
from toolkit.notebook.explorer_state import CONTROLS, Choice, ExplorerState, choices, command, train_command


def _memory(state: ExplorerState) -> Result:
    return forecast(state.spec, state.strategy, state.machine, state.train_config)


def _compare(state: ExplorerState) -> Result:
    both = (state.strategy, state.against)
    return diff_forecasts(*(forecast(state.spec, one, state.machine, state.train_config, advice=False) for one in both))


def _timeline(state: ExplorerState) -> Result:
    return timeline(state.spec, state.strategy, state.machine, state.train_config, run=state.run)


def _precision(state: ExplorerState) -> Result:
    return dtype_report(state.spec, state.strategies, state.machine, state.train_config, run=state.run)


VIEWS: dict[str, tuple[Callable[[ExplorerState], Result], str]] = {
    "memory": (_memory, "Memory per rank"),
    "compare": (_compare, "Two strategies side by side"),
    "timeline": (_timeline, "A step, phase by phase"),
    "precision": (_precision, "Who keeps what in which dtype"),
}
"""Kind of panel → the function of its answer, and its heading."""

SIDE_BY_SIDE = ("timeline", "precision")
"""The kinds that show a run with its forecast."""


class Explorer(AnswerPanel):
    """A panel over a forecast's request: `controls` by name, `value` (the answer to where they stand), `static_html()`."""

    def __init__(self, kind: str, state: ExplorerState, controls: Sequence[str] | None = None) -> None:
        """Answer once, and make the named controls; None: all of the kind."""
        self.kind = kind
        self.state = state
        self.names = CONTROLS[kind] if controls is None else tuple(controls)
        """The controls that this panel has."""
        self._ahead: subprocess.Popen[bytes] | None = None
        for name in set(self.names) - set(CONTROLS[kind]):
            raise unknown_control(kind, name, CONTROLS[kind])
        super().__init__(kind, VIEWS[kind][1], continuous=("devices",))

    @property
    def sentence(self) -> str:
        """The answer, or the refusal, in a sentence."""
        return self.refusal or str(getattr(self.value, "reason", ""))

    def choices(self) -> list[Choice]:
        """Return the controls' choices at the current values, in order."""
        return [choice for choice in choices(self.kind, self.state) if choice.name in self.names]

    def _move(self, values: Mapping[str, Any]) -> None:
        self.state = self.state.but(**values)

    def _compute(self) -> Any:
        return VIEWS[self.kind][0](self.state)

    def _key(self) -> Any:
        return tuple(self.state.values.items()) if self.state.run is None else None  # a run may still be running

    def _command(self) -> str:
        return command(self.kind, self.state)

    def _train_command(self) -> str | None:
        # The others are over several strategies.
        return train_command(self.state) if self.kind in ("memory", "timeline") else None

    def _after(self, names: Collection[str] = ()) -> None:
        """Trace for the other sequence lengths in the background."""
        if set(names) == {"seq_len"} or "seq_len" not in self.names or not background.allowed():
            return
        if self._ahead is not None:
            self._ahead.terminate()
            self._ahead.wait()
        self._ahead = start_prefetch(self.kind, self.state)


def explore(
    kind: str = "memory",
    model: Any = None,
    hardware: Hardware | str | None = None,
    strategy: Strategy | None = None,
    train_config: TrainConfig | None = None,
    *,
    against: Strategy | None = None,
    run: Any = None,
    controls: Sequence[str] | None = None,
) -> Explorer:
    """Return a panel with controls that change a forecast's request. It shows itself in a notebook.

    Args:
        kind: `memory` (bytes by part and the limit), `compare` (two strategies), `timeline` (a step phase by phase), or
            `precision` (dtypes by stage).
        model: what `describe` takes, or several of these; by default the run's, or the embedded one.
        hardware: the machine, or its name; by default this one.
        strategy: the controls' first values.
        train_config: the same.
        against: for `compare`, the second strategy.
        run: for `timeline` and `precision`, a run's folder (or a `Run`) to show with the forecast.
        controls: names of the controls to show, such as `["sharding", "devices"]`; by default all of the kind.

    Raises:
        ToolkitError: for an unknown kind, control, model or machine. An impossible request is a sentence in the panel.
    """
    if kind not in VIEWS:
        raise StrategyError(f"explore {kind!r}: expected one of {', '.join(VIEWS)}.{nearest(kind, VIEWS)}")
    if run is not None and kind not in SIDE_BY_SIDE:
        raise StrategyError(f"run: {kind} does not show a run. Use {' or '.join(SIDE_BY_SIDE)}.")
    state = ExplorerState.begin(kind, model, hardware, strategy, train_config, against=against, run=run)
    return Explorer(kind, state, controls)


# Answers ahead --------------------------------------------------------------------------------------------------------

PREFETCH = "from toolkit.notebook.explorer import prefetch; prefetch()"
"""The program of the child process."""

PREFETCH_DELAY = 1.0
"""Seconds before it begins: a control that still moves makes the state out of date."""


def start_prefetch(kind: str, state: ExplorerState) -> subprocess.Popen[bytes]:
    """Start a child process that answers for every other position of the sequence slider: each is another trace.

    The traces stay in the cache on disk, so that the panel itself answers at once. The child ends with its work or with this
    process. Terminate it when the state is out of date.
    """
    command = [sys.executable, "-P", "-c", PREFETCH, str(os.getpid())]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(pickle.dumps((kind, state)))
    return process


def lengths_ahead(kind: str, state: ExplorerState) -> list[int]:
    """Return the slider's other sequence lengths, the nearest first."""
    sliders = [choice for choice in choices(kind, state) if choice.name == "seq_len"]
    others = [value for slider in sliders for value in slider.values if value != slider.value]
    return sorted(others, key=lambda length: abs(math.log(length / state.values["seq_len"])))


def prefetch() -> None:
    """Answer for each length. The argument is the parent's process id; kind and state come pickled on standard input."""
    die_with_parent(int(sys.argv[1]))
    os.nice(19)
    kind, state = pickle.load(sys.stdin.buffer)
    time.sleep(PREFETCH_DELAY)
    for length in lengths_ahead(kind, state):
        with contextlib.suppress(ToolkitError):
            VIEWS[kind][0](state.but(seq_len=length))
