"""A source → documents, each checked, with its file and line. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import open_regular, unique_names
from toolkit.core.errors import DataError
from toolkit.data.sources import JSONL, Source

LONGEST = 8 * 2**20
"""Bytes of the longest text: a tokenizer takes some 160 for each of them."""

TOOLS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
"""Fields of conversations with tools, which are refused: without these they would be other conversations."""

KINDS = ("text", "prompt", "messages")
"""Kinds of documents, each named after its first field."""

PAIR = ("prompt", "completion")

EXPECTED: dict[type, str] = {str: "a string that is not empty", dict: "an object", list: "a list of messages"}
"""The types of a row and its fields, for messages."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, prompt with its completion, or conversation."""

    kind: str
    """`text`, `prompt` or `messages`."""
    content: Mapping[str, Any]
    """`text`; `prompt` and `completion`; or `messages`: a list of `{"role", "content"}`. All filled strings."""
    where: str
    """The file and line, for messages to the user."""
    file: int = 0
    """The index of its file in the source."""
    line: int = 0
    """Its line there, or its row in a dataset; of a text the lines before it."""


def documents(source: Source, *, text_column: str = "text", cache: Path | None = None) -> Iterator[Document]:
    """Yield the documents of a source in order, each checked as it is read. Every file is read once.

    Args:
        source: from `find_source`.
        text_column: the column of rows that holds a text.
        cache: folder in which `datasets` converts tables; its own by default.

    Raises:
        DataError: for a file that is empty or not UTF-8, and for a row that is malformed, empty, or lacks a column:
            file, line, reason, fix.
    """
    if source.kind != "files":
        with _read_errors(source.name):
            yield from _rows(enumerate(source.rows(cache)), 0, source, text_column)
        return
    for file, path in enumerate(source.files):
        with _read_errors(path):
            if path.suffix.lower() in JSONL:
                yield from _rows(_json_rows(path), file, source, text_column)
            else:
                yield from _texts(path, file)


@contextlib.contextmanager
def _read_errors(name: str | Path) -> Iterator[None]:
    """Convert a failed read into a DataError that names the file or the dataset."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{name}: cannot be read: {reason}. Check its permissions and its disk.") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines with their numbers."""
    filled = False
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
            _check_size(len(line), f"{path}, line {number}")
            filled = filled or bool(line.strip())
            yield number, line
    if not filled:
        raise DataError(f"{path}: the file is empty. Give one with text or rows, or leave it out.")


def _texts(path: Path, file: int) -> Iterator[Document]:
    """Yield a text file as one document; one that is longer than `LONGEST` in pieces of whole lines."""

    def document(lines: list[bytes], before: int) -> Document:
        where = f"{path}, from line {before + 1}" if before else str(path)
        content = {"text": _decoded(b"".join(lines), where)}
        return Document(kind="text", content=content, where=where, file=file, line=before)

    lines: list[bytes] = []
    size = before = 0
    for number, line in _lines(path):
        if size + len(line) > LONGEST:
            yield document(lines, before)
            lines, size, before = [], 0, number - 1
        lines.append(line)
        size += len(line)
    yield document(lines, before)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a JSONL file with their lines. Blank lines are allowed at its end."""
    blank = 0
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        text = _decoded(line, where).rstrip()
        if not text:
            blank = blank or number
            continue
        if blank:
            raise DataError(f"{path}, line {blank}: the row is empty. Remove it.")
        try:
            yield number, json.loads(text, object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):  # some of its messages end with "at" already
                reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise DataError(f"{where}: malformed JSON: {reason}. Each line must be one JSON object.") from error


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {error.start} ({data[error.start]:#04x})"
        raise DataError(f"{where}: {problem}. Convert it: iconv -f LATIN1 -t UTF-8") from error


def _check_size(size: int, where: str) -> None:
    if size > LONGEST:
        raise DataError(f"{where}: the text has more than {LONGEST:,} bytes, expected fewer. Split it into several.")


def _rows(rows: Iterable[tuple[int, Any]], file: int, source: Source, text_column: str) -> Iterator[Document]:
    """Yield rows, given with their lines, as documents. The first row decides the kind of all rows in the file."""
    kinds = {"prompt": PAIR, "messages": ("messages",), "text": (text_column,)}
    if text_column != "text":  # a column that the user named comes first
        kinds = {"text": (text_column,), **kinds}
    kind = ""
    for line, row in rows:
        where = source.where(file, line)
        _check(row, dict, where, "the row")
        kind = kind or _kind(row, kinds)
        columns = kinds[kind]
        if missing := [name for name in columns if name not in row]:
            raise DataError(
                f"{where}: lacks the column {missing[0]!r}. It has {', '.join(map(repr, row))}; expected in every row"
                f" {text_column!r}, 'prompt' and 'completion', or 'messages'. Rename it, or name it with --text-column."
            )
        content: dict[str, Any]
        if kind == "messages":
            _check_tools(row, f"{where}: the row")
            content = {"messages": _messages(row["messages"], where)}
        else:
            names = zip(("text",) if kind == "text" else PAIR, columns, strict=True)
            content = {name: _check(row[column], str, where, f"column {column!r}") for name, column in names}
        yield Document(kind=kind, content=content, where=where, file=file, line=line)
    if not kind:
        raise DataError(f"{source.name}: no rows. Give data with at least one.")


def _kind(row: Mapping[str, Any], kinds: Mapping[str, tuple[str, ...]]) -> str:
    """Return the first kind of which the row has all columns, else some; else a text."""
    complete = [kind for kind, columns in kinds.items() if all(name in row for name in columns)]
    partial = [kind for kind, columns in kinds.items() if any(name in row for name in columns)]
    return [*complete, *partial, "text"][0]


def _messages(messages: Any, where: str) -> list[dict[str, str]]:
    """Return a conversation with the roles and contents of its messages."""
    turns = []
    for index, message in enumerate(_check(messages, list, where, "column 'messages'")):
        name = f"message {index}"
        _check(message, dict, where, name)
        if missing := [key for key in ("role", "content") if key not in message]:
            raise DataError(f"{where}: {name} lacks {' and '.join(map(repr, missing))}. Correct or remove the row.")
        _check_tools(message, f"{where}: {name}")
        turns.append({key: _check(message[key], str, where, f"{name}'s {key!r}") for key in ("role", "content")})
    return turns


def _check_tools(fields: Mapping[str, Any], where: str) -> None:
    if tool := next((name for name in TOOLS if fields.get(name)), None):
        raise DataError(
            f"{where} has {tool!r}: training on calls of tools is not available. Remove the row, or write the whole"
            " conversation as 'text' or as 'prompt' and 'completion'."
        )


def _check(value: Any, kind: type, where: str, what: str) -> Any:
    """Return `value` if it is of this type and not empty."""
    if not isinstance(value, kind) or not (value.strip() if isinstance(value, str) else value):
        empty = isinstance(value, kind)
        names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}
        actual = "empty" if empty else names.get(type(value).__name__, repr(value))
        raise DataError(f"{where}: {what} is {actual}, expected {EXPECTED[kind]}. Correct or remove the row.")
    if isinstance(value, str):
        _check_size(len(value), where)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = ascii(value[error.start])
            raise DataError(f"{where}: {what} holds half of a surrogate pair ({half}). Remove it.") from error
    return value
