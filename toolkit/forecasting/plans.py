"""`plan()` → `Plan`: every strategy that a model, a machine and a global batch allow, the fastest that fits first."""

from __future__ import annotations

import dataclasses
import math
import shlex
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.config.flags import spell, spoken
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.config.unknown_names import by_name
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import format_bytes
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines.registry import engine_for
from toolkit.engines.resolution import accelerate_config
from toolkit.forecasting.memory import check_forecast
from toolkit.forecasting.prediction import CPU_NOTE, check_type
from toolkit.forecasting.reasons import EQUAL, why_faster
from toolkit.forecasting.search import ALTERNATIVE_FIELDS, OFFLOADED, Candidate, Search, find_alternatives
from toolkit.models import ModelSpec, describe
from toolkit.transforms.adapters import check_quantized

UNCERTAIN = 3
"""Number of best candidates with printed uncertainties."""

SHOWN_CANDIDATES, SHOWN_REASONS = 10, 5
"""Numbers of ranked candidates, and of reasons for rejections, that are printed without --all."""


@dataclass(frozen=True, kw_only=True)
class Plan(Result):
    """Candidates for one model, machine and global batch."""

    json_fields = "model hardware global_batch ranked rejected alternatives"

    model: str
    """The model's name, as a command line takes it."""
    hardware: Hardware
    global_batch: int
    ranked: tuple[Candidate, ...]
    """Those that fit with a margin, by tokens/s (`search.OFFLOADED` of them with an offload), then by memory."""
    rejected: tuple[Candidate, ...]
    alternatives: tuple[Candidate, ...] = ()
    """Changed requests that fit: where nothing else does, or for the fields that the request leaves open."""
    tokens: float | None = None
    """Tokens of the whole training, for hours."""
    price: float | None = None
    """Of a device for an hour, for costs."""
    whole: bool = False
    """Whether it shows every candidate."""

    @property
    def best(self) -> Candidate:
        """The first of the ranked.

        Raises:
            StrategyError: where none fits.
        """
        if not self.ranked:
            fitting = "; ".join(one.flags for one in self.alternatives[:3])
            fix = f"What fits: {fitting}." if fitting else "Take more or larger devices, or a smaller model."
            raise StrategyError(
                f"nothing fits {self.model} on {self.hardware.label} with a global batch of {self.global_batch}. {fix}"
            )
        return self.ranked[0]

    def config(self) -> dict[str, Any]:
        """Return the best candidate's Accelerate config file."""
        strategy = self.best.strategy
        return accelerate_config(strategy, self.hardware.ranks, self.hardware.nodes)

    def command(self, model: str, config: str = "accelerate.yaml") -> str:
        """Return the command that launches the best candidate with its config file."""
        left_out = ("sharding", "offload", "dp_replicate")  # the file binds them
        return (
            f"accelerate launch --config_file {shlex.quote(config)} -m toolkit.finetune {self._flags(model, left_out)}"
        )

    def headline(self) -> str:
        """Return the best strategy, why, and its command; or that nothing fits."""
        if not self.ranked:
            text = f"Nothing fits a global batch of {self.global_batch} on {self.hardware.label}."
            if closest := min(self.rejected, key=lambda candidate: candidate.shortfall, default=None):
                what = " The closest, {sharding} with offload {offload}: " if closest.forecast else " {sharding}: "
                text += what.format(**closest.cells) + closest.reason
            return f"{text} The changes below fit." if self.alternatives else text
        forecast = self.best.forecast
        assert forecast is not None, "what is ranked has a forecast"
        words = "{sharding}, offload {offload}, recompute {recompute}, batch {batch}".format(**self.best.cells)
        speed = f" at {forecast.tokens_per_second:,.0f} tokens/s" if forecast.tokens_per_second else ""
        needs = f"A rank needs {format_bytes(forecast.needed_bytes)} of {format_bytes(forecast.limit_bytes)}"
        if self.best.strategy.offload != "none":
            host = format_bytes(forecast.hardware.host_free_bytes)
            needs += f", a node's host {format_bytes(forecast.host_bytes)} of {host}"
        run = "--write FILE writes its config for every node."
        if self.hardware.nodes == 1:
            ranks = f"--processes {self.hardware.ranks} " if self.hardware.ranks > 1 else ""
            run = f"Run it:\n    toolkit train {ranks}{self._flags(self.model)}"
        return " ".join(
            filter(None, [f"Best on {self.hardware.label}: {words}{speed}.", f"{needs}.", self._explanation(), run])
        )

    def tables(self) -> list[Table]:
        """Return the ranked candidates, the alternatives, and the rejected ones."""
        costs = ("hours", "cost", "saving") if self.tokens is not None else ()
        shown = self.ranked if self.whole else self.ranked[:SHOWN_CANDIDATES]
        ranked = _table(
            f"{self.model} on {self.hardware.label}, global batch {self.global_batch}",
            (*PLAN_COLUMNS, *(costs or ("tokens/s", "step")), "need"),
            shown,
            self._notes(len(shown)),
        )
        batch = "the smallest micro-batch" + (", or at any for more devices" if self.ranked else "")
        alternatives = _table(
            "What fits with one change" if self.ranked else "What would fit",
            ("change", "sharding", "offload", *(costs or ("tokens/s",)), "need"),
            self.alternatives,
            [f"Each with its fastest sharding at {batch}. Plan again with the change for all of them."],
        )
        rejected = _table("Rejected", (*PLAN_COLUMNS, "why"), self.rejected) if self.whole else self._reasons_table()
        return [table for table in (ranked, alternatives, rejected) if table.rows]

    def _notes(self, shown: int) -> list[str]:
        if not self.ranked:
            return []
        notes = [note for best in self.ranked[:UNCERTAIN] if best.forecast for note in best.forecast.unknown]
        notes.append(
            "recompute: activation checkpointing. batch: micro-batch x accumulation. need: of a rank, with CUDA's own memory. "
            f"Sorted by tokens/s, with an offload by {OFFLOADED:.0%} of them."
        )
        if shown < len(self.ranked):
            notes.append(f"{len(self.ranked) - shown} more fit; `whole=True` (--all) shows them.")
        if self.tokens is not None:
            price = f", at {self.price:,.2f} a device and hour" if self.price else ""
            notes.append(
                f"hours: of {self.tokens:,.0f} tokens{price}. saving: their share for a checkpoint every 30 minutes."
            )
        return [*dict.fromkeys(notes), *self._cheapest()]

    def _cheapest(self) -> list[str]:
        """Return the best by cost and the best by speed, in a sentence; nothing without a price."""
        candidates = [*self.ranked, *(one for one in self.alternatives if "hardware" in one.change)]
        priced = [candidate for candidate in candidates if candidate.cost]
        if not priced:
            return []
        best = {
            "cost": min(priced, key=lambda candidate: candidate.cost or 0),
            "speed": min(priced, key=lambda candidate: candidate.hours or 0),
        }
        sentences = []
        for what, candidate in best.items():
            cells = {**candidate.cells, "machine": candidate.forecast.hardware.label if candidate.forecast else ""}
            sentences.append(f"Best by {what}: " + "{sharding} on {machine}, {hours} hours, {cost}.".format(**cells))
        return [" ".join(sentences)]

    def _reasons_table(self) -> Table:
        """Return the rejections by reason, with the smallest need of each."""
        groups: dict[str, list[Candidate]] = {}
        for candidate in self.rejected:
            groups.setdefault(candidate.kind, []).append(candidate)
        rows = []
        for kind, candidates in sorted(groups.items(), key=lambda group: -len(group[1]))[:SHOWN_REASONS]:
            closest = min(candidates, key=lambda candidate: candidate.shortfall)
            words = " ".join(dict.fromkeys(candidate.strategy.sharding for candidate in candidates))
            least = (
                f"{{sharding}}, {{offload}}: {closest.least_need}".format(**closest.cells) if closest.forecast else ""
            )
            rows.append((len(candidates), textwrap.shorten(kind, 130, placeholder="…"), words, least))
        more = len(groups) - len(rows)
        note = f"{more} more reasons; " * bool(more) + "`whole=True` (--all) shows each candidate."
        own = (CPU_NOTE,) if self.hardware.device.kind == "cpu" else ()
        notes = (note, *(() if self.ranked else self.hardware.notes), *own)
        return Table(title="Rejected", columns=("", "why", "sharding", "least need"), rows=rows, notes=notes)

    def _explanation(self) -> str:
        """Return why the best is first: what is faster with an offload, else the fastest of another sharding, the most like it."""
        best, fastest = self.best, max(self.ranked, key=lambda candidate: candidate.speed)
        if not best.speed:
            return "No speed of the device is known: this needs least."
        if fastest.speed > (1 + EQUAL) * best.speed:
            words = "{sharding} with offload {offload} is forecast at {tokens/s} tokens/s: not enough more to rely on."
            return words.format(**fastest.cells)
        offloaded = all(candidate.strategy.offload != "none" for candidate in self.ranked)
        reason = "Nothing fits without an offload." if offloaded else ""
        if offloaded and not self.alternatives:
            reason = "Nothing fits without an offload: --adapter any and --precision any look for a change that does."
        own = best.strategy.sharding
        others = [candidate for candidate in self.ranked if candidate.strategy.sharding != own and candidate.speed]
        if not others:
            return reason
        speed, fields = max(candidate.speed for candidate in others), ("offload", "recompute", "batch")
        second = max(
            (candidate for candidate in others if candidate.speed >= (1 - EQUAL) * speed),
            key=lambda candidate: sum(candidate.cells[name] == best.cells[name] for name in fields),
        )
        assert best.forecast is not None, "what is ranked has a forecast"
        assert second.forecast is not None, "what is ranked has a forecast"
        same = second.strategy.offload == best.strategy.offload
        other = ("{sharding}" if same else "{sharding} with offload {offload}").format(**second.cells)
        why = why_faster(best.forecast, second.forecast, (own, other))
        why = why or f"{other} is as fast, and needs {second.cells['need']}."
        return f"{reason} {why}".strip()

    def _flags(self, model: str, excluded: Collection[str] = ()) -> str:
        fields = {
            name: value
            for name, value in spoken(self.best.strategy, self.best.train_config).items()
            if name not in excluded
        }
        model_field = {} if model == EMBEDDED else {"model": model, "data": "YOUR_DATA"}
        return shlex.join(spell({**model_field, **fields}))


