"""Files → rows, as they are written: no value is converted, compression and kind are found by content."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import shorten_value, unique_names
from toolkit.core.errors import DataError
from toolkit.models.files import first_line

LONGEST_TEXT = 8 * 2**20
"""Characters of the longest text: a tokenizer takes some 160 bytes for each of them."""

READ_BYTES = 2**20
"""Bytes that are read at once."""

LONGEST_VALUE = 2**30
"""Characters of the longest JSON value: one object with a list of rows is read whole. Arrays are read row by row."""

BATCH_ROWS = 500
"""Rows of a table that become Python objects at once."""

CSV, ARROW = (".csv", ".tsv", ".tab", ".psv"), (".parquet", ".arrow", ".feather")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".json")
"""Suffixes of tables and rows."""

PLAIN_SUFFIXES = (".txt", ".text")
"""Suffixes that tell nothing: rows are found by content."""

TEXT = (
    *PLAIN_SUFFIXES, ".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go",
    ".java", ".js", ".ts", ".rb", ".sh", ".sql", ".html", ".css", ".toml", ".yaml", ".yml",
)  # fmt: skip
"""Text in a folder. A single file with any other ending is read as text too."""

COMPRESSIONS = {
    rb"\x1f\x8b": "gzip",
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": "zstd",
    rb"BZh\d(1AY&SY|\x17rE8P)": "bz2",
    rb"\xfd7zXZ": "xz",
}
BINARIES = {rb"PAR1": "parquet", rb"ARROW1\0": "arrow", rb"\xff{4}": "arrow stream"}
ENCODINGS = {rb"\xff\xfe\0\0": "utf-32", rb"\xff\xfe|\xfe\xff": "utf-16"}
"""Pattern of the first bytes → what follows."""

QUOTE = 'Quote a cell that contains the delimiter or a line break, and write " inside it as ""'
CSV_ERRORS = {
    "end of data": ("a quote is not closed", QUOTE),
    "new-line": ("a carriage return ends a line", "Convert its line ends: tr '\\r' '\\n'"),
}
"""Parts of the csv module's errors → what is wrong, and what to do."""

REFUSED_FORMATS = (
    (rb"PK\x03\x04.*?word/|\{\\rtf|\xd0\xcf\x11\xe0", "a document of a word processor (or an old workbook)", "Save it as text"),
    (rb"PK\x03\x04.*?xl/", "an Excel workbook", "Save it as CSV (UTF-8)"),
    (rb"PK\x03\x04.*?data\.pkl|\x80[\x02-\x05]", "a PyTorch file or pickle", "Load it and write its rows as JSONL"),
    (rb"PK\x03\x04.*?\.npy|\x93NUMPY", "an array of NumPy", "Load it and write its rows as JSONL"),
    (rb"PK[\x03\x05]", "a zip archive", "Unpack it with unzip, and give the files"),
    (rb".{257}ustar", "a tar archive", "Unpack it with tar -xf, and give the files"),
    (rb"Rar!|7z\xbc\xaf|\x04\x22\x4d\x18", "an archive (RAR, 7-Zip or lz4)", "Unpack it, and give the files"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "Get the file with git lfs pull"),
    (rb"%PDF-\d", "a PDF", "Extract its text with pdftotext"),
    (rb".{6}\0\0\{\"", "a safetensors file", "Weights belong to --model"),
    (rb"SQLite format 3", "an SQLite database", "Export a table: sqlite3 -header -csv"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}(WAVE|AVI |WEBP)|OggS\0|ID3[\2-\4]", "an image or sound", "Give text"),
    (rb"[^\0]*\0", "a binary file, or UTF-16 without a byte order mark", "Give text in UTF-8"),
)  # fmt: skip
"""Pattern of the first bytes, what a file is, and what to do with it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one file or dataset."""

    columns: Sequence[str]
    """As the file spells them; of JSON, those of the first row."""
    read: Callable[[Sequence[str]], Iterable[tuple[int, Any]]]
    """Given the needed columns, return the rows with their lines; below 0: minus the row's number."""
    line: int = 0
    """The line of the columns."""
    inner: Table | None = None
    """Of a JSON file that is one object: its only list of objects."""
    note: str = ""
    """The delimiter of a CSV file that is not the comma."""


