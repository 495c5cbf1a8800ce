"""What a checkpoint every 50 steps costs a run, beside the same run without; and what Python can do meanwhile.

    python benchmarks/checkpoint_cost.py               # results into benchmarks/results/checkpoint_cost.json and .md
    python benchmarks/checkpoint_cost.py --block 50    # blocks as long as the interval
    python benchmarks/checkpoint_cost.py --smoke       # whether it still runs

Each strategy is one run of the recipe's own loop over the embedded model. Its steps are cut into blocks, with and without a
checkpoint in turn, and who goes first changes from pair to pair. A block with one begins with the snapshot and lasts until the
checkpoint is published and all its steps are done, so that whatever the writing in the background takes from the steps is in
it. Blocks are shorter than the interval, so that a pair takes less of the machine's own ups and downs in; the ratio is scaled.
Cost: ((seconds with) / (seconds without) - 1) x block / interval. Stood still: the loop's own wait for the snapshot.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forking import result_of, write
from machine import about, parse, parser, write_results
from recipe import rank, tiny_model

from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import read_events
from toolkit.core.display import Table
from toolkit.core.units import MiB

if TYPE_CHECKING:
    from recipe import Rank

WARM = 6
"""Steps before the first block: the memory window ends with the third, and a first save makes the snapshot's buffers."""

STEP_SECONDS = 0.5
"""The target is meant for steps of at least so long."""

TARGET = 0.035


def order(pair: int) -> tuple[bool, bool]:
    """Which block of a pair has a checkpoint."""
    return (True, False) if pair % 2 else (False, True)


