"""The fields of dataclasses as command-line flags, and back. A flag has the name of its field."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.fields import kinds_of
from toolkit.config.hints import HINTS, VERBS
from toolkit.config.train_config import PIPELINE_ROWS
from toolkit.config.unknown_names import meaning_of, spell_notes
from toolkit.core.errors import StrategyError, nearest

MAX_METAVAR = 60
"""Characters of a flag and its values in one line of help; more values stand in its text."""


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
            kind, _ = kinds_of(owner)[f.name]
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


class _Joined(argparse.Action):
    """Join the values of a flag that is given several times by commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, value if before is None else f"{before},{value}")


def flag(name: str) -> str:
    """Return a field's flag: `"micro_batch"` → `"--micro-batch"`."""
    return "--" + name.replace("_", "-")


def to_flags(*owners: Any) -> list[str]:
    """Return the shortest equivalent command line."""
    return spell(spoken(*owners))


def spoken(*owners: Any) -> dict[str, Any]:
    """Return the fields that a command line has to say: those with other values than their defaults."""
    stages = max((getattr(owner, "pp", 1) for owner in owners), default=1)
    fields = [other_values(dataclasses.asdict(owner), type(owner)(), stages) for owner in owners]
    return {name: value for values in fields for name, value in values.items()}


def other_values(values: Mapping[str, Any], plain: Any, stages: int = 1) -> dict[str, Any]:
    """Return the fields with other values than those of `plain`.

    A pipeline's default rows are others (see `pipeline_rows`), so with several stages the rows are always among them.
    """
    said = PIPELINE_ROWS if stages > 1 else ()
    return {name: value for name, value in values.items() if name in said or value != getattr(plain, name)}


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
    kinds = {name: kind for owner in owners for name, (kind, _) in kinds_of(owner).items()}
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
