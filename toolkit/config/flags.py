"""The fields of dataclasses as command-line flags, and back. A flag has the name of its field."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import operator
import re
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar

from toolkit.config.hints import VERBS, spell_hint
from toolkit.core.display import Table
from toolkit.core.errors import StrategyError, nearest

Owner = TypeVar("Owner")


def amount(default: Any, help: str, alias: str = "", joined: bool = False, **bounds: float) -> Any:
    """Return a dataclass field with its flag's help, the name of an alias, and bounds of a number: words of `_BOUNDS`.

    `joined`: the flag may be given several times; its values are joined by commas.
    """
    return field(default=default, metadata={"help": help, "alias": alias, "joined": joined, "bounds": bounds})


class _Joined(argparse.Action):
    """Join the values of a flag that is given several times by commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, value if before is None else f"{before},{value}")


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
    kind, optional = _kinds(owner)[name]
    about: Mapping[str, Any] = owner.__dataclass_fields__[name].metadata
    if value is None and optional:
        return
    if choices := about.get("values"):
        later = about["later"]
        if value not in choices:
            known = ", ".join(word for word in choices if word not in later)
            raise StrategyError(f"{name} {value!r} is unknown.{nearest(value, choices)} Known: {known}.")
        if value in later:
            raise StrategyError(f"{name} {value!r} is not available yet.")
        return
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) > (kind is bool):
        raise StrategyError(f"{name} {value!r}: expected {kind.__name__}.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise StrategyError(f"{name} of {value.bit_length()} bits: expected {kind.__name__} of at most 63 bits.")
    if kind is float and not math.isfinite(value):
        raise StrategyError(f"{name} {value!r}: expected a finite number.")
    for word, bound in about["bounds"].items():
        holds, text = _BOUNDS[word]
        if not holds(value, bound):
            raise StrategyError(f"{name} {value!r}: expected {kind.__name__} {text} {bound:g}.")


_BOUNDS = {"least": (operator.ge, "of at least"), "above": (operator.gt, "above"), "below": (operator.lt, "below")}

_KINDS: dict[Any, dict[str, tuple[type[Any], bool]]] = {}


def _kinds(owner: type[Any]) -> dict[str, tuple[type[Any], bool]]:
    """Return the type of each field, and whether it may be None: `float | None` → `(float, True)`."""
    if owner not in _KINDS:
        options = {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(owner).items()}
        _KINDS[owner] = {name: (kinds[0], type(None) in kinds) for name, kinds in options.items()}
    return _KINDS[owner]


def fields_table(title: str, owner: Any) -> Table:
    """Return the fields of a dataclass and their values."""
    rows = [(name, "open" if value is None else value) for name, value in vars(owner).items()]
    return Table(title=title, columns=("field", "value"), rows=rows)


MAX_METAVAR = 60
"""Characters of a flag and its values in one line of help; more values stand in its text."""


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
            near = f" Here it is `toolkit {VERBS[value]}`." if value in VERBS else nearest(value, action.choices)
            raise StrategyError(f"{what} {value!r} is unknown.{near} Known: {choices}. See `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown flags; a verb's own parser names the nearest of its flags."""
        words = list(sys.argv[1:] if args is None else args)
        namespace_, unknown = super().parse_known_args(words, namespace)
        if not unknown:
            return namespace_, unknown
        end = f" See `{self.prog} --help`."
        before = words[words.index(unknown[0]) - 1] if unknown[0] in words[1:] else ""
        if isinstance(self._option_string_actions.get(before), argparse.BooleanOptionalAction):
            raise StrategyError(f"{before} takes no value. Give `{before}` or `--no-{before[2:]}`.{end}")
        if hints := self._hints(words, unknown):
            names = ", ".join(map(repr, hints))
            flags = " ".join(hint for hint in hints.values() if hint.startswith("--"))
            known = all(word in self._option_string_actions for word in flags.split() if word.startswith("--"))
            near = f" Here it is `{flags}`." if known else f" `toolkit train` has it as `{flags}`."
            near = near if flags else ""
            near += "".join(f" {name}: {hint}." for name, hint in hints.items() if not hint.startswith("--"))
            raise StrategyError(f"{self.prog} does not know {names}.{near}{end}")
        positional = [action for action in self._get_positional_actions() if f"--{action.dest}" == unknown[0]]
        near = nearest(unknown[0], self._option_string_actions)
        if positional:
            near = f" Give it without a flag: `{self.prog} {positional[0].metavar}`."
        raise StrategyError(f"{self.prog} does not know {unknown[0]!r}.{near}{end}")

    def _hints(self, words: Sequence[str], unknown: Sequence[str]) -> dict[str, str]:
        """Return the unknown flags of other tools, with ours: `--num_train_epochs` → `--epochs 3`."""
        hints = {}
        for word in unknown:
            name, equals, value = word.partition("=")
            after = itertools.takewhile(lambda next_: not next_.startswith("--"), words[words.index(word) + 1 :])
            positional = any(f"--{action.dest}" == name for action in self._get_positional_actions())
            if name.startswith("--") and not positional and (hint := spell_hint(name, [value] if equals else [*after])):
                hints[name] = hint
        return hints


def add_flags(
    parser: argparse.ArgumentParser, *owners: type[Any], without: tuple[str, ...] = (), default: str = ""
) -> None:
    """Give `parser` one flag for each field of dataclasses. A flag that is not given stays `None`, so that it binds nothing.

    `default`: the default in the help text, if it is not the field's own.
    """
    for owner in owners:
        group = parser.add_argument_group(owner.__name__)
        for f in dataclasses.fields(owner):
            if f.name in without:
                continue
            kind, _ = _kinds(owner)[f.name]
            values = [value for value in f.metadata.get("values", ()) if value not in f.metadata["later"]]
            metavar = "|".join(values) if values else kind.__name__.upper()
            text = f"{f.metadata['help']} (default: {default or ('open' if f.default is None else f.default)})"
            if len(flag(f.name)) + len(metavar) > MAX_METAVAR:
                metavar, text = "WORD", f"{', '.join(values)}; {text}"
            if not f.metadata["help"]:  # no engine runs it yet: the flag exists for its error message
                text = argparse.SUPPRESS
            if kind is bool:
                group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, default=None, help=text)
                continue
            action: Any = _Joined if f.metadata.get("joined") else "store"
            group.add_argument(flag(f.name), dest=f.name, type=kind, metavar=metavar, help=text, action=action)
            if alias := f.metadata.get("alias", ""):
                text = f"the same as {flag(f.name)} (also with _); of both, the last counts"
                group.add_argument(flag(alias), f"--{alias}", dest=f.name, type=kind, metavar=metavar, help=text)


def given(flags: argparse.Namespace, owner: type[Any]) -> dict[str, Any]:
    """Return the fields of `owner` that the command line sets, with their values."""
    values = {f.name: getattr(flags, f.name, None) for f in dataclasses.fields(owner)}
    return {name: value for name, value in values.items() if value is not None}


def to_flags(*owners: Any) -> list[str]:
    """Return the shortest equivalent command line: only fields with other values than the default."""
    return spell({name: value for owner in owners for name, value in differing(owner).items()})


def differing(owner: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with other values than their defaults."""
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
    kinds = {name: kind for owner in owners for name, (kind, _) in _kinds(owner).items()}
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


def field_hint(name: str, value: Any, names: Collection[str]) -> str:
    """Return the fields that mean the same as another tool's: `num_train_epochs`, 3 → `" Here it is epochs=3."`."""
    hint = spell_hint(name, value if isinstance(value, list | tuple) else [value])
    pairs = re.findall(r"--(no-)?([\w-]+)(?: (?!--)(\S+))?", hint)
    texts = {
        field.replace("-", "_"): repr(not no) if not text else text if re.fullmatch(r"[\d.e-]+", text) else repr(text)
        for no, field, text in pairs
    }
    if not texts or hint.startswith("leave"):
        return f" {hint.capitalize()}." if hint else ""
    if not texts.keys() <= set(names):
        return f" `toolkit train` has it as `{hint}`."
    return f" Here it is {', '.join(f'{field}={text}' for field, text in texts.items())}."


def from_dict(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """Return a dataclass from its JSON.

    Raises:
        StrategyError: for a field that does not exist, with the nearest one, and for a value of another type.
    """
    names = list(_kinds(owner))
    for name in values:
        if name not in names:
            near = field_hint(name, values[name], names) or nearest(name, names)
            raise StrategyError(f"{owner.__name__} has no field {name!r}.{near} Known: {', '.join(names)}.")
    return owner(**values)
