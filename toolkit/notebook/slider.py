"""`Slider`: the browser's own range input over a list of numbers, with the name that screen readers need.

The handle of ipywidgets' sliders has a role and no name (https://dequeuniversity.com/rules/axe/4.11/aria-input-field-name).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
from traitlets import Any as AnyValue
from traitlets import Bool, Int, List, TraitError, Unicode, observe, validate


class Slider(anywidget.AnyWidget):
    """A choice among numbers in their order, with the traits of an ipywidgets' SelectionSlider that a panel uses."""

    _esm = Path(__file__).with_name("slider.js")
    description = Unicode().tag(sync=True)
    tooltip = Unicode().tag(sync=True)
    spelled = List(Unicode()).tag(sync=True)
    index = Int().tag(sync=True)
    continuous_update = Bool().tag(sync=True)
    """Whether it calls while it is dragged, or once it is let go."""
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
