"""`Report`: a run from its folder, for a terminal, a notebook, JSON, and an HTML page."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import expand_user, open_regular, write_whole
from toolkit.core.display import Result, Table
from toolkit.core.errors import RunError
from toolkit.core.html import render
from toolkit.core.redaction import redact, visible
from toolkit.reports.page import MARK, html_page, html_parts
from toolkit.reports.parts import Section
from toolkit.reports.record import Record, read_record, step_seconds, throughput
from toolkit.reports.sections import figures, sections_of
from toolkit.run_folder.folder import refuse_links


@dataclass(frozen=True, kw_only=True)
class Report(Result):
    """A run: request, audit, forecast and measurement, and how it ended."""

    run: Record

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped` or `failed`."""
        return self.run.status

    def page(self) -> str:
        """Return the run as one self-contained HTML page without scripts."""
        name = self.run.path.absolute().name
        return redact(html_page(name, self.run.status, figures(self.run), sections_of(self.run)))

    def write(self, path: str | Path | None = None) -> Path:
        """Write the page, whole or not at all; `report.html` in the run's folder, where no other place is named.

        Raises:
            RunError: where it cannot be written, and where another place holds a file that is no report.
        """
        target = expand_user(path) if path else self.run.path / "report.html"
        if path is None:
            refuse_links(self.run.path)
        elif target.exists() and not _is_report(target):
            raise RunError(f"{target} exists and is not a report. Remove it, or choose another place with -o.")
        try:
            write_whole(target, self.page().encode())
        except OSError as error:
            raise RunError(f"{target} cannot be written: {error.strerror}. Choose another place with -o.") from error
        return target

    def tables(self) -> list[Table]:
        summary = Table(title=f"Run {self.run.path}", columns=("figure", "value"), rows=figures(self.run))
        return [summary, *(table for section in sections_of(self.run) for table, _ in section.tables)]

    def __str__(self) -> str:
        parts = [self.tables()[0].text(), *(section.text() for section in sections_of(self.run))]
        return visible(redact("\n\n".join(parts)))

    def _repr_html_(self) -> str:
        return redact(self.tables()[0].html() + "".join(_in_notebook(section) for section in sections_of(self.run)))

    def to_dict(self) -> dict[str, Any]:
        """Return the run in bytes and seconds, with a summary of its steps; `events.jsonl` has each."""
        run, about, memory = self.run, self.run.about, self.run.memory or {}
        fields = (
            "target",
            "strategy",
            "train_config",
            "run_config",
            "ranks",
            "seed",
            "data",
            "started",
            "finished",
            "attempts",
        )
        return {
            "run": str(run.path),
            "status": run.status,
            "words": run.words,
            "then": run.then,
            "command": run.command,
            **{name: about.get(name) for name in fields},
            **_progress(run),
            "evaluations": [{"step": event["step"], "loss": event["eval_loss"]} for event in run.evaluations],
            "checkpoints": [dict(event) for event in run.checkpoints],
            "audits": memory.get("audits"),
            "measured": memory.get("measured"),
            "reason": memory.get("reason"),
            "forecast": run.forecast,
            "unforecast": memory.get("unforecast"),
            "versions": about.get("versions"),
            "hardware": about.get("hardware"),
        }


def report(path: str | Path) -> Report:
    """Return the report of a run's folder, also of a running, stopped or failed run.

    Raises:
        RunError: for a folder that holds no run, and a file in it that cannot be read, or says what no run does.
    """
    result = Report(run=read_record(path))
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
            return MARK.encode() in file.read(1000)
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


def _progress(run: Record) -> dict[str, Any]:
    steps = run.steps
    losses = [(event["loss"], event["step"]) for event in steps if event["loss"] is not None]
    lowest = min(losses, default=(None, None))
    loss: Mapping[str, Any] = {
        "first": losses[0][0] if losses else None,
        "last": losses[-1][0] if losses else None,
        "lowest": lowest[0],
        "lowest_step": lowest[1],
    }
    return {
        "steps": run.done,
        "skipped": sum(bool(event.get("skipped")) for event in steps),
        "tokens": sum(event.get("tokens") or 0 for event in steps),
        "seconds": sum(event["seconds"] for event in steps),
        "step_seconds": step_seconds(steps) if steps else None,
        "tokens_per_second": throughput(steps),
        "loss": loss,
    }


def _in_notebook(section: Section) -> str:
    """Return the section without its heading: a notebook has its own."""
    pictures, tables = html_parts(section)
    return render("report_section", section=section, figures=pictures, tables=tables)
