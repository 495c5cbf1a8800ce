"""A report as one HTML page: light and dark, without scripts or requests, readable by screen readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.core.drawing import figure
from toolkit.core.html import markup, render
from toolkit.reports.parts import Section

WIDE = 4
"""Columns above which a table scrolls on a small screen."""

MARK = markup('<meta name="generator" content="accelerate-toolkit">')
"""The line in its head by which a page is known as a report."""


def html_page(name: str, status: str, figures: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Return the page of a run."""
    parts = [(section, *html_parts(section)) for section in sections]
    return render("report", name=name, status=status, figures=figures, sections=parts, mark=MARK) + "\n"


def html_parts(section: Section) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Return a section's figures, and its other tables, each with its title if it is wide."""
    figures = [markup(figure(svg, table)) for table, svg in section.tables if svg]
    plain = [table for table, svg in section.tables if not svg]
    return figures, [(table.title if len(table.columns) > WIDE else "", markup(table.html())) for table in plain]
