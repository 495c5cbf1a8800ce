"""The fields of dataclasses as command-line flags, and back. A flag has the name of its field."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import operator
import re
import shlex
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar, cast

from toolkit.config.hints import HINTS, VERBS, Meaning, translate
from toolkit.core.display import Table
from toolkit.core.errors import StrategyError, UnknownName, nearest

Owner = TypeVar("Owner")
T = TypeVar("T")


def amount(default: Any, help: str, alias: str = "", joined: bool = False, needs: str = "", **bounds: float) -> Any:
    """Return a dataclass field with its flag's help, the name of an alias, and bounds of a number: words of `_COMPARISONS`.

    Args:
        default, help, alias, bounds: as above.
        joined: the flag may be given several times; its values are joined by commas.
        needs: a field without which this one has no effect.
    """
    about = {"help": help, "alias": alias, "joined": joined, "needs": needs, "bounds": bounds}
    return field(default=default, metadata=about)


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
        if value not in choices or str(value).endswith(":K"):
            word, _, number = str(value).partition(":")
            if f"{word}:K" in choices and re.fullmatch(r"[1-9]\d*", number) and number != "1":
                return
            known = ", ".join(word for word in choices if word not in later)
            near = nearest(value, [word for word in choices if word not in later])
            raise StrategyError(f"{name} {value!r} is unknown.{near} Known: {known}.")
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
        holds, text = _COMPARISONS[word]
        if not holds(value, bound):
            raise StrategyError(f"{name} {value!r}: expected {kind.__name__} {text} {bound:g}.")


_COMPARISONS = {"least": (operator.ge, "of at least"), "above": (operator.gt, "above"), "below": (operator.lt, "below")}

_FIELD_TYPES: dict[Any, dict[str, tuple[type[Any], bool]]] = {}


def _kinds(owner: type[Any]) -> dict[str, tuple[type[Any], bool]]:
    """Return the type of each field, and whether it may be None: `float | None` → `(float, True)`."""
    if owner not in _FIELD_TYPES:
        options = {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(owner).items()}
        _FIELD_TYPES[owner] = {name: (kinds[0], type(None) in kinds) for name, kinds in options.items()}
    return _FIELD_TYPES[owner]


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
            near = nearest(value, action.choices)
            if ours := VERBS.get(value):
                near = f" {ours}." if ours[0].isupper() else f" Here it is `{ours}`."
            raise StrategyError(f"{what} {value!r} is unknown.{near} Known: {choices}. See `{self.prog} --help`.")

    def _parse_optional(self, arg_string: str) -> Any:
        """Take our flags with `_` for `-`, too."""
        name, equals, value = arg_string.partition("=")
        ours = name.replace("_", "-")
        return super()._parse_optional(ours + equals + value if ours in self._option_string_actions else arg_string)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown flags and words in one message, with ours that mean the same."""
        words = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            raise StrategyError(f"{self.prog} does not know {self._explain(words, unknown, parsed)}")
        return parsed, unknown

    def _explain(self, words: Sequence[str], unknown: Sequence[str], parsed: argparse.Namespace) -> str:
        end, foreign = f" See `{self.prog} --help`.", {}
        values: list[str] = []
        for word in unknown:
            name, equals, value = word.partition("=")
            before = words[words.index(word) - 1].replace("_", "-") if word in words[1:] else ""
            if isinstance(self._option_string_actions.get(before), argparse.BooleanOptionalAction):
                off = (word.lower() in ("false", "no", "0", "off")) != before.startswith("--no-")
                ours = before.removeprefix("--").removeprefix("no-")
                return f"{word!r}: {before} takes no value. Give `--{'no-' * off}{ours}`.{end}"
            if name.startswith("-"):
                after = itertools.takewhile(lambda next_: not next_.startswith("--"), words[words.index(word) + 1 :])
                foreign[name] = [value] if equals else [*after]
                values += foreign[name]
            elif word not in values:
                foreign[word] = [word]
        names, known = ", ".join(map(repr, foreign)), {action.dest for action in self._actions}
        positional = {f"--{action.dest}": action.metavar for action in self._get_positional_actions()}
        meant = {name: values for name, values in foreign.items() if name not in positional}
        given = {name: value for name, value in vars(parsed).items() if value not in (None, False)}
        meant |= {f"--{name} {value}": [value] for name, value in given.items() if f"{name}={value}" in HINTS}
        meaning = meaning_of(meant, known, given)
        text = ""
        for has, prefix in ((True, " Here it is"), (False, " `toolkit train` has it as")):
            if fields := {name: value for name, value in meaning.fields.items() if (name in known) is has}:
                text += f"{prefix} `{shlex.join(spell(fields))}`."
        text += spell_notes(meaning)
        text += "".join(
            f" Give it without a flag: `{self.prog} {positional[name]}`." for name in foreign if name in positional
        )
        for name in meaning.unknown:
            if name[0] != "-" and "--model" in self._option_string_actions:
                text += f" Give a model as `--model {name}`, data as `--data {name}`."
            else:
                text += nearest(name, self._option_string_actions) or f" {name} has no meaning here." * (
                    len(foreign) > 1
                )
        return f"{names}.{text}{end}"


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
                text = f"the same as {flag(f.name)}; of both, the last counts"
                group.add_argument(flag(alias), dest=f.name, type=kind, metavar=metavar, help=text)


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


