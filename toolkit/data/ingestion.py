"""Read a source once: check and hash its documents, and store them as an Arrow file in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.core.atomic_io import expand_user
from toolkit.core.cache import cache_folder, keep, recall
from toolkit.core.display import progress_bar
from toolkit.core.errors import DataError
from toolkit.data.files import Document, Findings, documents
from toolkit.data.sources import Source, find_source, split_weights

if TYPE_CHECKING:
    import numpy as np

DOCUMENTS_FORMAT = 5
"""Version of the cached documents. Raise it when their columns or checks change."""

BATCH_DOCUMENTS, BATCH_BYTES = 500, 1 << 20
"""A record batch of the Arrow file ends at either of them; a process tokenizes one at a time."""


class Batch(NamedTuple):
    """A record batch of a source's Arrow file in the cache, which holds a row for each document."""

    source: Source
    path: Path
    number: int
    rows: int
    size: int
    """Bytes."""
    times: np.ndarray[Any, Any] | None = None
    """Of a mixture: how often each document is taken."""

    def documents(self) -> Iterator[Document]:
        """Yield the documents in their order."""
        import numpy as np
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as file:
            every: list[dict[str, Any]] = pa.ipc.open_file(file).get_batch(self.number).to_pylist()
        for at in np.repeat(np.arange(self.rows), 1 if self.times is None else self.times):
            file, line, *fields = ((name, value) for name, value in every[at].items() if value is not None)
            kind, value = fields[0]
            content = json.loads(value) if kind in ("messages", "turns") else dict(fields)
            yield Document(kind=kind, content=content, where=self.source.where(file[1], line[1]))


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Sources that were read and checked."""

    name: str
    """As `--data` names them."""
    hash: str
    """sha256 of their documents, with files and lines."""
    batches: Sequence[Batch]
    notes: str = ""
    """What the user should know: the files of a folder, formats and columns."""
    untrained: str = ""
    """Where half of the conversations have no turn of the assistant: their number, and the roles in them."""


def ingest(source: str | Path | None, *, seed: int = 0, **reading: Any) -> Contents:
    """Read, check and hash sources, unless all their files are as they were when they were read last.

    A file is known by path, device, inode, size, and the times of its last changes. Processes that come at once wait
    for the first.

    Args:
        source: as `find_source` takes it; or several by commas, with a weight after a colon: `a.jsonl,b.parquet:0.3`.
            A weight of 0.3 takes 30% of the rows, drawn by the seed without replacement; 2 takes each row twice.
        seed: of the draw.
        reading: `text_column`, `columns` and `data_format`, as `files.documents` takes them.

    Raises:
        DataError: naming file, line, reason and fix; also for a file that changes meanwhile.
    """
    parts = [(_ingest(name, reading), weight) for name, weight in split_weights(source)]
    return parts[0][0] if len(parts) == 1 and parts[0][1] == 1 else _mix(str(source), parts, seed)


def _ingest(source: str | Path | None, reading: dict[str, Any]) -> Contents:
    from filelock import FileLock

    origin = find_source(source)
    place = expand_user(origin.name)
    reading = {name: value for name, value in sorted(reading.items()) if value is not None}
    key = f"{DOCUMENTS_FORMAT}\n{place.absolute() if place.exists() else origin.name}\n{reading}"
    entry = cache_folder("sources") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with cache_errors(entry.parent), FileLock(entry.with_suffix(".lock")):
        return _cached_contents(origin, entry) or _read(origin, entry, reading)


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Convert a failed write into a DataError. A failed read is one already."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache {folder} cannot be written: {error.strerror or error}. Free some space there, or set"
            " XDG_CACHE_HOME to another folder."
        ) from error


@contextlib.contextmanager
def draft_folder(folder: Path, key: str) -> Iterator[Path]:
    """Make an empty folder for unfinished files, under the lock of `key`. What a killed process left there is removed."""
    draft = folder / f".{key}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _cached_contents(origin: Source, entry: Path) -> Contents | None:
    """Return the contents in the cache if all files, and the copy of their documents, are unchanged."""
    with contextlib.suppress(OSError):
        cached, now = recall(entry, dict) or {}, _stats(origin)
        if cached.get("files") == now and len(now) == len(origin.files) > 0:
            path = _documents(entry, cached["contents"]["hash"])
            if cached["documents"] == _stat(path):
                return Contents(name=origin.name, batches=_batches(origin, path), **cached["contents"])
    return None


def _documents(entry: Path, digest: str) -> Path:
    """Return the place of a source's documents. Other contents lie elsewhere: a process may still read the older ones."""
    return cache_folder("documents") / f"{entry.stem}-{digest}.arrow"


