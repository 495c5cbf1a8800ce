"""How a run went: its losses, its speed, its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from toolkit.core.display import Table
from toolkit.core.drawing import curve
from toolkit.core.units import format_bytes, format_count, format_seconds, format_step_seconds
from toolkit.reports.memory import compared, ratio
from toolkit.reports.parts import Section, sample_table, spell_number
from toolkit.reports.record import Record, pace, step_seconds, throughput
from toolkit.training.loop import Step

SPELLINGS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", spell_number),
    "grad_norm": ("gradient norm", spell_number),
    "lr": ("lr", "{:.3g}".format),
}
"""Figures of a step that have columns, each with its title."""

KNOWN = frozenset({*(field.name for field in fields(Step)), "attempt", "samples", "steps"})
"""The recipe's figures of a step."""


def training(run: Record) -> Section:
    """Return losses, evaluation losses and tokens a second, step by step."""
    title, steps = "Training", run.steps
    if not steps:
        return Section(title=title, words="No step was done.")
    lines = {"loss": [(event["step"], event["loss"]) for event in steps]}
    if run.evaluations:
        lines["evaluation"] = [(event["step"], event["eval_loss"]) for event in run.evaluations]
    tables = [(_steps(run), curve(lines, title="Loss", x="step", y="loss"))]
    if rates := [(event["step"], rate) for event in steps if (rate := pace(event)) is not None]:
        picture = curve({"tokens/s": rates}, title="Throughput", x="step", y="tokens/s", spell_y="{:,.0f}".format)
        tables.append((_rates(run, sum(event.get("tokens") or 0 for event in steps)), picture))
    if run.evaluations:
        evaluations = sample_table("Evaluation losses", ("step", "loss"), run.evaluations, _evaluation, "events.jsonl")
        tables.append((evaluations, ""))
    skipped = sum(bool(event.get("skipped")) for event in steps)
    words = f"In {skipped} step(s) fp16 overflowed, and they were skipped." if skipped else ""
    return Section(title=title, words=words, tables=tables)


def checkpoints(run: Record) -> Section:
    """Return the published checkpoints and their cost."""
    title, saved = "Checkpoints", run.checkpoints
    if not saved:
        return Section(title=title, words="None was published.")
    stalled, trained = (
        sum(checkpoint["stall_seconds"] for checkpoint in saved),
        sum(event["seconds"] for event in run.steps),
    )
    words = f"{len(saved):,} published. The training waited {format_seconds(stalled)} for them in all"
    words += f", {stalled / trained:.1%} of the time in steps." if trained else "."
    columns = ("step", "bytes", "training waited", "written in")
    return Section(
        title=title, words=words, tables=[(sample_table(title, columns, saved, _checkpoint, "checkpoints.jsonl"), "")]
    )


def speed(run: Record) -> Table:
    """Return the median step, forecast and measured."""
    forecast, seconds, rate = run.forecast or {}, step_seconds(run.steps), throughput(run.steps)
    rows = []
    for name, expected, measured, spell in (
        ("a step", forecast.get("step_seconds"), seconds, format_step_seconds),
        ("tokens/s", forecast.get("tokens_per_second"), rate, "{:,.0f}".format),
    ):
        if measured is not None:
            rows.append((name, spell(expected) if expected else "–", spell(measured), ratio(expected, measured)))
    return replace(compared("Time, of the median step", "figure", rows), notes=forecast.get("unknown") or ())


def _steps(run: Record) -> Table:
    """Return loss, norm, learning rate and speed where the steps have them, and other figures of `tk.log`."""
    last = run.steps[-1]
    spellings = {name: spelling for name, spelling in SPELLINGS.items() if name in last}
    spellings |= {name: (name, "{:.4g}".format) for name in last if name not in KNOWN}

    def row(event: Mapping[str, Any]) -> tuple[str, ...]:
        cells = (_cell(event, name, spell) for name, (_, spell) in spellings.items())
        rate = pace(event)
        return f"{event['step']:,}", *cells, "–" if rate is None else f"{rate:,.0f}"

    columns = ("step", *(title for title, _ in spellings.values()), "tokens/s")
    return sample_table("Steps", columns, run.steps, row, "events.jsonl")


def _cell(event: Mapping[str, Any], name: str, spell: Callable[[float], str]) -> str:
    """Return a figure's text; JSON has null for a value that is not finite."""
    if name not in event:
        return "–"
    return spell_number(None) if event[name] is None else spell(event[name])


def _evaluation(event: Mapping[str, Any]) -> tuple[str, ...]:
    return f"{event['step']:,}", spell_number(event["eval_loss"])


def _checkpoint(checkpoint: Mapping[str, Any]) -> tuple[str, ...]:
    stalled, written = format_seconds(checkpoint["stall_seconds"]), format_seconds(checkpoint["write_seconds"])
    return f"{checkpoint['step']:,}", format_bytes(checkpoint["bytes"]), stalled, written


def _rates(run: Record, tokens: int) -> Table:
    seconds = sum(event["seconds"] for event in run.steps)
    rows = [
        ("tokens", format_count(tokens)),
        ("time in steps", format_seconds(seconds)),
        ("the median step", format_step_seconds(step_seconds(run.steps))),
        ("tokens/s, over all", f"{tokens / seconds:,.0f}"),
        ("tokens/s, of the median step", f"{throughput(run.steps) or 0:,.0f}"),
    ]
    notes = ("The first five steps do not count for the median: the memory window lies in them.",)
    return Table(title="Throughput", columns=("figure", "value"), rows=rows, notes=notes)
