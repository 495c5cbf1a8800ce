"""The recipe on forked ranks: a cell's words are the command line of `toolkit.finetune`."""

from __future__ import annotations

import sys
from typing import Any

import ranks


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """One run, to its end."""
    from toolkit import finetune

    if code := finetune.main(cell["words"]):
        sys.exit(code)
    return {}


if __name__ == "__main__":
    ranks.main(run, *sys.argv[1:])