def _batches(origin: Source, path: Path) -> list[Batch]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
        return [Batch(origin, path, number, len(each), each.nbytes) for number, each in enumerate(batches)]


def _stats(origin: Source) -> dict[str, list[int]]:
    """Return the state of each file."""
    result = {}
    for path in origin.files:
        with contextlib.suppress(OSError):  # reading it reports the error
            result[str(path)] = _stat(path)
    return result


def _stat(path: Path) -> list[int]:
    """Return a file's device, inode, size and times of change. No program can set the last one, `ctime`."""
    now = path.stat()
    return [now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def _read(origin: Source, entry: Path, reading: dict[str, Any]) -> Contents:
    """Read the source and keep its documents and their hash."""
    before, findings = _stats(origin), Findings()
    with draft_folder(cache_folder("documents"), entry.stem) as fresh:
        draft = fresh / "documents.arrow"
        checked = documents(origin, findings=findings, **reading)
        with progress_bar("reading", sum(stats[2] for stats in before.values()), "B") as bar:
            digest = _write(checked, draft, bar)
        if _stats(origin) != before:
            raise DataError(f"data {origin.name}: changed while it was read. Start again once it is complete.")
        notes = "; ".join(filter(None, (origin.summary, *findings.formats)))
        about = {"hash": digest, "notes": notes, "untrained": findings.problem()}
        path = _documents(entry, digest)
        if path.is_dir():
            path.rename(fresh / "damaged")
        draft.replace(path)
    keep(entry, {"files": before, "documents": _stat(path), "contents": about})
    return Contents(name=origin.name, batches=_batches(origin, path), **about)


def _write(checked: Iterable[Document], path: Path, bar: Any) -> str:
    """Write documents as an Arrow file. Return the sha256 of their places and contents."""
    import pyarrow as pa

    texts = dict.fromkeys(("text", "prompt", "completion", "messages", "turns"), pa.large_string())
    schema = pa.schema({"file": pa.int32(), "line": pa.int64(), **texts})
    rows: list[dict[str, Any]] = []
    digest, size = hashlib.sha256(), 0
    with pa.OSFile(os.fspath(path), "wb") as file, pa.ipc.new_file(file, schema) as stream:
        for document in checked:
            chat = "messages" in document.content
            content = {document.kind: json.dumps(document.content)} if chat else document.content
            rows.append({"file": document.file, "line": document.line, **content})
            line = "".join(f"{name} {len(text)} {text}\n" for name, text in content.items())
            digest.update(f"{document.file} {document.line} {line}".encode())
            size += len(line)
            if len(rows) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
                stream.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                bar.update(size)
                rows, size = [], 0
        stream.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return digest.hexdigest()


def _mix(name: str, parts: list[tuple[Contents, float]], seed: int) -> Contents:
    """Take as many documents of each part as its weight says."""
    key = repr([seed, *((each.hash, weight, each.name) for each, weight in parts)])
    batches: list[Batch] = []
    notes: list[str] = []
    for number, (each, weight) in enumerate(parts):
        total = sum(batch.rows for batch in each.batches)
        times = draw(each.name, total, weight, (seed, number))
        notes += [f"{each.name}: {times.sum():,} of {total:,} rows", *filter(None, [each.notes])]
        for batch in each.batches:
            taken, times = times[: batch.rows], times[batch.rows :]
            batches.append(batch._replace(times=taken, size=round(batch.size * taken.mean())))
    return Contents(
        name=name,
        hash=hashlib.sha256(key.encode()).hexdigest(),
        batches=batches,
        notes="; ".join(notes),
        untrained="; ".join(each.untrained for each, _ in parts if each.untrained),
    )


def draw(name: str, total: int, weight: float, seed: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Return how often each of `total` documents is taken, `weight` × `total` in all.

    Raises:
        DataError: where that is none.
    """
    import numpy as np

    if not (count := round(weight * total)):
        raise DataError(f"data {name}: a weight of {weight:g} takes none of {total:,} rows. Raise it.")
    # RandomState's stream is frozen by numpy's policy (NEP 19), so that a run can be resumed after an upgrade.
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(total)
    return count // total + (order < count % total)
