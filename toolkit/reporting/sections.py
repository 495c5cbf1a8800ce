"""The parts of a report, each from what a run's folder says: words, commands, tables, and pictures beside their tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.drawing import curve
from toolkit.readying import Recipe
from toolkit.redacting import MARK
from toolkit.reporting.memory import by_part, by_phase, by_rank, compared, ratio
from toolkit.reporting.record import Record, step_seconds, throughput
from toolkit.show import Table
from toolkit.strategy import Loop, Strategy
from toolkit.units import format_bytes, format_count, format_seconds

SAID = (
    "model", "data", "sharding", "offload", "adapter", "precision", "attention", "activation_checkpointing",
    "micro_batch", "accumulation", "seq_len", "optimizer", "lr", "steps", "seed",
)  # fmt: skip
"""Fields that are told whatever they are; others where they differ from their defaults."""

ROWS = 12
"""Rows of a table in which a long run's lines are told."""

STATES = ("trainable", "frozen", "master", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a report."""

    title: str
    words: str = ""
    """A paragraph."""
    code: str = ""
    """What is shown as it is: a command, the last words of a rank."""
    tables: Sequence[tuple[Table, str]] = ()
    """Each with its picture, or an empty text."""

    def text(self) -> str:
        """For a terminal."""
        code = "\n".join("    " + line for line in self.code.splitlines())
        told = [part for part in (self.words, code, *(table.text() for table, _ in self.tables)) if part]
        return "\n\n".join([f"== {self.title} ==", *told])


def sections(run: Record) -> list[Section]:
    """All of them, in the order of the page."""
    made = (_outcome, _asked, _got, _beside, _training, _checkpoints, _attempts, _machine)
    return [section for make in made if (section := make(run)) is not None]


def figures(run: Record) -> list[tuple[str, str]]:
    """What a person asks first, each as a name and a value."""
    loop, steps = run.about["loop"], run.steps
    found = [("status", run.status), ("steps", f"{run.done:,} of {int(loop.get('steps', 0)):,}")]
    losses = [event["loss"] for event in steps if event["loss"] is not None]
    if losses:
        found.append(("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    if run.evaluations:
        found.append(("evaluation loss", _number(run.evaluations[-1]["eval_loss"])))
    if steps:
        found.append(("tokens/s", f"{throughput(steps):,.0f}"))
        found.append(("time in steps", format_seconds(sum(event["seconds"] for event in steps))))
    if run.measured:
        found.append(("peak of a rank", format_bytes(run.measured["peak_bytes"])))
        if run.forecast:
            found.append(
                ("forecast / measured", ratio(run.forecast["device"]["peak_bytes"], run.measured["peak_bytes"]))
            )
    elif run.forecast:
        found.append(("forecast peak", format_bytes(run.forecast["device"]["peak_bytes"])))
    return found


def _outcome(run: Record) -> Section:
    if run.status == "failed":
        return Section(title="How it ended", words=f"It failed. {run.then}".strip(), code=run.words)
    told = " ".join(dict.fromkeys(filter(None, (run.words, "" if run.then in run.words else run.then))))
    return Section(title="How it goes" if run.status == "going" else "How it ended", words=told)


def _asked(run: Record) -> Section:
    about, loop, command = run.about, run.about["loop"], run.command
    samples = int(loop.get("micro_batch", 1)) * int(loop.get("accumulation", 1)) * about["ranks"]
    more = {
        Strategy: [("ranks", str(about["ranks"]))],
        Loop: [("global batch", f"{samples} samples")],
        Recipe: [("trained tokens of the data", format_count((about.get("data") or {}).get("trained_tokens", 0)))],
    }
    tables = [_fields(kind, about[kind.__name__.lower()], rows) for kind, rows in more.items()]
    notes = ["Fields that are not listed have their defaults."]
    if MARK in command:
        notes.append(f"A secret stood where the command says {MARK}: give it anew.")
    return Section(
        title="What was asked",
        words=" ".join([*notes, "The command that does the same again:"]),
        code=command,
        tables=[(table, "") for table in tables],
    )


def _fields(kind: type[Any], values: Mapping[str, Any], more: Sequence[tuple[str, str]]) -> Table:
    """Those of a dataclass that say most, and those that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    shown = [
        name for name, value in values.items() if value is not None and (name in SAID or value != defaults.get(name))
    ]
    rows = [(name, _plain(values[name])) for name in shown]
    return Table(title=kind.__name__, columns=("field", "value"), rows=[*rows, *more])


def _got(run: Record) -> Section:
    audits = (run.memory or {}).get("audits") or []
    if not audits:
        return Section(
            title="What was got",
            words="What each rank held is written to memory.json when a run finishes; this one has none.",
        )
    return Section(
        title="What was got",
        words=f"Audited after the first step: {audits[0]['engine']} on {audits[0]['ranks']} rank(s).",
        tables=[(_holdings(audits), ""), (_ledger(audits[0]), "")],
    )


def _holdings(audits: Sequence[Mapping[str, Any]]) -> Table:
    """Bytes of each rank beside the engine's account; ranks that hold the same are one row."""

    def cells(held: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple("–" if held.get(part) is None else format_bytes(held[part]) for part in STATES)

    same: dict[tuple[str, ...], list[int]] = {}
    for rank, audit in enumerate(audits):
        same.setdefault(cells(audit["held"]), []).append(rank)
    rows = [(_ranks(ranks), *held) for held, ranks in same.items()]
    if audits[0].get("expected"):
        rows.append(("account", *cells(audits[0]["expected"])))
    notes = ("account: what the engine's arithmetic says a rank holds.",)
    return Table(title="States held between steps, by rank", columns=("rank", *STATES), rows=rows, notes=notes)


def _ledger(audit: Mapping[str, Any]) -> Table:
    held, asked = audit["held"].get("dtypes", {}), (audit.get("expected") or {}).get("dtypes", {})
    rows = [(part, dtype, asked.get(part, "–")) for part, dtype in held.items()]
    return Table(title="Dtype ledger", columns=("part", "got", "account"), rows=rows)


def _beside(run: Record) -> Section:
    title = "Forecast beside measured"
    forecast, measured = run.forecast, run.measured
    why = (run.memory or {}).get("reason") or "peaks are written when a run finishes"
    unforecast = (run.memory or {}).get("unforecast") or "it was not forecast"
    if not forecast and not measured:
        return Section(title=title, words=f"There is neither: {unforecast}; {why}.")
    words = ["Bytes of the rank that holds most, by what it holds at its peak, and the highest total of each phase."]
    if not measured:
        words.append(f"Nothing was measured: {why}.")
    elif not forecast:
        words.append(f"There is no forecast: {unforecast}.")
    elif forecast["device"]["peak_phase"] != measured["peak_phase"]:
        foretold = forecast["device"]["peak_phase"]
        words.append(f"The peak was forecast in {foretold} and measured in {measured['peak_phase']}.")
    tables = [by_part(forecast, measured), by_phase(forecast, measured)]
    if measured:
        tables.append((by_rank(run.memory or {}), ""))
    if run.steps:
        tables.append((_speed(run), ""))
    return Section(title=title, words=" ".join(words), tables=tables)


def _speed(run: Record) -> Table:
    forecast = run.forecast or {}
    seconds, speed = step_seconds(run.steps), throughput(run.steps)
    rows = []
    for name, foretold, measured, spell in (
        ("a step", forecast.get("step_seconds"), seconds, _seconds),
        ("tokens/s", forecast.get("tokens_per_second"), speed, "{:,.0f}".format),
    ):
        rows.append((name, spell(foretold) if foretold else "–", spell(measured), ratio(foretold, measured)))
    notes = forecast.get("unknown") or ()
    return dataclasses.replace(compared("Time, of the median step", "figure", rows), notes=notes)


def _training(run: Record) -> Section:
    title = "Training"
    if not run.steps:
        return Section(title=title, words="No step was done.")
    losses = [(event["step"], event["loss"]) for event in run.steps]
    lines = {"loss": losses}
    if run.evaluations:
        lines["evaluation"] = [(event["step"], event["eval_loss"]) for event in run.evaluations]
    speed = [(event["step"], event["tokens"] / event["seconds"]) for event in run.steps]
    shown = _some(run.steps, ROWS)
    rows = [
        (
            f"{e['step']:,}",
            _number(e["loss"]),
            _number(e["grad_norm"]),
            f"{e['lr']:.3g}",
            f"{e['tokens'] / e['seconds']:,.0f}",
        )
        for e in shown
    ]
    columns = ("step", "loss", "gradient norm", "lr", "tokens/s")
    table = Table(
        title="Steps", columns=columns, rows=rows, notes=_left_out(len(run.steps), len(shown), "events.jsonl")
    )
    tables = [(table, curve(lines, title="Loss", x="step", y="loss"))]
    tables.append(
        (_rates(run), curve({"tokens/s": speed}, title="Throughput", x="step", y="tokens/s", spell_y="{:,.0f}".format))
    )
    if run.evaluations:
        tables.append((_evaluations(run), ""))
    skipped = sum(bool(event.get("skipped")) for event in run.steps)
    words = f"In {skipped} step(s) fp16 overflowed, and they were skipped." if skipped else ""
    return Section(title=title, words=words, tables=tables)


def _rates(run: Record) -> Table:
    tokens, seconds = sum(event["tokens"] for event in run.steps), sum(event["seconds"] for event in run.steps)
    rows = [
        ("tokens", format_count(tokens)),
        ("time in steps", format_seconds(seconds)),
        ("the median step", _seconds(step_seconds(run.steps))),
        ("tokens/s, over all", f"{tokens / seconds:,.0f}"),
        ("tokens/s, of the median step", f"{throughput(run.steps):,.0f}"),
    ]
    notes = ("The first five steps do not count for the median: the memory window lies in them.",)
    return Table(title="Throughput", columns=("figure", "value"), rows=rows, notes=notes)


def _evaluations(run: Record) -> Table:
    shown = _some(run.evaluations, ROWS)
    rows = [(f"{event['step']:,}", _number(event["eval_loss"])) for event in shown]
    notes = _left_out(len(run.evaluations), len(shown), "events.jsonl")
    return Table(title="Evaluation losses", columns=("step", "loss"), rows=rows, notes=notes)


def _checkpoints(run: Record) -> Section:
    title, made = "Checkpoints", run.checkpoints
    if not made:
        return Section(title=title, words="None was published.")
    shown = _some(made, ROWS)
    rows = [
        (
            f"{c['step']:,}",
            format_bytes(c["bytes"]),
            format_seconds(c["stall_seconds"]),
            format_seconds(c["write_seconds"]),
        )
        for c in shown
    ]
    stalled, trained = sum(c["stall_seconds"] for c in made), sum(event["seconds"] for event in run.steps)
    words = f"{len(made)} published. The training waited {format_seconds(stalled)} for them in all"
    words += f", {stalled / trained:.1%} of the time in steps." if trained else "."
    columns = ("step", "bytes", "training waited", "written in")
    notes = _left_out(len(made), len(shown), "checkpoints.jsonl")
    return Section(title=title, words=words, tables=[(Table(title=title, columns=columns, rows=rows, notes=notes), "")])


def _attempts(run: Record) -> Section | None:
    attempts = run.about.get("attempts") or []
    if not attempts:
        return None
    rows = [
        (str(number), one["started"], one["strategy"]["sharding"], str(one["ranks"]), f"{one['from_step']:,}")
        for number, one in enumerate(attempts, start=1)
    ]
    columns = ("attempt", "started", "sharding", "ranks", "from step")
    shown = rows if len(rows) <= ROWS else [*rows[:1], *rows[1 - ROWS :]]
    notes = _left_out(len(rows), len(shown), "run.json")
    return Section(title="Attempts", tables=[(Table(title="Attempts", columns=columns, rows=shown, notes=notes), "")])


def _machine(run: Record) -> Section:
    about = run.about
    versions = [(name, version or "not installed") for name, version in about.get("versions", {}).items()]
    machine, rows = about.get("hardware") or {}, []
    if device := machine.get("device"):
        count = f"{machine.get('nodes', 1)} node(s) with {machine.get('count', 1)} each"
        rows = [("device", f"{device['name']} ({device['kind']})"), ("devices", count)]
        rows.append(("memory of a device", format_bytes(device["total_bytes"])))
        rows.append(("memory of the host", format_bytes(machine["host_bytes"])))
    tables = [
        (Table(title="Machine", columns=("figure", "value"), rows=rows), ""),
        (Table(title="Versions", columns=("library", "version"), rows=versions), ""),
    ]
    return Section(title="Machine and versions", tables=[pair for pair in tables if pair[0].rows])


def _some(lines: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """At most so many, evenly, the first and the last among them."""
    if len(lines) <= most:
        return lines
    return [lines[round(number * (len(lines) - 1) / (most - 1))] for number in range(most)]


def _left_out(count: int, shown: int, file: str) -> list[str]:
    return [f"{shown} of {count:,} lines; all are in {file}."] if shown < count else []


def _ranks(ranks: Sequence[int]) -> str:
    """`0`, `0–3`, `0, 2`."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _seconds(seconds: float) -> str:
    """Of a step: a few seconds have a fraction that tells."""
    return f"{seconds:.2f} s" if 1 <= seconds < 10 else format_seconds(seconds)


def _number(value: float | None) -> str:
    """JSON's null stands for what was not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def _plain(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