def open_file(path: Path, file: Any, suffix: str, names: Sequence[str] = ()) -> Text | Table:
    """Return the data in an open file: rows by its content or its suffix (without one of compression), else text.

    `names`: columns that tell a table by its header.

    Raises:
        DataError: for a file that is neither text nor a table, with what it is and what to do.
    """
    stream = file
    if compression := _match(stream.peek(), COMPRESSIONS):
        import pyarrow as pa

        opened = lzma.LZMAFile if compression == "xz" else partial(pa.CompressedInputStream, compression=compression)
        stream = io.BufferedReader(opened(stream), 2**16)
    head = stream.peek()
    if binary := _match(head, BINARIES):
        if compression:
            raise DataError(f"{path}: is a {binary} file inside {compression}. Decompress it first.")
        return _arrow_table(stream, binary)
    encoding = _match(head, ENCODINGS)
    for pattern, what, cure in REFUSED_FORMATS if not encoding else ():
        if re.match(pattern, head, re.DOTALL):
            raise DataError(f"{path}: is {what}, expected text, JSON, CSV, parquet or arrow. {cure}.")
    if suffix in ARROW:
        raise DataError(f"{path}: is not the {suffix[1:]} file that its name says. Download or write it again.")
    start = head.decode(encoding or "utf-8", "ignore").removeprefix("\ufeff")
    if suffix in PLAIN_SUFFIXES or suffix not in (*CSV, *JSON_SUFFIXES, *TEXT):
        header, row = (re.split("[\t,;|]", line) for line in (start.strip() + "\n").split("\n")[:2])
        known = {cell.strip(" \"'\r").casefold() for cell in header} <= set(names)
        table = known and 1 < len(header) <= len(row)
        suffix = ".csv" if table else ".jsonl" if _holds_rows(start) else suffix
    text = Text(path, stream, encoding or "utf-8-sig")
    if suffix in CSV:
        return _csv_table(text, suffix)
    return _json_table(text, suffix == ".json" and start.lstrip()[:1] == "{") if suffix in JSON_SUFFIXES else text


def _holds_rows(start: str) -> bool:
    """Return whether a text begins with an object of JSON that fills its line, or an array of them."""
    if (match := _OBJECT.match(start)) is None:
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(start, start.index("{"))
    except (ValueError, RecursionError):  # longer than what was read, or damaged
        return True
    rest = start[end:].lstrip(" \t\r")
    return not rest or (rest[0] in (",\n]" if match[1] else "\n") and not (rest[0] == "]" and rest[1:].strip()))


def _match(head: bytes, table: Mapping[bytes, str]) -> str:
    return next((name for pattern, name in table.items() if re.match(pattern, head, re.DOTALL)), "")


@contextlib.contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Convert a failed read into a DataError."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, _arrow_exception()) as error:
        problem = f"is damaged or incomplete: {first_line(error).rstrip('.')}. Download or write it again."
        if isinstance(error, OSError) and error.errno:
            problem = f"cannot be read: {error.strerror}. Check its permissions and its disk."
        raise DataError(f"{path}: {problem}") from error


def _arrow_exception() -> Any:
    import pyarrow as pa

    return pa.ArrowException


