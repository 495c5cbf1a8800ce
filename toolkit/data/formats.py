"""Rows → documents: one table of the columns, roles and fields that people use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.atomic_io import shorten_value, unique_names
from toolkit.core.errors import DataError, nearest
from toolkit.data.readers import check_size

SYSTEM = {"system?": "system system_prompt", "tools?": "tools"}

FORMATS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "prompt-completion": ("prompt", {"prompt": "prompt", "completion": "completion", **SYSTEM}),
    "prompt-response": ("prompt", {"prompt": "prompt", "completion": "response", **SYSTEM}),
    "messages": ("messages", {"messages": "messages conversation dialogue dialog chat turns", **SYSTEM}),
    "sharegpt": ("messages", {"messages": "conversations", **SYSTEM}),
    "alpaca": ("turns", {"prompt": "instruction", "completion": "output", "input?": "input", **SYSTEM}),
    "dolly": ("turns", {"prompt": "instruction", "completion": "response", "input?": "context", **SYSTEM}),
    "question-answer": ("turns", {"prompt": "question", "completion": "answer response", "input?": "context", **SYSTEM}),
    "query-response": ("turns", {"prompt": "query", "completion": "response", **SYSTEM}),
    "problem-solution": ("turns", {"prompt": "problem", "completion": "solution", **SYSTEM}),
    "input-output": ("turns", {"prompt": "input", "completion": "output", **SYSTEM}),
    "text": ("text", {"text": "text"}),
}  # fmt: skip
"""Format → the kind of its documents, and field → its columns; with `?` it may be missing. The first complete one counts."""

NAMES = sorted({name for _, fields in FORMATS.values() for columns in fields.values() for name in columns.split()})
"""Names of columns, which `--columns` gives to others."""

_ROLES = {
    "user": "user human prompter", "assistant": "assistant gpt model bot chatbot ai chatgpt function_call",
    "system": "system developer", "tool": "tool function observation tool_response ipython",
}  # fmt: skip
ROLES = {spelled: role for role, names in _ROLES.items() for spelled in names.split()}
"""A role, in lower case → the templates' name of it. Other roles are handed to the template as they are."""

_FIELDS = "role content tool_calls name tool_call_id weight reasoning_content"
FIELDS = {name: name for name in _FIELDS.split()} | {
    "from": "role", "value": "content", "text": "content", "function_call": "tool_calls", "train": "weight",
    "training": "weight", "thinking": "reasoning_content", "reasoning": "reasoning_content",
}  # fmt: skip
"""Names of a message's fields → the templates' names."""

TYPES = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}
"""Names of JSON's types, for messages."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the rows of a table become documents."""

    name: str
    kind: str
    columns: Mapping[str, str]
    """Field → its column in the table."""

    def document(self, row: Any) -> tuple[str, dict[str, Any]]:
        """Return a row's kind and content, as `files.Document` has them.

        Raises:
            DataError: without the row's place.
        """
        values: dict[str, Any] = {}
        for field, column in self.columns.items():
            if column not in check(row, dict, "the row") and field[-1] != "?":
                raise missing_column(column, row)
            spelled = FORMATS[self.name][1][field].split()
            if field[-1] == "?" and column in spelled:  # rows may spell an optional field in several ways
                column = next((each for each in spelled if row.get(each)), column)
            value, what = row.get(column), f"column {column!r}"
            if field[-1] == "?" and (not value or str(value).isspace()):
                continue
            if field == "messages" or (self.kind == "prompt" and field[-1] != "?" and isinstance(value, list)):
                value = _messages(value, what)
            elif field == "tools?":
                value = [_parsed(tool, dict, "a tool") for tool in _parsed(value, list, what, empty=True)]
                check_encodable(json.dumps(value, ensure_ascii=False), what)
            else:
                check(value, str, what)
            values[field.strip("?")] = value
        texts = all(isinstance(values.get(name, ""), str) for name in ("prompt", "completion"))
        if self.kind == "text" or (self.kind == "prompt" and texts and values.keys() == {"prompt", "completion"}):
            return self.kind, values
        if self.kind != "messages":
            prompt, answer = values["prompt"], values["completion"]
            text = f"{prompt}\n\n{values['input']}" if values.get("input") else prompt
            before = prompt if isinstance(prompt, list) else [{"role": "user", "content": text}]
            after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
            values["messages"] = [
                turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in before
            ] + after
        system, first = values.get("system"), values["messages"][0]
        if system and first["role"] != "system":
            values["messages"].insert(0, {"role": "system", "content": system})
        elif system and first.get("content") != system:
            raise DataError("has a system text in a column and another in its messages. Keep one of them.")
        content = {name: values[name] for name in ("messages", "tools") if values.get(name)}
        return "turns" if self.kind != "messages" and texts and "tools" not in content else "messages", content


