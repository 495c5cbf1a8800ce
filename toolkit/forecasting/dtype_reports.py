"""`dtype_report()` → `DtypeReport`: the dtypes of all states at each stage of a run, engine by engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config.strategy import Strategy, usual_shardings
from toolkit.config.train_config import TrainConfig
from toolkit.core.charts import Bar, bars
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF
from toolkit.devices.machine import Hardware
from toolkit.engines.job import Job
from toolkit.engines.states import optimizer_bytes, parameters_of
from toolkit.forecasting.finished_run import read_finished_run
from toolkit.forecasting.prediction import resolve_request
from toolkit.models import ModelSpec
from toolkit.transforms.adapters import read_dtype

STAGES = ("loading", "preparation", "compute", "reduction", "optimizer", "checkpoint")
"""In the order of a run."""

Place = tuple[str, str]
"""A stage and a part."""


@dataclass(frozen=True, kw_only=True)
class DtypeColumn:
    """One strategy's dtypes, or why it cannot run."""

    strategy: Strategy
    """The resolved strategy; the requested one if it cannot run."""
    ranks: int
    dtypes: Mapping[Place, str] = field(default_factory=dict)
    """Stage and part → torch's name of the dtype."""
    loading: str = ""
    """How the weights are read."""
    computing: str = ""
    """How the forward gets its dtype."""
    element_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes for each trained weight, over all ranks that share it: parameters, master, gradients, optimizer."""
    measured: Mapping[Place, str] = field(default_factory=dict)
    """The dtypes in a run's audit."""
    refused: str = ""
    """Why it cannot run, in a sentence; empty where it can."""

    @property
    def label(self) -> str:
        """Its sharding."""
        return self.strategy.label


@dataclass(frozen=True, kw_only=True)
class DtypeReport(Result):
    """The dtype ledger of several strategies, stage by stage."""

    model: str
    precision: str
    """The requested precision."""
    device: str
    columns: tuple[DtypeColumn, ...]
    run: str | None = None
    """Folder of the run with the shown audit."""

    @property
    def accepted(self) -> list[DtypeColumn]:
        """The strategies that can run."""
        return [column for column in self.columns if not column.refused]

    @property
    def reason(self) -> str:
        """Return the bytes of a trained weight under each strategy, and whether the run's audit has the same dtypes."""
        by_bytes: dict[float, list[str]] = {}
        for column in self.accepted:
            by_bytes.setdefault(sum(column.element_bytes.values()), []).append(column.label)
        sentences = [
            f"{', '.join(labels)} {'keep' if len(labels) > 1 else 'keeps'} {size:g} bytes"
            for size, labels in by_bytes.items()
        ]
        words = [f"{'; '.join(sentences)} for each trained weight, before anything is sharded."] if sentences else []
        if refused := [column.label for column in self.columns if column.refused]:
            words.append(f"Refused: {', '.join(refused)}.")
        for column in self.columns:
            if column.measured:
                wrong = [place for place, name in column.measured.items() if column.dtypes.get(place, name) != name]
                odd = ", ".join(f"{what} at {stage}" for stage, what in wrong)
                words.append(f"The audit of {self.run} found {'otherwise: ' + odd if wrong else 'the same'}.")
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return each column, its dtypes as stage → part → dtype."""
        values = dataclasses.asdict(self)
        for column in values["columns"]:
            for field_name in ("dtypes", "measured"):
                nested: dict[str, dict[str, str]] = {}
                for (stage, part), name in column[field_name].items():
                    nested.setdefault(stage, {})[part] = name
                column[field_name] = nested
        return values

    def pictures(self) -> Sequence[str]:
        """Return a picture of the bytes for each trained weight."""
        rows = [Bar(label=column.label, parts=column.element_bytes) for column in self.accepted]
        title = f"{self.precision}: bytes for each trained weight, before anything is sharded"
        return [bars(rows, title=title, spell=lambda size: f"{size:g} B")] if rows else []

    def tables(self) -> list[Table]:
        """Return dtypes by stage, then how weights are read and cast, then the refusals."""
        views = {column.label: column.dtypes for column in self.accepted}
        views |= {f"{column.label}, measured": column.measured for column in self.accepted if column.measured}
        places = dict.fromkeys(place for column in self.accepted for place in column.dtypes)
        rows = [
            (f"{place[0]}: {place[1]}", *(dtypes.get(place, "–") for dtypes in views.values()))
            for place in sorted(places, key=lambda place: STAGES.index(place[0]))
        ]
        casts = [(column.label, column.loading, column.computing) for column in self.accepted]
        refused = [(column.label, column.refused) for column in self.columns if column.refused]
        title = f"{self.model} in {self.precision} on {self.device}: dtypes, stage by stage"
        headers = ("sharding", "weights are read", "the forward computes")
        tables = [
            Table(title=title, columns=("stage", *views), rows=rows, notes=(self.reason,)),
            Table(title="Reading and casting", columns=headers, rows=casts),
            Table(title=f"Cannot run in {self.precision} here", columns=("sharding", "why"), rows=refused),
        ]
        return [table for table in tables if table.rows]


def dtype_report(
    model: ModelSpec | str | None = None,
    strategies: Sequence[Strategy] | None = None,
    on: Hardware | str | None = None,
    train_config: TrainConfig | None = None,
    *,
    ranks: int | None = None,
    run: str | Path | None = None,
) -> DtypeReport:
    """Return the dtypes of each strategy from loading to the checkpoint. No launch, no device.

    Args:
        model: a spec, or what `describe` takes.
        strategies: by default the run's own, or else ddp, zero3 and fsdp.
        on: the machine, or its name; by default this one.
        train_config: as in `forecast`.
        ranks: processes; by default the machine's devices, at least two.
        run: folder of a run; its strategy comes first, with its audit.

    Raises:
        ToolkitError: for an unknown model or machine.
        RunError: for a folder without an audited run.
    """
    finished = read_finished_run(run) if run is not None else None
    compared = list(strategies or [Strategy(sharding=word) for word in usual_shardings()])
    if finished is not None:
        more = [strategy for strategy in strategies or () if strategy.sharding != finished.strategy.sharding]
        compared = [finished.strategy, *more]
        ranks = finished.ranks if ranks is None and on is None else ranks
    # Dtypes do not depend on the number of ranks; with one device, sharding is forecast for two.
    job, machine = resolve_request(model, Strategy(), on, train_config, ranks=1, run=finished)
    count = ranks if ranks is not None else max(2, machine.ranks)
    columns = []
    for strategy in compared:
        world_size = 1 if strategy.single_process else max(count, strategy.least_ranks)
        try:
            column = _column(resolve_request(job.spec, strategy, machine, train_config, ranks=world_size)[0])
        except StrategyError as error:
            column = DtypeColumn(strategy=strategy, ranks=world_size, refused=str(error))
        if finished is not None and strategy is finished.strategy:
            measured = _at_stages(finished.dtypes, _weights(strategy))
            column = dataclasses.replace(column, measured=measured)
        columns.append(column)
    assert job.spec is not None
    return DtypeReport(
        model=job.spec.name,
        precision=", ".join(dict.fromkeys(column.strategy.precision for column in columns)),
        device=machine.device.name,
        columns=tuple(columns),
        run=str(run) if run is not None else None,
    )


LEDGER = {
    "trainable": ("preparation", "weights"),
    "frozen": ("preparation", "frozen weights"),
    "master": ("preparation", "master copy"),
    "gradients": ("compute", "gradients, added up"),
    "reduce": ("reduction", "gradients, between ranks"),
    "optimizer": ("optimizer", "moments"),
}
"""Names in an engine's account, or in a run's audit → their place."""

PER_WEIGHT = {"parameters": "trainable", "master": "master", "gradients": "gradients"}
"""Parts of a picture → names in an engine's account. The moments are several."""


