"""Names that people know from other tools, and unknown names: answered in a sentence with the arguments that mean the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

from toolkit.config.fields import check_value, kinds_of
from toolkit.config.hints import Meaning, translate
from toolkit.core.errors import StrategyError, UnknownName, nearest

T = TypeVar("T")


def meaning_of(names: Mapping[str, Any], known: Collection[str], given: Mapping[str, Any]) -> Meaning:
    """Return what names of other tools mean, as `translate` does; a value that our field refuses is a sentence."""
    meaning = translate(names, known, given)
    for name, value in list(meaning.fields.items()):
        for owner in OWNERS.values():
            if name in (kinds := kinds_of(owner)):
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


def unknown_arguments(
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
    ours = {name: value for name, value in names.items() if any(name in kinds_of(owner) for owner in OWNERS.values())}
    meaning = meaning_of({name: value for name, value in theirs.items() if name not in ours}, known, given)
    fields = {**meaning.fields, **ours}
    if here := {name: value for name, value in fields.items() if name in known}:
        text += f" Here it is {_arguments(here)}."
    for argument, owner in OWNERS.items():
        own = {name: fields.pop(name) for name in kinds_of(owner) if name in fields and name not in known}
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
            raise unknown_arguments(f"{whole.__name__} has no {kind}", unknown, known[bool(owner) :], given)
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
