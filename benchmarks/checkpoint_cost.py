"""What a checkpoint every 50 steps costs a run, beside the same run without; and what Python can do meanwhile.

    python benchmarks/checkpoint_cost.py                       # results into benchmarks/results/checkpoint_cost.json and .md
    python benchmarks/checkpoint_cost.py --pairs 1 --every 10  # a short look

Each strategy is one launch of the recipe's own loop over the embedded model. Its steps are cut into blocks of `--every`,
with and without a checkpoint in turn, and who goes first changes from pair to pair. A block with one begins with the snapshot
and lasts until the checkpoint is published and all its steps are done, so that whatever the writing in the background takes
from the steps is in it. Cost: (seconds with) / (seconds without) - 1. Stood still: the loop's own wait for the snapshot.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from machine import about, write_results

from toolkit.durable import read_events
from toolkit.engines.job import engine_of
from toolkit.show import Table
from toolkit.strategy import Strategy
from toolkit.units import MiB

if TYPE_CHECKING:
    from toolkit.checkpoints import Saver
    from toolkit.folder import Folder
    from toolkit.measuring import Window
    from toolkit.training import Step

WARM = 6
"""Steps before the first block: the memory window ends with the third, and a first save makes the snapshot's buffers."""

STEP_SECONDS = 0.5
"""The target is meant for steps of at least so long."""

TARGET = 0.035
GIL_BYTES = 500_000_000


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


def worker(arguments: argparse.Namespace) -> None:
    """One rank of the recipe, up to its first step; `blocks` does the rest."""
    from toolkit import measuring
    from toolkit.checkpoints import Saver, identify
    from toolkit.data import batches, hash_ids, sample_ids
    from toolkit.devices import hardware
    from toolkit.folder import enter
    from toolkit.following import follow
    from toolkit.loading import load
    from toolkit.preparing import prepare, prepared
    from toolkit.readying import Recipe, get_ready, versions
    from toolkit.runtime import accelerator as make
    from toolkit.runtime import agree, job
    from toolkit.strategy import Loop
    from toolkit.training import adamw, warmup_cosine

    rank, ranks, start = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.every - WARM
    machine = hardware()
    window = measuring.start(machine.device.kind)
    loop = Loop(steps=arguments.every * (1 + 2 * arguments.pairs), micro_batch=arguments.micro_batch)
    strategy = agree({}, os.environ)
    ready = get_ready(Recipe(), strategy, loop, ranks, machine.device)
    accelerator = make(strategy, loop, ready.job.spec)
    asked = job(accelerator)
    model, _ = load(accelerator)
    optimizer = adamw(model, asked.loop)
    schedule = warmup_cosine(optimizer, asked.loop)
    loader = batches(
        ready.rows, asked.loop, rank=rank, ranks=ranks, start_step=start, attention=asked.strategy.attention
    )
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule)
    made = prepared(accelerator, (model, optimizer))
    identity = identify(ready.spec, asked.strategy, ready.rows.fingerprint)

    def samples(step: int) -> str:
        return hash_ids(sample_ids(ready.rows, asked.loop, ranks=ranks, step=step - 1))

    with enter(arguments.folder) as folder:
        saver = Saver(made, schedule, folder.checkpoints, identity, versions=versions())
        steps = follow(made, loader, schedule, folder=folder, samples=samples, start=start)
        found = blocks(steps, saver, window, folder, arguments)
        if accelerator.is_main_process:
            about_it = {"sharding": asked.strategy.sharding, "ranks": ranks, "micro_batch": asked.loop.micro_batch}
            Path(arguments.worker).write_text(json.dumps({**about_it, **found}))
    accelerator.end_training()


