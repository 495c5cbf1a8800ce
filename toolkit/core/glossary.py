"""The glossary: one definition of each term, for the panels, the site and whoever reads a table."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path


@cache
def glossary_terms() -> dict[str, str]:
    """Return term → definition, from `glossary.txt`."""
    lines = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)


@cache
def _any_term() -> re.Pattern[str]:
    """Return a pattern of every term or its plural as a word, the longest first."""
    words = sorted(map(re.escape, glossary_terms()), key=len, reverse=True)
    words = [f"(?-i:{word})" if re.search("[a-z][A-Z]", word) else word for word in words]  # «zero» is a number, too
    return re.compile(rf"(?<![\w-])({'|'.join(words)})s?(?![\w-])", re.IGNORECASE)


def meaning(term: str) -> str:
    """Return the definition of a term, or an empty string."""
    return next((words for name, words in glossary_terms().items() if name.lower() == term.lower()), "")


def explained(text: str, known: set[str]) -> str:
    """Return text as HTML with terms explained on hover. `known` are those explained before; these are added."""

    def explain(match: re.Match[str]) -> str:
        term = match[1].lower()
        if term in known:
            return match[0]
        known.add(term)
        return f'<abbr title="{escape(meaning(term))}">{match[0]}</abbr>'

    return _any_term().sub(explain, escape(text))
