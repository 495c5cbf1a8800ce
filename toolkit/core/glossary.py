"""The glossary: one definition of each term, for the panels, the site and whoever reads a table."""

from __future__ import annotations

from pathlib import Path


def glossary_terms() -> dict[str, str]:
    """Return term → definition, from `glossary.txt`."""
    lines = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)
