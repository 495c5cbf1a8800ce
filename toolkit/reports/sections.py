"""The sections of a report, from a run's folder: sentences, commands, tables, and pictures with their tables."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.parallelism import ORDER, Parallelism
from toolkit.config.run_config import SECTIONS
from toolkit.core.charts import curve
from toolkit.core.display import Table
from toolkit.core.redaction import MARK, shorten
from toolkit.core.units import format_bytes, format_count, format_seconds, format_step_seconds
from toolkit.engines.records import STATES
from toolkit.exporters import logits_text
from toolkit.forecasting.mesh_picture import mesh_table
from toolkit.forecasting.stages import schedule_picture, stages_table
from toolkit.reports.run_record import RunRecord
from toolkit.reports.tables import (
    by_part,
    by_phase,
    by_rank,
    by_time,
    ratio,
    sample,
    spell_bytes,
    spell_number,
    step_seconds,
    throughput,
)
from toolkit.run_folder.run_charts import experts_table, speed
from toolkit.training.loop import Step

OUTCOMES = (
    "model", "data", "sharding", "offload", "adapter", "precision", "attention", "activation_checkpointing", "loss",
    "micro_batch", "accumulation", "seq_len", "optimizer", "lr", "steps", "seed",
)  # fmt: skip
"""Fields that are always shown; others appear if they differ from their defaults."""

TABLE_ROWS, MOST_FIGURES, CELL = 200, 12, 1_000
"""The most rows of a table, figures of `tk.log` in it, and characters of a cell."""

SPELLINGS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", spell_number),
    "grad_norm": ("gradient norm", spell_number),
    "lr": ("lr", "{:.3g}".format),
}
"""Figures of a step that have columns, each with its title."""

STEP_FIELDS = frozenset({*(field.name for field in dataclasses.fields(Step)), "attempt", "samples", "steps"})
"""The recipe's figures of a step."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a report."""

    title: str
    words: str = ""
    """A paragraph."""
    code: str = ""
    """Literal text: a command, or the end of a rank's log."""
    tables: Sequence[Table] = ()

    def text(self) -> str:
        """Return text for a terminal."""
        code = "\n".join("    " + line for line in self.code.splitlines())
        paragraphs = [part for part in (self.words, code, *(table.text() for table in self.tables)) if part]
        return "\n\n".join([f"== {self.title} ==", *paragraphs])


def sections_of(run: RunRecord) -> list[Section]:
    """Return all sections, in the order of the page. The memory of a target's ranks is its own to measure."""
    sections = [_outcome(run), _target_settings(run, run.target) if run.target else _settings(run)]
    if run.target is None:
        sections += [_audit(run), _memory(run)]
    sections += [_training(run), _checkpoints(run)]
    if run.status == "finished" and run.about.get("export"):
        sections.append(_export(run.about["export"]))
    if run.about.get("attempts"):
        sections.append(_attempts(run.about["attempts"]))
    sections.append(_machine(run))
    return [
        replace(part, words=shorten(part.words), code=shorten(part.code), tables=[*map(_bounded, part.tables)])
        for part in sections
    ]


def _bounded(table: Table) -> Table:
    """Return a table of at most `TABLE_ROWS` rows, with short cells: a folder may have been written by anybody."""
    rows = [*table.rows]
    notes = [f"{TABLE_ROWS} of {len(rows):,} rows are shown."] if len(rows) > TABLE_ROWS else []
    shown = (table.columns, table.notes[:TABLE_ROWS], *rows[:TABLE_ROWS])
    lines = ([shorten(str(cell), CELL) for cell in line] for line in shown)
    columns, own, *cells = lines
    return replace(table, columns=columns, rows=cells, notes=[*own, *notes])


