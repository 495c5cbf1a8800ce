"""Meshes of two ranks beside loops by hand: tokens/s, and the collectives of a step beside the forecast's.

    python benchmarks/mesh_speed.py               # results into benchmarks/results/mesh_speed.json and .md
    python benchmarks/mesh_speed.py --only pp,tp
    python benchmarks/mesh_speed.py --only counts # the collectives alone
    python benchmarks/mesh_speed.py --only idle   # how long the ranks of a pipeline wait, alone
    python benchmarks/mesh_speed.py --smoke       # whether it still runs

Three loops train the same model from the same checkpoint over two CPU ranks, with one thread each: one by hand (`mesh_loops.py`),
the recipe's, and the one by hand again. A pair is some steps of each with the same batches; who goes first changes from pair to
pair. Ratio: (seconds by hand) / (seconds of the recipe), the median of all pairs. Control: the same for the second loop by hand.
All three have to report the same losses.

Then every collective of one of the recipe's steps is recorded, and compared with what `Job.communication` forecasts. Last, the
share of a step that each rank of a pipeline spends outside forward and backward stands beside the forecast's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import checkpoint
from forking import result_of, write
from machine import about, parse, parser, stored, write_results
from recipe import rank

import toolkit as tk
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Table
from toolkit.core.units import format_bytes
from toolkit.engines.pipeline.stopwatch import KEPT_STEPS
from toolkit.engines.played import measured

if TYPE_CHECKING:
    from recipe import Rank

    from toolkit.engines.job import Job

RANKS, WARM = 2, 4
"""Ranks, and the steps before the first pair: the memory window ends with the third."""

COMMON = {"activation_checkpointing": "none", "loss": "whole"}
MESHES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "pp": ({"pp": 2, **COMMON}, {"micro_batch": 1, "accumulation": 4}),
    "tp": ({"tp": 2, **COMMON}, {"micro_batch": 4}),
    "cp": ({"cp": 2, "sharding": "ddp", **COMMON}, {"micro_batch": 4}),
}
"""Name of a loop by hand → the strategy, and the rows of a step."""

LORA, FULL = {"adapter": "lora"}, {"activation_checkpointing": "full"}
COUNTED: list[tuple[dict[str, Any], dict[str, int]]] = [
    *MESHES.values(),
    ({"pp": 2, "pp_schedule": "interleaved", **COMMON}, {"micro_batch": 1, "accumulation": 4}),
    ({"tp": 2, **COMMON, **FULL}, {"micro_batch": 2, "accumulation": 2}),
    ({"tp": 2, **COMMON, "loss": "chunked"}, {"micro_batch": 2}),
    ({"tp": 2, **COMMON, **LORA}, {"micro_batch": 2}),
    ({"tp": 2, "tp_sequence": True, **COMMON}, {"micro_batch": 2}),
    ({"tp": 2, "tp_sequence": True, **COMMON, **FULL}, {"micro_batch": 2}),
    ({"cp": 2, "sharding": "ddp", **COMMON, **FULL, "cp_attention": "gather"}, {"micro_batch": 2, "accumulation": 2}),
]
"""Strategies with counted collectives, and the rows of a step."""

SCHEDULES = [
    ("gpipe", 4),
    ("gpipe", 8),
    ("1f1b", 4),
    ("1f1b", 8),
    ("interleaved", 4),
    ("looped_bfs", 4),
    ("zero_bubble", 4),
]
"""Schedules of two ranks, with the micro-batches of a step."""

TIMED = 16
"""Steps of a pipeline from which its idle time is read."""

LOSSES = 1e-5
"""The largest relative difference of two loops' losses."""

SMALL = 4096
"""Bytes from which a collective is the model's; smaller ones carry losses, norms and memory."""

GATHER = "all-gather, reduce-scatter"
OTHERS = (RANKS - 1) / RANKS
SHARES = {"all-reduce": 2 * OTHERS, GATHER: OTHERS, "all-to-all": OTHERS, "send": 1.0}
"""Kind → what a rank sends, as a multiple of the larger one of its tensors."""

KINDS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": GATHER,
    "all_gather": GATHER,
    "reduce_scatter": GATHER,
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "send": "send",
}
"""How torch's operators begin → kind."""

