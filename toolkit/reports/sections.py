"""The sections of a report, from a run's folder: sentences, commands, tables, and pictures with their tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.flags import section
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Table
from toolkit.core.redaction import MARK
from toolkit.core.units import format_bytes, format_count, format_seconds
from toolkit.exporters import logits_text
from toolkit.reports.memory import by_part, by_phase, by_rank, ratio
from toolkit.reports.parts import Section, sample_table, spell_number
from toolkit.reports.progress import checkpoints, speed, training
from toolkit.reports.record import Record, throughput

OUTCOMES = (
    "model", "data", "sharding", "offload", "adapter", "precision", "attention", "activation_checkpointing",
    "micro_batch", "accumulation", "seq_len", "optimizer", "lr", "steps", "seed",
)  # fmt: skip
"""Fields that are always shown; others appear if they differ from their defaults."""

STATES = ("trainable", "frozen", "master", "optimizer")


def sections_of(run: Record) -> list[Section]:
    """Return all sections, in the order of the page."""
    writers = (
        _outcome_section,
        _settings_section,
        _audit_section,
        _memory_section,
        training,
        checkpoints,
        _export_section,
        _attempts_section,
        _machine_section,
    )
    return [section for make in writers if (section := make(run)) is not None]


def figures(run: Record) -> list[tuple[str, str]]:
    """Return the most important figures, each a name and a value."""
    train_config, steps = run.about["train_config"], run.steps
    planned = f" of {int(train_config['steps']):,}" if "steps" in train_config else ""
    rows = [("status", run.status), ("steps", f"{run.done:,}{planned}")]
    losses = [event["loss"] for event in steps if event["loss"] is not None]
    if losses:
        rows.append(("loss", f"{losses[0]:.3f} → {losses[-1]:.3f}"))
    if run.evaluations:
        rows.append(("evaluation loss", spell_number(run.evaluations[-1]["eval_loss"])))
    if steps:
        if rate := throughput(steps):
            rows.append(("tokens/s", f"{rate:,.0f}"))
        rows.append(("time in steps", format_seconds(sum(event["seconds"] for event in steps))))
    if run.measured:
        rows.append(("peak of a rank", format_bytes(run.measured["peak_bytes"])))
        if run.forecast:
            expected = run.forecast["device"]["peak_bytes"]
            rows.append(("forecast / measured", ratio(expected, run.measured["peak_bytes"])))
    elif run.forecast:
        rows.append(("forecast peak", format_bytes(run.forecast["device"]["peak_bytes"])))
    return rows


def _outcome_section(run: Record) -> Section:
    if run.status == "failed":
        return Section(title="How it ended", words=f"It failed. {run.then}".strip(), code=run.words)
    words = " ".join(dict.fromkeys(filter(None, (run.words, "" if run.then in run.words else run.then))))
    return Section(
        title="How it goes" if run.status == "running" else "How it ended", words=words[:1].upper() + words[1:]
    )


def _settings_section(run: Record) -> Section:
    if run.target is not None:
        return _target_section(run, run.target)
    about, train_config, command = run.about, run.about["train_config"], run.command
    sizes = {**train_config, **about.get("parallelism", {})}
    samples = math.prod(int(sizes.get(name, 1)) for name in ("micro_batch", "accumulation", "dp_replicate", "dp_shard"))
    more = {
        Strategy: [("ranks", str(about["ranks"]))],
        TrainConfig: [("global batch", f"{samples} samples")],
        RunConfig: [("trained tokens of the data", format_count((about.get("data") or {}).get("trained_tokens", 0)))],
    }
    tables = [_changed_settings(kind, about[section(kind)], rows) for kind, rows in more.items()]
    notes = ["Fields that are not listed have their defaults."]
    if MARK in command:
        notes.append(f"A secret in the command is replaced by {MARK}: give it again.")
    return Section(
        title="Settings",
        words=" ".join([*notes, "The command that does the same again:"]),
        code=command,
        tables=[(table, "") for table in tables],
    )


def _target_section(run: Record, target: Mapping[str, Any]) -> Section:
    """Return the section of a script, module or function: its name, and the strategy of `tk.accelerator()`."""
    rows = [("kind", target["kind"]), ("name", target["name"])]
    if target["arguments"]:
        rows.append(("arguments", " ".join(target["arguments"])))
    if target["sha256"]:
        rows.append(("sha256 of its file", target["sha256"]))
    strategy = _changed_settings(Strategy, run.about["strategy"], [("ranks", str(run.about["ranks"]))])
    words = "Fields that are not listed have their defaults. "
    words += f"A secret is replaced by {MARK}: give it again. " if MARK in run.command else ""
    words += "What does the same again"
    more = ", given its arguments (`args=`, `kwargs=`):" if target["kind"] == "function" else ":"
    tables = [(Table(title="Target", columns=("field", "value"), rows=rows), ""), (strategy, "")]
    return Section(title="Settings", words=words + more, code=run.command, tables=tables)


def _changed_settings(kind: type[Any], values: Mapping[str, Any], more: Sequence[tuple[str, str]]) -> Table:
    """Return the main settings of a dataclass, and those with other values than the default."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    cells = [
        name
        for name, value in values.items()
        if value is not None and (name in OUTCOMES or value != defaults.get(name))
    ]
    rows = [(name, _cell_text(values[name])) for name in cells]
    return Table(title=kind.__name__, columns=("field", "value"), rows=[*rows, *more])