PLAN_COLUMNS = ("sharding", "offload", "recompute", "batch")
"""Columns of every candidate."""


def _table(title: str, columns: Sequence[str], candidates: Iterable[Candidate], notes: Sequence[str] = ()) -> Table:
    rows = [tuple(candidate.cells[name] for name in columns) for candidate in candidates]
    return Table(title=title, columns=columns, rows=rows, notes=notes)


DEFAULT_BATCH = 32
"""Samples of a step that a plan takes by default, or the next multiple of the ranks."""


@by_name
def plan(
    model: ModelSpec | str,
    on: Hardware | str | None = None,
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    strategy: Strategy | None = None,
    train_config: TrainConfig | None = None,
    one_document: bool = False,
    allow_unquantized: bool = False,
    vary: Collection[str] = (),
    tokens: float | None = None,
    price: float | None = None,
    whole: bool = False,
) -> Plan:
    """Rank all candidates, the fastest that fits first. No launch, no device.

    Args:
        model: a spec, or what `describe` takes.
        on: the machine, or its name; by default this one.
        global_batch: samples of a step, over all ranks; by default the least multiple of the ranks from 32 on.
        seq_len: tokens of a sample; by default that of `train_config`.
        strategy: adapter, precision and attention; sharding, offload and activation checkpointing are chosen.
        train_config: the step; micro-batch and accumulation are chosen.
        one_document: as in `forecast`.
        allow_unquantized: as in `forecast`.
        vary: of `search.ALTERNATIVE_FIELDS`, the fields for which other values are tried too. Where nothing fits, all are.
        tokens: of the whole training; adds hours to each candidate.
        price: of a device for an hour; with `tokens` it adds costs.
        whole: show every candidate, not the first ones and the reasons.

    Raises:
        StrategyError: for a global batch that the ranks cannot share evenly.
        ModelError: for a model that a run would refuse.
        ToolkitError: for an unknown model or machine.
    """
    check_type("strategy", strategy, Strategy)
    check_type("train_config", train_config, TrainConfig)
    request = train_config or TrainConfig()
    search = Search(
        spec=model if isinstance(model, ModelSpec) else describe(model),
        strategy=strategy or Strategy(),
        train_config=request if seq_len is None else dataclasses.replace(request, seq_len=seq_len),
        machine=on if isinstance(on, Hardware) else hardware(on),
        global_batch=0,
        one_document=one_document,
        tokens=tokens,
        price=price,
    )
    default = math.ceil(DEFAULT_BATCH / search.data_ranks) * search.data_ranks
    search = dataclasses.replace(search, global_batch=default if global_batch is None else global_batch)
    _check_request(search, vary, allow_unquantized)
    return _ranked(search, vary, whole=whole)