class Text:
    """The characters of a text file."""

    def __init__(self, path: Path, stream: Any, encoding: str) -> None:
        """Read from an open file."""
        self.path, self._stream, self._encoding = path, stream, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._bytes, self._line = 0, 1

    def read(self, size: int = 0) -> str:
        """Return the characters of the next `size` bytes, or of a piece; none at the end."""
        data = self._stream.read(size := max(size, READ_BYTES))
        self._bytes += len(data)
        try:
            text = self._decoder.decode(data, final=len(data) < size)
        except UnicodeDecodeError as error:
            line = self._line + error.object[: error.start].count(b"\n")
            at = self._bytes - len(error.object) + error.start
            encoding = "WINDOWS-1252" if 0x80 <= error.object[error.start] < 0xA0 else "LATIN1"
            raise DataError(
                f"{self.path}, line {line}: not {self._encoding.removesuffix('-sig').upper()} at byte {at} of the file"
                f" ({error.object[error.start]:#04x}). Convert it: iconv -f {encoding} -t UTF-8"
            ) from error
        self._line += text.count("\n")
        return text

    def lines(self) -> Iterator[str]:
        """Yield the lines with their ends."""
        rest, number = "", 1
        while piece := self.read():
            *whole, rest = (rest + piece).split("\n")
            number += len(whole)
            yield from (f"{line}\n" for line in whole)
            check_size(len(rest), f"{self.path}, line {number}")
        if rest:
            yield rest


def check_size(size: int, where: str) -> None:
    """Refuse a text over `LONGEST_TEXT`."""
    if size > LONGEST_TEXT:
        raise DataError(f"{where}: the text has more than {LONGEST_TEXT:,} characters. Split it into several.")


