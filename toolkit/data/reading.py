"""Where text comes from: a source → documents, each checked, with its file and line. Imports nothing heavy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.embedded import embedded_files
from toolkit.data.hub import check_hub, open_dataset
from toolkit.errors import DataError

EMBEDDED = "embedded"
"""The source's name that means the embedded text, as None does."""

JSONL = (".jsonl", ".ndjson")
TEXT = (
    ".txt", ".text", ".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go",
    ".java", ".js", ".ts", ".rb", ".sh", ".sql", ".html", ".css", ".toml", ".yaml", ".yml",
)  # fmt: skip
"""What is taken from a folder. A single file with any other ending is read as text too."""

BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow", ".json": "json"}
"""Files that the `datasets` library reads, with its name for them."""

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
    """Its part of `Source.size`."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the documents are: files, or rows of the `datasets` library."""

    files: tuple[Path, ...] = ()
    dataset: Any = None
    name: str = ""

    @property
    def size(self) -> int:
        """Bytes of the files, or rows of the dataset."""
        return sum(path.stat().st_size for path in self.files) if self.dataset is None else len(self.dataset)


def find_source(source: str | Path | None) -> Source:
    """What a name given as `--data` means.

    None or `embedded`; a file; a folder (its text and JSONL files, subfolders included, sorted by name); or what the
    `datasets` library reads: a folder or a file of its own, or a Hub id as `ID`, `ID:SPLIT` or `ID:CONFIG:SPLIT` (split
    `train` unless named).

    Raises:
        DataError: for a path that does not exist, a folder without text, a dataset that cannot be loaded.
        MissingLibrary: for a dataset without the `datasets` library.
    """
    if source is None or str(source) == EMBEDDED:
        return Source(files=tuple(embedded_files()), name=EMBEDDED)
    name, path = str(source), Path(source).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return Source(dataset=open_dataset(name, saved=path), name=name)
        files = _files_of(path)
        if files:
            return Source(files=files, name=name)
        if any(file.suffix.lower() in BUILDERS for file in path.rglob("*")):
            return Source(dataset=open_dataset(name, path=str(path)), name=name)
        raise DataError(
            f"data {name}: the folder holds no text. Expected .jsonl files, or text such as .txt, .md or .py."
        )
    if path.exists():
        if path.suffix.lower() in BUILDERS:
            builder = BUILDERS[path.suffix.lower()]
            return Source(dataset=open_dataset(name, path=builder, data_files=str(path)), name=name)
        return Source(files=(path,), name=name)
    known = (*JSONL, *TEXT, *BUILDERS)
    hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.%\[\]-]+){0,2}", name)
    if not hub or Path(name).suffix.lower() in known:
        raise DataError(
            f"data {name}: no such file or folder. Give a path that exists, or leave --data out to train on the"
            " embedded text."
        )
    identifier, *rest = name.split(":")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    check_hub(name)
    return Source(dataset=open_dataset(name, path=identifier, name=config, split=split), name=name)


def check_source(source: str | Path | None, *, text_column: str = "text") -> None:
    """Read every row once and say what is wrong with the first bad one, before anything heavy is imported.

    Raises:
        DataError: naming file, line, reason and fix.
    """
    for _ in documents(find_source(source), text_column=text_column):
        pass


def documents(source: Source, *, text_column: str = "text") -> Iterator[Document]:
    """The documents of a source, in its order, each checked as it is read.

    Raises:
        DataError: for a file that is empty or not UTF-8, and for a row that is malformed, empty, or lacks a column:
            file, line, reason, fix.
    """
    if source.dataset is not None:
        rows = ((f"{source.name}, row {number}", row, 1) for number, row in enumerate(source.dataset))
        yield from _rows(rows, text_column, source.name)
        return
    for path in source.files:
        if path.suffix.lower() in JSONL:
            yield from _rows(_json_lines(path), text_column, str(path))
        else:
            data, where = _bytes(path), str(path)
            text = _filled(_decoded(data, where), where, "the file")
            yield Document(kind="text", content={"text": text}, where=where, size=len(data))


def _files_of(folder: Path) -> tuple[Path, ...]:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in (*JSONL, *TEXT) and p.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return tuple(names[name] for name in sorted(names) if not re.search(r"(^|/)\.", name))


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    if not data:
        raise DataError(f"{path}: the file is empty. Give one with text, or leave it out.")
    return data


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 at byte {error.start} ({data[error.start]:#04x}). Convert it: iconv -f LATIN1 -t UTF-8"
        ) from error


def _filled(value: Any, where: str, what: str) -> str:
    """`value`, if it is a string with something in it."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is {_type(value)}, expected a string. Write it in quotes, or remove the row.")
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


def _type(value: Any) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}
    return names.get(type(value).__name__, repr(value))


def _json_lines(path: Path) -> Iterator[tuple[str, Any, int]]:
    _bytes_at_least_one(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            text = _decoded(line, where)
            if not text.strip():
                raise DataError(f"{where}: the row is empty. Remove it.")
            try:
                yield where, json.loads(text), len(line)
            except (ValueError, RecursionError) as error:
                reason = str(error)
                if isinstance(error, json.JSONDecodeError):  # some of its messages end with "at" already
                    reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
                raise DataError(
                    f"{where}: malformed JSON: {reason}. Each line must be one JSON object; correct or remove it."
                ) from error


def _bytes_at_least_one(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    if not size:
        raise DataError(f"{path}: the file is empty. Give one with rows, or leave it out.")


def _rows(rows: Iterable[tuple[str, Any, int]], text_column: str, source: str) -> Iterator[Document]:
    """Rows as documents. The first row says which kind all rows of this source are."""
    kind = ""
    for where, row, size in rows:
        if not isinstance(row, dict):
            raise DataError(
                f'{where}: the row is {_type(row)}, expected an object such as {{"{text_column}": "…"}}.'
                " Correct or remove it."
            )
        kind = kind or _kind(row, text_column, where)
        wanted = COLUMNS.get(kind, (text_column,))
        missing = [name for name in wanted if name not in row]
        if missing:
            raise DataError(
                f"{where}: lacks the column {missing[0]!r}, which the rows before have. It has {_names(row)}. Add"
                " it, or put rows of another kind into a file of their own."
            )
        if kind == "messages":
            content: dict[str, Any] = {"messages": _conversation(row["messages"], where)}
        else:
            names = ("text",) if kind == "text" else wanted
            pairs = zip(names, wanted, strict=True)
            content = {name: _filled(row[column], where, f"column {column!r}") for name, column in pairs}
        yield Document(kind=kind, content=content, where=where, size=size)
    if not kind:
        raise DataError(f"{source}: no rows. Give data with at least one.")


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
        turns.append(
            {name: _filled(message[name], where, f"message {index}'s {name!r}") for name in ("role", "content")}
        )
    return turns
