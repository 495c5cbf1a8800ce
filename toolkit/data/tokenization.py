"""Documents in the cache → tokens, in several processes where they are many."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from toolkit.core.errors import DataError
from toolkit.core.process_lifecycle import begin_child
from toolkit.data.encoder import Encoded, Encoder
from toolkit.data.files import KINDS, Document
from toolkit.data.ingestion import Contents, progress_bar

PROCESS_BYTES = 32 << 20
"""Bytes of documents for each process: fewer cost less time than another process."""

_work: tuple[Contents, Encoder]
"""What a process encodes; set as it starts."""


def tokenize(contents: Contents, encoder: Encoder) -> Iterator[Encoded]:
    """Yield the documents' tokens in order.

    Raises:
        DataError: as `Encoder.encode`, and for a process that was killed.
    """
    import pyarrow as pa

    size = contents.documents.stat().st_size
    processes = min(_cores(), size // PROCESS_BYTES)
    with pa.memory_map(str(contents.documents)) as file, progress_bar("tokenizing", size, "B") as bar:
        reader = pa.ipc.open_file(file)
        sizes = (reader.get_batch(number).nbytes for number in range(reader.num_record_batches))
        batches: Iterator[Iterable[Encoded]] = (
            _by_processes(contents, encoder, processes, reader.num_record_batches)
            if processes > 1
            else (encoder.encode(_documents(contents, number)) for number in range(reader.num_record_batches))
        )
        for nbytes, batch in zip(sizes, batches, strict=True):
            yield from batch
            bar.update(nbytes)


def _by_processes(contents: Contents, encoder: Encoder, processes: int, count: int) -> Iterator[list[Encoded]]:
    """Yield batches in order; at most two for each process are encoded ahead."""
    others = multiprocessing.active_children()
    ahead: deque[Future[list[Encoded]]] = deque()
    fork = multiprocessing.get_context("fork")
    work = (os.getpid(), contents, encoder)
    pool = ProcessPoolExecutor(processes, mp_context=fork, initializer=_start, initargs=work)
    try:
        for number in range(count):
            ahead.append(pool.submit(_encode, number))
            if len(ahead) == 2 * processes:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "tokenizing: a process was killed, most likely for its memory. Split long documents, or free some memory."
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - set(others):
            process.kill()
        pool.shutdown(cancel_futures=True)


def _start(parent: int, contents: Contents, encoder: Encoder) -> None:
    global _work
    begin_child(parent)
    _work = contents, encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the tokenizer do not survive a fork


def _encode(number: int) -> list[Encoded]:
    """Return a batch with tokens as arrays: they are sent in a tenth of the bytes."""
    import numpy as np

    contents, encoder = _work
    return [
        Encoded(
            ids=np.asarray(document.ids, np.int32),  # type: ignore[arg-type]
            trained=np.asarray(document.trained, bool),  # type: ignore[arg-type]
            whole=document.whole,
            split=document.split,
        )
        for document in encoder.encode(_documents(contents, number))
    ]


def _documents(contents: Contents, number: int) -> Iterator[Document]:
    """Yield the documents of a batch in the cache."""
    import pyarrow as pa

    with pa.memory_map(str(contents.documents)) as file:
        rows: list[dict[str, Any]] = pa.ipc.open_file(file).get_batch(number).to_pylist()
    for row in rows:
        where = contents.source.where(row.pop("file"), row.pop("line"))
        content = {name: value for name, value in row.items() if value is not None}
        yield Document(kind=next(name for name in KINDS if name in content), content=content, where=where)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
