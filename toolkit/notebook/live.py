"""The live view of a run: one output that a thread brings up to date until the run has ended, and a button that stops it."""

from __future__ import annotations

import contextlib
import html
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolkit.launcher import Run

UPDATE_SECONDS = 1.0
"""Seconds between two updates. A page takes a seventh of a second to draw, and the ranks may need every core."""


@dataclass(frozen=True)
class _View:
    """One display for all outputs that show a run, so that one message updates them all."""

    handle: Any
    removes: list[Callable[[], None]] = field(default_factory=list)
    """Takes the last cell's button away; empty without ipywidgets."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the run's end is shown."""


_shown: dict[str, int] = {}
"""Folder → the number of the cell that shows it."""

_followed: dict[str, _View] = {}
"""Folder → view of a running run."""

_logarithmic: set[str] = set()
"""Folders of runs that are shown with logarithmic axes."""

_lock = threading.Lock()
"""Protects `_followed`: a view that is added as its thread ends would miss the end."""


def show(run: Run) -> Callable[[float], object] | None:
    """Display a run in plain HTML, so that a saved notebook still shows how it ended.

    A thread updates it in place during the run, and the kernel stays free. With ipywidgets there are buttons, in the last cell
    that shows it: one stops the run, one makes the axes logarithmic.
    The returned function waits until the end is shown; None for a run that has ended.
    """
    from IPython.core.getipython import get_ipython
    from IPython.display import HTML, display

    shell: Any = get_ipython()
    cell, folder = int(getattr(shell, "execution_count", 0)), str(run.folder)
    if _shown.get(folder) == cell and not run.alive:
        return None
    _shown[folder] = cell
    # Checked before the page is made: a run that ends in between is shown as running, and updated at once.
    if not run.alive:
        display(HTML(run.view(log=folder in _logarithmic)))
        return None
    remove = _button(run)
    if remove is None:
        display(HTML("<p><code>run.stop()</code> stops it. For a button: <code>pip install ipywidgets</code></p>"))
    page = HTML(run.view(log=folder in _logarithmic))
    with _lock:
        view = _followed.get(folder)
        if view is not None:
            view.handle.display(page)
        else:
            view = _followed[folder] = _View(display(page, display_id=True))
            threading.Thread(target=_follow, args=(folder, run, view), name=f"live {folder}", daemon=True).start()
        before = view.removes[:]
        view.removes[:] = [remove] if remove is not None else []
    for remove_before in before:
        remove_before()
    return view.ended.wait


def _follow(folder: str, run: Run, view: _View) -> None:
    """Update the view until the run has ended, through partial lines and slow disks."""
    from IPython.display import HTML

    before, alive = "", True
    while alive:
        with contextlib.suppress(Exception):
            alive = run.alive
        if not alive:
            with _lock:
                del _followed[folder]
        page = _page(run, last=not alive)
        # The last page is sent even if it is equal: a newer view may show an older one.
        if page and (page != before or not alive):
            with contextlib.suppress(Exception):
                view.handle.update(HTML(page))
                before = page
        if alive:
            time.sleep(UPDATE_SECONDS)
    for remove in view.removes:
        with contextlib.suppress(Exception):
            remove()
    view.ended.set()


def _page(run: Run, *, last: bool) -> str:
    """Return the run's current page; None where it cannot be read, with the reason the last time."""
    try:
        return str(run.view(log=str(run.folder) in _logarithmic))
    except Exception as error:
        return f"<p>{html.escape(f'{run.folder} has ended, and cannot be shown: {error}')}</p>" if last else ""


def _button(run: Run) -> Callable[[], None] | None:
    """Show a button that stops the run, which ends its step and publishes a checkpoint, and one for logarithmic axes.

    The returned function removes them: in a notebook that was saved with a widget, another kernel shows an error in its place.
    None without ipywidgets.
    """
    try:
        from ipywidgets import HTML as Words
        from ipywidgets import Button, HBox, Layout, ToggleButton, VBox
    except ImportError:
        return None
    from IPython.display import HTML, display

    button = Button(
        description="Stop",
        tooltip=f"End the step, publish a checkpoint and stop {run.folder}",
        icon="stop",
        button_style="danger",
        layout=Layout(width="auto"),
    )
    folder, message = str(run.folder), Words()
    axes = ToggleButton(value=folder in _logarithmic, description="Log axis", layout=Layout(width="auto"))
    # Not as wide as the page.
    box = VBox([HBox([button, axes]), message], layout=Layout(align_items="flex-start"))
    # ipykernel 7 hands a widget's messages to the shell that made it, which handles none while a cell runs, as in run.wait().
    # Without that note they go where JupyterLab sends them: to a shell of their own.
    for control in (button, axes):
        with contextlib.suppress(AttributeError):
            del control.comm._reply_subshell_id

    def stop(_: Any) -> None:
        button.disabled, button.description, message.value = True, "Stopping…", ""
        threading.Thread(target=request_stop, name=f"stop {run.folder}", daemon=True).start()

    def request_stop() -> None:
        try:
            run.stop()
        except Exception as error:
            message.value = f'<p role="alert">{html.escape(str(error))}</p>'
            button.disabled, button.description = False, "Stop"

    button.on_click(stop)
    axes.observe(lambda change: _logarithmic.symmetric_difference_update({folder}), names="value")
    bundle = {**box._repr_mimebundle_(), "text/plain": "run.stop() stops it."}
    handle: Any = display(bundle, raw=True, display_id=True)

    def remove() -> None:
        handle.update(HTML(""))
        for widget in (box, *box.children[0].children, *box.children):
            widget.close()

    return remove
