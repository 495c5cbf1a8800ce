"""What the toolkit's loop costs beside a hand-written Accelerate loop: the same model, engine and batches, both in turn.

    python benchmarks/overhead.py                      # all strategies, results into benchmarks/results/
    python benchmarks/overhead.py --pairs 5 --steps 55

Each strategy is one launch. In it the two loops take their steps in turn over one prepared model, and change who goes first
from step to step. A pair's ratio is (hand-written median step) / (toolkit median step), steps after the fifth of each. A
third loop, the hand-written one once more, takes its turn too: its ratio is what this machine shows of a difference of nothing.

A second launch does the same with a model so small that a step is little else than what the loops themselves cost: the
difference is that cost in milliseconds, without the noise of a large model's steps.

Results of other strategies that lie in the folder are kept, each with its own machine and date.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from machine import RESULTS, about, write_results

from toolkit.engines.job import engine_of
from toolkit.flags import spell
from toolkit.show import Table
from toolkit.strategy import Strategy

STRATEGIES = {"none": 1, "ddp": 2, "zero3": 2, "fsdp": 2}
"""Sharding words and ranks."""

SKIPPED = 5
"""Steps at the head of each loop that do not count."""

WARM = 4
"""Steps before the first pair: the memory window ends with the third."""

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Of the model in which the loops themselves are most of a step."""

TINY_STEPS = 205

LOOPS = ("hand", "toolkit", "again")
"""By hand, ours, and by hand once more: the control."""


def tiny_model(folder: Path) -> Path:
    """A checkpoint of it, with the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.readying import embedded_model

    LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_key_value_heads=2, **TINY)).save_pretrained(folder)
    for file in embedded_model().glob("token*"):
        shutil.copy(file, folder)
    return folder


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
    from toolkit.heartbeat import Beat
    from toolkit.keeping import Keeper
    from toolkit.lifetime import StopSignal
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
    loop = Loop(steps=arguments.steps, micro_batch=arguments.micro_batch, seq_len=arguments.seq_len)
    strategy = agree({}, os.environ)
    recipe = Recipe(model=arguments.model)
    ready = get_ready(recipe, strategy, loop, ranks, machine.device)
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

    def toolkits(folder: Any, beat: Any, keeper: Any) -> Iterator[None]:
        """What `toolkit.finetune` does with its steps, where no checkpoint is due; without a saver, which would read a clock."""

        def begin(step: int) -> None:
            beat.note("begin", step=step)

        followed = {"folder": folder, "samples": samples, "begin": begin, "wish": keeper.wish}
        for step in follow(made, loader(), schedule, **followed):
            beat.note("between")
            keeper.window.step_done(step.step)
            keeper.step_done(step)
            yield

    for step in train(made, loader(), schedule, samples=samples):
        window.step_done(step.step)
        if step.step == WARM:
            break
    window.close()
    folder = enter(arguments.folder)
    folder.beat(rank).parent.mkdir(exist_ok=True)
    with folder, Beat(folder.beat(rank), rank) as beat, StopSignal() as stop:
        # The heartbeat's thread, one small write a second, and the signal handler stand beside all three loops.
        keeper = Keeper(None, recipe, window, folder, stop, steps=arguments.steps, attempt=0)
        pairs = []
        for _ in range(arguments.pairs):
            plain = (accelerator, model, optimizer)
            loops = {
                "hand": by_hand(*plain, loader(), schedule, asked.loop.max_grad_norm),
                "toolkit": toolkits(folder, beat, keeper),
                "again": by_hand(*plain, loader(), schedule, asked.loop.max_grad_norm),
            }
            seconds: dict[str, list[float]] = {name: [] for name in loops}
            for number in range(arguments.steps):
                first = number % len(LOOPS)
                for name in LOOPS[first:] + LOOPS[:first]:
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


def launch(sharding: str, ranks: int, **flags: object) -> dict[str, Any]:
    """One strategy's run, through `accelerate launch`; the worker's flags by name."""
    strategy = Strategy(sharding=sharding)
    with tempfile.TemporaryDirectory() as made:
        config, result = Path(made, "accelerate.yaml"), Path(made, "result.json")
        config.write_text(yaml.safe_dump(engine_of(strategy).to_yaml(strategy, ranks, 1)))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--main_process_port", "0", __file__, "--worker", str(result), "--folder", f"{made}/run"]
        command += spell(flags)
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": threads, **os.environ})
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def measured(sharding: str, arguments: argparse.Namespace, tiny: Path) -> dict[str, Any]:
    """Both launches of a strategy."""
    ranks = STRATEGIES[sharding]
    run = launch(
        sharding, ranks, pairs=arguments.pairs, steps=arguments.steps, micro_batch=arguments.micro_batch, seq_len=256
    )
    small = launch(sharding, ranks, pairs=arguments.pairs, steps=TINY_STEPS, micro_batch=1, seq_len=64, model=str(tiny))
    cost, nothing = (
        statistics.median(pair[name] - pair["hand"] for pair in small["pairs"]) for name in ("toolkit", "again")
    )
    step = statistics.median(pair["hand"] for pair in run["pairs"])
    shape = {"micro_batch": arguments.micro_batch, "steps": arguments.steps}
    found = {"ratio": statistics.median(ratios(run, "toolkit")), "control": statistics.median(ratios(run, "again"))}
    found |= {"cost_seconds": cost, "control_cost_seconds": nothing, "small_pairs": small["pairs"]}
    return {**about(), **shape, **run, **found, "ratio_by_cost": step / (step + cost)}


def ratios(run: dict[str, Any], name: str) -> list[float]:
    """The hand-written loop's median step over another loop's, of every pair."""
    return [pair["hand"] / pair[name] for pair in run["pairs"]]


def span(found: list[float]) -> str:
    """The least and the greatest."""
    return f"{min(found):.3f} to {max(found):.3f}"


def row(run: dict[str, Any]) -> tuple[str, ...]:
    """A strategy's line."""
    speed = run["tokens_per_step"] / statistics.median(pair["hand"] for pair in run["pairs"])
    return (
        run["sharding"],
        str(run["ranks"]),
        f"{len(run['pairs'])} x {run['steps']}",
        f"{run['tokens_per_step']:,}",
        f"{speed:,.0f}",
        f"{run['ratio']:.3f}",
        span(ratios(run, "toolkit")),
        f"{run['control']:.3f}",
        span(ratios(run, "again")),
        f"{run['cost_seconds'] * 1e3:.1f}",
        f"{run['ratio_by_cost']:.3f}",
        f"{run['window_seconds']:.2f}",
        run["date"],
    )


