"""What the toolkit's loop costs beside a hand-written Accelerate loop: the same model, engine and batches, in turns.

    python benchmarks/overhead.py                      # results into benchmarks/results/overhead.json and .md
    python benchmarks/overhead.py --sharding ddp --steps 100
    python benchmarks/overhead.py --smoke              # whether it still runs

Three loops share one prepared model: the hand-written one, the toolkit's, and the hand-written one again. A turn is one step
of each with the same batch; who goes first changes from turn to turn. Ratio: (hand-written step) / (toolkit step), the median
of all turns after the fifth. Control: the same for the second hand-written loop, which differs from the first in nothing.

The same is done with a model so small that a step is little else than the loops' own cost: there the difference is that cost
in milliseconds, without the noise of a large model's steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forking import result_of, write
from machine import about, parse, parser, write_results
from recipe import rank, tiny_model

from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Table

if TYPE_CHECKING:
    from recipe import Rank

RANKS = {"none": 1, "ddp": 2, "zero3": 2, "fsdp": 2}
"""Sharding → number of ranks."""

SKIPPED = 5
"""Turns that do not count: the memory window ends with the third step."""

LOOPS = ("hand", "toolkit", "again")
"""By hand, the toolkit's, and by hand once more: the control."""


def hand_written(rank: Rank) -> Iterator[None]:
    """What Accelerate's documentation shows, and the loss brought to the host as every loop does to show it."""
    accelerator, model, optimizer = rank.prepared.accelerator, rank.prepared.model, rank.prepared.optimizer
    for batch in rank.loader:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), rank.prepared.job.train_config.max_grad_norm)
        optimizer.step()
        rank.schedule.step()
        optimizer.zero_grad()
        loss.item()
        yield


def toolkits(rank: Rank) -> Iterator[None]:
    """The recipe's loop without checkpoints, which would read a clock."""
    policy = rank.policy(None)
    for step in rank.steps(policy):
        policy.step_done(step)
        yield


def timed(train_config: Iterator[None]) -> float:
    """Seconds of one step of a loop."""
    began = time.perf_counter()
    next(train_config)
    return time.perf_counter() - began


def worker(config: dict[str, Any]) -> None:
    """One rank: the three loops in turns. Rank 0 writes the seconds of every turn that counts to `out`."""
    run_config, train_config = RunConfig(model=config["model"]), TrainConfig(**config["train_config"])
    with rank(
        Strategy(sharding=config["sharding"]), train_config, run_config, Path(config["out"]).with_name("run")
    ) as this:
        loops = {"hand": hand_written(this), "toolkit": toolkits(this), "again": hand_written(this)}
        turns = []
        for number in range(train_config.total_steps):
            first = number % len(LOOPS)
            turns.append({name: timed(loops[name]) for name in LOOPS[first:] + LOOPS[:first]})
        this.run.window.close()
        if this.prepared.accelerator.is_main_process:
            write(config, {"turns": turns[SKIPPED:], "window_seconds": this.run.window.result().seconds})


def measure(
    sharding: str, train_config: dict[str, int], tiny_loop: dict[str, int], model: str, tiny: str
) -> dict[str, Any]:
    """The results of one strategy, from a run of each model."""

    def run(model: str, train_config: dict[str, int]) -> dict[str, Any]:
        config = {"sharding": sharding, "model": model, "train_config": train_config}
        found: dict[str, Any] = result_of("overhead:worker", config, RANKS[sharding], distributed=sharding != "none")
        return found

    large, small = run(model, train_config), run(tiny, tiny_loop)
    step = statistics.median(turn["hand"] for turn in large["turns"])
    cost, nothing = (
        statistics.median(turn[name] - turn["hand"] for turn in small["turns"]) for name in ("toolkit", "again")
    )
    return {
        "sharding": sharding,
        "ranks": RANKS[sharding],
        "tokens_per_step": train_config["micro_batch"] * train_config["seq_len"] * RANKS[sharding],
        **large,
        "ratio": statistics.median(ratios(large["turns"], "toolkit")),
        "control": statistics.median(ratios(large["turns"], "again")),
        "tiny_turns": small["turns"],
        "cost_seconds": cost,
        "control_cost_seconds": nothing,
        "ratio_by_cost": step / (step + cost),
    }


