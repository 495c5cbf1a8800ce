"""The live view of a run: one output that a thread brings up to date until the run has ended, and a button that stops it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from toolkit.drawing import portable
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
    remove = _button(run) if alive else None
    if alive and remove is None:
        display(HTML("<p><code>run.stop()</code> stops it. For a button: <code>pip install ipywidgets</code></p>"))
    handle: Any = display(HTML(run._repr_html_()), display_id=True)
    if alive:
        threading.Thread(target=_follow, args=(run, handle, remove), name=f"live {run.folder}", daemon=True).start()


def _follow(run: Run, handle: Any, remove: Callable[[], None] | None) -> None:
    from IPython.display import HTML

    before, ended = "", threading.Event()
    while True:
        alive = run.alive
        with contextlib.suppress(ToolkitError, OSError):  # a line that is being written
            page = portable(run._repr_html_())
            if page != before:
                handle.update(HTML(page))
                before = page
        if not alive:
            break
        ended.wait(EVERY)
    if remove is not None:
        remove()


def _button(run: Run) -> Callable[[], None] | None:
    """Show a button that stops the run: it ends its step and publishes a checkpoint.

    What comes back takes it away: a notebook that was saved with a widget shows an error in its place where another kernel
    opens it. None where ipywidgets is not installed.
    """
    try:
        from ipywidgets import Button, Layout
    except ImportError:
        return None
    from IPython.display import HTML, display

    made = Button(
        description="Stop",
        tooltip=f"End the step, publish a checkpoint and stop {run.folder}",
        icon="stop",
        button_style="danger",
        layout=Layout(width="auto"),
    )
    # ipykernel 7 hands a widget's messages to the shell that made it, which hears none while a cell runs, as run.wait() does.
    # Without that note they go where JupyterLab sends them: to a shell of their own.
    with contextlib.suppress(AttributeError):
        del made.comm._reply_subshell_id

    def stop(_: Any) -> None:
        made.disabled, made.description = True, "Stopping…"
        threading.Thread(target=_stop, args=(run,), name=f"stop {run.folder}", daemon=True).start()

    made.on_click(stop)
    shown = {**made._repr_mimebundle_(), "text/plain": "run.stop() stops it."}
    handle: Any = display(shown, raw=True, display_id=True)

    def remove() -> None:
        handle.update(HTML(""))
        made.close()

    return remove


def _stop(run: Run) -> None:
    with contextlib.suppress(ToolkitError):  # it may have ended meanwhile, and the view says how
        run.stop()