FORECAST = {"all-reduced": "all-reduce", "exchanged": "all-to-all", "keys": "all-to-all", "stage": "send"}
"""A word of a forecast transfer → kind; all others are gathered or scattered."""


def recorder() -> Any:
    """A context that records what this process sends: `sent`, of each collective its kind and bytes."""
    import torch
    from torch.utils import _python_dispatch
    from torch.utils._pytree import tree_leaves

    mode: Any = _python_dispatch.TorchDispatchMode

    class Recorder(mode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[tuple[str, float]] = []

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            if operator.namespace.endswith(("c10d", "c10d_functional")):
                name = operator._schema.name.partition("::")[2].lstrip("_")
                kind = next((kind for begin, kind in KINDS.items() if name.startswith(begin)), "")
                tensors = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
                if kind and tensors:
                    most = max(each.numel() * each.element_size() for each in tensors)
                    self.sent.append((kind, SHARES[kind] * most))
            return result

    make: Any = Recorder
    return make()


def toolkits(rank: Rank) -> Iterator[float]:
    """The recipe's loop, without checkpoints; yields each step's loss."""
    policy = rank.policy(None)
    for step in rank.steps(policy):
        policy.step_done(step)
        yield step.loss


def run_block(loop: Iterator[float], steps: int) -> tuple[float, list[float]]:
    """Return the seconds of a step, over so many, and their losses."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    losses = [next(loop) for _ in range(steps)]
    dist.barrier()
    return (time.perf_counter() - began) / steps, losses


def worker(config: dict[str, Any]) -> None:
    """One rank: the loops in turns, then a step that is recorded. Rank 0 writes seconds, losses and collectives to `out`."""
    import mesh_loops
    import torch.distributed as dist

    warm = config.get("warm", WARM)
    total = warm + config["pairs"] * config["steps"] + 1
    train_config = TrainConfig(**config["train_config"], steps=total, lr=1e-3, warmup=0, scheduler="constant")
    run_config, path = RunConfig(model=config["model"]), Path(config["out"]).with_name("run")
    with rank(Strategy(**config["strategy"]), train_config, run_config, path) as this:
        job, source = this.prepared.job, this.run.preflight.spec.source
        loops = {"toolkit": toolkits(this)}
        if config["pairs"]:
            by_hand = mesh_loops.LOOPS[config["loop"]]
            loops |= {name: by_hand(job, str(source), this.loader) for name in ("hand", "again")}
        losses: dict[str, list[float]] = {name: [] for name in loops}
        pairs: list[dict[str, float]] = []
        for number in range(-1, config["pairs"]):
            first, names = number % len(loops), [*loops]
            pairs.append({})
            for name in names[first:] + names[:first]:
                pairs[-1][name], new = run_block(loops[name], warm if number < 0 else config["steps"])
                losses[name] += new
        timed = job.engine.timed_actions(this.prepared)
        with recorder() as record:
            next(loops["toolkit"])
        this.run.window.close()
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, (record.sent, timed))
        if this.prepared.accelerator.is_main_process:
            sent, ran = ([each[part] for each in everywhere] for part in (0, 1))
            idle = idle_of(ran) if all(ran) else []
            found = {"sent": sent, "forecast": forecast_of(job), "idle": idle}
            write(config, {"pairs": pairs[1:], "losses": losses, **found})


def idle_of(ran: Sequence[Sequence[Any]]) -> list[float]:
    """Return the median share of each rank over the steps that all kept."""
    kept = min(map(len, ran))
    steps = zip(*(own[len(own) - kept :] for own in ran), strict=True)
    shares = [measured([[own] for own in step]).idle for step in steps]
    return [statistics.median(each) for each in zip(*shares, strict=True)]


def forecast_of(job: Job) -> list[tuple[str, float]]:
    """Return kind and bytes of the transfers that the forecast has of a step."""
    return [
        (next((kind for word, kind in FORECAST.items() if word in sent.what), GATHER), sent.size * sent.times)
        for sent in job.communication()
    ]


def counts(run: Mapping[str, Any]) -> list[tuple[str, int, float, float]]:
    """Return of each kind the number and bytes that the rank that sends most has sent, and the forecast's bytes."""
    result = []
    for kind in SHARES:
        ranks = [[size for each, size in sent if each == kind and size >= SMALL] for sent in run["sent"]]
        most, expected = max(ranks, key=sum), sum(size for each, size in run["forecast"] if each == kind)
        if most or expected:
            result.append((kind, len(most), sum(most), expected))
    return result


def check_losses(losses: Mapping[str, Sequence[float]], name: str) -> float:
    """Return the largest relative difference of the losses of two loops; end the program where they are others."""
    worst = max(
        abs(ours - theirs) / abs(theirs)
        for other in ("hand", "again")
        for ours, theirs in zip(losses["toolkit"], losses[other], strict=True)
    )
    if worst > LOSSES:
        raise SystemExit(f"{name}: losses differ by {worst:.1e} of the loss by hand, expected at most {LOSSES:g}.")
    return worst


def measure(name: str, given: Any, model: str) -> dict[str, Any]:
    """Return the results of a mesh beside its loops by hand."""
    strategy, rows = MESHES[name]
    train_config = {**rows, "seq_len": given.seq_len}
    config = {"strategy": strategy, "train_config": train_config, "model": model, "loop": name}
    run = result_of("mesh_speed:worker", {**config, "pairs": given.pairs, "steps": given.steps}, RANKS)
    rank_rows = rows["micro_batch"] * rows.get("accumulation", 1)
    return {
        "mesh": name,
        "strategy": strategy,
        "tokens_per_step": rank_rows * given.seq_len,
        "pairs": run["pairs"],
        "losses": run["losses"],
        "loss_difference": check_losses(run["losses"], name),
        "step_seconds": statistics.median(pair["hand"] for pair in run["pairs"]),
        "ratio": statistics.median(pair["hand"] / pair["toolkit"] for pair in run["pairs"]),
        "control": statistics.median(pair["hand"] / pair["again"] for pair in run["pairs"]),
    }


def counted(strategy: Mapping[str, Any], rows: Mapping[str, int], given: Any, model: str) -> dict[str, Any]:
    """Return the collectives of a step of the recipe, and the forecast's."""
    train_config = {**rows, "seq_len": given.seq_len}
    config = {"strategy": strategy, "train_config": train_config, "model": model, "pairs": 0, "steps": 0}
    run = result_of("mesh_speed:worker", config, RANKS)
    return {"strategy": strategy, "train_config": train_config, "counts": counts(run)}


def waited(schedule: str, micro_batches: int, given: Any, model: str) -> dict[str, Any]:
    """Return the share of a step in which each rank of a pipeline waits, forecast and measured."""
    strategy: dict[str, Any] = {"pp": RANKS, "pp_schedule": schedule, **COMMON}
    train_config = {"micro_batch": 1, "accumulation": micro_batches, "seq_len": given.seq_len}
    made = tk.forecast(model, Strategy(**strategy), tk.hardware(), TrainConfig(**train_config), ranks=RANKS)
    assert made.pipeline is not None
    by_rank = {stage.rank: stage.idle for stage in made.pipeline.stages}
    config = {"strategy": strategy, "train_config": train_config, "model": model, "pairs": 0, "steps": 0, "warm": TIMED}
    run = result_of("mesh_speed:worker", config, RANKS)
    formula = made.pipeline.equal_stages_idle_share
    forecast = [by_rank[rank] for rank in range(RANKS)]
    return {
        "schedule": schedule,
        "micro_batches": micro_batches,
        "formula": formula,
        "idle": run["idle"],
        "forecast": forecast,
    }


def idle_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each rank of each schedule."""
    rows = [
        (
            run["schedule"] if rank == 0 else "",
            run["micro_batches"] if rank == 0 else "",
            f"{run['formula']:.3f}",
            rank,
            f"{expected:.3f}",
            f"{share:.3f}",
            f"{expected - share:+.3f}",
        )
        for run in runs
        for rank, (expected, share) in enumerate(zip(run["forecast"], run["idle"], strict=True))
    ]
    columns = ("schedule", "micro-batches", "formula", "rank", "forecast", "measured", "difference")
    notes = (
        "Share of a step outside forward and backward. formula: (p - 1) / (v m + p - 1), with equal stages.",
        f"Measured: the median of the last {KEPT_STEPS} of {TIMED} steps.",
    )
    return Table(title="Idle time of pipelines of two ranks", columns=columns, rows=rows, notes=notes)


def speed_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each mesh."""
    columns: tuple[str, ...] = ("mesh", "pairs", "tokens a step", "step by hand, s", "by hand, tokens/s")
    columns += ("ratio", "lowest, highest", "control", "lowest, highest", "losses differ by")
    rows = []
    for run in runs:
        both = []
        for name in ("toolkit", "again"):
            ratios = [pair["hand"] / pair[name] for pair in run["pairs"]]
            both += [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}, {max(ratios):.3f}"]
        tokens, seconds = run["tokens_per_step"], run["step_seconds"]
        speed = (len(run["pairs"]), f"{tokens:,}", f"{seconds:.2f}", f"{tokens / seconds:,.0f}")
        rows.append((f"{run['mesh']} 2", *speed, *both, f"{run['loss_difference']:.0e}"))
    notes = (
        "ratio: the recipe's tokens/s over those by hand, median of all pairs.",
        "control: the same of a second loop by hand: what this machine shows where there is no difference.",
    )
    return Table(title="Meshes of two ranks beside loops by hand", columns=columns, rows=rows, notes=notes)


def counts_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each kind of collective of each strategy."""
    rows = []
    for run in runs:
        plain = {name: value for name, value in run["strategy"].items() if COMMON.get(name) != value}
        words = ", ".join(f"{name} {value}" for name, value in plain.items())
        words += f", accumulation {run['train_config'].get('accumulation', 1)}"
        for kind, number, size, expected in run["counts"]:
            off = f"{expected / size - 1:+.1%}" if size else "–"
            rows.append((words, kind, number, format_bytes(round(size)), format_bytes(round(expected)), off))
            words = ""
    columns = ("strategy", "kind", "number", "bytes sent", "forecast", "difference")
    note = f"Of a step, on the rank that sends most; without those below {SMALL} bytes, which carry losses, norms and memory."
    return Table(title="Collectives of a step", columns=columns, rows=rows, notes=[note])


TABLES = {"runs": speed_table, "counts": counts_table, "idle": idle_table}


def main() -> None:
    """Measure, count, print the tables, write the results."""
    flags = parser(__doc__)
    flags.add_argument("--only", default="", help="pp, tp, cp, counts, idle: those alone, with commas")
    flags.add_argument("--pairs", type=int, default=5, help="pairs of each mesh (default: %(default)s)")
    flags.add_argument("--steps", type=int, default=4, help="steps of each loop in a pair (default: %(default)s)")
    flags.add_argument("--seq-len", type=int, default=256)
    given = parse(flags, only="", pairs=1, steps=1, seq_len=64)
    chosen = given.only.split(",") if given.only else [*MESHES, "counts", "idle"]
    runs = [measure(name, given, "embedded") for name in MESHES if name in chosen]
    strategies = COUNTED[:1] if given.smoke else COUNTED
    kinds = [counted(*each, given, "embedded") for each in strategies] if "counts" in chosen else []
    schedules = SCHEDULES[:1] if given.smoke else SCHEDULES
    idle = []
    if "idle" in chosen:
        with tempfile.TemporaryDirectory() as folder:
            model = "embedded" if given.smoke else str(checkpoint(Path(folder) / "model", "Llama", "mesh"))
            idle = [waited(*each, given, model) for each in schedules]
    parts = {"runs": runs, "counts": kinds, "idle": idle}
    known = stored(given.results / "mesh_speed.json")
    kept = {name: known[name] for name, found in parts.items() if not found and known.get(name)}
    facts = about()
    facts["commit"] = ", ".join(sorted({facts["commit"], *(known["commit"].split(", ") if kept else [])}))
    result = {**facts, "given": {"pairs": given.pairs, "steps": given.steps}, **parts, **kept}
    tables = [make(result[name]) for name, make in TABLES.items() if result[name]]
    shown = "\n\n".join(table.text() for table in tables)
    write_results(given.results, "mesh_speed", "Meshes of two ranks beside loops by hand", result, shown)
    print(shown)


if __name__ == "__main__":
    main()