def find_format(columns: Sequence[str], data_format: str, renamed: Mapping[str, str]) -> Format:
    """Return the format of a table with these columns.

    Args:
        columns: the table's.
        data_format: a name in `FORMATS`, or `auto`.
        renamed: name in `NAMES` → the column that has its meaning.

    Raises:
        DataError: for a column that is missing or stands twice, and for rows that are not trained on; without a place.
    """
    if unknown := next((name for name in renamed if name not in NAMES), None):
        raise DataError(f"--columns: {unknown!r} is unknown.{nearest(unknown, NAMES)} Known: {', '.join(NAMES)}.")
    if missing := next((column for column in renamed.values() if column not in columns), None):
        raise missing_column(missing, columns)
    names = {column.strip().casefold(): column for column in reversed(columns)}
    names |= {column.strip(): column for column in columns} | dict(renamed)
    if {"chosen", "rejected"} <= names.keys() and data_format == "auto" and not renamed:
        raise DataError(
            "rows with 'chosen' and 'rejected' are preferences, which need another loss. Use TRL's DPOTrainer, or train on"
            " the chosen answers alone: --columns completion=chosen (conversations: --columns messages=chosen)."
        )
    if {"prompt", "completion", "label"} <= names.keys() and data_format == "auto" and not renamed:
        raise DataError(
            "rows with 'completion' and 'label' tell good answers from bad ones, which needs another loss. Use TRL's KTOTrainer,"
            " keep the good rows alone, or train on all of them: --data-format prompt-completion."
        )
    # Rows of JSON may have an optional field that the first one lacks.
    fits = {
        name: {f: next((names[c] for c in w.split() if c in names), w.split()[0] * ("?" in f)) for f, w in fields.items()}
        for name, (_, fields) in FORMATS.items() if data_format in ("auto", name)
    }  # fmt: skip

    def matches(name: str, wanted: Iterable[str]) -> int:
        return len(set(wanted) & set(fits[name].values()))

    name = max(fits, key=lambda name: (all(fits[name].values()), matches(name, renamed.values())))
    if not all(fits[name].values()):
        name = max(fits, key=lambda name: (matches(name, columns), name == "text"))
        raise missing_column(
            next(FORMATS[name][1][f].split()[0] for f, column in fits[name].items() if not column), columns
        )
    if matches(name, renamed.values()) < len(set(renamed.values())):
        raise DataError(
            f"--columns has more than the format {name} takes: {', '.join(fits[name])}. Name all, or fewer."
        )
    if twice := next((column for column in fits[name].values() if columns.count(column) > 1), None):
        raise DataError(f"the column {twice!r} stands twice. Rename one of them.")
    return Format(name=name, kind=FORMATS[name][0], columns=fits[name])


def missing_column(name: str, columns: Iterable[str]) -> DataError:
    """Return the error for a table or row without a column."""
    return DataError(
        f"lacks the column {name!r}. It has {', '.join(map(repr, columns))}; expected 'text', 'prompt' and 'completion',"
        " 'messages', or columns of another --data-format. Name them: --columns prompt=question,completion=answer, or"
        " --text-column NAME."
    )


def _messages(value: Any, what: str) -> list[dict[str, Any]]:
    """Return a conversation with the roles and fields that chat templates know."""
    return [_message(each, f"message {at}") for at, each in enumerate(_parsed(value, list, what))]


