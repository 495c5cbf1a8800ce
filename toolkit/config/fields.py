"""Fields of the configuration's dataclasses: declared with help and bounds, checked, compared, and read from JSON."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, TypeVar

from toolkit.core.display import Table
from toolkit.core.errors import StrategyError, nearest

Owner = TypeVar("Owner")


def amount(default: Any, help: str, alias: str = "", joined: bool = False, needs: str = "", **bounds: float) -> Any:
    """Return a dataclass field with its flag's help, the name of an alias, and bounds of a number: words of `_COMPARISONS`.

    Args:
        default, help, alias, bounds: as above.
        joined: the flag may be given several times; its values are joined by commas.
        needs: a field without which this one has no effect.
    """
    about = {"help": help, "alias": alias, "joined": joined, "needs": needs, "bounds": bounds}
    return field(default=default, metadata=about)


def choice(default: str, values: Collection[str], help: str, later: tuple[str, ...] = ()) -> Any:
    """Return a field that takes one of `values`; values in `later` have a name and no engine yet."""
    return field(default=default, metadata={"help": help, "values": values, "later": later})


def validate(owner: Any) -> None:
    """Check the type, the choices and the bounds of every field of a dataclass.

    Raises:
        StrategyError: with the value and what was expected; for a word with the nearest known one.
    """
    for f in dataclasses.fields(owner):
        check_value(type(owner), f.name, getattr(owner, f.name))


def check_value(owner: type[Any], name: str, value: Any) -> None:
    """Check a value of a dataclass's field, as `validate` does."""
    kind, optional = kinds_of(owner)[name]
    about: Mapping[str, Any] = owner.__dataclass_fields__[name].metadata
    if value is None and optional:
        return
    if choices := tuple(about.get("values") or ()):
        later = about["later"]
        able = [word for word in choices if word not in later]
        if value not in choices or str(value).endswith("K"):
            pattern = re.sub(r"[1-9]\d+|[2-9]", "K", str(value), count=1)
            if pattern in choices and pattern != value:
                return
            raise StrategyError(f"{name} {value!r} is unknown.{nearest(value, able)} Known: {', '.join(able)}.")
        if value in later:
            raise StrategyError(f"{name} {value!r} is not available yet. Choose one of {', '.join(able)}.")
        return
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) > (kind is bool):
        raise StrategyError(f"{name} {value!r}: expected {kind.__name__}.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise StrategyError(f"{name} of {value.bit_length()} bits: expected {kind.__name__} of at most 63 bits.")
    if kind is float and not math.isfinite(value):
        raise StrategyError(f"{name} {value!r}: expected a finite number.")
    for word, bound in about["bounds"].items():
        holds, text = _COMPARISONS[word]
        if not holds(value, bound):
            raise StrategyError(f"{name} {value!r}: expected {kind.__name__} {text} {bound:g}.")


_COMPARISONS = {"least": (operator.ge, "of at least"), "above": (operator.gt, "above"), "below": (operator.lt, "below")}

_FIELD_TYPES: dict[Any, dict[str, tuple[type[Any], bool]]] = {}


def kinds_of(owner: type[Any]) -> dict[str, tuple[type[Any], bool]]:
    """Return the type of each field, and whether it may be None: `float | None` → `(float, True)`."""
    if owner not in _FIELD_TYPES:
        options = {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(owner).items()}
        _FIELD_TYPES[owner] = {name: (kinds[0], type(None) in kinds) for name, kinds in options.items()}
    return _FIELD_TYPES[owner]


def fields_table(title: str, owner: Any) -> Table:
    """Return the fields of a dataclass and their values."""
    rows = [(name, "open" if value is None else value) for name, value in vars(owner).items()]
    return Table(title=title, columns=("field", "value"), rows=rows)


def differing(owner: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with other values than their defaults."""
    values = {f.name: (getattr(owner, f.name), f.default) for f in dataclasses.fields(owner)}
    return {name: value for name, (value, default) in values.items() if value != default}


def from_dict(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """Return a dataclass from its JSON.

    Raises:
        StrategyError: for a field that does not exist, with what means the same, and for a value of another type.
    """
    return owner(**values)
