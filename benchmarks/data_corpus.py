"""Memory and speed of preparing a large JSONL file, beside `datasets.map(batched=True)` over the same tokenizer.

    python benchmarks/data_corpus.py                  # 4 GB for the memory, pairs of 100 MB for the speed
    python benchmarks/data_corpus.py --smoke          # 2 MB each, results in a temporary folder

Rows are pieces of the standard library's sources: texts of 2,000 characters, or conversations of four messages. Memory is that of
the process that prepares and of its children, looked at every 100 ms: the resident set of each added up (shared pages count in
each), and its proportional part. Speed is bytes of the file a second, from the file to what is stored; `datasets.map` gets its rows
from `load_dataset("json")`, and has as many processes. Both sides in turn, each in a process and a cache of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import about, parse, parser, write_results

from toolkit.core.display import Table
from toolkit.core.units import format_bytes

LIMIT = 2**30
"""Bytes of resident memory."""

SMALL = 5_000_000
"""Bytes of a file from which nothing can be measured."""

SEQ_LEN, PIECE = 1024, 2_000

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_corpus(path: Path, size: int, chat: bool) -> None:
    """Write rows until the file has `size` bytes."""
    from toolkit.data import embedded_files

    texts = [file.read_text(encoding="utf-8", errors="replace") for file in embedded_files()]
    pieces = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    with path.open("w") as file:
        for number, piece in zip(itertools.count(), itertools.cycle(pieces)):
            quarter = len(piece) // 4
            parts = [f"{number} {piece[at * quarter : (at + 1) * quarter]}x" for at in range(4)]
            turns = [{"role": ("user", "assistant")[at % 2], "content": part} for at, part in enumerate(parts)]
            file.write(json.dumps({"messages": turns} if chat else {"text": f"{number} {piece}"}) + "\n")
            if file.tell() >= size:
                return


def ours(path: Path, chat: bool) -> int:
    """Prepare the file. Return the number of its tokens."""
    from toolkit.config.run_config import EMBEDDED
    from toolkit.data import prepare_data, resolve_spec
    from toolkit.models.hf_loading import load_tokenizer

    spec, template = resolve_spec(EMBEDDED), TEMPLATE if chat else None
    return prepare_data(path, load_tokenizer(spec), spec, seq_len=SEQ_LEN, chat_template=template).tokens


def theirs(path: Path, chat: bool) -> int:
    """Tokenize the file with `datasets`. Return the number of its tokens."""
    import datasets

    from toolkit.config.run_config import EMBEDDED
    from toolkit.data import resolve_spec
    from toolkit.models.hf_loading import load_tokenizer

    tokenizer = load_tokenizer(resolve_spec(EMBEDDED))
    cache = os.environ["XDG_CACHE_HOME"]
    data = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)

    def encode(batch: dict[str, list[Any]]) -> Any:
        if not chat:
            return tokenizer(batch["text"])
        return tokenizer.apply_chat_template(batch["messages"], chat_template=TEMPLATE, return_dict=True)

    cores = len(os.sched_getaffinity(0))
    data = data.map(encode, batched=True, remove_columns=data.column_names, num_proc=cores)
    return sum(map(len, data.with_format("numpy")["input_ids"][:]))


SIDES = {"ours": ours, "datasets.map": theirs}


def child(side: str, path: Path, chat: bool) -> None:
    """Print the tokens and the seconds of a side, without the import of the libraries."""
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    begin = time.perf_counter()
    tokens = SIDES[side](path, chat)
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - begin}))


def measure(side: str, path: Path, chat: bool) -> dict[str, Any]:
    """Return the seconds and the highest memory of a side in a process of its own, with a cache that knows the model alone.

    A file of a smoke test is too small for a measurement: there the cache is empty.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if path.stat().st_size > SMALL:
            first = Path(folder) / "first.jsonl"
            write_corpus(first, 10_000, chat)
            run(side, first, folder, chat)
        return run(side, path, folder, chat)


