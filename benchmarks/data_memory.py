"""Anonymous memory of the process that prepares data, and of a rank that trains on them, at few and at many rows.

    python benchmarks/data_memory.py              # 1,000 and 1,000,000 rows, results into benchmarks/results/
    python benchmarks/data_memory.py --smoke      # 10,000 and 30,000 rows, results into a temporary folder

A row is one short text, padded to 8 tokens: the most rows that a file of its size can make. Memory is `RssAnon` of a process
that was forked for it, without what it had at its start: the highest value while it works, looked at every 10 ms. A rank's
growth from few rows to many must not be over 200 MiB a million rows.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import about, parse, parser, write_results

from toolkit.core.display import Table
from toolkit.core.units import format_bytes

FULL, SMOKE = (1_000, 1_000_000), (10_000, 30_000)

LIMIT = 200 * 2**20 / 1e6
"""Bytes a row."""

BATCHES = 200
"""That a rank takes, from all over the data."""

SEQ_LEN = 8


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def apart(work: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """What `work` returns in a forked process, with its highest anonymous memory and its seconds."""

    def child() -> None:
        start, highest, ended = anonymous(), [0], threading.Event()

        def look() -> None:
            while not ended.wait(0.01):
                highest[0] = max(highest[0], anonymous())

        thread = threading.Thread(target=look)
        thread.start()
        begin = time.perf_counter()
        found = work(*arguments)
        seconds = time.perf_counter() - begin
        ended.set()
        thread.join()
        sending.send({"found": found, "bytes": max(highest[0], anonymous()) - start, "seconds": seconds})
        os._exit(0)

    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    sending.close()
    try:
        found: dict[str, Any] = receiving.recv()
    finally:
        process.join()
    return found


def prepare(source: Path, tokenizer: Any, spec: Any) -> str:
    """As the parent does it, or rank 0 without one."""
    from toolkit.data import prepare_data

    return prepare_data(source, tokenizer, spec, seq_len=SEQ_LEN, packing=False).fingerprint


def train(fingerprint: str, count: int) -> int:
    """What a rank does with rows: order, batches, evaluation."""
    from toolkit.config.train_config import TrainConfig
    from toolkit.data import batches, eval_batches, find_rows, one_document

    rows = find_rows(fingerprint)
    assert rows is not None
    assert rows.count == count
    train_config = TrainConfig(micro_batch=4, steps=BATCHES)
    one_document(rows, train_config, dp_size=2)
    loader = batches(rows, train_config, dp_rank=1, dp_size=2)
    evaluation = eval_batches(rows, micro_batch=max(1, count // BATCHES), dp_rank=0, dp_size=1)
    return sum(batch["input_ids"].numel() for each in (loader, evaluation) for batch in each)


def measure(count: int, folder: Path, tokenizer: Any, spec: Any) -> dict[str, Any]:
    """Memory of both at so many rows."""
    source = folder / f"{count}.jsonl"
    with source.open("w") as file:
        file.writelines(f'{{"text": "a{number}"}}\n' for number in range(count))
    prepared = apart(prepare, source, tokenizer, spec)
    rank = apart(train, prepared["found"], count)
    return {
        "rows": count,
        "prepare_bytes": prepared["bytes"],
        "prepare_seconds": prepared["seconds"],
        "rank_bytes": rank["bytes"],
    }


def growth(few: dict[str, Any], many: dict[str, Any], name: str) -> float:
    """Bytes a row."""
    return float((many[name] - few[name]) / (many["rows"] - few["rows"]))


def measure_all(counts: Sequence[int]) -> list[dict[str, Any]]:
    """`measure` for each number of rows, with the embedded model's tokenizer and a cache of its own."""
    import datasets  # noqa: F401 - imported before the fork: libraries are not what is measured

    from toolkit.config.run_config import EMBEDDED
    from toolkit.data import supports_packing
    from toolkit.data.embedded import resolve_spec
    from toolkit.models.hf_loading import load_tokenizer

    spec = resolve_spec(EMBEDDED)
    supports_packing(spec)
    tokenizer = load_tokenizer(spec)
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        try:
            return [measure(count, Path(scratch), tokenizer, spec) for count in counts]
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def main() -> int:
    """Measure, show, write; 1 where memory grows by more than the limit."""
    flags = parse(parser(__doc__))
    cases = measure_all(SMOKE if flags.smoke else FULL)
    few, many = cases
    grown = {name: growth(few, many, name) for name in ("prepare_bytes", "rank_bytes")}
    rows = [
        (f"{case['rows']:,}", *(format_bytes(case[name]) for name in grown), f"{case['prepare_seconds']:.1f} s")
        for case in cases
    ]
    rows.append(("growth a row", *(f"{value:.1f} B" for value in grown.values()), ""))
    table = Table(title="Anonymous memory", columns=("rows", "prepare", "rank", "seconds"), rows=rows)
    print(table.text())
    result = {**about(), "limit_bytes_per_row": LIMIT, "growth_bytes_per_row": grown, "cases": cases}
    write_results(flags.results, "data_memory", "Memory of data", result, table.text())
    return int(max(grown.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
