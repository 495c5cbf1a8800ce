"""`Finding`: what one check found, and how it travels from the process that checked."""

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
    """What to do, where there is something to do."""
