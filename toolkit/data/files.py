"""A source → documents, each checked, with its file and line. Imports nothing heavy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.core.errors import DataError, nearest
from toolkit.data.formats import COLUMNS, FORMATS, find_format
from toolkit.data.messages import check
from toolkit.data.readers import LONGEST_TEXT, Table, Text, read_errors
from toolkit.data.sources import Source


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, prompt with its completion, or conversation."""

    kind: str
    """`text`, `prompt`, `messages`, or `turns`: one question and answer, which `resolve` makes a conversation or a prompt."""
    content: Mapping[str, Any]
    """`text`; `prompt` and `completion`; or `messages`, as the chat template gets them but for their `weight`, and `tools`."""
    where: str
    """The file and line, for messages to the user."""
    file: int = 0
    """The index of its file in the source."""
    line: int = 0
    """Its line there; of a text the lines before it; below 0: minus the number of its row in a table."""
    joined: bool = False
    """A question and its answer that became prompt and completion, with nothing between them."""

    def resolve(self, chat: bool) -> Document:
        """Return `turns` as a conversation, if there is a chat template, else as prompt and completion."""
        if self.kind != "turns" or chat:
            return replace(self, kind="messages") if self.kind == "turns" else self
        *before, last = (message["content"] for message in self.content["messages"])
        return replace(self, kind="prompt", content={"prompt": "\n\n".join(before), "completion": last}, joined=True)


@dataclass(kw_only=True)
class Findings:
    """What reading a source shows."""

    names: dict[str, None] = field(default_factory=dict)
    """The formats of its files, in order."""
    formats: dict[str, None] = field(default_factory=dict)
    """The same with their columns, for the user."""
    trained: int = 0
    """Conversations with a turn of the assistant that is trained."""
    untrained: Counter[str] = field(default_factory=Counter)
    """The roles of each other conversation."""

    def count(self, messages: list[dict[str, Any]]) -> None:
        """Count a conversation."""
        if any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
            self.trained += 1
        else:
            self.untrained[", ".join(sorted({repr(message["role"]) for message in messages}))] += 1

    def problem(self) -> str:
        """Return the roles of conversations without a trained turn, where these are half of all."""
        count = self.untrained.total()
        roles = " · ".join(f"{roles} in {rows:,}" for roles, rows in self.untrained.most_common(5))
        what = f"{count:,} of {count + self.trained:,} conversations have no trained turn of the assistant (roles: {roles})"
        return what if count and count >= self.trained else ""


def documents(
    source: Source,
    *,
    text_column: str = "text",
    columns: str | None = None,
    data_format: str = "auto",
    findings: Findings | None = None,
) -> Iterator[Document]:
    """Yield the documents of a source in order, each checked as it is read. Every file is read once.

    Args:
        source: from `find_source`.
        text_column: the column of rows that holds a text.
        columns: `NAME=COLUMN`, several by commas: the column has the meaning of this name of `formats.COLUMNS`.
        data_format: a name in `formats.FORMATS`; `auto` finds it by the columns.
        findings: is filled.

    Raises:
        DataError: for a file that is empty, damaged or not UTF-8, and for a row that is malformed, empty, or lacks a
            column: file, line, reason, fix.
    """
    renamed = {"text": text_column} if text_column != "text" else {}
    for word in columns.split(",") if columns else ():
        name, equals, column = (part.strip() for part in word.partition("="))
        if not (name and equals and column):
            raise DataError(f"columns {columns!r}: expected NAME=COLUMN, such as prompt=question,completion=answer.")
        renamed[name] = column
    if data_format not in ("auto", *FORMATS):
        raise DataError(
            f"data_format {data_format!r} is unknown.{nearest(data_format, FORMATS)} Known: {', '.join(FORMATS)}."
        )
    findings = findings or Findings()
    empty: list[EmptyFile] = []
    for file in range(len(source.places)):
        try:
            with read_errors(source.places[file]), source.open(file, COLUMNS) as data:
                if isinstance(data, Text):
                    if data_format not in ("auto", "text") or renamed.keys() - {"text"}:
                        raise DataError(
                            f"{source.places[file]}: is text without columns. Leave --data-format and --columns out."
                        )
                    findings.names["text"] = None
                    yield from _texts(data, file)
                else:
                    yield from _rows(data, file, source, data_format, renamed, findings)
        except EmptyFile as error:
            empty.append(error)
    if len(empty) == len(source.places):
        raise empty[0]
    if empty:
        findings.formats[f"{len(empty):,} empty file{'s' * (len(empty) > 1)}"] = None


class EmptyFile(DataError):
    """A file without text or rows, which is no error among others."""


def _texts(text: Text, file: int) -> Iterator[Document]:
    """Yield a text file as one document; one that is longer than `LONGEST_TEXT` in pieces of whole lines."""

    def document(before: int) -> Document:
        where = f"{text.path}, from line {before + 1}" if before else str(text.path)
        return Document(kind="text", content={"text": "".join(lines)}, where=where, file=file, line=before)

    lines: list[str] = []
    size, before, filled = 0, 0, False
    for number, line in enumerate(text.lines()):
        if size + len(line) > LONGEST_TEXT:
            yield document(before)
            lines, size, before = [], 0, number
        lines.append(line)
        size += len(line)
        filled = filled or bool(line.strip())
    if not filled:
        raise _empty(text.path)
    yield document(before)


def _rows(
    table: Table, file: int, source: Source, data_format: str, renamed: Mapping[str, str], findings: Findings
) -> Iterator[Document]:
    """Yield the rows of a table as documents. The columns decide the format; of JSON, those of the first row."""
    known = {*COLUMNS, *renamed.values()}
    if table.inner and not known & {*table.columns, *(column.strip().casefold() for column in table.columns)}:
        table = table.inner
    used: list[str] = []
    line, where = None, source.where(file, table.line)
    if table.columns:
        form = _placed(where, find_format, table.columns, data_format, renamed)
        used = [column for column in form.columns.values() if column in table.columns]
        unused = ", ".join(column for column in table.columns if column not in used)
        notes = (f"format {form.name} ({', '.join(used)})", unused and f"not used: {unused}", table.note)
        findings.names[form.name] = None
        findings.formats["; ".join(filter(None, notes))] = None
    for line, row in table.read(used):
        where = source.where(file, line)
        kind, content = _placed(where, form.document, row) if used else _placed(where, check, row, dict, "the row")
        if kind == "messages":
            findings.count(content["messages"])
        yield Document(kind=kind, content=content, where=where, file=file, line=line)
    if line is None:
        raise _empty(source.places[file])
    if form.unused:
        findings.formats[f"not used in messages: {', '.join(form.unused)}"] = None


def _placed(place: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of `formats`, and name the place in its errors."""
    try:
        return function(*arguments)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _empty(place: str | Path) -> EmptyFile:
    return EmptyFile(f"{place}: the file is empty, or a header alone. Give one with text or rows, or leave it out.")
