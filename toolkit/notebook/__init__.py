"""Show results and runs in a notebook; widgets that call the same functions as the command line.

`import toolkit` in a kernel calls `register`. IPython and ipywidgets are imported when something is first shown.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Show a `Run` live in a notebook's kernel, also while it is waited for."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return
    from toolkit.launcher import run_handle

    shell.display_formatter.ipython_display_formatter.for_type(run_handle.Run, _show)
    if _show not in run_handle.views:
        run_handle.views.append(_show)


def _show(run: Any) -> Any:
    from toolkit.notebook.live import show

    return show(run)
