"""The fields of dataclasses as command-line flags, and back. Whatever a field is called, its flag is called."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, TypeVar

from toolkit.core.display import Table
from toolkit.core.errors import StrategyError, nearest

Owner = TypeVar("Owner")


def amount(default: Any, help: str, alias: str = "") -> Any:
    """Return a dataclass field with its flag's help, and the name of an alias."""
    return field(default=default, metadata={"help": help, "alias": alias})


def choice(default: str, values: Collection[str], help: str, later: tuple[str, ...] = ()) -> Any:
    """Return a field that takes one of `values`; values in `later` have a name and no engine yet."""
    return field(default=default, metadata={"help": help, "values": values, "later": later})


def check_choices(owner: Any) -> None:
    """Refuse a value that a `choice` of this dataclass does not know, or that is not available yet.

    Raises:
        StrategyError: with the nearest known value.
    """
    for f in dataclasses.fields(owner):
        allowed, later, value = f.metadata.get("values"), f.metadata.get("later", ()), getattr(owner, f.name)
        if allowed and value not in allowed:
            known = ", ".join(word for word in allowed if word not in later)
            raise StrategyError(f"{f.name} {value!r} is unknown.{nearest(value, allowed)} Known: {known}.")
        if value in later:
            raise StrategyError(f"{f.name} {value!r} is not available yet.")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse a value that is not a whole number of at least `least`.

    Raises:
        StrategyError: with the name and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StrategyError(f"{name} {value!r}: expected a whole number of at least {least}.")


def fields_table(title: str, owner: Any) -> Table:
    """Return the fields of a dataclass and their values."""
    rows = [
        (f.name, "open" if getattr(owner, f.name) is None else getattr(owner, f.name))
        for f in dataclasses.fields(owner)
    ]
    return Table(title=title, columns=("field", "value"), rows=rows)


MAX_METAVAR = 60
"""Characters of a flag and its values in one line of help; more values stand in its text."""


def section(owner: type[Any]) -> str:
    """Return the JSON key of a dataclass of fields: `TrainConfig` → `train_config`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner.__name__).lower()


def flag(name: str) -> str:
    """Return a field's flag: `"micro_batch"` → `"--micro-batch"`."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A command line without abbreviated flags. A user error is one sentence.

    Raises:
        StrategyError: for a flag or value that is not known, in place of a usage text and the interpreter's end.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> typing.NoReturn:
        raise StrategyError(f"{message}. See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown choice, and name the nearest one."""
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            what = action.metavar or action.dest
            near = nearest(value, action.choices)
            raise StrategyError(f"{what} {value!r} is unknown.{near} Known: {choices}. See `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown flags; a verb's own parser names the nearest of its flags."""
        namespace_, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = nearest(unknown[0], self._option_string_actions)
            raise StrategyError(f"{self.prog} does not know {unknown[0]!r}.{near} See `{self.prog} --help`.")
        return namespace_, unknown


def add_flags(
    parser: argparse.ArgumentParser, *owners: type[Any], without: tuple[str, ...] = (), default: str = ""
) -> None:
    """Give `parser` one flag for each field of dataclasses. A flag that is not given stays `None`, so that it binds nothing.

    `default`: what help says of one that is not given, where that is not the field's own default.
    """
    for owner in owners:
        group = parser.add_argument_group(owner.__name__)
        kinds = typing.get_type_hints(owner)
        for f in dataclasses.fields(owner):
            if f.name in without:
                continue
            kind, later = _type_of(kinds[f.name]), f.metadata.get("later", ())
            values = [value for value in f.metadata.get("values", ()) if value not in later]
            metavar = "|".join(values) if values else kind.__name__.upper()
            text = f"{f.metadata['help']} (default: {default or _default(f)})"
            if len(flag(f.name)) + len(metavar) > MAX_METAVAR:
                metavar, text = "WORD", f"{', '.join(values)}; {text}"
            if not f.metadata["help"]:  # no engine runs it yet: the flag exists for its error message
                text = argparse.SUPPRESS
            if kind is bool:
                group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, default=None, help=text)
                continue
            group.add_argument(flag(f.name), dest=f.name, type=kind, metavar=metavar, help=text)
            if alias := f.metadata.get("alias", ""):
                text = f"the same as {flag(f.name)} (also with _)"
                group.add_argument(flag(alias), f"--{alias}", dest=f.name, type=kind, metavar=metavar, help=text)


def _type_of(kind: Any) -> type[Any]:
    """Return the type of an optional field: `float | None` → `float`."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    plain: type[Any] = kind
    return plain


def _default(f: dataclasses.Field[Any]) -> str:
    return "open" if f.default is None else str(f.default)


def given(flags: argparse.Namespace, owner: type[Any]) -> dict[str, Any]:
    """Return the fields of `owner` that the command line sets, with their values."""
    values = {f.name: getattr(flags, f.name, None) for f in dataclasses.fields(owner)}
    return {name: value for name, value in values.items() if value is not None}


def to_flags(*owners: Any) -> list[str]:
    """Return the shortest equivalent command line: only fields with other values than the default."""
    return spell({name: value for owner in owners for name, value in differing(owner).items()})


def differing(owner: Any) -> dict[str, Any]:
    """Return the fields of a dataclass whose values are not their defaults."""
    values = {f.name: (getattr(owner, f.name), f.default) for f in dataclasses.fields(owner)}
    return {name: value for name, (value, default) in values.items() if value != default}


def spell(values: Mapping[str, Any]) -> list[str]:
    """Return a command line that sets these fields to these values."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(flag(name))
        elif value is False:
            words.append("--no-" + flag(name).removeprefix("--"))
        elif str(value).startswith("-"):
            words.append(f"{flag(name)}={value}")
        else:
            words += [flag(name), str(value)]
    return words


def read_assignments(text: str, *owners: type[Any], alone: str) -> dict[str, Any]:
    """Parse fields: `"sharding=fsdp,micro_batch=8"`; a first word without `=` is the value of `alone`.

    A value may hold commas: `"lora_targets=q_proj,v_proj"`.

    Raises:
        StrategyError: for a field that none of them has, with the nearest, and for a value of another type.
    """
    kinds = {name: _type_of(kind) for owner in owners for name, kind in typing.get_type_hints(owner).items()}
    values: dict[str, Any] = {}
    for word in filter(None, (part.strip(", ") for part in re.split(r",(?=[^,]*=)", text))):
        name, equals, value = word.rpartition("=")
        name = name.strip().removeprefix("--").replace("-", "_") if equals else alone
        if name not in kinds:
            raise StrategyError(f"{text!r}: there is no field {name!r}.{nearest(name, kinds)}")
        try:
            values[name] = kinds[name](value.strip())
        except ValueError:
            raise StrategyError(f"{name} {value!r}: expected {kinds[name].__name__}.") from None
    return values


def from_dict(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """Return a dataclass from its JSON.

    Raises:
        StrategyError: for a field that does not exist, with the nearest one, and for a value of another type.
    """
    names = [f.name for f in dataclasses.fields(owner)]  # type: ignore[arg-type]
    kinds = typing.get_type_hints(owner)
    for name, value in values.items():
        if name not in names:
            raise StrategyError(
                f"{owner.__name__} has no field {name!r}.{nearest(name, names)} Known: {', '.join(names)}."
            )
        kind = _type_of(kinds[name])
        right = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) <= (kind is bool)
        if not right and not (value is None and kind != kinds[name]):
            raise StrategyError(f"{name} {value!r}: expected {kind.__name__}.")
    return owner(**values)
