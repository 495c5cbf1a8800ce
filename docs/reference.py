"""Pages that are generated from the code: commands, fields, public names, JSON schemas, errors, glossary, results of runs."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import results
import schemas as written

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def pages() -> dict[str, str]:
    """Return the address of each page, with its Markdown."""
    return {
        "reference/commands.md": commands(),
        "reference/fields.md": fields(),
        "reference/python.md": python(),
        "reference/json.md": schemas(),
        "reference/errors.md": errors(),
        "reference/glossary.md": terms(),
        **results.pages(),
    }


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Return each command with its parser."""
    from toolkit.cli.parser import build_parser

    [action] = [action for action in build_parser()._actions if action.dest == "verb"]
    assert isinstance(action.choices, dict)
    return action.choices


def commands() -> str:
    """Return every command with its flags, as `--help` has them."""
    parts = [
        "# Commands and flags",
        "",
        "Every field of a [dataclass](fields.md) is a flag spelled as the field, with `-` for `_`.",
    ]
    parts += [
        "Each command also takes `--json FILE`; `--json -` writes the JSON to standard output and nothing else there."
    ]
    for name, parser in verbs().items():
        usage = parser.format_usage().removeprefix("usage: ").strip()
        parts += ["", f"## {name}", "", _plain(parser.description or ""), "", f"```text\n{usage}\n```"]
        for group in parser._action_groups:
            rows = [_flag(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
            rows = [row for row in rows if row[0] not in ("`--help`", "`--json FILE`")]
            if rows:
                title = {"positional arguments": "Arguments", "options": "Flags"}.get(
                    group.title or "", f"`{group.title}`"
                )
                parts += ["", f"**{title}**", "", table(("flag", "meaning"), rows)]
    return "\n".join(parts) + "\n"


def _flag(action: argparse.Action) -> tuple[str, str]:
    names = list(action.option_strings) or [str(action.metavar or action.dest).strip("[]")]
    if isinstance(action, argparse.BooleanOptionalAction):
        value = ""
    else:
        value = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
    names = [name for name in names if name != "-h"]
    return " ".join(f"`{name}{value}`" for name in names), _plain((action.help or "").replace("%%", "%"))


def _plain(text: str) -> str:
    return " ".join(text.replace("<", "&lt;").split())


def owners() -> list[type[Any]]:
    """Return the dataclasses with fields that are flags."""
    from toolkit.config.run_config import RunConfig
    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig
    from toolkit.launcher import RestartPolicy

    return [Strategy, TrainConfig, RunConfig, RestartPolicy]


def fields() -> str:
    """Return every field with its values, default and meaning."""
    from toolkit.config.strategy import SHARDINGS

    parts = [
        "# Fields",
        "",
        "The same words in Python, the shell, JSON and YAML. «open» is decided when the request is resolved.",
    ]
    for owner in owners():
        rows = []
        for field in dataclasses.fields(owner):
            about = field.metadata
            if not about.get("help"):
                continue
            values = [value for value in about.get("values", ()) if value not in about.get("later", ())]
            bounds = {"least": "at least", "above": "above", "below": "below"}
            limits = ", ".join(f"{bounds[word]} {bound:g}" for word, bound in about.get("bounds", {}).items())
            kind = " ".join(f"`{value}`" for value in values) or f"`{field.type}`" + (f", {limits}" if limits else "")
            default = "open" if field.default is None else f"`{field.default}`"
            rows.append((f"`{field.name}`", kind, default, _plain(about["help"].replace("%%", "%"))))
        summary = _plain((inspect.getdoc(owner) or "").partition("\n\n")[0])
        parts += ["", f"## {owner.__name__}", "", summary, "", table(("field", "values", "default", "meaning"), rows)]
    rows = [
        (f"`{row.word}`", row.engine, row.shards, " ".join(row.aliases), ", ".join(row.offload), ", ".join(row.adapter))
        for row in SHARDINGS.values()
    ]
    columns = ("sharding", "engine", "sharded over ranks", "FSDP1 name", "offload", "adapter")
    return "\n".join([*parts, "", "## The shardings", "", table(columns, rows)]) + "\n"


def python() -> str:
    """Return every public name, for mkdocstrings, and the results that functions return."""
    import toolkit
    from toolkit.core.display import Result

    parts = [
        "# Python",
        "",
        "`import toolkit as tk` costs little: torch is imported when a function needs it.",
        "",
        "## Public names",
    ]
    for name in toolkit.__all__:
        parts += ["", f"::: toolkit.{name}"]
    for found in pkgutil.walk_packages(toolkit.__path__, "toolkit."):
        if found.name not in ("toolkit.forecasting.tracker", "toolkit.notebook.widgets", "toolkit.__main__"):
            importlib.import_module(found.name)
    public = {getattr(toolkit, name) for name in toolkit.__all__}
    results = sorted(set(_subclasses(Result)) - public, key=lambda one: one.__name__)
    parts += ["", "## Results", "", "Each shows itself: `print` in a terminal, a table in a notebook, and `to_json()`."]
    for one in results:
        if not one.__name__.startswith("_"):
            parts += ["", f"::: {one.__module__}.{one.__name__}"]
    return "\n".join(parts) + "\n"


def _subclasses(owner: type[Any]) -> Iterator[type[Any]]:
    for one in owner.__subclasses__():
        yield one
        yield from _subclasses(one)


def schemas() -> str:
    """Return the schemas of the JSON that commands write."""
    parts = [
        "# JSON",
        "",
        "Sizes are bytes, times are seconds. Each command takes `--json FILE`; the schemas are JSON Schema 2020-12.",
    ]
    for name, schema in written.all_schemas().items():
        parts += ["", f"## {name}", "", f"[`{name}.schema.json`](../schemas/{name}.schema.json)"]
        parts += ["", table(("key", "type", "meaning"), _keys(schema, schema.get("$defs", {})))]
    return "\n".join(parts) + "\n"


def _keys(schema: dict[str, Any], known: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, one in schema.get("properties", {}).items():
        kind = one.get("type", "")
        words = " or ".join(kind) if isinstance(kind, list) else kind
        if "$ref" in one:
            words = f"`{one['$ref'].rsplit('/', 1)[1]}`"
        elif "anyOf" in one:
            words = " or ".join(sub.get("type") or f"`{sub['$ref'].rsplit('/', 1)[1]}`" for sub in one["anyOf"])
        if one.get("type") == "array" and "$ref" in one.get("items", {}):
            words += f" of `{one['items']['$ref'].rsplit('/', 1)[1]}`"
        yield f"`{prefix}{name}`", words, _plain(one.get("description", ""))
        yield from _keys(one, known, f"{prefix}{name}.")
    if not prefix:
        for title, one in known.items():
            if title not in ("Strategy", "TrainConfig"):
                yield from _keys(one, known, f"{title}: ")


def messages() -> dict[str, list[tuple[str, str]]]:
    """Return the messages of each class of error, as the code spells them, with the file that raises them."""
    from toolkit.core.errors import ToolkitError

    names = {"ToolkitError", *(one.__name__ for one in _subclasses(ToolkitError))}
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted((ROOT / "toolkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
                text = _message(node.args[0])
                if len(re.findall(r"\w+", text.replace("…", ""))) > 2:
                    found[node.func.id].append((text, str(path.relative_to(ROOT))))
    return found


def _message(node: ast.expr) -> str:
    """Return a message with `…` in the place of each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _message(node.left) + _message(node.right)
    return "…"


def errors() -> str:
    """Return every class of error and its messages."""
    import toolkit.launcher.failures  # its class is one of them
    from toolkit.core.errors import ToolkitError

    assert toolkit.launcher.failures
    texts = messages()
    classes = [ToolkitError, *dict.fromkeys(_subclasses(ToolkitError))]
    rows = [
        (f"`{one.__name__}`", one.exit_code, _plain((inspect.getdoc(one) or "").partition("\n\n")[0]))
        for one in classes
    ]
    parts = [
        "# Errors",
        "",
        "A user's mistake is one message: the value, what was expected, what to do. `…` stands for a value.",
    ]
    parts += ["The search box finds a message by its words.", "", table(("class", "exit code", "meaning"), rows)]
    for one in classes:
        own = sorted(set(texts.get(one.__name__, ())))
        if own:
            rows = [(_plain(text), f"`{place}`") for text, place in own]
            parts += ["", f"## {one.__name__}", "", table(("message", "raised in"), rows)]
    return "\n".join(parts) + "\n"


def terms() -> str:
    """Return the glossary."""
    from toolkit.core.glossary import glossary_terms

    parts = ["# Glossary", ""]
    for term, meaning in sorted(glossary_terms().items(), key=lambda pair: pair[0].lower()):
        anchor = re.sub(r"\W+", "-", term.lower())
        parts += [f'<a id="{anchor}"></a>**{term}**: {meaning}', ""]
    return "\n".join(parts)


def stored(name: str) -> Any:
    """Return the stored results of executed runs, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
