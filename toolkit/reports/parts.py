"""`Section`, and tables that sample the lines of a long run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.display import Table

ROWS = 12
"""The largest number of rows in such a table."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a report."""

    title: str
    words: str = ""
    """A paragraph."""
    code: str = ""
    """Literal text: a command, or the end of a rank's log."""
    tables: Sequence[tuple[Table, str]] = ()
    """Each with its picture, or an empty text."""

    def text(self) -> str:
        """Return text for a terminal."""
        code = "\n".join("    " + line for line in self.code.splitlines())
        paragraphs = [part for part in (self.words, code, *(table.text() for table, _ in self.tables)) if part]
        return "\n\n".join([f"== {self.title} ==", *paragraphs])


def sample_table(
    title: str,
    columns: Sequence[str],
    lines: Sequence[Mapping[str, Any]],
    row: Callable[[Mapping[str, Any]], Any],
    file: str,
) -> Table:
    """Return a table of a file's lines: at most `ROWS`, evenly spaced, with the first and the last."""
    places = list(range(len(lines)))
    if len(lines) > ROWS:
        places = [round(place * (len(lines) - 1) / (ROWS - 1)) for place in range(ROWS)]
    notes = [f"{ROWS} of {len(lines):,}; all are in {file}."] if len(lines) > ROWS else []
    return Table(title=title, columns=columns, rows=[row(lines[place]) for place in places], notes=notes)


def spell_number(value: float | None) -> str:
    """Return a number's text; JSON has null for a value that is not finite."""
    return "not finite" if value is None else f"{value:.4f}"
