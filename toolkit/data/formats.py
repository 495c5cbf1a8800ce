"""Rows → documents: one table of the columns, roles and fields that people use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.atomic_io import shorten_value, unique_names
from toolkit.core.errors import DataError, nearest
from toolkit.data.readers import check_size

SYSTEM = {"system?": "system system_prompt"}

FORMATS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "prompt-completion": ("prompt", {"prompt": "prompt", "completion": "completion"}),
    "prompt-response": ("prompt", {"prompt": "prompt", "completion": "response"}),
    "messages": ("messages", {"messages": "messages conversation dialogue dialog chat turns", "tools?": "tools", **SYSTEM}),
    "sharegpt": ("messages", {"messages": "conversations", "tools?": "tools", **SYSTEM}),
    "alpaca": ("turns", {"prompt": "instruction", "completion": "output", "input?": "input", **SYSTEM}),
    "dolly": ("turns", {"prompt": "instruction", "completion": "response", "input?": "context", **SYSTEM}),
    "question-answer": ("turns", {"prompt": "question", "completion": "answer", **SYSTEM}),
    "query-response": ("turns", {"prompt": "query", "completion": "response", **SYSTEM}),
    "problem-solution": ("turns", {"prompt": "problem", "completion": "solution", **SYSTEM}),
    "input-output": ("turns", {"prompt": "input", "completion": "output", **SYSTEM}),
    "text": ("text", {"text": "text"}),
}  # fmt: skip
"""Format → the kind of its documents, and field → its columns; with `?` it may be missing. The first complete one counts."""

NAMES = sorted({name for _, fields in FORMATS.values() for columns in fields.values() for name in columns.split()})
"""Names of columns, which `--columns` gives to others."""

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatbot", "ai", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}
"""A role, in lower case → the templates' name of it. Other roles are handed to the template as they are."""

FIELDS = {
    **{name: name for name in ("role", "content", "tool_calls", "name", "tool_call_id", "weight", "reasoning_content")},
    **{"from": "role", "value": "content", "thinking": "reasoning_content", "function_call": "tool_calls"},
}
"""Names of a message's fields → the templates' names."""

EXPECTED = {str: "a string that is not empty", dict: "an object", list: "a list that is not empty"}


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the rows of a table become documents."""

    name: str
    kind: str
    columns: Mapping[str, Sequence[str]]
    """Field → its columns in the table. Of several the first one that is filled counts."""

    def document(self, row: Any, where: str) -> tuple[str, dict[str, Any]]:
        """Return a row's kind and content, as `files.Document` has them."""
        check(row, dict, where, "the row")
        values: dict[str, Any] = {}
        for field, columns in self.columns.items():
            present = [row[column] for column in columns if column in row]
            if not present and field[-1] != "?":
                raise missing_column(columns[0], row, where)
            value, what = next(filter(None, present), present[0] if present else None), f"column {columns[0]!r}"
            if field == "messages" or (self.kind == "prompt" and isinstance(value, list)):
                value = _messages(value, where, what)
            elif field == "tools?" and value:
                value = [_parsed(tool, dict, where, "a tool") for tool in _parsed(value, list, where, what)]
            elif value or field[-1] != "?":
                check(value, str, where, what)
            values[field.strip("?")] = value
        if self.kind == "text" or (self.kind == "prompt" and all(isinstance(value, str) for value in values.values())):
            return self.kind, values
        if self.kind == "turns":
            user = "\n\n".join(filter(None, (values["prompt"], values.get("input"))))
            values["messages"] = [*_turns("user", user), *_turns("assistant", values["completion"])]
        elif self.kind == "prompt":
            for turn in (before := _turns("user", values["prompt"])):
                turn.update({"weight": 0} if turn["role"] == "assistant" else {})
            values["messages"] = [*before, *_turns("assistant", values["completion"])]
        messages = values["messages"]
        if (system := values.get("system")) and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif system and messages[0]["content"] != system:
            raise DataError(f"{where}: has a system text in a column and another in its messages. Keep one of them.")
        content = {name: values[name] for name in ("messages", "tools") if values.get(name)}
        return "turns" if self.kind == "turns" else "messages", content


