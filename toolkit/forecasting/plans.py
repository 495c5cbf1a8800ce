"""`plan()` → `Plan`: every strategy that a model, a machine and a global batch allow, the fastest that fits first."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from toolkit.config.flags import differing, spell
from toolkit.config.run_config import EMBEDDED, RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import Hardware, hardware
from toolkit.engines.adapters import check_quantized
from toolkit.engines.base import engine_of
from toolkit.forecasting.alternatives import FIELDS, Alternative, find_alternatives
from toolkit.forecasting.candidates import Candidate, Search
from toolkit.models import ModelSpec, describe

UNCERTAIN = 3
"""The number of best candidates whose uncertainties are printed."""

SHOWN, REASONS = 10, 5
"""Ranked candidates, and reasons of rejections, that are printed unless all are wanted."""


@dataclass(frozen=True, kw_only=True)
class Plan(Result):
    """Candidates for one model, machine and global batch."""

    model: str
    """The model's name, as a command line takes it."""
    hardware: Hardware
    global_batch: int
    ranked: tuple[Candidate, ...]
    """Those that fit with a margin, by tokens/s, then by memory."""
    rejected: tuple[Candidate, ...]
    alternatives: tuple[Alternative, ...] = ()
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
        return engine_of(strategy).to_yaml(strategy, self.hardware.ranks, self.hardware.nodes)

    def command(self, model: str, config: str = "accelerate.yaml") -> str:
        """Return the command that launches the best candidate with its config file."""
        left_out = ("sharding", "offload", "dp_replicate")  # the file binds them
        return f"accelerate launch --config_file {config} -m toolkit.finetune {self._flags(model, left_out)}"

    def hours(self, candidate: Candidate) -> float | None:
        """Return the hours of a training on `tokens`, with its checkpoints; None without tokens or a known speed."""
        timing = candidate.forecast.timing if candidate.forecast else None
        if timing is None or self.tokens is None:
            return None
        return self.tokens / timing.tokens_per_second / 3600 * (1 + _checkpoint_share(candidate))

    def cost(self, candidate: Candidate) -> float | None:
        """Return the price of these hours on all devices; None where either is not known."""
        hours = self.hours(candidate)
        if hours is None or self.price is None or candidate.forecast is None:
            return None
        return hours * self.price * candidate.forecast.ranks

    def to_dict(self) -> dict[str, Any]:
        """Return the lists, each candidate with its forecast's JSON."""
        return {
            "model": self.model,
            "hardware": dataclasses.asdict(self.hardware),
            "global_batch": self.global_batch,
            "ranked": [self._candidate_dict(candidate) for candidate in self.ranked],
            "rejected": [self._candidate_dict(candidate) for candidate in self.rejected],
            "alternatives": [
                {"change": dict(one.change), "global_batch": one.global_batch, **self._candidate_dict(one.candidate)}
                for one in self.alternatives
            ],
        }

    def headline(self) -> str:
        """Return the best strategy, why, and its command; or that nothing fits."""
        if not self.ranked:
            headline = f"Nothing fits a global batch of {self.global_batch} on {self.hardware.label}."
            closest = min(self.rejected, key=lambda one: one.shortfall, default=None)
            if closest is not None and closest.forecast is not None:
                sharding, offload, *_ = closest.cells
                headline += f" The closest, {sharding} with offload {offload}: {closest.reason}"
            return headline + (" The changes below fit." if self.alternatives else "")
        best = self.best
        assert best.forecast is not None, "what is ranked has a forecast"
        sharding, offload, recompute, batch = best.cells
        timing = best.forecast.timing
        speed = f" at {timing.tokens_per_second:,.0f} tokens/s" if timing else ""
        peak, limit = format_bytes(best.forecast.peak_bytes), format_bytes(best.forecast.limit_bytes)
        words = f"{sharding}, offload {offload}, recompute {recompute}, batch {batch}"
        sentences = [f"Best: {words}{speed}. A rank needs {peak} of {limit}.", self._explanation()]
        if self.hardware.nodes == 1:
            ranks = f"--processes {self.hardware.ranks} " if self.hardware.ranks > 1 else ""
            sentences.append(f"Run it: toolkit train {ranks}{self._flags(self.model)}")
        else:
            sentences.append("--write FILE writes its config for every node.")
        return " ".join(filter(None, sentences))

    def tables(self) -> list[Table]:
        """Return the ranked candidates, their hours and costs, the alternatives, and the rejected ones."""
        shown = self.ranked if self.whole else self.ranked[:SHOWN]
        tables = [self._ranked_table(shown)] if shown else []
        if self.tokens is not None and any(self.hours(candidate) for candidate in shown):
            tables.append(self._cost_table(shown))
        if self.alternatives:
            tables.append(self._alternatives_table())
        if self.rejected:
            tables.append(self._rejected_table() if self.whole else self._reasons_table())
        return tables

    def _ranked_table(self, shown: tuple[Candidate, ...]) -> Table:
        rows = []
        for place, candidate in enumerate(shown, start=1):
            assert candidate.forecast is not None, "what is ranked has a forecast"
            timing = candidate.forecast.timing
            speed = f"{timing.tokens_per_second:,.0f}" if timing else "–"
            seconds = format_step_seconds(timing.step_seconds) if timing else "–"
            rows.append((place, *candidate.cells, speed, seconds, format_bytes(candidate.forecast.peak_bytes)))
        notes = [note for best in self.ranked[:UNCERTAIN] if best.forecast for note in best.forecast.unknown]
        notes.append("recompute: activation checkpointing. batch: micro-batch x accumulation. peak: of a rank.")
        if len(shown) < len(self.ranked):
            notes.append(f"{len(self.ranked) - len(shown)} more fit; --all shows them.")
        return Table(
            title=f"{self.model} on {self.hardware.label}, global batch {self.global_batch}",
            columns=("", *NAMES, "tokens/s", "step", "peak"),
            rows=rows,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _cost_table(self, shown: tuple[Candidate, ...]) -> Table:
        rows = []
        for place, candidate in enumerate(shown, start=1):
            hours, cost = self.hours(candidate), self.cost(candidate)
            rows.append(
                (
                    place, candidate.strategy.sharding, f"{hours:,.1f}" if hours else "–",
                    f"{_checkpoint_share(candidate):.1%}", f"{cost:,.2f}" if cost else "–",
                )
            )  # fmt: skip
        note = "checkpoints: the share of the time in which a step waits for one, every 30 minutes; it is in the hours."
        title = f"{self.tokens:,.0f} tokens" + (f" at {self.price:,.2f} a device and hour" if self.price else "")
        return Table(
            title=title,
            columns=("", "sharding", "hours", "checkpoints", "cost"),
            rows=rows,
            notes=(note, *self._cheapest()),
        )

    def _cheapest(self) -> list[str]:
        """Return the best by cost beside the best by speed, in a sentence; nothing without a price."""
        candidates = [*self.ranked, *(one.candidate for one in self.alternatives if "hardware" in one.change)]
        costs = {index: cost for index, one in enumerate(candidates) if (cost := self.cost(one)) is not None}
        if not costs:
            return []
        cheapest = candidates[min(costs, key=lambda index: costs[index])]
        fastest = min(candidates, key=lambda one: self.hours(one) or math.inf)
        words = [
            f"Best by {what}: {one.strategy.sharding} on {one.forecast.hardware.label}, {self.hours(one):,.1f} hours, "
            f"{self.cost(one):,.2f}."
            for what, one in (("cost", cheapest), ("speed", fastest))
            if one.forecast is not None
        ]
        return [" ".join(words)]

    def _alternatives_table(self) -> Table:
        rows = []
        for one in self.alternatives:
            forecast = one.candidate.forecast
            assert forecast is not None, "an alternative has a forecast"
            sharding, offload, *_ = one.candidate.cells
            speed = f"{forecast.timing.tokens_per_second:,.0f}" if forecast.timing else "–"
            hours, cost = self.hours(one.candidate), self.cost(one.candidate)
            costs = (f"{hours:,.1f}" if hours else "–", f"{cost:,.2f}" if cost else "–") if self.tokens else ()
            rows.append((one.flags, sharding, offload, speed, *costs, format_bytes(forecast.peak_bytes)))
        costs = ("hours", "cost") if self.tokens else ()
        note = "Each with its fastest sharding at the smallest micro-batch. Plan again with the change for all of them."
        title = "What fits with one change" if self.ranked else "What would fit"
        columns = ("change", "sharding", "offload", "tokens/s", *costs, "peak")
        return Table(title=title, columns=columns, rows=rows, notes=(note,))

    def _reasons_table(self) -> Table:
        """Return the rejections by reason, with the smallest need of each."""
        groups: dict[str, list[Candidate]] = {}
        for candidate in self.rejected:
            groups.setdefault(candidate.reason_group, []).append(candidate)
        rows = []
        for reason, candidates in sorted(groups.items(), key=lambda group: -len(group[1]))[:REASONS]:
            closest = min(candidates, key=lambda candidate: candidate.shortfall)
            words = " ".join(dict.fromkeys(candidate.strategy.sharding for candidate in candidates))
            least = f"{format_bytes(closest.need)}: {', '.join(closest.cells[:2])}" if closest.need else ""
            rows.append((len(candidates), _shortened(reason), words, least))
        left = len(groups) - len(rows)
        notes = (f"{left} more reasons; --all shows each candidate's.",) if left else ("--all shows each candidate.",)
        return Table(title="Rejected", columns=("", "why", "sharding", "least need"), rows=rows, notes=notes)

    def _rejected_table(self) -> Table:
        rows = [
            (*candidate.cells, f"needs {format_bytes(candidate.need)}" if candidate.need else candidate.reason)
            for candidate in self.rejected
        ]
        return Table(title="Rejected", columns=(*NAMES, "why"), rows=rows)

    def _explanation(self) -> str:
        """Return why the best is faster than the best of another sharding, in a sentence."""
        from toolkit.forecasting.reasons import explain  # it imports this package

        best = self.best
        other = next((one for one in self.ranked if one.strategy.sharding != best.strategy.sharding), None)
        if other is None or other.forecast is None or best.forecast is None:
            return ""
        labels = best.strategy.sharding, other.strategy.sharding
        return next((text for part, text in explain(best.forecast, other.forecast, labels) if part == "time"), "")

    def _flags(self, model: str, left_out: Collection[str] = ()) -> str:
        best = self.best
        strategy = {name: value for name, value in differing(best.strategy).items() if name not in left_out}
        named = {} if model == EMBEDDED else {"model": model}
        return shlex.join(spell({**named, **strategy, **differing(best.train_config)}))

    def _candidate_dict(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "strategy": dataclasses.asdict(candidate.strategy),
            "train_config": dataclasses.asdict(candidate.train_config),
            "forecast": candidate.forecast.to_dict() if candidate.forecast else None,
            "hours": self.hours(candidate),
            "cost": self.cost(candidate),
            "reason": candidate.reason,
        }


NAMES = ("sharding", "offload", "recompute", "batch")
"""Columns of `Candidate.cells`."""


def plan(
    model: ModelSpec | str,
    on: Hardware | str | None = None,
    *,
    global_batch: int,
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
        global_batch: samples of a step, over all ranks.
        seq_len: tokens of a sample; by default that of `train_config`.
        strategy: adapter, precision and attention; sharding, offload and activation checkpointing are chosen.
        train_config: the step; micro-batch and accumulation are chosen.
        one_document, allow_unquantized: as in `forecast`.
        vary: of `alternatives.FIELDS`, the fields for which other values are tried too. Where nothing fits, all are.
        tokens: of the whole training; adds hours to each candidate.
        price: of a device for an hour; with `tokens` it adds costs.
        whole: show every candidate, not the first ones and the reasons.

    Raises:
        StrategyError: for a global batch that the ranks cannot share evenly.
        ModelError: for a model that a run would refuse.
        ToolkitError: for an unknown model or machine.
    """
    spec = model if isinstance(model, ModelSpec) else describe(model)
    base, request = strategy or Strategy(), train_config or TrainConfig()
    search = Search(
        spec=spec,
        strategy=base,
        train_config=dataclasses.replace(request, seq_len=seq_len or request.seq_len),
        machine=on if isinstance(on, Hardware) else hardware(on),
        global_batch=global_batch,
        one_document=one_document,
    )
    _check_request(search, vary, tokens, price)
    if base.quantized:
        check_quantized(spec, allow_unquantized)
    ranked, rejected = search.run()
    return Plan(
        model=spec.name,
        hardware=search.machine,
        global_batch=global_batch,
        ranked=tuple(ranked),
        rejected=tuple(rejected),
        alternatives=tuple(find_alternatives(search, vary if ranked else FIELDS)),
        tokens=tokens,
        price=price,
        whole=whole,
    )


def _check_request(search: Search, vary: Collection[str], tokens: float | None, price: float | None) -> None:
    global_batch, data = search.global_batch, search.data_ranks
    if global_batch < 1 or global_batch % data:
        raise StrategyError(
            f"global_batch {global_batch}: expected a multiple of {data}, so that each rank has as many samples. "
            f"Choose {max(1, round(global_batch / data)) * data}."
        )
    for name, value in (("tokens", tokens), ("price", price)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ToolkitError(f"{name} {value}: expected a number above 0.")
    if price is not None and tokens is None:
        raise ToolkitError("price: expected the tokens of the training too. Add --tokens, such as --tokens 2e9.")
    if unknown := set(vary) - set(FIELDS):
        raise ToolkitError(f"vary {', '.join(sorted(unknown))}: expected some of {', '.join(FIELDS)}.")


def _checkpoint_share(candidate: Candidate) -> float:
    """Return the share of the time in which steps wait for checkpoints."""
    assert candidate.forecast is not None
    return candidate.forecast.checkpoint_stall_seconds / RunConfig().save_seconds


def _shortened(text: str, limit: int = 100) -> str:
    """Return a sentence that a narrow column can hold."""
    first = text.split(". ")[0].rstrip(".") + "."
    return first if len(first) <= limit else first[: limit - 1].rsplit(" ", 1)[0] + "…"
