"""The live view of a run: one output that a thread brings up to date until the run has ended, and a button that stops it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.launching import Run

EVERY = 0.5
"""Seconds between two updates: a page that redraws more often stutters."""

_shown: dict[str, int] = {}
"""Folder → number of the cell whose output shows it already."""


def show(run: Run) -> None:
    """Display a run. The output is plain HTML, so that a saved notebook still shows how the run ended.

    While it goes a thread updates it in place, and the kernel stays free; where ipywidgets is installed there is a button.
    """
    from IPython.core.getipython import get_ipython
    from IPython.display import HTML, display

    shell: Any = get_ipython()
    cell = int(getattr(shell, "execution_count", 0))
    if _shown.get(str(run.folder)) == cell and not run.alive:
        return
    _shown[str(run.folder)] = cell
    # Asked before the page is made: what ends in between is shown as running, and at once brought up to date.
    alive = run.alive
    button = _button(run) if alive else None
    if button is not None:
        display(button)
    elif alive:
        display(HTML("<p><code>run.stop()</code> stops it. For a button: <code>pip install ipywidgets</code></p>"))
    handle: Any = display(HTML(run._repr_html_()), display_id=True)
    if alive:
        threading.Thread(target=_follow, args=(run, handle, button), name=f"live {run.folder}", daemon=True).start()


def _follow(run: Run, handle: Any, button: Any) -> None:
    from IPython.display import HTML

    before, ended = "", threading.Event()
    while True:
        alive = run.alive
        with contextlib.suppress(ToolkitError, OSError):  # a line that is being written
            page = run._repr_html_()
            if page != before:
                handle.update(HTML(page))
                before = page
        if not alive:
            break
        ended.wait(EVERY)
    if button is not None:
        button.disabled = True
        button.description = "Ended"


def _button(run: Run) -> Any:
    """Stops the run: it ends its step and publishes a checkpoint. None where ipywidgets is not installed."""
    try:
        from ipywidgets import Button, Layout
    except ImportError:
        return None
    made = Button(
        description="Stop",
        tooltip=f"End the step, publish a checkpoint and stop {run.folder}",
        icon="stop",
        button_style="warning",
        layout=Layout(width="auto"),
    )

    def stop(_: Any) -> None:
        made.disabled, made.description = True, "Stopping…"
        threading.Thread(target=_stop, args=(run,), name=f"stop {run.folder}", daemon=True).start()

    made.on_click(stop)
    return made


def _stop(run: Run) -> None:
    with contextlib.suppress(ToolkitError):  # it may have ended meanwhile, and the view says how
        run.stop()