def _at_stages(account: Mapping[str, str], weights: str) -> dict[Place, str]:
    places = {**LEDGER, "trainable": ("preparation", weights)}
    return {place: account[name] for name, place in places.items() if name in account}


def _weights(strategy: Strategy) -> str:
    return "weights" if strategy.adapter == "none" else "the adapter's weights"


def _column(job: Job) -> DtypeColumn:
    engine = job.engine
    account, weights = engine.expected_state(job).dtypes, _weights(job.strategy)
    stepped_dtype = account.get("master", account["trainable"])
    dtypes: dict[Place, str] = {("loading", weights): read_dtype(job)}
    if job.strategy.adapter != "none":
        frozen = "+".join(sorted({state.dtype for state in parameters_of(job) if not state.trainable}))
        if job.strategy.adapter == "qlora":  # the dtype does not show it, as int8 does
            frozen = f"4 bits in {frozen}"
        dtypes = {("loading", weights): job.kept_dtype, ("loading", "frozen weights"): frozen}
        account = {**account, "frozen": frozen}
    dtypes["compute", "forward"] = job.compute_dtype
    dtypes["optimizer", "weights that are stepped"] = dtypes["checkpoint", "weights"] = stepped_dtype
    dtypes["checkpoint", "moments"] = account["optimizer"]
    scaled = "; the loss is scaled up before the backward" if job.precision.scaled else ""
    return DtypeColumn(
        strategy=job.strategy,
        ranks=job.ranks,
        dtypes=dtypes | _at_stages(account, weights),
        loading=engine.loading_note(job, engine.streams(job)),
        computing=engine.compute_note(job) + scaled,
        element_bytes={
            **{part: float(BYTES_OF[account[name]]) for part, name in PER_WEIGHT.items() if name in account},
            "optimizer": float(optimizer_bytes(job, 1)),
        },
    )
