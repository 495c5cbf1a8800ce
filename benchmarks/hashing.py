"""How fast a checkpoint's hashes are checked: `checkpoints.problems` over 1 GiB in 1, 2 and 4 files, beside hashlib alone.

    python benchmarks/hashing.py                       # results into benchmarks/results/hashing.json and .md
    python benchmarks/hashing.py --folder /data/tmp    # on another disk
    python benchmarks/hashing.py --smoke               # whether it still runs

warm: the files are in the page cache. cold: they were dropped from it (posix_fadvise), and the share of pages that still
were in it is said. hashlib alone: sha256 over a quarter of that in memory, by one thread and by one a core.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import about, parse, parser, write_results

from toolkit.checkpoints import Manifest, validate
from toolkit.checkpoints.manifest import MANIFEST, MANIFEST_FORMAT, sha256_of_all
from toolkit.config.parallelism import Parallelism
from toolkit.core.display import Table
from toolkit.core.units import GiB, MiB
from toolkit.training.preflight import versions

FILES = (1, 2, 4)
TARGET = 1e9
"""Bytes a second."""


def make(folder: Path, files: int, size: int) -> None:
    """A checkpoint of random bytes in equal files, flushed to the disk, so that its pages can be dropped."""
    folder.mkdir()
    block = os.urandom(64 * MiB)
    paths = [folder / f"rank-{rank:05d}.safetensors" for rank in range(files)]
    for path in paths:
        with path.open("wb") as file:
            for start in range(0, size // files, len(block)):
                file.write(block[: size // files - start])
            os.fsync(file.fileno())
    digests = zip(paths, sha256_of_all(paths), strict=True)
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        step=1,
        parallelism=vars(Parallelism(dp_shard=files)),
        global_batch=1,
        strategy={},
        train_config={},
        counters={"steps": 0},
        schedule={},
        tensors={},
        identity={},
        versions=versions(),
        written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        files={path.name: {"sha256": sha256, "bytes": path.stat().st_size} for path, sha256 in digests},
    )
    (folder / MANIFEST).write_bytes(manifest.encode())


def drop(folder: Path) -> None:
    """Ask the system to forget what it has cached of the files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(folder: Path) -> float:
    """Share of 64 pages of each file, drawn at random, that can be read without waiting for the disk."""
    found = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            for page in random.Random(0).sample(range(path.stat().st_size // mmap.PAGESIZE), 64):
                try:
                    found.append(os.preadv(file.fileno(), [bytearray(1)], page * mmap.PAGESIZE, os.RWF_NOWAIT) == 1)
                except BlockingIOError:
                    found.append(False)
    return statistics.mean(found)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def check(folder: Path) -> None:
    """What resume does with a checkpoint."""
    assert validate(folder) == [], "the checkpoint that was made is not whole"


def measure(folder: Path, files: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One number of files, warm and cold in turn."""
    size = int(arguments.gib * GiB)
    make(folder, files, size)
    warm, cold, left = [], [], []
    for _ in range(arguments.repeats):
        drop(folder)
        left.append(cached(folder))
        cold.append(timed(lambda: check(folder)))
        warm.append(timed(lambda: check(folder)))
    shutil.rmtree(folder)
    return {"files": files, "bytes": size, "warm_seconds": warm, "cold_seconds": cold, "cached_when_cold": left}


def alone(threads: int, size: int, repeats: int) -> dict[str, Any]:
    """sha256 over memory: what the processor can do."""
    block = os.urandom(size)

    def once() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(hashlib.sha256, [block] * threads))

    return {
        "threads": threads,
        "bytes": threads * len(block),
        "seconds": [timed(once) for _ in range(repeats)],
    }


def speed(size: int, seconds: list[float]) -> str:
    """The median and its range, in GB/s."""
    found = sorted(size / 1e9 / one for one in seconds)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def table(found: dict[str, Any]) -> Table:
    """A row for hashlib on one core and on all, and one for each number of files."""
    rows = [
        (f"hashlib, {one['threads']} thread{'s'[: one['threads'] - 1]}", speed(one["bytes"], one["seconds"]), "–", "–")
        for one in found["hashlib"]
    ]
    for one in found["checkpoints"]:
        left = f"{100 * max(one['cached_when_cold']):.0f}%"
        name = f"checkpoint, {one['files']} file{'s'[: one['files'] - 1]}"
        rows.append((name, speed(one["bytes"], one["warm_seconds"]), speed(one["bytes"], one["cold_seconds"]), left))
    gib = found["checkpoints"][0]["bytes"] / GiB
    notes = [f"GB/s (1e9 bytes): median of {len(found['checkpoints'][0]['warm_seconds'])} and range."]
    notes.append("in cache when cold: the most of the pages that dropping left; at 0% all bytes came from the disk.")
    slow = [
        one["files"] for one in found["checkpoints"] if statistics.median(one["warm_seconds"]) > one["bytes"] / TARGET
    ]
    said = ", ".join(str(files) for files in slow)
    notes.append(f"Target, warm: at least 1 GB/s: {f'missed with {said} file(s)' if slow else 'reached with each'}.")
    columns = ("what", "warm, GB/s", "cold, GB/s", "in cache when cold")
    return Table(title=f"Checking the hashes of {gib:g} GiB", columns=columns, rows=rows, notes=notes)


def main() -> None:
    """Measure, print the table, write both files."""
    made = parser(__doc__)
    made.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--folder", help="where the checkpoint is made (default: the system's folder for such)")
    arguments = parse(made, gib=0.01, repeats=1)
    threads = sorted({1, os.cpu_count() or 1})
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        found = {
            **about(),
            "hashlib": [alone(number, int(arguments.gib * GiB / 4), arguments.repeats) for number in threads],
            "checkpoints": [measure(Path(scratch, f"{files}-files"), files, arguments) for files in FILES],
        }
    text = table(found).text()
    write_results(arguments.results, "hashing", "Checking hashes", found, text)
    print(text)


if __name__ == "__main__":
    main()
