"""`Report`: a run from its folder, for a terminal, a notebook, JSON, and an HTML page."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import expand_user, open_regular, read_events, write_whole
from toolkit.core.charts import figure
from toolkit.core.display import Result, Table, markup, render
from toolkit.core.errors import RunError, StrategyError
from toolkit.core.redaction import redact, redact_all, shorten, visible
from toolkit.reports.run_record import RunRecord
from toolkit.reports.sections import Section, figures, sections_of
from toolkit.reports.tables import step_seconds, throughput
from toolkit.run_folder.folder import Folder, refuse_links, run_paths
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.status import read_memory, read_outcome, shown_sharding
from toolkit.training.resumption import resume_hint

ABOUT = (
    "target", "strategy", "train_config", "run_config", "ranks", "seed", "data", "started", "finished", "attempts",
    "versions", "hardware",
)  # fmt: skip
"""Keys of `run.json` that a report's JSON repeats."""

WIDE = 4
"""Columns above which a table scrolls on a small screen."""

REPORT_MARK = markup('<meta name="generator" content="accelerate-toolkit">')
"""The line in its head by which a page is known as a report."""


@dataclass(frozen=True, kw_only=True)
class Report(RunRecord, Result):
    """A run, read once from its folder and redacted: request, audit, forecast and measurement, and its end."""

    @cached_property
    def sections(self) -> list[Section]:
        """The report's sections, in the order of the page."""
        return sections_of(self)

    def page(self) -> str:
        """Return the run as one self-contained HTML page without scripts."""
        name = self.path.absolute().name
        parts = [(part, *_html_parts(part)) for part in self.sections]
        values = {"name": name, "status": self.status, "figures": figures(self), "sections": parts}
        return redact(render("report", mark=REPORT_MARK, **values) + "\n")

    def write(self, path: str | Path | None = None) -> Path:
        """Write the page, whole or not at all; `report.html` in the run's folder, where no other place is named.

        Raises:
            RunError: where it cannot be written, and where another place holds a file that is no report.
        """
        target = expand_user(path) if path else self.path / "report.html"
        if path is None:
            refuse_links(self.path)
        elif target.exists() and not _is_report(target):
            raise RunError(f"{target} exists and is not a report. Remove it, or choose another place with -o.")
        try:
            write_whole(target, self.page().encode())
        except OSError as error:
            raise RunError(f"{target} cannot be written: {error.strerror}. Choose another place with -o.") from error
        return target

    def tables(self) -> list[Table]:
        summary = Table(title=f"Run {self.path}", columns=("figure", "value"), rows=figures(self))
        return [summary, *(table for part in self.sections for table in part.tables)]

    def __str__(self) -> str:
        parts = [self.tables()[0].text(), *(part.text() for part in self.sections)]
        return visible(redact("\n\n".join(parts)))

    def _repr_html_(self) -> str:
        parts = [self.tables()[0].html()]
        for part in self.sections:  # without headings: a notebook has its own
            pictures, tables = _html_parts(part)
            parts.append(render("report_section", section=part, figures=pictures, tables=tables))
        return redact("".join(parts))

    def to_dict(self) -> dict[str, Any]:
        """Return the run in bytes and seconds, with a summary of its steps; `events.jsonl` has each."""
        return {
            "run": str(self.path),
            **{name: getattr(self, name) for name in ("status", "words", "then", "command", "sharding")},
            **{name: self.about.get(name) for name in ABOUT},
            **_progress(self),
            "evaluations": [{"step": event["step"], "loss": event["eval_loss"]} for event in self.evaluations],
            "checkpoints": [dict(event) for event in self.checkpoints],
            **{name: self.memory.get(name) for name in ("audits", "measured", "reason", "unforecast")},
            "forecast": self.forecast,
        }


def report(path: str | Path) -> Report:
    """Return the report of a run's folder, also of a running, stopped or failed run.

    Raises:
        RunError: for a folder without a run, and for an unreadable or invalid file in it.
    """
    folder = run_paths(path)
    about = redact_all(read_run_json(folder.path))
    events = read_events(folder.events)  # redacted as they were written, and in every view
    status, words = read_outcome(folder, about)
    result = Report(
        path=folder.path,
        about=about,
        steps=tuple(event for event in events if "loss" in event),
        evaluations=tuple(event for event in events if "eval_loss" in event),
        checkpoints=tuple(read_events(folder.published)),
        memory=read_memory(folder, about) or {},
        status=status,
        words=shorten(words),
        sharding=shown_sharding(folder, about),
        then="" if status in ("finished", "not audited", "running") else redact(_how_to_resume(folder)),
    )
    try:
        result.tables(), result.to_dict()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RunError(
            f"{path} is not valid ({type(error).__name__}: {str(error)[:200]}), and cannot be shown. Another version, or "
            "somebody by hand, wrote its files."
        ) from error
    return result


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """Write `report.html` at the end if the run has begun, however the block ends. Errors are not changed."""
    try:
        yield
    except BaseException:
        _write_page(path)  # silently: the error matters, not the report
        raise
    if written := _write_page(path):
        with contextlib.suppress(OSError):
            print(f"report: {written}", file=sys.stderr)


def _is_report(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return REPORT_MARK.encode() in file.read(1000)
    except OSError:
        return False


def _write_page(path: Path) -> Path | None:
    """Write the page and return its path; None where it cannot be written."""
    try:
        return report(path).write() if (path / "run.json").exists() else None
    except Exception as error:
        with contextlib.suppress(OSError):
            print(f"toolkit: no report of {path}: {error}", file=sys.stderr)
        return None


def _how_to_resume(folder: Folder) -> str:
    try:
        return resume_hint(folder)
    except StrategyError as error:
        return f"This version cannot resume it: {error}"


def _progress(run: Report) -> dict[str, Any]:
    steps = run.steps
    losses = [(event["loss"], event["step"]) for event in steps if event["loss"] is not None] or [(None, None)]
    first, last, (lowest, step) = losses[0][0], losses[-1][0], min(losses)
    return {
        "steps": run.done,
        "skipped": sum(bool(event.get("skipped")) for event in steps),
        "tokens": sum(event.get("tokens") or 0 for event in steps),
        "seconds": sum(event["seconds"] for event in steps),
        "step_seconds": step_seconds(steps) if steps else None,
        "tokens_per_second": throughput(steps),
        "loss": {"first": first, "last": last, "lowest": lowest, "lowest_step": step},
    }


def _html_parts(section: Section) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Return a section's figures, and its other tables, each with its title if it is wide."""
    figures = [markup(figure(table.picture, table)) for table in section.tables if table.picture]
    plain = [table for table in section.tables if not table.picture]
    return figures, [(table.title if len(table.columns) > WIDE else "", markup(table.html())) for table in plain]
