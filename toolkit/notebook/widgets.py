"""`Panel`: the widgets of an explorer. `Slider`: a range input with a name. Only a panel imports this file, and ipywidgets."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
from traitlets import Any as AnyValue
from traitlets import Bool, Int, List, TraitError, Unicode, observe, validate

from toolkit.notebook.explorer_state import Choice

GROUPS = {"": "", "first": "The first", "second": "Against"}
"""Headings of the controls that belong together."""

MOMENT = 0.4
"""Seconds after which a person wonders whether anything happens."""

TRACING = "The model is traced for this, once: some seconds, of a large one with an adapter half a minute."

UNSEEN = "position:absolute;width:1px;height:1px;margin:0;overflow:hidden;clip-path:inset(50%);white-space:nowrap"
"""Takes no room on a page, and is read aloud all the same."""


class Panel:
    """Controls that call back while they move, and a line that screen readers announce."""

    def __init__(
        self, heading: str, choices: Sequence[Choice], moved: Callable[..., None], continuous: Collection[str] = ()
    ) -> None:
        """Make a widget for each choice; `moved` is called with its name and its new value, of `continuous` while it is dragged."""
        self._moved, self._own, self._continuous = moved, False, continuous
        self.controls = {choice.name: self._control(choice) for choice in choices}
        self._status = ipywidgets.HTML()
        groups = []
        for group, title in GROUPS.items():
            inside = [self.controls[choice.name] for choice in choices if choice.group == group]
            named = [ipywidgets.HTML(f"<strong>{title}</strong>")] if title and inside else []
            row = ipywidgets.Box(inside, layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="2px 14px"))
            groups += [*named, row] if inside else []
        self.box = ipywidgets.VBox([ipywidgets.HTML(f"<h3>{html.escape(heading)}</h3>"), *groups, self._status])

    def _control(self, choice: Choice) -> Any:
        options = {"value": choice.value, "description": choice.label, "tooltip": choice.help}
        if all(_is_number(value) for value in choice.values):
            # Where each other number needs a trace, its picture is drawn once, at the slider's release.
            control = Slider(_options(choice), continuous_update=choice.name in self._continuous, **options)
        else:
            room = {"style": {"description_width": "170px"}, "layout": ipywidgets.Layout(width="380px")}
            control = ipywidgets.Dropdown(options=_options(choice), **options, **room)
        control.observe(lambda change: self._on_change(choice.name, change.new), names="value")
        return control

    def _on_change(self, name: str, value: Any) -> None:
        if not self._own:
            self._moved(**{name: value})

    def move(self, choice: Choice) -> None:
        """Set a control from the program, without calling back. An unknown word changes nothing."""
        control, self._own = self.controls[choice.name], True
        try:
            with contextlib.suppress(TraitError):
                if isinstance(control, Slider):
                    control.offer(_options(choice), choice.value)
                else:
                    control.value = choice.value
        finally:
            self._own = False

    def announce(self, sentence: str, *, visible: bool = False) -> None:
        """Show a sentence: read out politely by screen readers, and visible above the picture or here."""
        style = "" if visible else f' style="{UNSEEN}"'
        self._status.value = f'<p role="status" aria-live="polite"{style}>{html.escape(sentence)}</p>'

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Show a note if an answer takes longer than a moment."""
        late = threading.Timer(MOMENT, self.announce, [TRACING], {"visible": True})
        late.start()
        try:
            yield
        finally:
            late.cancel()
            late.join()


class Slider(anywidget.AnyWidget):
    """The browser's own range input over a list of numbers, with the traits of an ipywidgets' SelectionSlider.

    The handle of that one has a role and no name for screen readers (https://dequeuniversity.com/rules/axe/4.11/aria-input-field-name).
    """

    _esm = Path(__file__).with_name("slider.js")
    description = Unicode().tag(sync=True)
    tooltip = Unicode().tag(sync=True)
    spelled = List(Unicode()).tag(sync=True)
    index = Int().tag(sync=True)
    continuous_update = Bool().tag(sync=True)
    """Whether it calls back while it is dragged, or at its release only."""
    value = AnyValue()

    def __init__(self, options: list[tuple[str, Any]], value: Any, **traits: Any) -> None:
        """Create a slider of `options`: each a label and a value."""
        self._values = [option for _, option in options]
        super().__init__(spelled=[word for word, _ in options], value=value, **traits)

    def offer(self, options: list[tuple[str, Any]], value: Any) -> None:
        """Replace the options and the value."""
        with self.hold_sync():
            self._values = [option for _, option in options]
            self.spelled = [word for word, _ in options]
            self.value = value
            self.index = self._values.index(value)

    @validate("value")
    def _check_value(self, proposal: Any) -> Any:
        if proposal["value"] not in self._values:
            raise TraitError(f"{proposal['value']!r} is none of {self._values}")
        return proposal["value"]

    @observe("value")
    def _value_moved(self, change: Any) -> None:
        self.index = self._values.index(change["new"])

    @observe("index")
    def _index_moved(self, change: Any) -> None:
        self.value = self._values[change["new"]]


def _options(choice: Choice) -> list[tuple[str, Any]]:
    return [(f"{value:,}" if _is_number(value) else str(value), value) for value in choice.values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
