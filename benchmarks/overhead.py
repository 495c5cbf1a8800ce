"""What the toolkit's loop costs beside a hand-written Accelerate loop: the same model, engine and batches, both in turn.

    python benchmarks/overhead.py                      # all strategies, results into benchmarks/results/
    python benchmarks/overhead.py --pairs 5 --steps 55

Each strategy is one launch. In it the two loops take their steps in turn over one prepared model, and swap who goes first
from step to step. A pair's ratio is (hand-written median step) / (toolkit median step), steps after the fifth of each.
"""

from __future__ import annotations

import argparse
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

import yaml
from machine import about

from toolkit.engines.job import engine_of
from toolkit.show import Table
from toolkit.strategy import Strategy

STRATEGIES = {"none": 1, "ddp": 2, "zero3": 2, "fsdp": 2}
"""Sharding words and ranks."""

SKIPPED = 5
"""Steps at the head of each loop that do not count."""

WARM = 4
"""Steps before the first pair: the memory window ends with the third."""

RESULTS = Path(__file__).parent / "results"


def by_hand(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any, max_norm: float
) -> Iterator[None]:
    """What Accelerate's documentation shows, and the loss brought to the host as every loop does to show it."""
    for batch in loader:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()
        yield


def timed(step: Iterator[Any]) -> float:
    """Seconds of one step of a loop."""
    began = time.perf_counter()
    next(step)
    return time.perf_counter() - began


def worker(arguments: argparse.Namespace) -> None:
    """One rank: prepare once, then both loops in turn."""
    from toolkit import measuring
    from toolkit.data import batches, hash_ids, sample_ids
    from toolkit.devices import hardware
    from toolkit.folder import enter
    from toolkit.following import follow
    from toolkit.loading import load
    from toolkit.preparing import prepare, prepared
    from toolkit.readying import Recipe, get_ready
    from toolkit.runtime import accelerator as make
    from toolkit.runtime import agree, job
    from toolkit.strategy import Loop
    from toolkit.training import adamw, train, warmup_cosine

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    machine = hardware()
    window = measuring.start(machine.device.kind)
    loop = Loop(steps=arguments.steps, micro_batch=arguments.micro_batch)
    strategy = agree({}, os.environ)
    ready = get_ready(Recipe(), strategy, loop, ranks, machine.device)
    accelerator = make(strategy, loop, ready.job.spec)
    asked = job(accelerator)
    model, _ = load(accelerator)
    optimizer = adamw(model, asked.loop)
    schedule = warmup_cosine(optimizer, asked.loop)
    model, optimizer, schedule = prepare(accelerator, model, optimizer, schedule)
    made = prepared(accelerator, (model, optimizer))

    def loader() -> Any:
        return batches(ready.rows, asked.loop, rank=rank, ranks=ranks, attention=asked.strategy.attention)

    def samples(step: int) -> str:
        return hash_ids(sample_ids(ready.rows, asked.loop, ranks=ranks, step=step - 1))

    for step in train(made, loader(), schedule, samples=samples):
        window.step_done(step.step)
        if step.step == WARM:
            break
    window.close()
    with enter(arguments.folder) as folder:
        pairs = []
        for _ in range(arguments.pairs):
            loops = {
                "hand": by_hand(accelerator, model, optimizer, loader(), schedule, asked.loop.max_grad_norm),
                "toolkit": follow(made, loader(), schedule, folder=folder, samples=samples),
            }
            seconds: dict[str, list[float]] = {name: [] for name in loops}
            for number in range(arguments.steps):
                for name in ("hand", "toolkit") if number % 2 else ("toolkit", "hand"):
                    seconds[name].append(timed(loops[name]))
            pairs.append({name: statistics.median(found[SKIPPED:]) for name, found in seconds.items()})
    if accelerator.is_main_process:
        tokens = asked.loop.micro_batch * asked.loop.seq_len * ranks
        result = {
            "sharding": asked.strategy.sharding,
            "ranks": ranks,
            "tokens_per_step": tokens,
            "pairs": pairs,
            "window_seconds": window.result().seconds,
        }
        Path(arguments.worker).write_text(json.dumps(result))
    accelerator.end_training()


def launch(sharding: str, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One strategy's run, through `accelerate launch`."""
    strategy = Strategy(sharding=sharding)
    with tempfile.TemporaryDirectory() as made:
        config, result = Path(made, "accelerate.yaml"), Path(made, "result.json")
        config.write_text(yaml.safe_dump(engine_of(strategy).to_yaml(strategy, ranks, 1)))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--main_process_port", "0", __file__, "--worker", str(result), "--folder", f"{made}/run"]
        command += ["--pairs", str(arguments.pairs), "--steps", str(arguments.steps)]
        command += ["--micro-batch", str(arguments.micro_batch)]
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": threads, **os.environ})
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main() -> None:
    """Measure every strategy, print the table, write the results."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pairs", type=int, default=5)
    made.add_argument("--steps", type=int, default=55, help="of each loop and pair")
    made.add_argument("--micro-batch", type=int, default=4)
    made.add_argument("--sharding", default=",".join(STRATEGIES))
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    runs = [launch(word, STRATEGIES[word], arguments) for word in arguments.sharding.split(",")]
    rows = []
    for run in runs:
        ratios = [pair["hand"] / pair["toolkit"] for pair in run["pairs"]]
        run["ratio"] = statistics.median(ratios)
        rows.append(
            (
                run["sharding"],
                run["ranks"],
                f"{run['tokens_per_step'] / statistics.median(p['hand'] for p in run['pairs']):,.0f}",
                f"{run['tokens_per_step'] / statistics.median(p['toolkit'] for p in run['pairs']):,.0f}",
                f"{run['ratio']:.3f}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                f"{run['window_seconds']:.2f}",
            )
        )
    columns = ("sharding", "ranks", "by hand, tokens/s", "toolkit, tokens/s", "ratio", "of the pairs", "window, s")
    notes = (
        f"ratio: median of {arguments.pairs} pairs; {arguments.steps} steps of each, medians after step {SKIPPED};"
        f" micro-batch {arguments.micro_batch} x 256 tokens.",
        "window: what starting, stopping and reading the memory window costs once a run.",
    )
    table = Table(title="The toolkit's loop beside a hand-written one", columns=columns, rows=rows, notes=notes)
    print(table.text())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overhead.json").write_text(json.dumps({**about(), "runs": runs}, indent=2) + "\n")
    (RESULTS / "overhead.md").write_text(f"{about()['machine']}, {about()['date']}\n\n```\n{table.text()}\n```\n")


if __name__ == "__main__":
    main()
