"""Conversations in any spelling → messages as chat templates know them."""

from __future__ import annotations

import json
from typing import Any

from toolkit.core.atomic_io import shorten_value, unique_names
from toolkit.core.errors import DataError
from toolkit.data.readers import check_size

_ROLE_SPELLINGS = {
    "user": "user human prompter", "assistant": "assistant gpt model bot chatbot ai chatgpt function_call",
    "system": "system developer", "tool": "tool function observation tool_response ipython",
}  # fmt: skip
CHAT_ROLES = {spelled: role for role, names in _ROLE_SPELLINGS.items() for spelled in names.split()}
"""A role, in lower case → the templates' name of it. Other roles are handed to the template as they are."""

_TEMPLATE_FIELDS = "role content tool_calls name tool_call_id weight reasoning_content tools"
MESSAGE_FIELDS = {name: name for name in _TEMPLATE_FIELDS.split()} | {
    "from": "role", "value": "content", "text": "content", "function_call": "tool_calls", "train": "weight",
    "training": "weight", "thinking": "reasoning_content", "reasoning": "reasoning_content",
}  # fmt: skip
"""Names of a message's fields → the templates' names."""

TYPES = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}
"""Names of JSON's types, for messages."""


def read_messages(value: Any, what: str, unused: dict[str, None]) -> list[dict[str, Any]]:
    """Return a conversation with the roles and fields that chat templates know. Names of other fields go into `unused`.

    Raises:
        DataError: for what is no conversation, with the number of the message.
    """
    return [_message(each, f"message {at}", unused) for at, each in enumerate(_parsed(value, list, what))]


def read_tools(value: Any, what: str) -> list[dict[str, Any]]:
    """Return the tools of a conversation, as they are."""
    tools = [_parsed(tool, dict, "a tool") for tool in _parsed(value, list, what, empty=True)]
    _check_encodable(json.dumps(tools, ensure_ascii=False), what)
    return tools


def read_text(value: Any, name: str) -> Any:
    """Join a text that is given in parts."""
    return "".join(_part(part, name) for part in value) if isinstance(value, list) else value


def _message(value: Any, name: str, unused: dict[str, None]) -> dict[str, Any]:
    if (
        check(value, dict, name).keys() == {"role", "content"}
        and value["role"] in ("user", "assistant", "system", "tool")
        and _is_text(value["content"])
    ):
        return {"role": value["role"], "content": check(value["content"], str, name)}
    message: dict[str, Any] = {}
    # The templates' own names come first: where a message has two names of a field, theirs counts.
    for key, item in sorted(value.items(), key=lambda pair: pair[0] not in MESSAGE_FIELDS.values()):
        field = MESSAGE_FIELDS.get(key.strip().casefold())
        if item != item:  # NaN: pandas' empty cell
            continue
        if field and message.get(field) is None and (item is not None or field == "content"):
            message[field] = item
        elif not field and item is not None:
            unused[key] = None
    if missing := [field for field in ("role", "content") if field not in message and "tool_calls" not in message]:
        raise DataError(f"{name} lacks {' and '.join(map(repr, missing))}. Correct or remove the row.")
    role = check(message.get("role"), str, f"{name}'s 'role'")
    message["role"] = CHAT_ROLES.get(role.strip().casefold(), role)
    if role.strip().casefold() == "function_call":
        message["tool_calls"] = message.pop("content", None)
    if calls := message.pop("tool_calls", None):
        calls = _parsed(calls, list | dict, f"{name}'s 'tool_calls'")
        calls = [calls] if isinstance(calls, dict) else calls
        message["tool_calls"] = [_tool_call(call, name) for call in calls]
    content = message.pop("content", None)
    if message["role"] == "tool" and not isinstance(content, str):  # a result in JSON, or none
        parts = isinstance(content, list) and all(isinstance(part, str) or "type" in part for part in content)
        content = content if parts else "" if content is None else json.dumps(content, ensure_ascii=False)
    content = read_text(content, name)
    empty = (
        calls
        or message["role"] == "tool"
        or (content == "" and (message["role"] == "system" or "reasoning_content" in message))
    )
    if content is not None or not empty:
        message["content"] = content if content in ("", None) and empty else check(content, str, f"{name}'s 'content'")
    if "reasoning_content" in message:  # templates read it under one of two names
        message["thinking"] = check(message["reasoning_content"], str, f"{name}'s 'reasoning_content'")
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"{name}'s 'weight' is {message['weight']!r}, expected 0 (not trained) or 1. Correct it.")
    _check_encodable(json.dumps(message, ensure_ascii=False), name)
    return message


def _part(part: Any, name: str) -> str:
    """Return the text of one part of a message's content."""
    kind, text = (part.get("type", "text"), part.get("text")) if isinstance(part, dict) else ("text", part)
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
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
        _check_encodable(value, what)
    return value


def _check_encodable(text: str, what: str) -> None:
    """Refuse text that is not Unicode: JSON can write half of a surrogate pair."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds half of a surrogate pair ({text[error.start]!a}). Remove it.") from error
