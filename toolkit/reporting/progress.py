"""How a run went: its losses, its speed, its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.drawing import curve
from toolkit.reporting.memory import compared, ratio
from toolkit.reporting.parts import Section, spell_number, spell_seconds, told
from toolkit.reporting.record import Record, step_seconds, throughput
from toolkit.show import Table
from toolkit.units import format_bytes, format_count, format_seconds


def training(run: Record) -> Section:
    """Losses, evaluation losses and tokens per second, step by step."""
    title, steps = "Training", run.steps
    if not steps:
        return Section(title=title, words="No step was done.")
    lines = {"loss": [(event["step"], event["loss"]) for event in steps]}
    if run.evaluations:
        lines["evaluation"] = [(event["step"], event["eval_loss"]) for event in run.evaluations]
    rates = {"tokens/s": [(event["step"], event["tokens"] / event["seconds"]) for event in steps]}
    columns = ("step", "loss", "gradient norm", "lr", "tokens/s")
    tables = [
        (told("Steps", columns, steps, _step, "events.jsonl"), curve(lines, title="Loss", x="step", y="loss")),
        (_rates(run), curve(rates, title="Throughput", x="step", y="tokens/s", spell_y="{:,.0f}".format)),
    ]
    if run.evaluations:
        found = told("Evaluation losses", ("step", "loss"), run.evaluations, _evaluation, "events.jsonl")
        tables.append((found, ""))
    skipped = sum(bool(event.get("skipped")) for event in steps)
    words = f"In {skipped} step(s) fp16 overflowed, and they were skipped." if skipped else ""
    return Section(title=title, words=words, tables=tables)


def checkpoints(run: Record) -> Section:
    """What was published, and what it cost."""
    title, made = "Checkpoints", run.checkpoints
    if not made:
        return Section(title=title, words="None was published.")
    stalled, trained = sum(one["stall_seconds"] for one in made), sum(event["seconds"] for event in run.steps)
    words = f"{len(made):,} published. The training waited {format_seconds(stalled)} for them in all"
    words += f", {stalled / trained:.1%} of the time in steps." if trained else "."
    columns = ("step", "bytes", "training waited", "written in")
    return Section(
        title=title, words=words, tables=[(told(title, columns, made, _checkpoint, "checkpoints.jsonl"), "")]
    )


def speed(run: Record) -> Table:
    """The median step, forecast and measured."""
    forecast, seconds, rate = run.forecast or {}, step_seconds(run.steps), throughput(run.steps)
    rows = []
    for name, foretold, measured, spell in (
        ("a step", forecast.get("step_seconds"), seconds, spell_seconds),
        ("tokens/s", forecast.get("tokens_per_second"), rate, "{:,.0f}".format),
    ):
        rows.append((name, spell(foretold) if foretold else "–", spell(measured), ratio(foretold, measured)))
    return replace(compared("Time, of the median step", "figure", rows), notes=forecast.get("unknown") or ())


def _step(event: Mapping[str, Any]) -> tuple[str, ...]:
    loss, norm = spell_number(event["loss"]), spell_number(event["grad_norm"])
    return f"{event['step']:,}", loss, norm, f"{event['lr']:.3g}", f"{event['tokens'] / event['seconds']:,.0f}"


def _evaluation(event: Mapping[str, Any]) -> tuple[str, ...]:
    return f"{event['step']:,}", spell_number(event["eval_loss"])


def _checkpoint(one: Mapping[str, Any]) -> tuple[str, ...]:
    stalled, written = format_seconds(one["stall_seconds"]), format_seconds(one["write_seconds"])
    return f"{one['step']:,}", format_bytes(one["bytes"]), stalled, written


def _rates(run: Record) -> Table:
    tokens, seconds = sum(event["tokens"] for event in run.steps), sum(event["seconds"] for event in run.steps)
    rows = [
        ("tokens", format_count(tokens)),
        ("time in steps", format_seconds(seconds)),
        ("the median step", spell_seconds(step_seconds(run.steps))),
        ("tokens/s, over all", f"{tokens / seconds:,.0f}"),
        ("tokens/s, of the median step", f"{throughput(run.steps):,.0f}"),
    ]
    notes = ("The first five steps do not count for the median: the memory window lies in them.",)
    return Table(title="Throughput", columns=("figure", "value"), rows=rows, notes=notes)