def figures(run: RunRecord) -> list[tuple[str, str]]:
    """Return the most important figures, each a name and a value."""
    train_config, steps = run.about["train_config"], run.steps
    planned = f" of {int(train_config['steps']):,}" if train_config.get("steps") else ""
    rows = [("status", run.status), ("sharding", run.sharding), ("steps", f"{run.done:,}{planned}")]
    if losses := [event["loss"] for event in steps if event["loss"] is not None]:
        rows.append(("loss", f"{losses[0]:.3f} → {losses[-1]:.3f}"))
    if run.evaluations:
        rows.append(("evaluation loss", spell_number(run.evaluations[-1]["eval_loss"])))
    if rate := throughput(steps):
        rows.append(("tokens/s", f"{rate:,.0f}"))
    if steps:
        rows.append(("time in steps", format_seconds(sum(event["seconds"] for event in steps))))
    expected = run.forecast["device"]["peak_bytes"] if run.forecast else None
    if run.measured:
        measured = run.measured["peak_bytes"]
        rows.append(("peak of a rank", format_bytes(measured)))
        rows += [("forecast / measured", ratio(expected, measured))] if expected else []
    elif expected:
        rows.append(("forecast peak", format_bytes(expected)))
    return rows


def summarize(run: RunRecord) -> str:
    """Return the end of a training in a few lines: losses, speed, memory next to the forecast, the saved model."""
    about, steps = run.about, run.steps
    losses = [event["loss"] for event in steps if event.get("loss") is not None]
    evaluations = [event["eval_loss"] for event in run.evaluations if event["eval_loss"] is not None]
    rows, peak = (about.get("data") or {}).get("count"), (run.measured or {}).get("peak_bytes")
    forecast = format_bytes(run.forecast["device"]["peak_bytes"]) if run.forecast else "none"
    parts = [
        f"loss {losses[0]:.4f} → {losses[-1]:.4f}" if losses else "",
        f"evaluation loss {evaluations[-1]:.4f}" if evaluations else "",
        f"lowest {min(evaluations):.4f}" if len(evaluations) > 1 else "",
        f"{throughput(steps) or 0:,.0f} tokens/s",
        f"ended early, of {about['planned_steps']:,} steps" if about.get("planned_steps") else "",
        f"{run.done:,} steps in {sum(event['seconds'] for event in steps):,.1f} s",
        f"{run.done * _global_batch(about) / rows:.2f} epochs" if rows else "",
        f"peak of a rank {format_bytes(peak) if peak else 'not measured'}, forecast {forecast}",
    ]
    export, best = about.get("export"), run.path / "best"
    lines = [", ".join(filter(None, parts))]
    lines += [f"saved in {export['folder']}", f"load it with: {export['load']}"] if export else ["nothing was saved"]
    lines += [f'try it: toolkit generate {shlex.quote(str(run.path))} "a prompt"'] if export else []
    lines += [f"the model of the lowest evaluation loss: {best}"] if best.is_dir() else []
    return "\n".join(lines)


def _global_batch(about: Mapping[str, Any]) -> int:
    """Return the samples of a step."""
    sizes = {**about["train_config"], **about.get("parallelism", {})}
    return math.prod(int(sizes.get(name, 1)) for name in ("micro_batch", "accumulation", "dp_replicate", "dp_shard"))


def _outcome(run: RunRecord) -> Section:
    if run.status == "failed":
        return Section(title="How it ended", words=f"It failed. {run.then}".strip(), code=run.words)
    words = f"{run.words} {run.then}".strip() if run.then not in run.words else run.words
    title = "Progress" if run.status == "running" else "How it ended"
    return Section(title=title, words=words[:1].upper() + words[1:])


def _settings(run: RunRecord) -> Section:
    about = run.about
    tokens = (about.get("data") or {}).get("trained_tokens", 0)
    tables = [
        _changed_settings("strategy", about, ("ranks", str(about["ranks"]))),
        _changed_settings("train_config", about, ("global batch", f"{_global_batch(about)} samples")),
        _changed_settings("run_config", about, ("trained tokens of the data", format_count(tokens))),
    ]
    sizes = {name: int(size) for name, size in about.get("parallelism", {}).items() if name in (*ORDER, "ep")}
    mesh = mesh_table(Parallelism(**sizes), (run.forecast or {}).get("pipeline"))
    tables += [mesh] if mesh.picture else []
    return _repeatable(run, tables, "The command that does the same again:")


