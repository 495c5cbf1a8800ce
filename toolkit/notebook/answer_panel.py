"""`AnswerPanel`: controls over a function, and its answer as plain HTML beneath them. Explorers and variations are such panels."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.core.display import Result, Table, markup, render
from toolkit.core.errors import StrategyError, ToolkitError, nearest
from toolkit.core.glossary import explained
from toolkit.core.pictures import LEGIBLE
from toolkit.core.redaction import redact
from toolkit.notebook.explorer_state import Choice

FIX = (
    "Sliders need ipywidgets and anywidget: `pip install ipywidgets anywidget`, then restart the kernel. "
    "Until then this is the answer alone."
)
NEEDED = ("ipywidgets", "anywidget")

VIEW = "application/vnd.jupyter.widget-view+json"
"""The MIME type of a widget."""

AT_ONCE = 0.1
"""Seconds that an answer may take to be given while a slider is dragged."""

OLD = "opacity:.35;filter:grayscale(1)"
"""The look of an answer to values that were changed since."""

WIDE_LETTERS = 60
"""Letters of a cell, from which a table stands below the pictures."""


def unknown_control(panel: str, name: str, names: Sequence[str]) -> ToolkitError:
    """Return the error for a control that a panel does not have."""
    return StrategyError(f"{panel} has no control {name!r}.{nearest(name, names)} It has {', '.join(names)}.")


class AnswerPanel:
    """Controls by name, `value` (the answer to where they stand), and `static_html()` (the same as static HTML).

    A subclass has the controls' values: `choices`, `_move`, `_compute`, and optionally `_command` and `_after`.
    """

    names: Sequence[str]
    """Names of the controls that `set` takes."""

    def __init__(self, name: str, heading: str, continuous: Collection[str] | None = None) -> None:
        """Answer once, and make controls where ipywidgets and anywidget are installed.

        Args:
            name: the panel's name in errors.
            heading: stands above the controls.
            continuous: sliders that answer while they are dragged; others answer at their release. None: all, if the first
                answer is quick.
        """
        self._name = name
        self.value: Any = None
        """The answer; None for an impossible request."""
        self.refusal = ""
        """Why it cannot be, in a sentence."""
        self.controls: dict[str, Any] = {}
        self.panel: Any = None
        """The widget with the controls; None without ipywidgets."""
        self._shown: Any = None
        """The display of all cells that show the answer; None before the first does."""
        self._page = ""
        """What it shows."""
        self._kept: dict[Any, Any] = {}
        """Answers by `_key`."""
        self._drawn: dict[Any, dict[str, list[Any]]] = {}
        """Pictures and tables of those that are results and do not change, by `_key`."""
        began = time.monotonic()
        self._answer()
        if continuous is None:
            continuous = self.names if time.monotonic() - began < AT_ONCE else ()
        if all(importlib.util.find_spec(module) for module in NEEDED):
            from toolkit.notebook.widgets import Panel

            self.panel = Panel(heading, self.choices(), self.set, continuous, self._train_command())
            self.controls = self.panel.controls
            self.panel.announce(self.sentence)

    @property
    def sentence(self) -> str:
        """The answer, or the refusal, in a sentence."""
        return self.refusal

    def choices(self) -> list[Choice]:
        """Return the controls' choices at the current values, in order."""
        raise NotImplementedError

    def _move(self, values: Mapping[str, Any]) -> None:
        """Take other values."""
        raise NotImplementedError

    def _compute(self) -> Any:
        """Return the answer to the current values."""
        raise NotImplementedError

    def _key(self) -> Any:
        """Return what the answer is kept under: equal values have one answer. None for an answer that may change."""
        return None

    def _command(self) -> str:
        """Return the equivalent command of a shell; empty where none exists."""
        return ""

    def _train_command(self) -> str | None:
        """Return the command that trains what is shown; empty where none can, None for a panel over something else."""
        return None

    def _after(self, names: Collection[str] = ()) -> None:
        """Do what follows a shown answer: `names` are the moved controls."""

    def set(self, **values: Any) -> None:
        """Change values, as a moved control does.

        Raises:
            ToolkitError: for a control that this panel does not have. A value that cannot be is a `refusal`.
        """
        for name in values.keys() - set(self.names):
            raise unknown_control(self._name, name, self.names)
        self._move(values)
        if self.panel is None:
            self._answer()
        else:
            for choice in self.choices():
                if choice.name in values.keys() & self.controls.keys():
                    self.panel.move(choice)
            with self.panel.busy(self._grey):
                self._answer()
            self.panel.announce(self.sentence)
            if self.panel.copy is not None:
                self.panel.copy.command = self._train_command()
        if self._shown is not None:
            self._page = self.static_html()
            self._shown.update(_html(self._page))
            self._after(values.keys())

    def _grey(self) -> None:
        """Show that the answer is of the values before: the next is waited for."""
        if self._shown is not None:
            self._shown.update(_html(f'<div aria-busy="true" style="{OLD}">{self._page}</div>'))

    def _answer(self) -> None:
        """Compute the answer to the current values. An impossible request sets `refusal`: a panel shows no traceback."""
        self.value, self.refusal = None, ""
        try:
            key = self._key()
            self.value = self._kept[key] if key in self._kept else self._compute()
        except ToolkitError as error:
            self.refusal = str(error)
        else:
            if key is not None:
                self._kept[key] = self.value

    def _parts(self) -> dict[str, list[Any]]:
        """Return the answer's pictures and tables; those of a kept result that does not change are drawn once."""
        key = self._key() if isinstance(self.value, Result) and not self.value.changes else None
        parts = self._drawn.get(key) or _figures_and_tables(self.value)
        if key is not None:
            self._drawn[key] = parts
        return parts

    def forget(self) -> None:
        """Drop the kept answers: the next ones are computed and drawn again."""
        self._kept.clear()
        self._drawn.clear()

    def static_html(self) -> str:
        """Return HTML that needs no kernel, script or network, and the equivalent command."""
        hint, parts = "" if self.panel is not None else FIX, self._parts()
        sentence = markup(explained(self.sentence, set()))
        return redact(
            render("explorer", sentence=sentence, command=self._command(), hint=hint, legible=LEGIBLE, **parts)
        )

    def __repr__(self) -> str:
        """Return the answer as text."""
        return str(self.value) if self.value is not None else self.refusal

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """Return controls for a page with their kernel, and static HTML for others."""
        bundle = {"text/plain": repr(self), "text/html": self.static_html()}
        if self.panel is not None:
            bundle[VIEW] = self.panel.box._repr_mimebundle_(**options)[VIEW]
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
        hint = "Controls show while the notebook's kernel runs: run this cell. Below is where they stood."
        bundle = {VIEW: self._repr_mimebundle_()[VIEW], "text/html": f"<p>{hint}</p>", "text/plain": hint}
        display(bundle, raw=True)
        self._page = self.static_html()
        answer = {"text/html": self._page, "text/plain": repr(self)}
        if self._shown is None:
            self._shown = display(answer, raw=True, display_id=True)
            self._after()
        else:
            self._shown.display(answer, raw=True)


def _figures_and_tables(value: Any) -> dict[str, list[Any]]:
    """Return words, pictures, tables that stand at their side, and wide tables that stand below.

    `value` is a `Result`, something that shows itself as HTML, markup of ours (a picture), or a sentence.
    """
    parts: dict[str, list[Any]] = {"words": [], "pictures": [], "narrow": [], "wide": []}
    if isinstance(value, str) and not value.startswith("<"):
        parts["words"] = [value]
    elif isinstance(value, str):
        parts["pictures"] = [markup(value)]
    elif isinstance(value, Table):
        parts["narrow"] = [markup(value.html())]
    elif hasattr(value, "_repr_html_") and not isinstance(value, Result):
        parts["pictures"] = [markup(value._repr_html_())]
    elif value is not None:
        parts["pictures"] = [markup(picture) for picture in value.pictures()]
        for table in value.tables():
            table = replace(table, rows=list(table.rows))
            long = len(table.columns) > 5 or any(len(str(cell)) > WIDE_LETTERS for row in table.rows for cell in row)
            parts["wide" if long else "narrow"].append(markup(table.html()))
    return parts


def _html(page: str) -> Any:
    from IPython.display import HTML

    return HTML(page)
