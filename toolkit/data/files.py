"""A source → documents, each checked, with its file and line. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.core.errors import DataError
from toolkit.data.sources import JSONL, Source

ROWS = "rows"
"""The key in `hashes` of a dataset's rows."""

LONGEST = 8 * 2**20
"""Bytes of the longest text: a tokenizer takes some 160 for each of them."""

TOOLS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
"""Of conversations with tools, which are refused: without these they would be others."""

COLUMNS = {"prompt": ("prompt", "completion"), "messages": ("messages",)}
"""The columns of a kind of row; a text's one column is named by the caller."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, prompt with its completion, or conversation."""

    kind: str
    """`text`, `prompt` or `messages`."""
    content: Mapping[str, Any]
    """`text`; `prompt` and `completion`; or `messages`: a list of `{"role", "content"}`. All filled strings."""
    where: str
    """The file and line, for messages to the user."""
    size: int
    """Its bytes."""
    file: int = 0
    """The index of its file in the source."""
    line: int = 0
    """Its line there, or its row in a dataset; of a text the lines before it."""


def documents(
    source: Source, *, text_column: str = "text", hashes: dict[str, str] | None = None, cache: Path | None = None
) -> Iterator[Document]:
    """Yield the documents of a source in order, each checked as it is read. Every file is read once.

    Args:
        source: from `find_source`.
        text_column: the column of rows that holds a text.
        hashes: takes the sha256 of each file's bytes by its path, or by `ROWS` that of a dataset's documents. A file
            that is in it already is not hashed.
        cache: folder in which `datasets` converts tables; its own by default.

    Raises:
        DataError: for a file that is empty or not UTF-8, and for a row that is malformed, empty, or lacks a column:
            file, line, reason, fix.
    """
    hashes = {} if hashes is None else hashes
    if source.kind != "files":
        digest = hashlib.sha256()
        numbered = ((number, row, 0) for number, row in enumerate(source.rows(cache)))
        with _read_errors(source.name):
            for document in _rows(numbered, 0, source, text_column, source.name):
                line = json.dumps(document.content, sort_keys=True).encode() + b"\n"
                digest.update(line)
                yield replace(document, size=len(line))
        hashes[ROWS] = digest.hexdigest()
        return
    for file, path in enumerate(source.files):
        hashed = str(path) in hashes
        digest = hashlib.sha256()
        update = _ignore if hashed else digest.update
        with _read_errors(path):
            if path.suffix.lower() in JSONL:
                yield from _rows(_json_lines(path, update), file, source, text_column, str(path))
            else:
                yield from _texts(path, file, update)
        if not hashed:
            hashes[str(path)] = digest.hexdigest()


def _ignore(_: bytes) -> None:
    """Replace a hash's `update` for a file with a known hash."""


@contextlib.contextmanager
def _read_errors(name: str | Path) -> Iterator[None]:
    """Convert a failed read into a DataError that names the file or the dataset."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{name}: cannot be read: {reason}. Check its permissions and its disk.") from error


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 at byte {error.start} ({data[error.start]:#04x}). Convert it: iconv -f LATIN1 -t UTF-8"
        ) from error


def _nonempty_string(value: Any, where: str, what: str) -> str:
    """Return `value` if it is a non-empty string."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is {_type(value)}, expected a string. Write it in quotes, or remove the row.")
    _check_size(len(value), where)
    if not value.strip():
        raise DataError(f"{where}: {what} is empty. Fill it or remove it.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        raise DataError(
            f"{where}: {what} holds half of a surrogate pair ({half}), which is no text. Remove it."
        ) from error
    return value


def _texts(path: Path, file: int, update: Callable[[bytes], object]) -> Iterator[Document]:
    """Yield a text file as one document; one that is longer than `LONGEST` in pieces of whole lines."""

    def document(lines: list[bytes], before: int) -> Document:
        data, where = b"".join(lines), f"{path}, from line {before + 1}" if before else str(path)
        text = _nonempty_string(_decoded(data, where), where, "the file")
        return Document(kind="text", content={"text": text}, where=where, size=len(data), file=file, line=before)

    lines: list[bytes] = []
    size = before = 0
    with path.open("rb") as opened:
        for line in iter(lambda: opened.readline(LONGEST + 1), b""):
            _check_size(len(line), f"{path}, line {before + len(lines) + 1}")
            update(line)
            if size + len(line) > LONGEST:
                yield document(lines, before)
                before, lines, size = before + len(lines), [], 0
            lines.append(line)
            size += len(line)
    if not lines:
        raise DataError(f"{path}: the file is empty. Give one with text, or leave it out.")
    yield document(lines, before)


def _type(value: Any) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}
    return names.get(type(value).__name__, repr(value))


