"""JSON Schemas of what `toolkit forecast`, `plan` and `doctor` write with `--json`, made of the classes that write it.

`python docs/schemas.py` writes them into `docs/schemas/`. Tests compare them with the files and with real output.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
WORDS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: None}


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

    def dataclass(self, owner: Any, name: str = "") -> dict[str, Any]:
        """Return a reference to a dataclass's schema, which lies in `$defs`."""
        name = name or owner.__name__
        if name not in self.known:
            self.known[name] = {}
            hints, texts = typing.get_type_hints(owner), described(owner)
            properties = {}
            for field in dataclasses.fields(owner):
                text = field.metadata.get("help") or texts.get(field.name, "")
                properties[field.name] = {**self.of(hints[field.name]), **({"description": text} if text else {})}
            self.known[name] = closed(properties)
        return {"$ref": f"#/$defs/{name}"}

    def attributes(self, owner: Any, names: dict[str, str]) -> dict[str, Any]:
        """Return the schema of an object: key → a field or property of `owner`, with its type and docstring."""
        hints, texts = typing.get_type_hints(owner), described(owner)
        properties = {}
        for key, attribute in names.items():
            member = inspect.getattr_static(owner, attribute, None)
            if isinstance(member, property):
                hint, text = typing.get_type_hints(member.fget)["return"], inspect.getdoc(member) or ""
            else:
                hint, text = hints[attribute], texts.get(attribute, "")
            properties[key] = {**self.of(hint), **({"description": text} if text else {})}
        return closed(properties)


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


def forecast(schemas: Schemas) -> dict[str, Any]:
    """Return the schema of a forecast: `forecasting.result.Forecast.to_dict`."""
    from toolkit.forecasting.result import Forecast
    from toolkit.forecasting.timing import Timing

    def names(*same: str, **others: str) -> dict[str, str]:
        return {**{name: name for name in same}, **others}

    first = names("model", "strategy", "train_config", "hardware", "ranks", "fits", "reason", "change")
    device = names(
        "peak_bytes", "peak_phase", "needed_bytes", "context_bytes", "context", "limit_bytes", "reserved_bytes"
    )
    device |= names(fused_peak_bytes="fused_bytes") | names("parts", "phases")
    last = names("checkpoint_bytes", "checkpoint_stall_seconds", "operations", "communication_bytes", "unknown")
    host = names(peak_bytes="host_bytes", checkpoint_bytes="host_checkpoint_bytes")
    step = schemas.attributes(Timing, names(*(field.name for field in dataclasses.fields(Timing))))["properties"]
    return closed(
        {
            **schemas.attributes(Forecast, first)["properties"],
            "device": schemas.attributes(Forecast, device),
            "host": schemas.attributes(Forecast, host),
            "nvme": closed({"peak_bytes": {"type": "integer"}}),
            # Null on a device with unknown speed.
            **{name: {**one, "type": sorted({"null", *([one["type"]] if isinstance(one["type"], str) else one["type"])})}
               for name, one in step.items()},
            **schemas.attributes(Forecast, last)["properties"],
        }
    )  # fmt: skip


def plan(schemas: Schemas) -> dict[str, Any]:
    """Return the schema of a plan: `forecasting.plans.Plan.to_dict`."""
    from toolkit.forecasting.plans import Plan
    from toolkit.forecasting.search import Candidate

    schemas.known["Forecast"] = forecast(schemas)
    same = ("change", "strategy", "train_config", "hours", "cost", "checkpoint_share", "reason")
    one = schemas.attributes(Candidate, {name: name for name in same})["properties"]
    one["global_batch"] = {"type": ["integer", "null"], "description": "Null without a forecast."}
    one["forecast"] = {"anyOf": [{"$ref": "#/$defs/Forecast"}, {"type": "null"}]}
    schemas.known["Candidate"] = closed(one)
    lists = {"type": "array", "items": {"$ref": "#/$defs/Candidate"}}
    top = schemas.attributes(Plan, {name: name for name in ("model", "hardware", "global_batch")})["properties"]
    return closed({**top, **dict.fromkeys(("ranked", "rejected", "alternatives"), lists)})


def doctor(schemas: Schemas) -> dict[str, Any]:
    """Return the schema of a diagnosis: a dataclass as it is."""
    from toolkit.diagnosis.result import Diagnosis

    return schemas.known.pop(schemas.dataclass(Diagnosis)["$ref"].rsplit("/", 1)[1])


def all_schemas() -> dict[str, Any]:
    """Return each command's schema, by its name."""
    found = {}
    for make in (forecast, plan, doctor):
        schemas = Schemas()
        schema = make(schemas)
        title = f"toolkit {make.__name__} --json"
        found[make.__name__] = {"$schema": DIALECT, "title": title, **schema, "$defs": schemas.known}
    return found


def main() -> None:
    """Write them."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in all_schemas().items():
        (FOLDER / f"{name}.schema.json").write_text(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parents[1]))
    main()
