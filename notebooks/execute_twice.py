"""`make grid` executes each notebook twice in one folder, with two sets of other parameters: its claims hold each time.

    python notebooks/execute_twice.py          # rows into benchmarks/results/notebooks.json, after each
    python notebooks/execute_twice.py 01 06    # these alone

A row for the same source and parameters, these versions and this machine is not measured again. `make test` executes each notebook
once, and one of them twice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from execute import ROOT, claims, read, sources
from other_parameters import AGAIN, PARAMETERS, execute_with_others

sys.path.append(str(ROOT / "benchmarks"))

from machine import RESULTS, about

ROWS = RESULTS / "notebooks.json"


def identity(source: Path) -> dict[str, Any]:
    """What a row was measured of: equal rows are equal work."""
    others = json.dumps([PARAMETERS[source.stem], AGAIN[source.stem]])
    digest = hashlib.sha256(source.read_bytes() + others.encode()).hexdigest()
    here = about()
    return {"notebook": source.stem, "digest": digest, "versions": here["versions"], "machine": here["machine"]}


def executed(source: Path) -> dict[str, Any]:
    """The claims that held each time, and the seconds of each."""
    ends = [time.monotonic()]
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        for _ in execute_with_others(source, Path(folder), 2):
            ends.append(time.monotonic())
    seconds = [round(end - begin) for begin, end in itertools.pairwise(ends)]
    return {
        "claims": len(claims(read(source))),
        "seconds": seconds,
        "date": about()["date"],
        "commit": about()["commit"],
    }


def main(chosen: list[str]) -> None:
    """Execute what has no row."""
    rows = {row["notebook"]: row for row in (json.loads(ROWS.read_text())["rows"] if ROWS.exists() else [])}
    for source in sources(chosen):
        own, row = identity(source), rows.get(source.stem, {})
        if own.items() <= row.items():
            continue
        rows[source.stem] = row = {**own, **executed(source)}
        commits = ", ".join(sorted({row["commit"] for row in rows.values()}))
        ROWS.write_text(json.dumps({"commit": commits, "rows": [rows[name] for name in sorted(rows)]}, indent=2) + "\n")
        print(source.stem, row["claims"], "claims,", *row["seconds"], "s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
