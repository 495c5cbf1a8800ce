"""JSON Schemas of what `toolkit forecast`, `plan` and `doctor` write with `--json`, made of the classes that write it.

`python docs/schemas.py` writes them into `docs/schemas/`. Tests compare them with the files and with real output.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
WORDS: dict[Any, str | None] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    Any: None,
}


class Schemas:
    """Schemas of dataclasses, each once in `$defs`."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def of(self, hint: Any) -> dict[str, Any]:
        """Return the schema of a type."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            options = [self.of(one) for one in arguments]
            if all(set(one) == {"type"} for one in options):
                return {"type": [one["type"] for one in options]}
            return {"anyOf": options}
        if origin in (tuple, list, collections.abc.Sequence):
            if origin is tuple and Ellipsis not in arguments:
                items = [self.of(one) for one in arguments]
                return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
            return {"type": "array", "items": self.of(arguments[0])}
        if origin in (dict, collections.abc.Mapping):
            value = self.of(arguments[1])
            return {"type": "object", "additionalProperties": value} if value else {"type": "object"}
        if dataclasses.is_dataclass(hint):
            return self.dataclass(hint)
        word = WORDS[hint]
        return {"type": word} if word else {}

    def dataclass(self, owner: Any) -> dict[str, Any]:
        """Return a reference to a dataclass's schema, which lies in `$defs`."""
        if owner.__name__ not in self.known:
            self.known[owner.__name__] = {}
            self.known[owner.__name__] = self.object(owner)
        return {"$ref": f"#/$defs/{owner.__name__}"}

    def object(self, owner: Any) -> dict[str, Any]:
        """Return the schema of a dataclass's JSON: what its `json_fields` declare, or all of its fields."""
        result: dict[str, Any] = {}
        fields = " ".join(field.name for field in dataclasses.fields(owner))
        for word in getattr(owner, "json_fields", "*").replace("*", fields).split():
            path, _, attribute = word.partition("=")
            *groups, name = path.split(".")
            inner = functools.reduce(lambda outer, group: outer.setdefault(group, {}), groups, result)
            hint, text = member(owner, (attribute or name).split("."))
            inner[name] = {**self.of(hint), **({"description": text} if text else {})}
            for group in groups:
                result[group] = Group(result[group])
        return closed({name: closed(one) if isinstance(one, Group) else one for name, one in result.items()})


class Group(dict[str, Any]):
    """Keys of a nested object, and not a schema yet."""


def member(owner: Any, path: list[str]) -> tuple[Any, str]:
    """Return the type and the docstring of an attribute: of a field, a property, or one of an attribute's own."""
    first, *rest = path
    found = inspect.getattr_static(owner, first, None)
    if isinstance(found, property):
        hint, text = typing.get_type_hints(found.fget)["return"], inspect.getdoc(found) or ""
    else:
        hint = typing.get_type_hints(owner)[first]
        about = getattr(owner, "__dataclass_fields__", {}).get(first)
        text = (about.metadata.get("help") if about else "") or described(owner).get(first, "")
    if typing.get_origin(hint) is typing.ClassVar:
        hint = typing.get_args(hint)[0]
    if not rest:
        return hint, text.replace("%%", "%")
    options = [one for one in typing.get_args(hint) if one is not type(None)] or [hint]
    inner, text = member(options[0], rest)
    return (inner | None if len(options) < len(typing.get_args(hint)) else inner), text


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these keys."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def described(owner: type[Any]) -> dict[str, str]:
    """Return the docstring under each field of a class."""
    found: dict[str, str] = {}
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:], strict=False):
        text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            found[field.target.id] = " ".join(text.split())
    return found


def all_schemas() -> dict[str, Any]:
    """Return each command's schema, by its name."""
    from toolkit.diagnosis.result import Diagnosis
    from toolkit.forecasting.plans import Plan
    from toolkit.forecasting.result import Forecast

    found = {}
    for name, owner in (("forecast", Forecast), ("plan", Plan), ("doctor", Diagnosis)):
        schemas = Schemas()
        schema = schemas.object(owner)
        found[name] = {"$schema": DIALECT, "title": f"toolkit {name} --json", **schema, "$defs": schemas.known}
    return found


def main() -> None:
    """Write them."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in all_schemas().items():
        (FOLDER / f"{name}.schema.json").write_text(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parents[1]))
    main()