def _ranked(search: Search, vary: Collection[str], *, whole: bool) -> Plan:
    """Run a search, and then those of alternatives."""
    ranked, rejected = search.run()
    return Plan(
        model=search.spec.name,
        hardware=search.machine,
        global_batch=search.global_batch,
        ranked=tuple(ranked),
        rejected=tuple(rejected),
        alternatives=tuple(find_alternatives(search, vary, machines=True) if ranked else find_alternatives(search)),
        tokens=search.tokens,
        price=search.price,
        whole=whole,
    )


def _check_request(search: Search, vary: Collection[str], allow_unquantized: bool) -> None:
    check_forecast(engine_for(search.strategy.sharding, pp=search.strategy.pp))
    global_batch, data = search.global_batch, search.data_ranks
    if not isinstance(global_batch, int):
        raise StrategyError(f"global_batch {global_batch!r}: expected int. Choose {data}.")
    if global_batch < 1 or global_batch % data:
        raise StrategyError(
            f"global_batch {global_batch}: expected a multiple of {data}, so that each rank has as many samples. "
            f"Choose {max(1, round(global_batch / data)) * data}."
        )
    for name, value in (("tokens", search.tokens), ("price", search.price)):
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ToolkitError(f"{name} {value!r}: expected a number above 0.")
    if search.price is not None and search.tokens is None:
        raise ToolkitError("price: expected the tokens of the training too. Add --tokens, such as --tokens 2e9.")
    if search.strategy.quantized:
        check_quantized(search.spec, search.strategy.adapter, allow_unquantized)
    if unknown := set(vary) - set(ALTERNATIVE_FIELDS):
        raise ToolkitError(f"vary {', '.join(sorted(unknown))}: expected some of {', '.join(ALTERNATIVE_FIELDS)}.")
