"""`Panel`: the widgets of an explorer. `Control`: a slider or a list with a name. Panels alone import this file and ipywidgets."""

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

TRACING_NOTE = (
    "Computed once, then kept. A model that is traced takes some seconds, a large one with an adapter half a minute."
)

UNSEEN = "position:absolute;width:1px;height:1px;margin:0;overflow:hidden;clip-path:inset(50%);white-space:nowrap"
"""Takes no room on a page, and is read aloud all the same."""


class Panel:
    """Controls that call back while they move, and a line that screen readers announce."""

    def __init__(
        self,
        heading: str,
        choices: Sequence[Choice],
        moved: Callable[..., None],
        continuous: Collection[str] = (),
        command: str | None = None,
    ) -> None:
        """Make a widget for each choice; `moved` is called with its name and its new value, of `continuous` while it is dragged.

        With a `command`, also a button that copies it.
        """
        self._moved, self._own, self._continuous = moved, False, continuous
        self.controls = {choice.name: self._control(choice) for choice in choices}
        self._status = ipywidgets.HTML()
        groups = []
        for group, title in GROUPS.items():
            inside = [self.controls[choice.name] for choice in choices if choice.group == group]
            named = [ipywidgets.HTML(f"<strong>{title}</strong>")] if title and inside else []
            row = ipywidgets.Box(inside, layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="2px 14px"))
            groups += [*named, row] if inside else []
        self.copy = None if command is None else Copy(label="Train this", command=command)
        copy = [] if self.copy is None else [self.copy]
        title = ipywidgets.HTML(f"<h3>{html.escape(heading)}</h3>")
        self.box = ipywidgets.VBox([title, *groups, *copy, self._status])

    def _control(self, choice: Choice) -> Any:
        # Where each other number needs a trace, its picture is drawn once, at the slider's release.
        control = Control(
            _options(choice),
            choice.value,
            words=not all(map(_is_number, choice.values)),
            continuous_update=choice.name in self._continuous,
            description=choice.label,
            tooltip=choice.help,
            layout=ipywidgets.Layout(width="380px", max_width="100%"),
        )
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
                control.offer(_options(choice), choice.value)
        finally:
            self._own = False

    def announce(self, sentence: str, *, waits: bool = False) -> None:
        """Show a sentence: read out politely by screen readers; visible, with a moving bar, while something is waited for."""
        style, bar = ("", "<progress></progress>") if waits else (f' style="{UNSEEN}"', "")
        self._status.value = f'<p role="status" aria-live="polite"{style}>{bar} {html.escape(sentence)}</p>'

    @contextlib.contextmanager
    def busy(self, waits: Callable[[], None]) -> Iterator[None]:
        """Show a note, and call `waits`, if an answer takes longer than a moment."""

        def note() -> None:
            self.announce(TRACING_NOTE, waits=True)
            waits()

        late = threading.Timer(MOMENT, note)
        late.start()
        try:
            yield
        finally:
            late.cancel()
            late.join()


class Control(anywidget.AnyWidget):
    """The browser's own range input over numbers, or its list of words, with the traits of ipywidgets' selections.

    The handle of an ipywidgets slider has a role and no name for screen readers
    (https://dequeuniversity.com/rules/axe/4.11/aria-input-field-name), and its number is cut off in a narrow place.
    """

    _esm = Path(__file__).with_name("control.js")
    description = Unicode().tag(sync=True)
    tooltip = Unicode().tag(sync=True)
    words = Bool().tag(sync=True)
    """Whether it is a list."""
    spelled = List(Unicode()).tag(sync=True)
    index = Int().tag(sync=True)
    continuous_update = Bool().tag(sync=True)
    """Whether it calls back while it is dragged, or at its release only."""
    value = AnyValue()

    def __init__(self, options: list[tuple[str, Any]], value: Any, **traits: Any) -> None:
        """Create a control of `options`: each a label and a value."""
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


class Copy(anywidget.AnyWidget):
    """A button that copies a command."""

    _esm = Path(__file__).with_name("copy.js")
    label = Unicode().tag(sync=True)
    command = Unicode().tag(sync=True)


def _options(choice: Choice) -> list[tuple[str, Any]]:
    return [(f"{value:,}" if _is_number(value) else str(value), value) for value in choice.values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