def _audit_section(run: Record) -> Section | None:
    if run.target is not None:  # its ranks' memory is its own to measure
        return None
    audits = (run.memory or {}).get("audits") or []
    if not audits:
        return Section(
            title="Audit",
            words="A finished run has the memory of each rank in memory.json; this run has no such file.",
        )
    return Section(
        title="Audit",
        words=f"Audited after the first step: {audits[0]['engine']} on {audits[0]['ranks']} rank(s).",
        tables=[(_state_table(audits), ""), (_dtype_table(audits[0]), "")],
    )


def _state_table(audits: Sequence[Mapping[str, Any]]) -> Table:
    """Return each rank's bytes next to the engine's expectation; equal ranks share a row."""

    def cells(key: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple("–" if key.get(part) is None else format_bytes(key[part]) for part in STATES)

    same: dict[tuple[str, ...], list[int]] = {}
    for rank, audit in enumerate(audits):
        same.setdefault(cells(audit["measured"]), []).append(rank)
    rows = [(_ranks(ranks), *key) for key, ranks in same.items()]
    if audits[0].get("expected"):
        rows.append(("expected", *cells(audits[0]["expected"])))
    notes = ("expected: by the engine's arithmetic.",)
    return Table(title="States held between steps, by rank", columns=("rank", *STATES), rows=rows, notes=notes)


def _dtype_table(audit: Mapping[str, Any]) -> Table:
    actual, expected = audit["measured"].get("dtypes", {}), (audit.get("expected") or {}).get("dtypes", {})
    rows = [(part, dtype, expected.get(part, "–")) for part, dtype in actual.items()]
    return Table(title="Dtype ledger", columns=("part", "measured", "expected"), rows=rows)


def _memory_section(run: Record) -> Section | None:
    if run.target is not None:
        return None
    title = "Forecast and measured"
    forecast, measured = run.forecast, run.measured
    why = (run.memory or {}).get("reason") or "peaks are written when a run finishes"
    unforecast = (run.memory or {}).get("unforecast") or "it was not forecast"
    if not forecast and not measured:
        return Section(title=title, words=f"There is neither: {unforecast}; {why}.")
    words = ["Bytes of the rank with the highest peak: the parts at the peak, and the highest total of each phase."]
    if not measured:
        words.append(f"Nothing was measured: {why}.")
    elif not forecast:
        words.append(f"No forecast: {unforecast}.")
    elif forecast["device"]["peak_phase"] != measured["peak_phase"]:
        expected = forecast["device"]["peak_phase"]
        words.append(f"The peak was forecast in {expected} and measured in {measured['peak_phase']}.")
    tables = [by_part(forecast, measured), by_phase(forecast, measured)]
    if measured:
        tables.append((by_rank(run.memory or {}), ""))
    if run.steps:
        tables.append((speed(run), ""))
    return Section(title=title, words=" ".join(words), tables=tables)


def _export_section(run: Record) -> Section | None:
    export = run.about.get("export")
    if run.status != "finished" or not export:
        return None
    rows = [("folder", export["folder"]), ("logits against the trained model", logits_text(export["logits_error"]))]
    table = Table(title="Saved and checked", columns=("what", "value"), rows=rows)
    return Section(title="The trained model", words=" ".join(export["notes"]), tables=[(table, "")])


def _attempts_section(run: Record) -> Section | None:
    attempts = run.about.get("attempts") or []
    if not attempts:
        return None
    numbered = [{"number": number, **attempt} for number, attempt in enumerate(attempts, start=1)]

    def row(attempt: Mapping[str, Any]) -> tuple[str, ...]:
        sharding = attempt["strategy"]["sharding"]
        return (
            str(attempt["number"]),
            attempt["started"],
            sharding,
            str(attempt["ranks"]),
            f"{attempt.get('from_step', 0):,}",
        )

    columns = ("attempt", "started", "sharding", "ranks", "from step")
    return Section(title="Attempts", tables=[(sample_table("Attempts", columns, numbered, row, "run.json"), "")])


def _machine_section(run: Record) -> Section:
    about = run.about
    versions = [(name, version or "not installed") for name, version in about.get("versions", {}).items()]
    machine, rows = about.get("hardware") or {}, []
    if device := machine.get("device"):
        nodes, count = machine.get("nodes", 1), machine.get("count", 1)
        rows = [("device", f"{device['name']} ({device['kind']})")]
        if device["kind"] != "cpu":  # which all ranks share
            rows.append(("devices", str(count) if nodes == 1 else f"{nodes * count}, {count} on each of {nodes} nodes"))
        rows.append(("memory of a device", format_bytes(device["total_bytes"])))
        rows.append(("memory of the host", format_bytes(machine["host_bytes"])))
    tables = [
        (Table(title="Machine", columns=("figure", "value"), rows=rows), ""),
        (Table(title="Versions", columns=("library", "version"), rows=versions), ""),
    ]
    return Section(title="Machine and versions", tables=[pair for pair in tables if pair[0].rows])


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in short: `0`, `0–3`, `0, 2`."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _cell_text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
