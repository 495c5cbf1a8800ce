"""`explore()` → `Explorer`: controls over a function of the shell's, and its answer as plain HTML beneath them."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, markup, render
from toolkit.core.errors import StrategyError, ToolkitError, nearest
from toolkit.core.process_lifecycle import die_with_parent
from toolkit.core.redaction import redact
from toolkit.devices.machine import Hardware
from toolkit.forecasting import forecast
from toolkit.forecasting.diffs import diff_forecasts
from toolkit.forecasting.dtype_reports import dtype_report
from toolkit.forecasting.timelines import timeline
from toolkit.notebook.explorer_state import CONTROLS, ExplorerState, choices, command

FIX = (
    "Sliders need ipywidgets and anywidget: `pip install ipywidgets anywidget`, then restart the kernel. "
    "Until then this is the answer alone."
)
NEEDED = ("ipywidgets", "anywidget")


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


class Explorer:
    """A panel: `controls` by name, `value` (the answer to where they stand), `static_html()` (the same as static HTML)."""

    def __init__(self, kind: str, state: ExplorerState) -> None:
        """Answer once, and make controls where ipywidgets and anywidget are installed."""
        self.kind = kind
        self.state = state
        self.value: Result | None = None
        """The answer; None for an impossible request."""
        self.refusal = ""
        """Why it cannot be, in a sentence."""
        self.controls: dict[str, Any] = {}
        self.panel: Any = None
        """The widget with the controls; None without ipywidgets."""
        self._shown: Any = None
        """The display of all cells that show the answer; None before the first does."""
        self._ahead: subprocess.Popen[bytes] | None = None
        self._answer()
        if all(importlib.util.find_spec(name) for name in NEEDED):
            from toolkit.notebook.widgets import Panel

            self.panel = Panel(VIEWS[kind][1], choices(kind, state), self.set)
            self.controls = self.panel.controls
            self.panel.announce(self.sentence)

    @property
    def sentence(self) -> str:
        """The answer, or the refusal, in a sentence."""
        return self.refusal or str(getattr(self.value, "reason", ""))

    def set(self, **values: Any) -> None:
        """Change values, as a moved control does.

        Raises:
            ToolkitError: for a control that this panel does not have. A value that cannot be is a `refusal`.
        """
        names = CONTROLS[self.kind]
        for name in values.keys() - set(names):
            raise ToolkitError(f"{self.kind} has no control {name!r}.{nearest(name, names)} It has {', '.join(names)}.")
        self.state = self.state.but(**values)
        if self.panel is None:
            self._answer()
        else:
            for choice in choices(self.kind, self.state):
                if choice.name in values.keys() & self.controls.keys():
                    self.panel.move(choice)
            with self.panel.busy():
                self._answer()
            self.panel.announce(self.sentence)
        if self._shown is not None:
            self._shown.update(_html(self.static_html()))
            if values.keys() != {"seq_len"}:
                self._look_ahead()

    def _answer(self) -> None:
        """Compute the answer to the state's request. An impossible request sets `refusal`: a panel shows no traceback."""
        self.value, self.refusal = None, ""
        try:
            self.value = VIEWS[self.kind][0](self.state)
        except ToolkitError as error:
            self.refusal = str(error)

    def _look_ahead(self) -> None:
        """Trace for the other sequence lengths in the background."""
        if self._ahead is not None:
            self._ahead.terminate()
            self._ahead.wait()
        self._ahead = start_prefetch(self.kind, self.state)

    def static_html(self) -> str:
        """Return HTML that needs no kernel, script or network, and the equivalent command."""
        hint = "" if self.panel is not None else FIX
        parts = _figures_and_tables(self.value)
        page = render("explorer", sentence=self.sentence, command=command(self.kind, self.state), hint=hint, **parts)
        return redact(page)

    def __repr__(self) -> str:
        """Return the answer as text."""
        return str(self.value) if self.value is not None else self.refusal

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """Return controls for a page with their kernel, and static HTML for others."""
        bundle = {"text/plain": repr(self), "text/html": self.static_html()}
        view = "application/vnd.jupyter.widget-view+json"
        if self.panel is not None:
            bundle[view] = self.panel.box._repr_mimebundle_(**options)[view]
        return bundle

    def _ipython_display_(self) -> None:
        """Show controls and answer as two outputs: the answer stays when the controls' kernel is gone.

        A page with ipywidgets and without that kernel shows «model not found» for a widget, and hides the rest of its
        output.
        """
        from IPython.display import display

        if self.panel is None:
            display(self._repr_mimebundle_(), raw=True)
            return
        view = "application/vnd.jupyter.widget-view+json"
        hint = "Controls show while the notebook's kernel runs: run this cell. Below is where they stood."
        bundle = {view: self._repr_mimebundle_()[view], "text/html": f"<p>{hint}</p>", "text/plain": hint}
        display(bundle, raw=True)
        answer = {"text/html": self.static_html(), "text/plain": repr(self)}
        if self._shown is None:
            self._shown = display(answer, raw=True, display_id=True)
            self._look_ahead()
        else:
            self._shown.display(answer, raw=True)


WIDE_LETTERS = 60
"""Letters of a cell, from which a table stands below the pictures."""


def _figures_and_tables(value: Result | None) -> dict[str, list[Any]]:
    """Return pictures, tables that stand at their side, and wide tables that stand below."""
    parts: dict[str, list[Any]] = {"pictures": [], "narrow": [], "wide": []}
    if value is None:
        return parts
    parts["pictures"] = [markup(picture) for picture in value.pictures()]
    for table in value.tables():
        table = replace(table, rows=list(table.rows))
        long = len(table.columns) > 5 or any(len(str(cell)) > WIDE_LETTERS for row in table.rows for cell in row)
        parts["wide" if long else "narrow"].append(markup(table.html()))
    return parts


def _html(page: str) -> Any:
    from IPython.display import HTML

    return HTML(page)


def explore(
    kind: str = "memory",
    model: Any = None,
    hardware: Hardware | str | None = None,
    strategy: Strategy | None = None,
    train_config: TrainConfig | None = None,
    *,
    against: Strategy | None = None,
    run: Any = None,
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

    Raises:
        ToolkitError: for an unknown kind, model or machine. An impossible request is a sentence in the panel.
    """
    if kind not in VIEWS:
        raise StrategyError(f"explore {kind!r}: expected one of {', '.join(VIEWS)}.{nearest(kind, VIEWS)}")
    if run is not None and kind not in SIDE_BY_SIDE:
        raise StrategyError(f"run: {kind} does not show a run. Use {' or '.join(SIDE_BY_SIDE)}.")
    return Explorer(kind, ExplorerState.begin(kind, model, hardware, strategy, train_config, against=against, run=run))


# Answers ahead --------------------------------------------------------------------------------------------------------

PREFETCH = "from toolkit.notebook.explorer import prefetch; prefetch()"
"""The program of the child process."""

PAUSE = 1.0
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
    time.sleep(PAUSE)
    for length in lengths_ahead(kind, state):
        with contextlib.suppress(ToolkitError):
            VIEWS[kind][0](state.but(seq_len=length))