def clocked(owner: Any, name: str, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """From now on the seconds of each call of a module's function, or a class's method."""
    inner, seconds = getattr(owner, name), []

    def call(*given: Any) -> Any:
        began = clock()
        found = inner(*given)
        seconds.append(clock() - began)
        return found

    setattr(owner, name, call)
    return seconds


def worker(config: dict[str, Any]) -> None:
    """One rank of the recipe. Rank 0 writes what was clocked to `out`."""
    block, plan = config["block"], [saved for pair in range(config["pairs"]) for saved in order(pair)]
    train_config = TrainConfig(
        steps=block * (1 + len(plan)), micro_batch=config["micro_batch"], seq_len=config["seq_len"]
    )
    strategy, path = Strategy(sharding=config["sharding"]), Path(config["path"])
    run_config = RunConfig(model=config["model"], save_every=block, save_seconds=0.0)
    with rank(strategy, train_config, run_config, path, start=block - WARM) as this:
        clocked_blocks = blocks(this, block, plan)
        if this.prepared.accelerator.is_main_process:
            write(config, {"sharding": strategy.sharding, "ranks": this.prepared.job.ranks, **clocked_blocks})


def blocks(this: Rank, block: int, plan: list[bool]) -> dict[str, Any]:
    """Warm up and save once, then the blocks. What was clocked."""
    from toolkit.checkpoints import checkpoint_writer

    saver = this.writer()
    keepers = {saved: this.policy(saver if saved else None) for saved in (True, False)}
    marks: list[float] = []
    seconds, first = [], 0.0
    hashed, written = clocked(checkpoint_writer, "sha256_of"), clocked(checkpoint_writer, "save_tensors")
    computed = clocked(checkpoint_writer.CheckpointWriter, "_write", time.thread_time)
    for step in this.steps(keepers[True]):
        seconds.append(step.seconds)
        if step.step % block == 0:
            if marks and plan[len(marks) - 1]:
                saver.wait_published(step.step - block)
            marks.append(time.perf_counter())
        if step.step == block - 1:
            with this.run.window.saving():
                saver.save(step.step)
            saver.wait()
            first = sum(done.stall_seconds for done in saver.published())
        if 0 < len(marks) <= len(plan):
            keepers[plan[len(marks) - 1]].step_done(step)
    published = read_events(this.run.folder.published)
    published += [
        {"bytes": done.size_bytes, "stall_seconds": done.stall_seconds, "write_seconds": done.write_seconds}
        for done in saver.published()  # in the last block: the keeper has not noted it yet
    ]
    spans = zip(plan, marks, marks[1:], strict=False)
    return {
        "blocks": [{"saved": saved, "seconds": end - begin} for saved, begin, end in spans],
        "step_seconds": statistics.median(seconds[WARM:]),
        "first_stall_seconds": first,
        "published": published,
        "tensors_seconds": written[1:],
        "hash_seconds": hashed[1:],
        "cpu_seconds": computed[1:],
    }


def measure(sharding: str, given: argparse.Namespace, model: str) -> dict[str, Any]:
    """One strategy's run."""
    config = {name: getattr(given, name) for name in ("pairs", "block", "micro_batch", "seq_len")}
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        config |= {"sharding": sharding, "model": model, "path": f"{made}/run"}
        found: dict[str, Any] = result_of("checkpoint_cost:worker", config, given.ranks)
    pairs = [found["blocks"][at : at + 2] for at in range(0, len(found["blocks"]), 2)]
    by_kind = [{block["saved"]: block["seconds"] for block in pair} for pair in pairs]
    share = given.block / given.every
    found["costs"] = [(pair[True] / pair[False] - 1) * share for pair in by_kind]
    stalls = [done["stall_seconds"] for done in found["published"]]
    found["stood_still"] = share * statistics.median(
        stall / pair[True] for stall, pair in zip(stalls, by_kind, strict=True)
    )
    return found


class Spinner:
    """A Python thread that counts: how often, and how long it had to wait for the interpreter's lock at the longest."""

    def __init__(self) -> None:
        self.count, self.longest = 0, 0.0
        self._done = False
        self._thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        before = time.perf_counter()
        while not self._done:
            now = time.perf_counter()
            self.longest = max(self.longest, now - before)
            self.count, before = self.count + 1, now

    def beside(self, call: Callable[[], Any]) -> dict[str, float]:
        """Count while another call runs in this thread: counts a second, the longest wait, and the call's seconds."""
        self._thread.start()
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        self._done = True
        self._thread.join()
        return {"counts_per_second": self.count / seconds, "longest_wait_seconds": self.longest, "seconds": seconds}


def gil(parent: str | None, size: int) -> dict[str, dict[str, float]]:
    """How far a Python thread gets while another writes, flushes and hashes a file of so many bytes."""
    import torch
    from safetensors.torch import save_file

    tensor = torch.rand(size // 4)
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        path = Path(scratch, "tensor.safetensors")

        def flush() -> None:
            with path.open("rb") as file:
                os.fsync(file.fileno())

        def digest() -> None:
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")

        work: dict[str, Callable[[], Any]] = {
            "nothing": lambda: time.sleep(1.0),
            "safetensors' save_file": lambda: save_file({"weight": tensor}, path),
            "fsync": flush,
            "sha256": digest,
        }
        return {name: Spinner().beside(call) for name, call in work.items()}


def cost_table(runs: list[dict[str, Any]], given: argparse.Namespace) -> Table:
    """A row a strategy."""
    rows = []
    for run in runs:
        done, median = run["published"], statistics.median
        written = median(one["write_seconds"] for one in done)
        rows.append(
            (
                run["sharding"],
                run["ranks"],
                f"{run['step_seconds']:.3f}",
                f"{median(one['bytes'] for one in done) / MiB:.1f}",
                f"{median(one['stall_seconds'] for one in done):.3f}",
                f"{written:.3f}",
                f"{median(run['tensors_seconds']):.3f}",
                f"{median(run['hash_seconds']):.3f} ({100 * median(run['hash_seconds']) / written:.0f}%)",
                f"{median(run['cpu_seconds']):.3f}",
                f"{100 * run['stood_still']:.2f}%",
                f"{100 * median(run['costs']):+.2f}%",
                f"{100 * min(run['costs']):+.2f} to {100 * max(run['costs']):+.2f}%",
            )
        )
    short = [run["sharding"] for run in runs if run["step_seconds"] < STEP_SECONDS]
    loud = [run["sharding"] for run in runs if max(run["costs"]) - min(run["costs"]) > TARGET]
    missed = [
        run["sharding"] for run in runs if statistics.median(run["costs"]) >= TARGET and run["sharding"] not in loud
    ]
    notes = [
        f"cost: median and range of {len(runs[0]['costs'])} pairs of blocks of {given.block} steps, with a checkpoint and without,",
        f"as a share of {given.every} steps. snapshot: the loop stands still for it. write: in the background until",
        "published, on the cores that the steps use; of it rank 0's tensors (flushed), their sha256 (and its share), and",
        "what the writing thread computed, which other load on the machine hardly changes.",
        f"Target, with steps of {STEP_SECONDS} s or more: under {100 * TARGET:.1f}%: {_said('missed by', missed) or 'not missed'}.",
    ]
    notes += (
        [f"{_said('The pairs differ by more than that, and say nothing:', loud)}: is there other load?"] if loud else []
    )
    notes += [f"{_said('Shorter steps than that:', short)}; raise --micro-batch."] if short else []
    columns = ("sharding", "ranks", "step, s", "MiB", "snapshot, s", "write, s", "tensors, s", "hash, s", "CPU, s")
    title = f"A checkpoint every {given.every} steps, beside none"
    return Table(title=title, columns=(*columns, "stood still", "cost", "of the pairs"), rows=rows, notes=notes)


def _said(what: str, names: list[str]) -> str:
    return f"{what} {', '.join(names)}" if names else ""


def gil_table(found: dict[str, dict[str, float]], size: int) -> Table:
    """A row for each thing that another thread did."""
    alone = found["nothing"]["counts_per_second"]
    rows = [
        (
            name,
            f"{one['seconds']:.2f}",
            f"{100 * one['counts_per_second'] / alone:.0f}%",
            f"{1000 * one['longest_wait_seconds']:.0f}",
        )
        for name, one in found.items()
    ]
    held = [
        name for name, one in found.items() if name != "nothing" and one["longest_wait_seconds"] > one["seconds"] / 2
    ]
    said = f"Holds the interpreter's lock: {', '.join(held) or 'none of them'} (a wait of over half its time)."
    columns = ("another thread does", "s", "the thread gets on", "longest wait, ms")
    return Table(title=f"A Python thread beside a file of {size / 1e6:g} MB", columns=columns, rows=rows, notes=[said])


def main() -> None:
    """Measure every strategy, print the tables, write both files."""
    flags = parser(__doc__)
    flags.add_argument("--sharding", default="ddp,zero3")
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--pairs", type=int, default=12)
    flags.add_argument("--every", type=int, default=50, help="interval of the checkpoints, in steps")
    flags.add_argument("--block", type=int, default=8, help=f"steps of a block, more than {WARM}")
    flags.add_argument("--micro-batch", type=int, default=4)
    flags.add_argument("--seq-len", type=int, default=256)
    flags.add_argument("--file-bytes", type=int, default=500_000_000, help="of the file that another thread writes")
    flags.add_argument("--folder", help="where the runs are made (default: the system's folder for such)")
    given = parse(flags, sharding="ddp", pairs=2, block=WARM + 2, micro_batch=1, seq_len=64, file_bytes=4_000_000)
    with tempfile.TemporaryDirectory() as scratch:
        model = str(tiny_model(Path(scratch))) if given.smoke else "embedded"
        runs = [measure(word, given, model) for word in given.sharding.split(",")]
    beside = gil(given.folder, given.file_bytes)
    text = f"{cost_table(runs, given).text()}\n\n{gil_table(beside, given.file_bytes).text()}"
    shape = {name: getattr(given, name) for name in ("every", "block", "micro_batch", "seq_len")}
    result = {**about(), **shape, "runs": runs, "gil": {"bytes": given.file_bytes, "beside": beside}}
    write_results(given.results, "checkpoint_cost", "What checkpoints cost", result, text)
    print(text)


if __name__ == "__main__":
    main()
