"""Names of other training tools (HF Trainer, TRL, Axolotl, DeepSpeed, torchrun), and what means the same here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _sections() -> Iterator[dict[str, str]]:
    """Yield name → meaning of each section of `hints.txt`."""
    for section in re.split(r"^\[\w+\]$", Path(__file__).with_suffix(".txt").read_text("utf-8"), flags=re.M)[1:]:
        rows = [line.split(": ", 1) for line in section.splitlines() if ": " in line and line[0] != "#"]
        yield {name: meaning for names, meaning in rows for name in names.split()}


HINTS, VERBS, PYTHON_NAMES = _sections()
"""Flags and arguments, verbs, and names in the package, of other tools → ours, or a sentence."""

LISTS = ("lora_targets", "tracker", "data", "eval_data")
"""Fields that take several values by commas."""

_OFF = ("false", "no", "none", "off", "disabled", "disable", "null", "never", "[]", "")

SHARDING_NAMES = {"deepspeed": "zero3", "fsdp1": "fsdp", "fsdp2": "fsdp", "zero": "zero3", "ds": "zero3", "dp": "ddp"}
"""Names of libraries and of others' strategies → the sharding that is meant."""


@dataclass
class Meaning:
    """What names of other tools mean here, all together: one value a field."""

    fields: dict[str, str | bool] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Sentences, by the name that was given."""
    unknown: list[str] = field(default_factory=list)


def translate(
    names: Mapping[str, Sequence[object]], known: Collection[str] = (), given: Mapping[str, Any] | None = None
) -> Meaning:
    """Return the fields that names of other tools mean: `{"num_train_epochs": ["3"]}` → `epochs` 3.

    Args:
        names: each with its values.
        known: fields of the verb or function. They decide between several meanings.
        given: our own fields that have values already. They replace what a hint only proposes.
    """
    meaning, own = Meaning(), {name: str(value) for name, value in (given or {}).items()}
    proposed: dict[str, str | bool] = {}
    origin = dict.fromkeys(own, "")
    for name, values in names.items():
        forms, words = _forms(name, [str(value) for value in values], known)
        if not forms:
            meaning.unknown.append(name)
        for weak, field_, value in [
            part for form in forms if form.startswith(("--", "?")) for part in _parts(form, words)
        ]:
            if weak:
                proposed.setdefault(field_, value)
            elif str({**own, **meaning.fields}.get(field_, value)) != str(value):
                other = {**own, **meaning.fields}[field_]
                meaning.notes[name] = f"{field_} {value} contradicts {field_} {other}{origin[field_]}. Choose one"
            elif field_ not in own:
                meaning.fields[field_], origin[field_] = value, f" of {name}"
        meaning.notes.update((name, form) for form in forms if not form.startswith(("--", "?")))
    for field_, value in proposed.items():
        if field_ not in own:
            meaning.fields.setdefault(field_, value)
    return meaning


def _forms(name: str, values: Sequence[str], known: Collection[str]) -> tuple[list[str], str]:
    """Return the table's answers to a name, and the value for `{}`. What is off is only proposed."""
    key = name.lstrip("-").partition(" ")[0].lower().replace("-", "_")
    key = key if key in HINTS else Path(name).suffix or key
    words = " ".join(values).lower().split()
    if forms := list(dict.fromkeys(HINTS[each] for word in words if (each := f"{key}={word}") in HINTS)):
        return forms, ""
    if key not in HINTS:
        return [], ""
    on, _, off = HINTS[key].partition(" | ")
    if values and (" ".join(words) in _OFF or (words == ["0"] and "{}" not in on)):
        return [re.sub(r"(?<!\S)--", "?--", off) if off.startswith("--") else off or "leave it out"], ""
    choices = on.split(" // ")
    fits = [form for form in choices if {part for _, part, _ in _parts(form, "")} <= {*known}]
    return (fits or choices)[:1], ",".join(values) if any(f"--{each.replace('_', '-')} " in on for each in LISTS) else (
        values[0] if values else "VALUE"
    )


def _parts(form: str, value: str) -> list[tuple[str, str, str | bool]]:
    """Return `?` or nothing, field and value of each flag: `--no-packing` → `("", "packing", False)`."""
    run = re.sub(r"/checkpoint-\d+/?$", "", value)
    flags = re.findall(r"(\??)--(no-)?([\w-]+)(?: (?!\??--)(\S+))?", form) if form.startswith(("--", "?")) else []
    return [
        (weak, name.replace("-", "_"), text.format(value, run=run) if text else not no)
        for weak, no, name, text in flags
    ]