def find_format(columns: Sequence[str], where: str, data_format: str, renamed: Mapping[str, str]) -> Format:
    """Return the format of a table with these columns.

    Args:
        columns: the table's.
        where: its place, for messages.
        data_format: a name in `FORMATS`, or `auto`.
        renamed: name in `NAMES` → the column that has its meaning.

    Raises:
        DataError: for a column that is missing or stands twice, and for rows that are not trained on.
    """
    for name, column in renamed.items():
        if name not in NAMES:
            raise DataError(
                f"--columns {name}={column}: {name!r} is unknown.{nearest(name, NAMES)} Known: {', '.join(NAMES)}."
            )
        if column not in columns:
            raise missing_column(column, columns, where)
    names = {column.strip().casefold(): column for column in reversed(columns)}
    names |= {column.strip(): column for column in columns} | dict(renamed)
    if {"chosen", "rejected"} <= names.keys() and data_format == "auto" and not renamed:
        raise DataError(
            f"{where}: rows with 'chosen' and 'rejected' are preferences, which need another loss. Use TRL's DPOTrainer, or"
            " train on the chosen answers alone: --columns completion=chosen (conversations: --columns messages=chosen)."
        )
    fits = {
        name: {
            # Rows of JSON may have an optional field that the first one lacks.
            field: [names.get(c, c) for c in spelled.split() if c in names or field[-1] == "?"][
                : 9 if field[-1] == "?" else 1
            ]
            for field, spelled in fields.items()
        }
        for name, (_, fields) in FORMATS.items()
        if data_format in ("auto", name)
    }

    def unused(name: str) -> set[str]:
        return set(renamed.values()) - {column for found in fits[name].values() for column in found}

    order = sorted(fits, key=lambda name: len(unused(name)))
    complete = next((name for name in order if all(fits[name].values())), None)
    if complete is None:
        near = next(
            (n for n in order if not set(columns).isdisjoint(c for found in fits[n].values() for c in found)), "text"
        )
        near = near if near in fits else order[0]
        lacking = next(field for field, found in fits[near].items() if not found)
        raise missing_column(FORMATS[near][1][lacking].split()[0], columns, where)
    if left := sorted(unused(complete)):
        raise DataError(
            f"{where}: --columns: {left[0]!r} has no place in the format {complete}. Name the other columns, too."
        )
    needed = [column for found in fits[complete].values() for column in found]
    if twice := next((column for column in needed if columns.count(column) > 1), None):
        raise DataError(f"{where}: the column {twice!r} stands twice. Rename one of them.")
    return Format(name=complete, kind=FORMATS[complete][0], columns=fits[complete])


def missing_column(name: str, columns: Iterable[str], where: str) -> DataError:
    """Return the error for a table or row without a column."""
    return DataError(
        f"{where}: lacks the column {name!r}. It has {', '.join(map(repr, columns)) or 'none'}; expected 'text', 'prompt' and"
        " 'completion', 'messages', or columns of another --data-format. Name them: --columns prompt=question,completion=answer"
        " (of a text: --text-column NAME)."
    )


def _turns(role: str, value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _messages(value: Any, where: str, what: str) -> list[dict[str, Any]]:
    """Return a conversation with the roles and fields that chat templates know."""
    return [_message(each, where, f"message {at}") for at, each in enumerate(_parsed(value, list, where, what))]


def _message(value: Any, where: str, name: str) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for key, item in check(value, dict, where, name).items():
        if (field := FIELDS.get(key)) and (item is not None or field == "content"):
            message.setdefault(field, item)
    if missing := [field for field in ("role", "content") if field not in message and "tool_calls" not in message]:
        raise DataError(f"{where}: {name} lacks {' and '.join(map(repr, missing))}. Correct or remove the row.")
    role = check(message.get("role"), str, where, f"{name}'s 'role'")
    message["role"] = ROLES.get(role.strip().casefold(), role)
    if role == "function_call":
        message["tool_calls"] = [message.pop("content", None)]
    if calls := message.pop("tool_calls", None):
        calls = [calls] if isinstance(calls, dict) else _parsed(calls, list, where, f"{name}'s 'tool_calls'")
        message["tool_calls"] = [_tool_call(call, where, name) for call in calls]
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = content = "".join(_part(part, where, name) for part in content)
    if content or not (
        calls or (content == "" and (message["role"] in ("system", "tool") or "reasoning_content" in message))
    ):
        check(content, str, where, f"{name}'s 'content'")
    if "reasoning_content" in message:  # templates read it under one of two names
        message["thinking"] = check(message["reasoning_content"], str, where, f"{name}'s 'reasoning_content'")
    if message.get("weight", 1) not in (0, 1):
        raise DataError(
            f"{where}: {name}'s 'weight' is {message['weight']!r}, expected 0 (not trained) or 1. Correct it."
        )
    return message


def _part(part: Any, where: str, name: str) -> str:
    """Return the text of one part of a message's content."""
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    text = part.get("text") if isinstance(part, dict) else part
    if kind != "text" or not isinstance(text, str):
        raise DataError(f"{where}: {name} has a part of type {kind!r}, expected text alone. Remove the row.")
    return text


def _tool_call(call: Any, where: str, name: str) -> dict[str, Any]:
    """Return a call as templates expect it, with its arguments as an object."""
    call = _parsed(call, dict, where, f"{name}'s call of a tool")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: {name} has a call without the name of its function. Correct or remove the row.")
    arguments = function.get("arguments") or {}
    function = {
        "name": function["name"],
        "arguments": arguments and _parsed(arguments, dict, where, f"{name}'s 'arguments'"),
    }
    return {"type": "function", "function": function, **({"id": call["id"]} if call.get("id") else {})}


def _parsed(value: Any, kind: Any, where: str, what: str) -> Any:
    """Return a list or an object, which may be written as a string of JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value, object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            problem = f"{what} is a string that is not JSON ({error}): {shorten_value(value)}"
            raise DataError(f"{where}: {problem}. Write it with json.dumps.") from error
    return check(value, kind, where, what)


def check(value: Any, kind: Any, where: str, what: str) -> Any:
    """Return `value` if it is of this type and not empty."""
    if not isinstance(value, kind) or not (value.strip() if isinstance(value, str) else value):
        names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}
        actual = "empty" if isinstance(value, kind) else names.get(type(value).__name__, repr(value))
        raise DataError(f"{where}: {what} is {actual}, expected {EXPECTED[kind]}. Correct or remove the row.")
    if isinstance(value, str):
        check_size(len(value), where)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = ascii(value[error.start])
            raise DataError(f"{where}: {what} holds half of a surrogate pair ({half}). Remove it.") from error
    return value