def run(side: str, path: Path, folder: str, chat: bool) -> dict[str, Any]:
    """Run `child`, and look at its memory."""
    words = [sys.executable, __file__, "--child", side, "--file", str(path), *["--chat"] * chat]
    environ = {**os.environ, "XDG_CACHE_HOME": folder}
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        peaks = [0, 0]
        while process.poll() is None:
            peaks = [max(pair) for pair in zip(peaks, memory(process.pid), strict=True)]
            time.sleep(0.1)
        assert process.stdout is not None
        result: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    return {**result, "resident": peaks[0], "proportional": peaks[1], "bytes": path.stat().st_size}


def memory(pid: int) -> tuple[int, int]:
    """Return the resident and the proportional bytes of a process and its descendants."""
    sums = {"Rss": 0, "Pss": 0}
    for each in descendants(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        for name in sums:
            sums[name] += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    return sums["Rss"], sums["Pss"]


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has ended
            continue
        for child in children:
            yield from descendants(int(child))


def row(name: str, one: dict[str, Any], ratio: str = "") -> tuple[str, ...]:
    """Return a line of the table."""
    sizes = [format_bytes(one[name]) for name in ("bytes", "resident", "proportional")]
    return name, sizes[0], f"{one['seconds']:.1f} s", ratio, *sizes[1:]


def main() -> int:
    """Measure both parts. Return 1 where the memory is over the limit."""
    flags = parser(__doc__)
    flags.add_argument(
        "--megabytes", type=float, default=4_000, help="of the file for the memory, 0 for none (default: %(default)s)"
    )
    flags.add_argument(
        "--speed-megabytes", type=float, default=100, help="of those for the speed (default: %(default)s)"
    )
    flags.add_argument("--pairs", type=int, default=5, help="for the speed, 0 for none (default: %(default)s)")
    flags.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()), help="a folder, free for 7 times the file"
    )
    for name, what in {"child": "a side", "file": "its file"}.items():
        flags.add_argument(f"--{name}", help=f"in a child process: {what}")
    flags.add_argument("--chat", action="store_true", help="in a child process: the file holds conversations")
    options = parse(flags, megabytes=2, speed_megabytes=2, pairs=1)
    if options.child:
        child(options.child, Path(options.file), options.chat)
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    status = 0
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        path = Path(folder) / "corpus.jsonl"
        if options.megabytes:
            status = memory_part(path, round(options.megabytes * 1e6), options.results)
        if options.pairs:
            speed_part(path, round(options.speed_megabytes * 1e6), options.pairs, options.results)
    return status


def memory_part(path: Path, size: int, results: Path) -> int:
    """Prepare one large file, show, write. Return 1 where its memory is over the limit."""
    write_corpus(path, size, chat=False)
    measured = measure("ours", path, False)
    show("data_corpus", {"limit_bytes": LIMIT, "memory": measured}, [row("text", measured)], results)
    return int(measured["resident"] > LIMIT)


def speed_part(path: Path, size: int, pairs: int, results: Path) -> None:
    """Prepare both kinds of rows on both sides in turn, show, write."""
    speed: dict[str, Any] = {}
    rows = []
    for kind in ("text", "conversations"):
        chat = kind == "conversations"
        write_corpus(path, size, chat)
        measured = [{side: measure(side, path, chat) for side in SIDES} for _ in range(pairs)]
        ratio = statistics.median(pair["datasets.map"]["seconds"] / pair["ours"]["seconds"] for pair in measured)
        speed[kind] = {"ratio": ratio, "pairs": measured}
        rows.append(row(kind, measured[0]["ours"], f"{ratio:.2f}"))
    show("data_corpus_speed", {"speed": speed}, rows, results)


def show(name: str, result: dict[str, Any], rows: list[tuple[str, ...]], results: Path) -> None:
    """Print and write a table and its result."""
    columns = ("rows", "file", "seconds", "speed / datasets.map", "resident", "proportional")
    table = Table(title="Preparing a large file", columns=columns, rows=rows)
    print(table.text())
    write_results(results, name, "Preparing a large file", {**about(), **result}, table.text())


if __name__ == "__main__":
    sys.exit(main())
