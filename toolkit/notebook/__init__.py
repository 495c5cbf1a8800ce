"""Show results and runs in a notebook; widgets that call the same functions as the command line.

`import toolkit` in a kernel calls `register`. IPython and ipywidgets are imported when something is first shown.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Show a `Run` live in a notebook's kernel, also while it is waited for, and turn pictures into images."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return
    from IPython.display import HTML

    from toolkit.core.display import Result
    from toolkit.launcher import run_handle

    for kind in (HTML, Result):
        shell.display_formatter.formatters["text/html"].for_type(kind, _html)
    shell.display_formatter.ipython_display_formatter.for_type(run_handle.Run, _show)
    if _show not in run_handle.views:
        run_handle.views.append(_show)


def _show(run: Any) -> None:
    from toolkit.notebook.live import show

    show(run)


def _html(output: Any) -> Any:
    """Return HTML for saved notebooks, where viewers remove inline SVG: our pictures become images."""
    from toolkit.core.charts import portable

    html = output._repr_html_()
    data, *metadata = html if isinstance(html, tuple) else (html,)
    data = portable(data) if isinstance(data, str) else data
    return (data, *metadata) if metadata else data