def blocks(
    steps: Iterator[Step], saver: Saver, window: Window, folder: Folder, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Warm up and save once, then the blocks. What was clocked."""
    from toolkit.checkpoints import saving
    from toolkit.keeping import Keeper
    from toolkit.lifetime import StopSignal
    from toolkit.readying import Recipe

    every, plan = arguments.every, [saved for pair in range(arguments.pairs) for saved in order(pair)]
    keepers = {
        saved: Keeper(
            saver if saved else None,
            Recipe(save_every=every, save_seconds=0.0),
            window,
            folder,
            StopSignal(),
            steps=every * (2 + len(plan)),  # more than there are: no block has the checkpoint that ends a run
            attempt=0,
        )
        for saved in (True, False)
    }
    marks, seconds, first = [], [], 0.0
    hashed, written = clocked(saving, "sha256_of"), clocked(saving, "write_tensors")
    computed = clocked(saving.Saver, "_write", time.thread_time)
    for step in steps:
        window.step_done(step.step)
        seconds.append(step.seconds)
        if step.step % every == 0:
            marks.append(time.perf_counter())
        if step.step == every - 1:
            with window.saving():
                saver.save(step.step)
            saver.wait()
            first = sum(done.stall_seconds for done in saver.published())
        if 0 < len(marks) <= len(plan):
            keepers[plan[len(marks) - 1]].step_done(step)
    published = read_events(folder.published)
    assert not saver.main or len(published) == plan.count(True), "a block ended before its checkpoint was published"
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


def launch(sharding: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One strategy's run, through `accelerate launch`."""
    strategy = Strategy(sharding=sharding)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        config, result = Path(made, "accelerate.yaml"), Path(made, "result.json")
        config.write_text(yaml.safe_dump(engine_of(strategy).to_yaml(strategy, arguments.ranks, 1)))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--main_process_port", "0", __file__, "--worker", str(result), "--folder", f"{made}/run"]
        for name in ("pairs", "every", "micro_batch"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        threads = str(max(1, (os.cpu_count() or 1) // arguments.ranks))
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": threads, **os.environ})
        found: dict[str, Any] = json.loads(result.read_text())
    pairs = [found["blocks"][at : at + 2] for at in range(0, len(found["blocks"]), 2)]
    by_kind = [{block["saved"]: block["seconds"] for block in pair} for pair in pairs]
    found["costs"] = [pair[True] / pair[False] - 1 for pair in by_kind]
    stalls = [done["stall_seconds"] for done in found["published"]]
    found["stood_still"] = statistics.median(stall / pair[True] for stall, pair in zip(stalls, by_kind, strict=True))
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


def gil(parent: str | None) -> dict[str, dict[str, float]]:
    """How far a Python thread gets while another writes, flushes and hashes a file of 500 MB."""
    import torch
    from safetensors.torch import save_file

    tensor = torch.rand(GIL_BYTES // 4)
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


def cost_table(runs: list[dict[str, Any]], every: int) -> Table:
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
        f"cost: median and range of {len(runs[0]['costs'])} pairs of blocks of {every} steps, with a checkpoint and without.",
        "snapshot: the loop stands still for it. stood still: its share of the block. write: in the background until",
        "published, on the cores that the steps use; of it rank 0's tensors (flushed), their sha256 (and its share), and",
        "what the writing thread computed, which other load on the machine hardly changes.",
        f"Target, with steps of {STEP_SECONDS} s or more: under {100 * TARGET:.1f}%: {_said('missed by', missed) or 'not missed'}.",
    ]
    notes += (
        [f"{_said('The pairs differ by more than that, and say nothing:', loud)}: is there other load?"] if loud else []
    )
    notes += [f"{_said('Shorter steps than that:', short)}; raise --micro-batch."] if short else []
    columns = ("sharding", "ranks", "step, s", "MiB", "snapshot, s", "write, s", "tensors, s", "hash, s", "CPU, s")
    title = f"A checkpoint every {every} steps, beside none"
    return Table(title=title, columns=(*columns, "stood still", "cost", "of the pairs"), rows=rows, notes=notes)


def _said(what: str, names: list[str]) -> str:
    return f"{what} {', '.join(names)}" if names else ""


def gil_table(found: dict[str, dict[str, float]]) -> Table:
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
    return Table(title="A Python thread beside a file of 500 MB", columns=columns, rows=rows, notes=[said])


def main() -> None:
    """Measure every strategy, print the tables, write both files."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--sharding", default="ddp,zero3")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--pairs", type=int, default=4)
    made.add_argument("--every", type=int, default=50, help=f"steps of a block, more than {WARM}")
    made.add_argument("--micro-batch", type=int, default=4)
    made.add_argument("--folder", help="where the runs are made (default: the system's folder for such)")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    runs = [launch(word, arguments) for word in arguments.sharding.split(",")]
    beside = gil(arguments.folder)
    text = f"{cost_table(runs, arguments.every).text()}\n\n{gil_table(beside).text()}"
    whole = {**about(), "every": arguments.every, "runs": runs, "gil": {"bytes": GIL_BYTES, "beside": beside}}
    write_results("checkpoint_cost", "What checkpoints cost", whole, text)
    print(text)


if __name__ == "__main__":
    main()