def _target_settings(run: RunRecord, target: Mapping[str, Any]) -> Section:
    """Return the section of a script, module or function: its name, and the strategy of `tk.accelerator()`."""
    cells = {
        "kind": target["kind"],
        "name": target["name"],
        "arguments": " ".join(target["arguments"]),
        "sha256 of its file": target["sha256"],
    }
    rows = [(name, value) for name, value in cells.items() if value]
    strategy = _changed_settings("strategy", run.about, ("ranks", str(run.about["ranks"])))
    more = ", given its arguments (`args=`, `kwargs=`)" if target["kind"] == "function" else ""
    tables = [Table(title="Target", columns=("field", "value"), rows=rows), strategy]
    return _repeatable(run, tables, f"What does the same again{more}:")


def _repeatable(run: RunRecord, tables: Sequence[Table], words: str) -> Section:
    """Return the settings with the command that repeats the run."""
    notes = ["Fields that are not listed have their defaults."]
    if MARK in run.command:
        notes.append(f"A secret in the command is replaced by {MARK}: give it again.")
    return Section(title="Settings", words=" ".join([*notes, words]), code=run.command, tables=tables)


def _changed_settings(part: str, about: Mapping[str, Any], more: tuple[str, str]) -> Table:
    """Return the main settings of a part of `run.json`, and those with other values than the default."""
    defaults = {field.name: field.default for field in dataclasses.fields(SECTIONS[part])}
    rows = [
        (name, str({True: "yes", False: "no"}[value] if isinstance(value, bool) else value))
        for name, value in about[part].items()
        if value is not None and (name in OUTCOMES or value != defaults.get(name))
    ]
    return Table(title=SECTIONS[part].__name__, columns=("field", "value"), rows=[*rows, more])


def _audit(run: RunRecord) -> Section:
    audits = run.memory.get("audits") or []
    if not audits:
        words = "A finished run has the memory of each rank in memory.json; this run has no such file."
        return Section(title="Audit", words=words)
    words = f"Audited after the first step: {audits[0]['engine']}, ranks {audits[0]['ranks']}."
    if guard := (run.about.get("guard") or {}):
        words += (
            f" A small copy over {guard['ranks']} ranks computed as one process did before the run: losses "
            f"{guard['loss_difference']:.0e} and gradient norms {guard['norm_difference']:.0e} apart."
        )
    return Section(title="Audit", words=words, tables=[_state_table(audits), _dtype_table(audits[0])])


def _state_table(audits: Sequence[Mapping[str, Any]]) -> Table:
    """Return each rank's bytes next to the engine's expectation; equal ranks share a row."""
    same: dict[tuple[str, ...], list[int]] = {}
    for rank, audit in enumerate(audits):
        same.setdefault(tuple(spell_bytes(audit["measured"].get(part)) for part in STATES), []).append(rank)
    rows = [(_ranks(ranks), *cells) for cells, ranks in same.items()]
    if expected := audits[0].get("expected"):
        rows.append(("expected", *(spell_bytes(expected.get(part)) for part in STATES)))
    notes = ("expected: by the engine's arithmetic.",)
    return Table(title="States held between steps, by rank", columns=("rank", *STATES), rows=rows, notes=notes)


def _dtype_table(audit: Mapping[str, Any]) -> Table:
    actual, expected = audit["measured"].get("dtypes", {}), (audit.get("expected") or {}).get("dtypes", {})
    rows = [(part, dtype, expected.get(part, "–")) for part, dtype in actual.items()]
    return Table(title="Dtype ledger", columns=("part", "measured", "expected"), rows=rows)