def main() -> None:
    """Measure every strategy, print the table, write the results."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pairs", type=int, default=5)
    made.add_argument("--steps", type=int, default=55, help="of each loop and pair")
    made.add_argument("--micro-batch", type=int, default=4)
    made.add_argument("--sharding", default=",".join(STRATEGIES))
    for name, kind in (("worker", str), ("folder", str), ("model", str), ("seq-len", int)):
        made.add_argument(
            f"--{name}", type=kind, default="embedded" if name == "model" else None, help=argparse.SUPPRESS
        )
    arguments = made.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    before = RESULTS / "overhead.json"
    runs = {run["sharding"]: run for run in (json.loads(before.read_text())["runs"] if before.exists() else ())}
    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_model(Path(folder))
        for word in arguments.sharding.split(","):
            runs[word] = measured(word, arguments, tiny)
            table = tabled([runs[word] for word in STRATEGIES if word in runs])
            write_results("overhead", table.title, {**about(), "runs": list(runs.values())}, table.text())
    print(table.text())


def tabled(runs: Sequence[dict[str, Any]]) -> Table:
    """Every strategy that was measured."""
    columns: tuple[str, ...] = (
        "sharding",
        "ranks",
        "pairs x steps",
        "tokens a step",
        "by hand, tokens/s",
        "ratio",
        "of the pairs",
        "control",
        "of the pairs",
    )
    columns += ("cost, ms a step", "ratio by cost", "window, s", "date")
    notes = (
        f"ratio: the toolkit's tokens/s over those by hand: the median of the pairs, each of medians after step {SKIPPED}.",
        "control: the same ratio of a second hand-written loop: what this machine shows where there is no difference.",
        "cost: what the toolkit's loop takes more than the other in a step of a tiny model; ratio by cost: what it is of a step.",
        "window: what starting, stopping and reading the memory window costs once a run.",
    )
    title = "The toolkit's loop beside a hand-written one"
    return Table(title=title, columns=columns, rows=[row(run) for run in runs], notes=notes)


if __name__ == "__main__":
    main()