def ratios(turns: Sequence[dict[str, float]], name: str) -> list[float]:
    """The hand-written loop's step over another loop's, of every turn."""
    return [turn["hand"] / turn[name] for turn in turns]


def middle(values: list[float]) -> str:
    """The first and the third quartile."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"


def row(run: dict[str, Any]) -> tuple[Any, ...]:
    """A strategy's line of the table."""
    turns = run["turns"]
    speed = run["tokens_per_step"] / statistics.median(turn["hand"] for turn in turns)
    return (
        run["sharding"],
        run["ranks"],
        len(turns),
        f"{run['tokens_per_step']:,}",
        f"{speed:,.0f}",
        f"{run['ratio']:.3f}",
        middle(ratios(turns, "toolkit")),
        f"{run['control']:.3f}",
        middle(ratios(turns, "again")),
        f"{run['cost_seconds'] * 1e3:.1f}",
        f"{run['control_cost_seconds'] * 1e3:.1f}",
        f"{run['ratio_by_cost']:.3f}",
        f"{run['window_seconds']:.2f}",
    )


def table(runs: Sequence[dict[str, Any]]) -> Table:
    """Every strategy that was measured."""
    columns: tuple[str, ...] = ("sharding", "ranks", "turns", "tokens a step", "by hand, tokens/s")
    columns += ("ratio", "middle half", "control", "middle half")
    columns += ("cost, ms a step", "control, ms", "ratio by cost", "window, s")
    notes = (
        f"ratio: the toolkit's tokens/s over those by hand, median of all turns after the first {SKIPPED}, and its quartiles.",
        "control: the same ratio of a second hand-written loop: what this machine shows where there is no difference.",
        "cost: what a step of the toolkit's loop takes more than one by hand, with a tiny model; control: the second loop by hand.",
        "ratio by cost: the ratio that this cost makes with the first model's step.",
        "window: what starting, stopping and reading the memory window costs once a run.",
    )
    title = "The toolkit's loop beside a hand-written one"
    return Table(title=title, columns=columns, rows=[row(run) for run in runs], notes=notes)


def main() -> None:
    """Measure every strategy, print the table, write the results."""
    flags = parser(__doc__)
    flags.add_argument("--sharding", default=",".join(RANKS), help="words, with commas (default: %(default)s)")
    flags.add_argument("--steps", type=int, default=35, help="turns (default: %(default)s)")
    flags.add_argument("--tiny-steps", type=int, default=105, help="turns with the tiny model (default: %(default)s)")
    flags.add_argument("--micro-batch", type=int, default=4)
    flags.add_argument("--seq-len", type=int, default=256)
    given = parse(flags, sharding="none,zero3", steps=8, tiny_steps=8, micro_batch=1, seq_len=64)
    train_config = {"steps": given.steps, "micro_batch": given.micro_batch, "seq_len": given.seq_len}
    tiny_loop = {"steps": given.tiny_steps, "micro_batch": 1, "seq_len": 64}
    with tempfile.TemporaryDirectory() as scratch:
        tiny = str(tiny_model(Path(scratch)))
        model = tiny if given.smoke else "embedded"
        runs = [measure(word, train_config, tiny_loop, model, tiny) for word in given.sharding.split(",")]
    shown = table(runs)
    result = {**about(), "train_config": train_config, "tiny_loop": tiny_loop, "runs": runs}
    write_results(given.results, "overhead", "The toolkit's loop beside a hand-written one", result, shown.text())
    print(shown.text())


if __name__ == "__main__":
    main()
