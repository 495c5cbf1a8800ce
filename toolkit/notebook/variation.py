"""`vary()` → `Variation`: a control for each argument of a function, and its answer beneath them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.core.display import Result
from toolkit.core.errors import StrategyError
from toolkit.notebook.answer_panel import AnswerPanel, unknown_control
from toolkit.notebook.explorer_state import Choice


class Variation(AnswerPanel):
    """A panel over a function: `controls` by name, `value` (its answer to where they stand), `static_html()`."""

    def __init__(
        self,
        answer: Callable[..., Any],
        options: Mapping[str, Sequence[Any]],
        start: Mapping[str, Any],
        heading: str,
        *,
        ahead: bool = False,
    ) -> None:
        """Answer once at `start`; with `ahead`, for all values."""
        self._function, self._options = answer, {name: tuple(values) for name, values in options.items()}
        self.names = tuple(self._options)
        self._values = {name: start.get(name, values[len(values) // 2]) for name, values in self._options.items()}
        for name in start.keys() - self._options.keys():
            raise unknown_control("vary", name, self.names)
        self._check()
        super().__init__("vary", heading, continuous=self.names if ahead else None)
        if ahead:
            first = self._values
            for values in itertools.product(*self._options.values()):
                self._values = dict(zip(self.names, values, strict=True))
                with contextlib.suppress(Exception):  # it comes when the control moves there
                    self._answer()
                    if isinstance(self.value, Result):
                        self._parts()
            self._values = first
            self._answer()

    def choices(self) -> list[Choice]:
        """Return the controls' choices at the current values, in order."""
        return [
            Choice(name=name, label=name.replace("_", " "), help=f"{len(values)} values", values=values,
                   value=self._values[name])
            for name, values in self._options.items()
        ]  # fmt: skip

    def _move(self, values: Mapping[str, Any]) -> None:
        self._values |= values

    def _check(self) -> None:
        for name, value in self._values.items():
            if value not in self._options[name]:
                expected = ", ".join(map(str, self._options[name]))
                raise StrategyError(f"{name} {value!r} is not a choice of this panel. Expected one of {expected}.")

    def _key(self) -> Any:
        self._check()
        return tuple(self._values.values())

    def _compute(self) -> Any:
        return self._function(**self._values)


def vary(
    answer: Callable[..., Any],
    *,
    start: Mapping[str, Any] | None = None,
    title: str = "",
    ahead: bool = False,
    **choices: Sequence[Any],
) -> Variation:
    """Return a panel with a control for each keyword, over what `answer` returns for their values.

    A sequence of numbers is a slider, one of words a list. It shows itself in a notebook.

    Args:
        answer: called with a value for each keyword; returns a result of ours, a table, a picture, something with
            `_repr_html_`, or a sentence. A `ToolkitError` that it raises is shown as a sentence. Each answer is
            computed once and kept.
        start: keyword → its first value; by default the middle of the sequence.
        ahead: whether to answer for all values now, so that a moved control only shows what is there: for a function
            that takes longer than a moment.
        title: stands above the controls; by default the function's name.
        choices: keyword → its values.

    Raises:
        ToolkitError: for no choices, an empty sequence, or a start that is not among the choices.
    """
    for name, values in choices.items():
        if isinstance(values, str) or not len(values):
            raise StrategyError(f"vary: {name}={values!r} is not a choice. Expected a sequence of numbers or words.")
    if not choices:
        raise StrategyError(
            "vary: there is nothing to move. Expected a keyword with its values, such as rank=[1, 2, 4]."
        )
    heading = title or str(getattr(answer, "__name__", "")).replace("_", " ")
    return Variation(answer, choices, start or {}, heading, ahead=ahead)
