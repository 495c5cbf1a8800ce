"""Read a source once: its files are hashed and checked, and its documents kept as an Arrow file in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import expand_user
from toolkit.core.cache import cache_folder, keep
from toolkit.core.errors import DataError
from toolkit.data.files import ROWS, Document, documents
from toolkit.data.hub import progress
from toolkit.data.sources import Source, find_source

FORMAT = 1
"""Of the cached documents. Raise it when their columns or checks change."""

BATCH_DOCUMENTS, BATCH_BYTES = 10_000, 16 << 20
"""A record batch of the Arrow file ends at either of them."""

LARGE = 64 << 20
"""Bytes of a source from which on libraries show their progress."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A source that was read and checked."""

    source: Source
    hashes: tuple[str, ...]
    """Ending and sha256 of each file, in their order; of a dataset `rows` and the sha256 of its documents."""
    documents: Path
    """An Arrow stream with a row for each document, in their order."""


def ingest(source: str | Path | None, *, text_column: str = "text") -> Contents:
    """Read, check and hash a source, unless all its files are as they were when they were read last.

    A file is known by path, device, inode, size, and the times of its last changes. Processes that come at once wait
    for the first.

    Raises:
        DataError: naming file, line, reason and fix.
    """
    origin = find_source(source)
    place = expand_user(origin.name)
    key = f"{place.absolute() if place.exists() else origin.name}\n{text_column}"
    entry = cache_folder("sources") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    contents = _cached_contents(origin, entry, text_column)
    if contents is None:
        from filelock import FileLock

        with cache_errors(entry.parent), FileLock(entry.with_suffix(".lock")):
            contents = _cached_contents(origin, entry, text_column) or _read(origin, entry, text_column)
    return contents


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turn a failed write into a sentence. What fails while a source is read is a DataError already."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache {folder} cannot be written: {error.strerror or error}. Free some space there, or set"
            " XDG_CACHE_HOME to another folder."
        ) from error


@contextlib.contextmanager
def progress_bar(name: str, total: int, unit: str) -> Iterator[Any]:
    """Show a progress bar on a terminal if the work takes longer than two seconds."""
    from tqdm import tqdm

    with tqdm(total=total, desc=name, unit=unit, unit_scale=True, delay=2, disable=None, leave=False) as bar:
        yield bar


def _cached_contents(origin: Source, entry: Path, text_column: str) -> Contents | None:
    """Return the cached contents of the same, unchanged files."""
    hashes = _known_hashes(origin, entry)
    if not origin.files or not set(_hashed(origin)) <= set(hashes):
        return None
    contents = _contents(origin, hashes, text_column)
    return contents if contents.documents.exists() else None


def _known_hashes(origin: Source, entry: Path) -> dict[str, str]:
    """Return the hashes of the files that have not changed; of a dataset, only if none has."""
    try:
        stored = json.loads(entry.read_bytes())
        before, hashes = dict(stored["files"]), dict(stored["hashes"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    now = _stats(origin)
    if origin.kind != "files":
        return hashes if before == now else {}
    return {path: value for path, value in hashes.items() if path in now and before.get(path) == now[path]}


def _hashed(origin: Source) -> list[str]:
    return [ROWS] if origin.kind != "files" else [str(path) for path in origin.files]


def _stats(origin: Source) -> dict[str, list[int]]:
    """Return each file's device, inode, size and times of change. No program can set the last one, `ctime`."""
    result = {}
    for path in origin.files:
        with contextlib.suppress(OSError):  # reading it reports the error
            now = path.stat()
            if stat.S_ISREG(now.st_mode):  # a pipe is new each time
                result[str(path)] = [now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]
    return result


def _contents(origin: Source, hashes: Mapping[str, str], text_column: str) -> Contents:
    if origin.kind != "files":
        named: tuple[str, ...] = (f"{ROWS} {hashes[ROWS]}",)
    else:
        named = tuple(f"{path.suffix.lower()} {hashes[str(path)]}" for path in origin.files)
    key = json.dumps([FORMAT, text_column, named])
    folder = cache_folder("documents")
    return Contents(source=origin, hashes=named, documents=folder / f"{hashlib.sha256(key.encode()).hexdigest()}.arrow")


def _read(origin: Source, entry: Path, text_column: str) -> Contents:
    """Read the source and keep its documents and hashes.

    Raises:
        DataError: also for a file that changes meanwhile.
    """
    before, hashes = _stats(origin), _known_hashes(origin, entry)
    hashes = hashes if origin.kind == "files" else {}
    with tempfile.TemporaryDirectory(dir=cache_folder("documents"), prefix=".reading-") as fresh:
        draft = Path(fresh, "documents.arrow")
        read = documents(origin, text_column=text_column, hashes=hashes, cache=Path(fresh))
        size = sum(stats[2] for stats in before.values())
        with _quiet(origin, size), progress_bar("reading", size, "B") as bar:
            _write(read, draft, bar)
        if _stats(origin) != before:
            raise DataError(f"data {origin.name}: changed while it was read. Start again once it is complete.")
        contents = _contents(origin, hashes, text_column)
        draft.replace(contents.documents)
    keep(entry, json.dumps({"files": before, "hashes": hashes}))
    return contents


def _quiet(origin: Source, size: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if origin.kind == "files" else progress(is_shown(size))


def is_shown(size: int) -> bool:
    """Return whether libraries show their progress for this many bytes."""
    return size >= LARGE and sys.stderr.isatty()


def _write(read: Iterable[Document], path: Path, bar: Any) -> None:
    import pyarrow as pa

    turn = pa.struct({"role": pa.large_string(), "content": pa.large_string()})
    texts = dict.fromkeys(("text", "prompt", "completion"), pa.large_string())
    schema = pa.schema({"file": pa.int32(), "line": pa.int64(), "messages": pa.list_(turn), **texts})
    rows: list[dict[str, Any]] = []
    size = 0
    with pa.OSFile(os.fspath(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for document in read:
            rows.append({"file": document.file, "line": document.line, **document.content})
            size += document.size
            if len(rows) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
                stream.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                bar.update(size)
                rows, size = [], 0
        if rows:
            stream.write_batch(pa.RecordBatch.from_pylist(rows, schema))