def _json_lines(path: Path, update: Callable[[bytes], object]) -> Iterator[tuple[int, Any, int]]:
    number = blank = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
            update(line)
            where = f"{path}, line {number}"
            _check_size(len(line), where)
            text = _decoded(line, where)
            if not text.strip():
                blank = blank or number
                continue
            if blank:  # at the end they do no harm
                raise DataError(f"{path}, line {blank}: the row is empty. Remove it.")
            try:
                yield number, json.loads(text, object_pairs_hook=_unique_keys), len(line)
            except (ValueError, RecursionError) as error:
                reason = str(error)
                if isinstance(error, json.JSONDecodeError):  # some of its messages end with "at" already
                    reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
                raise DataError(
                    f"{where}: malformed JSON: {reason}. Each line must be one JSON object; correct or remove it."
                ) from error
    if number == 0 or blank == 1:
        raise DataError(f"{path}: the file is empty. Give one with rows, or leave it out.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse duplicate names."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice!r} stands twice in an object")
    return fields


def _check_size(size: int, where: str) -> None:
    """Refuse a text that is longer than `LONGEST`.

    Raises:
        DataError: saying how long it may be.
    """
    if size > LONGEST:
        raise DataError(f"{where}: the text has more than {LONGEST:,} bytes, expected fewer. Split it into several.")


def _rows(
    rows: Iterable[tuple[int, Any, int]], file: int, source: Source, text_column: str, name: str
) -> Iterator[Document]:
    """Yield rows, given with line and size, as documents. The first row decides the kind of all rows in the file."""
    kind = ""
    for line, row, size in rows:
        where = source.where(file, line)
        if not isinstance(row, dict):
            raise DataError(
                f'{where}: the row is {_type(row)}, expected an object such as {{"{text_column}": "…"}}.'
                " Correct or remove it."
            )
        kind = kind or _kind(row, text_column, where)
        columns = COLUMNS.get(kind, (text_column,))
        missing = [name for name in columns if name not in row]
        if missing:
            raise DataError(
                f"{where}: lacks the column {missing[0]!r}, which the rows before have. It has {_names(row)}. Add"
                " it, or put rows of another kind into a file of their own."
            )
        if kind == "messages":
            _check_tools(row, f"{where}: the row")
            content: dict[str, Any] = {"messages": _conversation(row["messages"], where)}
        else:
            names = ("text",) if kind == "text" else columns
            pairs = zip(names, columns, strict=True)
            content = {name: _nonempty_string(row[column], where, f"column {column!r}") for name, column in pairs}
        yield Document(kind=kind, content=content, where=where, size=size, file=file, line=line)
    if not kind:
        raise DataError(f"{name}: no rows. Give data with at least one.")


def _kind(row: Mapping[str, Any], text_column: str, where: str) -> str:
    kinds = [kind for kind, columns in COLUMNS.items() if all(name in row for name in columns)]
    if text_column in row and (text_column != "text" or not kinds):
        return "text"
    if kinds:
        return kinds[0]
    for name, other in (("prompt", "completion"), ("completion", "prompt")):
        if name in row:
            raise DataError(f"{where}: lacks the column {other!r}, though it has {name!r}. Add it or remove the row.")
    raise DataError(
        f"{where}: lacks the column {text_column!r}. It has {_names(row)}; expected {text_column!r}, 'prompt' and"
        " 'completion', or 'messages'. Rename it, or name the text's column with --text-column."
    )


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in row) or "no columns"


def _check_tools(fields: Mapping[str, Any], where: str) -> None:
    used = next((name for name in TOOLS if fields.get(name)), None)
    if used:
        raise DataError(
            f"{where} has {used!r}: training on calls of tools is not available. Remove the row, or write the whole "
            "conversation as 'text' or as 'prompt' and 'completion'."
        )


def _conversation(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise DataError(
            f"{where}: column 'messages' is {_type(messages)}, expected a list of objects with 'role' and 'content'."
            " Correct or remove the row."
        )
    if not messages:
        raise DataError(f"{where}: column 'messages' is empty. Fill it or remove the row.")
    turns = []
    for index, message in enumerate(messages):
        lacks = [name for name in ("role", "content") if not isinstance(message, dict) or name not in message]
        if lacks:
            what = f"lacks {' and '.join(map(repr, lacks))}" if isinstance(message, dict) else f"is {_type(message)}"
            raise DataError(
                f"{where}: message {index} {what}, expected an object with 'role' and 'content'. Correct or remove the row."
            )
        _check_tools(message, f"{where}: message {index}")
        turns.append(
            {
                name: _nonempty_string(message[name], where, f"message {index}'s {name!r}")
                for name in ("role", "content")
            }
        )
    return turns