def _message(value: Any, name: str) -> dict[str, Any]:
    if (
        check(value, dict, name).keys() == {"role", "content"}
        and value["role"] in ("user", "assistant", "system", "tool")
        and _is_text(value["content"])
    ):
        return {"role": value["role"], "content": check(value["content"], str, name)}
    message: dict[str, Any] = {}
    # The templates' own names come first: where a message has two names of a field, theirs counts.
    for key, item in sorted(value.items(), key=lambda pair: pair[0] not in FIELDS.values()):
        field = FIELDS.get(key.strip().casefold())
        if field and message.get(field) is None and (item is not None or field == "content"):
            message[field] = item
    if missing := [field for field in ("role", "content") if field not in message and "tool_calls" not in message]:
        raise DataError(f"{name} lacks {' and '.join(map(repr, missing))}. Correct or remove the row.")
    role = check(message.get("role"), str, f"{name}'s 'role'")
    message["role"] = ROLES.get(role.strip().casefold(), role)
    if role.strip().casefold() == "function_call":
        message["tool_calls"] = message.pop("content", None)
    if calls := message.pop("tool_calls", None):
        calls = _parsed(calls, list | dict, f"{name}'s 'tool_calls'")
        calls = [calls] if isinstance(calls, dict) else calls
        message["tool_calls"] = [_tool_call(call, name) for call in calls]
    content = message.pop("content", None)
    if isinstance(content, list):
        content = "".join(_part(part, name) for part in content)
    empty = calls or (content == "" and (message["role"] in ("system", "tool") or "reasoning_content" in message))
    if content is not None or not empty:
        message["content"] = content if content in ("", None) and empty else check(content, str, f"{name}'s 'content'")
    if "reasoning_content" in message:  # templates read it under one of two names
        message["thinking"] = check(message["reasoning_content"], str, f"{name}'s 'reasoning_content'")
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"{name}'s 'weight' is {message['weight']!r}, expected 0 (not trained) or 1. Correct it.")
    check_encodable(json.dumps(message, ensure_ascii=False), name)
    return message


def _part(part: Any, name: str) -> str:
    """Return the text of one part of a message's content."""
    kind, text = (part.get("type", "text"), part.get("text")) if isinstance(part, dict) else ("text", part)
    if kind != "text" or not isinstance(text, str):
        raise DataError(f"{name} has a part of type {kind!r}, expected text alone. Remove the row.")
    return text


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    """Return a call as templates expect it, with its arguments as an object."""
    call = _parsed(call, dict, f"{name}'s call of a tool")
    function = _parsed(call.get("function", call), dict, f"{name}'s function")
    if not isinstance(function.get("name"), str):
        raise DataError(f"{name} has a call without the name of its function. Correct or remove the row.")
    arguments = function.get("arguments", function.get("parameters")) or "{}"
    arguments = _parsed(arguments, dict, f"{name}'s 'arguments'", empty=True)
    call = {"id": call["id"]} if call.get("id") else {}
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parsed(value: Any, kind: Any, what: str, empty: bool = False) -> Any:
    """Return a list or an object, which may be written as a string of JSON. `empty`: it may have no element."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value, object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            problem = f"is a string that is not JSON ({error}): {shorten_value(value)}"
            raise DataError(f"{what} {problem}. Write it with json.dumps.") from error
    return value if empty and isinstance(value, kind) else check(value, kind, what)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not value.isspace()


def check(value: Any, kind: Any, what: str) -> Any:
    """Return `value` if it is of this type and not empty."""
    if not (_is_text(value) if kind is str else isinstance(value, kind) and value):
        actual = "empty" if isinstance(value, kind) else TYPES.get(type(value).__name__, shorten_value(value))
        names = " or ".join(TYPES[each.__name__] for each in getattr(kind, "__args__", (kind,)))
        expected = f"{names}{' that is not empty' * (kind is not dict)}"
        raise DataError(f"{what} is {actual}, expected {expected}. Correct or remove the row.")
    if kind is str:
        check_size(len(value), what)
        check_encodable(value, what)
    return value


def check_encodable(text: str, what: str) -> None:
    """Refuse text that is not Unicode: JSON can write half of a surrogate pair."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds half of a surrogate pair ({text[error.start]!a}). Remove it.") from error
