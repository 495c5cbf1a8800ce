"""`Finding`: the result of one check, which a child process sends as JSON."""

from __future__ import annotations

from dataclasses import dataclass

STATUSES = ("ok", "missing", "broken", "n/a")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check."""

    check: str
    status: str
    """`ok`; `missing`: not there, and something cannot be done without it; `broken`: there and not working; `n/a`."""
    detail: str
    fix: str = ""
    """What to do, if anything."""