def _memory(run: RunRecord) -> Section:
    title, forecast, measured, memory = "Forecast and measured", run.forecast, run.measured, run.memory
    why = memory.get("reason") or "peaks are written when a run finishes"
    unforecast = memory.get("unforecast") or "it was not forecast"
    if not forecast and not measured:
        return Section(title=title, words=f"There is neither: {unforecast}; {why}.")
    words = ["Bytes of the rank with the highest peak: the parts at the peak, and the highest total of each phase."]
    if not measured:
        words.append(f"Nothing was measured: {why}.")
    elif not forecast:
        words.append(f"No forecast: {unforecast}.")
    elif (expected := forecast["device"]["peak_phase"]) != measured["peak_phase"]:
        words.append(f"The peak was forecast in {expected} and measured in {measured['peak_phase']}.")
    tables = [by_part(forecast, measured), by_phase(forecast, measured)]
    if measured:
        tables.append(by_rank(memory))
    if pipeline := (forecast or {}).get("pipeline"):
        ran = memory.get("schedule")
        tables.append(stages_table(pipeline, schedule_picture(pipeline, ran), ran))
    if run.steps:
        tables.append(by_time(forecast or {}, step_seconds(run.steps), throughput(run.steps)))
    return Section(title=title, words=" ".join(words), tables=tables)


def _training(run: RunRecord) -> Section:
    """Return losses, evaluation losses and tokens a second, step by step."""
    title, steps = "Training", run.steps
    if not steps:
        return Section(title=title, words="No step was done.")
    if all(map(_is_counted, steps)):
        advice = "`tk.log(step, loss=loss)` in the loop shows its losses here."
        return Section(title=title, words=f"{run.done:,} optimizer steps were counted. {advice}")
    lines = {"loss": [(event["step"], event["loss"]) for event in steps]}
    if run.evaluations:
        lines["evaluation"] = [(event["step"], event["eval_loss"]) for event in run.evaluations]
    loss = curve(lines, title="Loss", x="step", y="loss")
    tables = [replace(_steps(run), picture=loss)]
    if rates := [(event["step"], rate) for event in steps if (rate := speed(event)) is not None]:
        tables.append(_throughput(run, rates))
    if run.evaluations:
        evaluations, notes = sample(run.evaluations, "events.jsonl")
        rows = [(f"{event['step']:,}", spell_number(event["eval_loss"])) for event in evaluations]
        tables.append(Table(title="Evaluation losses", columns=("step", "loss"), rows=rows, notes=notes))
    if (table := experts_table(steps)) is not None:
        tables.append(table)
    skipped = sum(bool(event.get("skipped")) for event in steps)
    words = f"In {skipped} step(s) fp16 overflowed, and they were skipped." if skipped else ""
    return Section(title=title, words=words, tables=tables)


def _is_counted(event: Mapping[str, Any]) -> bool:
    """Return whether a step of a user's own loop was counted, and has no figures (`run_log.count_step`)."""
    return set(event) == {"step", "seconds", "loss"} and event["loss"] is None


def _steps(run: RunRecord) -> Table:
    """Return loss, norm, learning rate and speed where the steps have them, and other figures of `tk.log`."""
    last = run.steps[-1]
    spellings = {name: spelling for name, spelling in SPELLINGS.items() if name in last}
    spellings |= {key: (key, "{:.4g}".format) for key in [key for key in last if key not in STEP_FIELDS][:MOST_FIGURES]}

    def cell(event: Mapping[str, Any], name: str, spell: Callable[[float], str]) -> str:
        if name not in event or _is_counted(event):
            return "–"
        return spell_number(None) if event[name] is None else spell(event[name])

    rows, (lines, notes) = [], sample(run.steps, "events.jsonl")
    for event in lines:
        cells, rate = [cell(event, name, spell) for name, (_, spell) in spellings.items()], speed(event)
        rows.append((f"{event['step']:,}", *cells, "–" if rate is None else f"{rate:,.0f}"))
    columns = ("step", *(title for title, _ in spellings.values()), "tokens/s")
    return Table(title="Steps", columns=columns, rows=rows, notes=notes)


