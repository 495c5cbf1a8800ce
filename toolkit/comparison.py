"""Compare strategies on the same training: memory, speed, and whether the losses agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.flags import to_flags
from toolkit.config.parallelism import resolve_parallelism
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.tables import PRECISIONS
from toolkit.config.train_config import TrainConfig
from toolkit.config.unknown_names import by_name
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes
from toolkit.devices.machine import Hardware
from toolkit.engines.resolution import accelerate_config
from toolkit.launcher import supervise
from toolkit.reports import reported, throughput
from toolkit.run_folder.folder import check_place, enter, new_path
from toolkit.run_folder.run_json import open_finished_run
from toolkit.run_folder.run_lock import new_token
from toolkit.training.certificates import guarded
from toolkit.training.preflight import run_preflight
from toolkit.training.setup import choose_ranks, print_default


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The run of one strategy."""

    sharding: str
    strategy: Mapping[str, Any]
    engine: str
    """The class of the prepared model."""
    ranks: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    tokens_per_second: float
    """Tokens a second of all ranks, from the median step after the fifth."""
    parameter_bytes_per_rank: tuple[int, ...]
    measured: Mapping[str, Any] | None
    forecast: Mapping[str, Any] | None
    run: str
    """The run's folder."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Runs of several strategies with the same model, data, order and global batch."""

    model: str
    data: str
    results: tuple[RunResult, ...]

    def difference(self, result: RunResult) -> float:
        """Return the largest relative difference of a step's loss from the first strategy's."""
        pairs = list(zip(result.losses, self.results[0].losses, strict=True))
        if any(loss is None for pair in pairs for loss in pair):  # fp16 overflowed, and the event has null
            return float("inf")
        return max(abs(mine - first) / abs(first) for mine, first in pairs)

    def agrees(self, result: RunResult) -> bool:
        """Return whether the losses differ no more than the precision allows."""
        return self.difference(result) <= PRECISIONS[str(result.strategy["precision"])].agreement

    def tables(self) -> list[Table]:
        """Return the memory of each run by phase, and at the end the table that compares: speed, losses and peak."""
        rows = [
            (
                result.sharding,
                result.ranks,
                f"{result.tokens_per_second:,.0f}",
                f"{result.losses[-1]:.4f}",
                f"{'yes' if self.agrees(result) else 'NO'} ({self.difference(result):.0e})",
                format_bytes(max(result.parameter_bytes_per_rank)),
                _with_ratio(*_bytes(result, "peak_bytes")),
            )
            for result in self.results
        ]
        columns = ("sharding", "ranks", "tokens/s", "last loss", "agree", "parameters", "peak")
        notes = (
            "agree: the largest relative difference of a step's loss from the first row's.",
            "Bytes are those of the rank that holds most: parameters between steps, peak over all phases. x: forecast / measured.",
        )
        title = f"model {self.model}, data {self.data}"
        return [self._memory(), Table(title=title, columns=columns, rows=rows, notes=notes)]

    def _memory(self) -> Table:
        names = [name for name in PHASES if any(r.measured and name in r.measured["phases"] for r in self.results)]
        pairs = {result.sharding: [_bytes(result, "phases", name) for name in names] for result in self.results}
        rows = [(word, *(format_bytes(pair[0]) for pair in own)) for word, own in pairs.items()]
        ratios = [expected / measured for own in pairs.values() for measured, expected in own if measured and expected]
        notes = [f"Forecast / measured: {min(ratios):.2f} to {max(ratios):.2f}."] if ratios else []
        return Table(title="Highest bytes of a rank by phase", columns=("sharding", *names), rows=rows, notes=notes)


def _bytes(result: RunResult, *keys: str) -> tuple[int, int | None]:
    """Return measured and forecast bytes of a run: 0 and None where there are none."""
    measured: Any = result.measured or {}
    expected: Any = result.forecast["device"] if result.forecast else {}
    for key in keys:
        measured, expected = measured.get(key, {}), expected.get(key, {})
    return measured or 0, expected or None


def _with_ratio(measured: int, expected: int | None) -> str:
    """Return measured bytes, and the forecast as a multiple of them."""
    if not measured:
        return "–"
    return format_bytes(measured) + (
        f" x {expected / measured:.2f}" if expected and expected <= 1000 * measured else ""
    )


@by_name
def compare(
    run_config: RunConfig,
    strategies: Sequence[Strategy],
    train_config: TrainConfig,
    *,
    machine: Hardware,
    root: Path,
    processes: int | None = None,
) -> Comparison:
    """Train under each strategy in turn, in new processes, from the same weights and over the same global batches.

    A strategy with fewer data-parallel ranks (`none` has one) accumulates, so that all have one global batch.

    Args:
        run_config: model and data.
        strategies: each is run once.
        train_config: the step, on `processes` ranks.
        machine: from `hardware()`.
        root: folder for the runs' folders.
        processes: of every strategy but `none`; None: the largest of their defaults, which is printed.

    Raises:
        ToolkitError: before any process starts, for a run that cannot start.
    """
    ranks = choose_ranks(strategies, machine, processes)
    counts = [1 if strategy.single_process else ranks for strategy in strategies]
    sizes = [resolve_parallelism(*pair).dp_size for pair in zip(strategies, counts, strict=True)]
    most = ranks if 1 in counts else max(sizes)
    for strategy, size in zip(strategies, sizes, strict=True):
        if most % size:
            raise StrategyError(
                f"sharding {strategy.sharding!r} has {size} data-parallel ranks, which do not divide {most}: the strategies "
                "cannot have one global batch. Choose another --processes."
            )
    batches = [dataclasses.replace(train_config, accumulation=train_config.accumulation * most // n) for n in sizes]
    plans = list(zip(strategies, batches, counts, strict=True))
    check_place(root)
    preflights = [guarded(run_preflight(run_config, *plan, machine.device), run_config) for plan in plans]
    environs = [preflight.rank_environment for preflight in preflights]
    print_default(ranks, machine, processes)
    results = tuple(_run(run_config, *plan, root, environ) for plan, environ in zip(plans, environs, strict=True))
    return Comparison(model=run_config.model, data=run_config.data, results=results)


def _run(
    run_config: RunConfig,
    strategy: Strategy,
    train_config: TrainConfig,
    ranks: int,
    root: Path,
    environ: Mapping[str, str],
) -> RunResult:
    path = new_path(root, strategy.sharding)
    run_config = dataclasses.replace(run_config, save_every=0, save_seconds=0.0)  # only the training is compared
    with enter(path, token=new_token()) as folder, reported(path):
        arguments = ["--run-dir", str(path), *to_flags(run_config, strategy, train_config)]
        config = accelerate_config(strategy, ranks)
        supervise(folder, "toolkit.finetune", arguments, config, environ=environ, timeout=run_config.timeout)
    return read_run(path)


def read_run(path: Path) -> RunResult:
    """Return a finished run's folder as a row of the comparison.

    Raises:
        RunError: for a folder without a finished run, and for invalid files in it.
    """
    with open_finished_run(path) as (about, memory, steps):
        return RunResult(
            sharding=about["strategy"]["sharding"],
            strategy=about["strategy"],
            engine=memory["audits"][0]["engine"],
            ranks=about["ranks"],
            losses=tuple(event["loss"] for event in steps),
            grad_norms=tuple(event["grad_norm"] for event in steps),
            tokens_per_second=throughput(steps) or 0.0,
            parameter_bytes_per_rank=tuple(audit["parameter_bytes"] for audit in memory["audits"]),
            measured=memory["measured"],
            forecast=memory["forecast"],
            run=str(path),
        )