def _csv_table(text: Text, suffix: str) -> Table:
    """Read a CSV file with the delimiter that splits its header most; every cell is text."""
    lines = text.lines()
    head = list(islice(lines, 1))
    marks = "\t,;|" if suffix == ".tsv" else ",;\t|"
    header = "".join(head).splitlines()[:1]
    skipped = bool(header and re.fullmatch(r"sep=.", header[0]))  # Excel writes the delimiter so
    if skipped:
        marks, head = header[0][-1], list(islice(lines, 1))
    delimiter = max(marks, key=lambda mark: len(next(csv.reader(header, delimiter=mark), ())))
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_TEXT))
    written: list[str] = []

    def remembered() -> Iterator[str]:
        """Yield the lines. Keep those of a row as they are in the file."""
        for line in chain(head, lines):
            written.append(line)
            yield line

    reader = csv.reader(remembered(), delimiter=delimiter, strict=True)

    def records() -> Iterator[tuple[int, list[str]]]:
        start = 1 + skipped
        try:
            for cells in reader:
                if any(cells):  # a blank line is no row
                    yield start, cells
                start = reader.line_num + 1 + skipped
                written.clear()
        except csv.Error as error:
            known = (pair for part, pair in CSV_ERRORS.items() if part in str(error))
            problem, cure = next(known, (f"malformed CSV: {error}", QUOTE))
            raise DataError(f"{text.path}, line {start}: {problem}. {cure}.") from error

    rows = records()
    names = [name.strip() for _, cells in islice(rows, 1) for name in cells]

    def read(used: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
        for line, cells in rows:
            if len(cells) != len(names):
                problem = f"{len(cells)} cell{'s' * (len(cells) != 1)}, expected {len(names)} as in the header"
                cure = f"Put quotes around a cell that contains {delimiter!r}, or correct the row"
                raise DataError(f"{text.path}, line {line}: {problem}. {cure}.")
            row = dict(zip(names, cells, strict=True))
            odd = next((row[name] for name in used if _BLANK_QUOTE.fullmatch(row[name])), None)
            if odd and f"{delimiter}{odd}" in delimiter + "".join(written):  # as it is: no quoted cell
                raise DataError(
                    f"{text.path}, line {line}: blanks before the quote of {shorten_value(odd)!r}. Remove them."
                )
            yield line, row

    return Table(
        columns=names, read=read, line=1 + skipped, note="" if delimiter == "," else f"delimiter {delimiter!r}"
    )


def _json_table(text: Text, whole: bool) -> Table:
    """Read JSON: one object a line, an array of objects; or, if it may be a `whole` file, one object with one list of them."""
    rows = _json_rows(text)
    first = list(islice(rows, 2))
    columns = list(first[0][1]) if first and isinstance(first[0][1], dict) else []
    whole = whole and len(first) == 1 and bool(columns)
    lists = [value for value in first[0][1].values() if isinstance(value, list)] if whole else []
    inner = None
    if len(lists) == 1 and lists[0] and all(isinstance(item, dict) for item in lists[0]):
        inner = Table(columns=list(lists[0][0]), read=lambda _: ((-at, item) for at, item in enumerate(lists[0], 1)))
    line = max(0, first[0][0]) if first else 0
    return Table(columns=columns, read=lambda _: chain(first, rows), line=line, inner=inner)


def _json_rows(text: Text) -> Iterator[tuple[int, Any]]:
    """Yield the elements of an array, else one value after the other, with their lines; read in pieces."""
    decode = json.JSONDecoder(object_pairs_hook=unique_names).raw_decode
    buffer, at, line, valid, value = "", 0, 1, {"": False, "[": True, "[]": True}, None
    while True:
        start = _GAP.match(buffer, at).end()  # type: ignore[union-attr]
        problem, end = "", start
        if start < len(buffer):
            try:
                value, end = decode(buffer, start)
            except (ValueError, RecursionError) as error:
                problem, end = getattr(error, "msg", str(error)), getattr(error, "pos", start)
        # What ends with the piece may go on. A long value is tried again after twice its length.
        cut = (end > len(buffer) - 8 or problem.startswith("Unterminated")) and len(buffer) - at < LONGEST_VALUE
        if cut and (piece := text.read(len(buffer) - at)):
            buffer, at = buffer[at:] + piece, 0
            continue
        marks, done = "".join(buffer[at:start].split()), start == len(buffer)
        if marks not in valid or (marks and (marks[-1] == "]") != done):
            problem = f"Expecting {' or '.join(filter(None, valid)) or 'nothing'} between rows, found {marks[:9] or 'nothing'}"
            end = at + len(buffer[at:start].rstrip())
        if problem:
            near = buffer[end : end + 20].strip()
            before = buffer[:end] if near else buffer[:end].rstrip()
            place = f"{text.path}, line {line + before.count(chr(10), at)}"
            where = f"column {len(before) - before.rfind(chr(10))}{near and f' (near {near!r})'}"
            cure = "Expected one object a line, or one array of objects."
            raise DataError(f"{place}: malformed JSON: {problem.removesuffix(' at')} at {where}. {cure}")
        if done:
            return
        valid = {",": True, "]": True} if valid[marks] else {"": False}
        line += buffer.count("\n", at, start)
        yield line, value
        line, at = line + buffer.count("\n", start, end), end


_OBJECT = re.compile(r'\s*(\[\s*)?\{\s*"[^"\n]+"\s*:')
_BLANK_QUOTE = re.compile(r'[ \t]+".*"\s*', re.DOTALL)
_GAP = re.compile(r"[ \t\r\n,\[\]]*")


def _arrow_table(stream: Any, kind: str) -> Table:
    """Open a parquet file, or an Arrow file or stream."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        parquet = pq.ParquetFile(stream, buffer_size=READ_BYTES, pre_buffer=False)
        return arrow_rows(parquet.schema_arrow.names, lambda c: parquet.iter_batches(BATCH_ROWS, columns=c))
    reader: Any = (pa.ipc.open_stream if "stream" in kind else pa.ipc.open_file)(stream)
    batches = reader if "stream" in kind else map(reader.get_batch, range(reader.num_record_batches))
    return arrow_rows(reader.schema.names, lambda c: (batch.select(c) for batch in batches))


def arrow_rows(names: Sequence[str], batches: Callable[[list[str]], Iterable[Any]]) -> Table:
    """Return a table of Arrow batches. In lists and structs a null is a field that the row does not have."""

    def read(columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        for batch in batches(list(columns)):
            for start in range(0, len(batch), BATCH_ROWS):
                for row in batch.slice(start, BATCH_ROWS).to_pylist():
                    number += 1
                    yield -number, {name: _without_nulls(value) for name, value in row.items()}

    return Table(columns=names, read=read)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return value
