"""Documents in the cache → tokens, in several processes where they are many."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.core.errors import DataError
from toolkit.core.process_lifecycle import forks_die_with_parent
from toolkit.data.encoder import Encoded, Encoder
from toolkit.data.files import COLUMNS, Document
from toolkit.data.hub import progress
from toolkit.data.ingestion import BATCH_BYTES, Contents, is_shown, progress_bar
from toolkit.data.sources import Source

PROCESS_BYTES = 32 << 20
"""Bytes of documents for each process: fewer cost less time than another process."""

BATCH_DOCUMENTS = 1000
"""Documents that a process takes at once, if they are short."""

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""The environment variable by which tokenizers start threads. `datasets` sets it for its processes."""


def tokenize(contents: Contents, encoder: Encoder, folder: Path) -> Iterator[Encoded]:
    """Yield the documents' tokens in order. Tokens of several processes lie in `folder` meanwhile, memory-mapped.

    Raises:
        DataError: as `Encoder.encode`.
    """
    import pyarrow as pa

    size = contents.documents.stat().st_size
    processes = min(_cores(), size // PROCESS_BYTES)
    if processes > 1:
        yield from _by_processes(contents, encoder, folder, processes)
        return
    with pa.memory_map(str(contents.documents)) as file, progress_bar("tokenizing", size, "B") as bar:
        for records in pa.ipc.open_stream(file):
            yield from encoder.encode(_documents(records.to_pydict(), contents.source))
            bar.update(records.nbytes)


def _by_processes(contents: Contents, encoder: Encoder, folder: Path, processes: int) -> Iterator[Encoded]:
    import datasets

    documents = datasets.Dataset.from_file(str(contents.documents))
    size = contents.documents.stat().st_size
    batch = max(1, min(BATCH_DOCUMENTS, BATCH_BYTES * len(documents) // size))
    integers, flags = datasets.Value("int32"), datasets.Value("bool")
    with progress(is_shown(size)), _workers():
        tokens = documents.map(
            partial(_encode, encoder=encoder, source=dataclasses.replace(contents.source, dataset=None)),
            batched=True,
            batch_size=batch,
            writer_batch_size=batch,
            remove_columns=documents.column_names,
            features=datasets.Features(
                ids=datasets.LargeList(integers), trained=datasets.LargeList(flags), whole=flags, split=integers
            ),
            cache_file_name=str(folder / "tokens.arrow"),
            new_fingerprint="tokens",  # the caller keeps the result under its own fingerprint
            num_proc=min(processes, len(documents)),
            desc="tokenizing",
        )
    with progress_bar("packing", len(tokens), " documents") as bar:
        for records in tokens.data.table.to_batches():
            yield from _encoded(records)
            bar.update(len(records))


def _documents(columns: Mapping[str, Sequence[Any]], source: Source) -> Iterator[Document]:
    """Yield the documents of a batch of the cache."""
    names = ("text", "prompt", "completion", "messages")
    for file, line, *values in zip(columns["file"], columns["line"], *(columns[name] for name in names), strict=True):
        content = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        kind = next((kind for kind, needed in COLUMNS.items() if needed[0] in content), "text")
        yield Document(kind=kind, content=content, where=source.where(file, line), size=0)


def _encode(columns: Mapping[str, Sequence[Any]], encoder: Encoder, source: Source) -> dict[str, list[Any]]:
    """Encode a batch of documents into columns of tokens."""
    encoded = list(encoder.encode(_documents(columns, source)))
    return {name: [getattr(document, name) for document in encoded] for name in ("ids", "trained", "whole", "split")}


def _encoded(records: Any) -> Iterator[Encoded]:
    """Yield the documents of an Arrow record batch; their tokens are views of the memory map."""
    ids, trained = records.column("ids"), records.column("trained")
    values, flags = ids.values.to_numpy(), trained.values.to_numpy(zero_copy_only=False)
    ends = ids.offsets.to_numpy()[1:].tolist()
    start = ends[0] - len(ids[0]) if ends else 0
    for end, whole, split in zip(
        ends, records.column("whole").to_pylist(), records.column("split").to_pylist(), strict=True
    ):
        yield Encoded(ids=values[start:end], trained=flags[start:end], whole=whole, split=split)
        start = end


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextlib.contextmanager
def _workers() -> Iterator[None]:
    """Let `datasets`' child processes end with this one. The environment is restored afterwards."""
    environ, parallelism = os.environ, os.environ.get(PARALLELISM)
    try:
        with forks_die_with_parent():
            yield
    except Exception as error:
        # `datasets` asks unfinished processes for results when a signal ends it, and their time-out hides the signal.
        if type(error).__name__ == "TimeoutError" and error.__context__ is not None:
            raise error.__context__ from None
        if "abruptly died" in str(error):
            raise DataError(
                "tokenizing: a process was killed, most likely for its memory. Split long documents, or free some memory."
            ) from error
        raise
    finally:
        os.environ = environ  # noqa: B003 - `datasets` leaves a copy of it in its place
        os.environ.pop(PARALLELISM, None)
        if parallelism is not None:
            os.environ[PARALLELISM] = parallelism