def meaning_of(names: Mapping[str, Any], known: Collection[str], given: Mapping[str, Any]) -> Meaning:
    """Return what names of other tools mean, as `translate` does; a value that our field refuses is a sentence."""
    meaning = translate(names, known, given)
    for name, value in list(meaning.fields.items()):
        for owner in OWNERS.values():
            if name in (kinds := _kinds(owner)):
                kind = kinds[name][0]
                try:
                    check_value(owner, name, value if kind is bool else kind(value))
                except StrategyError as error:
                    meaning.notes[name] = str(error).rstrip(".")
                    del meaning.fields[name]
                except ValueError:
                    meaning.notes[name] = f"{name} {value!r}: expected {kind.__name__}"
                    del meaning.fields[name]
    return meaning


def spell_notes(meaning: Meaning) -> str:
    """Return the sentences of a meaning, each after the name that it is about."""
    return "".join(f" {note if note.startswith(name) else f'{name}: {note}'}." for name, note in meaning.notes.items())


def unknown_names(
    where: str, names: Mapping[str, Any], known: Collection[str], given: Mapping[str, Any]
) -> UnknownName:
    """Return the error for arguments that a function or dataclass does not have, with those that mean the same.

    Args:
        where: begins the message: `"launch has no argument"`.
        names: the unknown ones, with their values.
        known: the arguments that it has.
        given: the values of arguments that it has.
    """
    text = ""
    theirs = {name: value if isinstance(value, list | tuple) else [value] for name, value in names.items()}
    ours = {name: value for name, value in names.items() if any(name in _kinds(owner) for owner in OWNERS.values())}
    meaning = meaning_of({name: value for name, value in theirs.items() if name not in ours}, known, given)
    fields = {**meaning.fields, **ours}
    if here := {name: value for name, value in fields.items() if name in known}:
        text += f" Here it is {_arguments(here)}."
    for argument, owner in OWNERS.items():
        own = {name: fields.pop(name) for name in _kinds(owner) if name in fields and name not in known}
        if own and argument in known:
            text += f" Give {argument}=tk.{owner.__name__}({_arguments(own)})."
        elif own:
            place = f"tk.{owner.__name__}" if where[0].isupper() else "tk.launch"
            text += f" {place} has it: {_arguments(own)}."
    if rest := {name: value for name, value in fields.items() if name not in known}:
        text += f" tk.launch has it: {_arguments(rest)}."
    text += spell_notes(meaning)
    text += "".join(nearest(name, known) or f" {name} has no meaning here." * bool(text) for name in meaning.unknown)
    text = text or f" Known: {', '.join(known)}."
    return UnknownName(f"{where} {', '.join(map(repr, names))}.{text}")


def _arguments(fields: Mapping[str, Any]) -> str:
    """Return fields as arguments in Python: `epochs=3, data='x.jsonl'`."""
    number = re.compile(r"-?\d+(\.\d*)?(e-?\d+)?")
    return ", ".join(
        f"{name}={value if number.fullmatch(str(value)) else repr(value)}" for name, value in fields.items()
    )


OWNERS: dict[str, type[Any]] = {}
"""Name of an argument, such as `train_config` → the dataclass. Each of its fields is a flag."""


def by_name(target: T) -> T:
    """Answer unknown and unnamed arguments of a function or a dataclass in a sentence. A decorator."""
    whole: Any = target
    owner: Any = target if isinstance(target, type) else None
    function = whole.__init__ if owner else whole
    code, kind = function.__code__, "field" if owner else "argument"
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def checked(*args: Any, **fields: Any) -> Any:
        if unknown := {name: value for name, value in fields.items() if name not in known}:
            given = {name: value for name, value in fields.items() if name in known}
            raise unknown_names(f"{whole.__name__} has no {kind}", unknown, known[bool(owner) :], given)
        if len(args) > code.co_argcount:
            value, name = args[code.co_argcount], known[code.co_argcount]
            raise UnknownName(f"{whole.__name__}({value!r}): expected names, such as {name}={value!r}.")
        for name in fields if owner else ():
            needs = owner.__dataclass_fields__[name].metadata.get("needs")
            if needs and needs not in fields and fields[name] is not None:
                raise StrategyError(
                    f"{name} {fields[name]}: without effect, since {needs} is not given. Give --{needs} too, or leave it out."
                )
        return function(*args, **fields)

    if owner is None:
        return cast("T", checked)
    owner.__init__ = checked
    OWNERS["_".join(re.findall("[A-Z][a-z]+", owner.__name__)).lower()] = owner
    return target


def from_dict(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """Return a dataclass from its JSON.

    Raises:
        StrategyError: for a field that does not exist, with what means the same, and for a value of another type.
    """
    return owner(**values)