def _throughput(run: RunRecord, rates: Sequence[tuple[float, float]]) -> Table:
    tokens, seconds = (sum(event.get(name) or 0 for event in run.steps) for name in ("tokens", "seconds"))
    rows = [
        ("tokens", format_count(tokens)),
        ("time in steps", format_seconds(seconds)),
        ("the median step", format_step_seconds(step_seconds(run.steps))),
        ("tokens/s, over all", f"{tokens / seconds:,.0f}"),
        ("tokens/s, of the median step", f"{throughput(run.steps) or 0:,.0f}"),
    ]
    notes = ("The first five steps do not count for the median: the memory window lies in them.",)
    picture = curve({"tokens/s": rates}, title="Throughput", x="step", y="tokens/s", spell_y="{:,.0f}".format)
    return Table(title="Throughput", columns=("figure", "value"), rows=rows, notes=notes, picture=picture)


def _checkpoints(run: RunRecord) -> Section:
    """Return the published checkpoints and their cost."""
    title, saved = "Checkpoints", run.checkpoints
    if not saved:
        return Section(title=title, words="None was published.")
    stalled, trained = sum(line["stall_seconds"] for line in saved), sum(event["seconds"] for event in run.steps)
    words = f"{len(saved):,} published. The training waited {format_seconds(stalled)} for them in all"
    words += f", {stalled / trained:.1%} of the time in steps." if trained else "."
    rows, (lines, notes) = [], sample(saved, "checkpoints.jsonl")
    for line in lines:
        times = (format_seconds(line[name]) for name in ("stall_seconds", "write_seconds"))
        rows.append((f"{line['step']:,}", format_bytes(line["bytes"]), *times))
    columns = ("step", "bytes", "training waited", "written in")
    return Section(title=title, words=words, tables=[Table(title=title, columns=columns, rows=rows, notes=notes)])


def _export(export: Mapping[str, Any]) -> Section:
    rows = [("folder", export["folder"]), ("logits against the trained model", logits_text(export["logits_error"]))]
    table = Table(title="Saved and checked", columns=("what", "value"), rows=rows)
    return Section(title="The trained model", words=" ".join(export["notes"]), tables=[table])


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Section:
    rows, (lines, notes) = [], sample([*enumerate(attempts, start=1)], "run.json")
    for number, attempt in lines:
        sharding, ranks, start = attempt["strategy"]["sharding"], attempt["ranks"], attempt.get("from_step", 0)
        rows.append((str(number), attempt["started"], sharding, str(ranks), f"{start:,}"))
    columns = ("attempt", "started", "sharding", "ranks", "from step")
    return Section(title="Attempts", tables=[Table(title="Attempts", columns=columns, rows=rows, notes=notes)])


def _machine(run: RunRecord) -> Section:
    versions = [(name, version or "not installed") for name, version in run.about.get("versions", {}).items()]
    machine, rows = run.about.get("hardware") or {}, []
    if device := machine.get("device"):
        nodes, count = machine.get("nodes", 1), machine.get("count", 1)
        rows = [("device", f"{device['name']} ({device['kind']})")]
        if device["kind"] != "cpu":  # which all ranks share
            rows.append(("devices", str(count) if nodes == 1 else f"{nodes * count}, {count} on each of {nodes} nodes"))
        rows.append(("memory of a device", format_bytes(device["total_bytes"])))
        rows.append(("memory of the host", format_bytes(machine["host_bytes"])))
    tables = [
        Table(title="Machine", columns=("figure", "value"), rows=rows),
        Table(title="Versions", columns=("library", "version"), rows=versions),
    ]
    return Section(title="Machine and versions", tables=[table for table in tables if table.rows])


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in short: `0`, `0–3`, `0, 2`."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))
