"""Each notebook executed twice in one folder, with other parameters than its own: whether its cells and claims hold each time.

    python benchmarks/notebooks.py                   # results into benchmarks/results/notebooks.json and .md
    python benchmarks/notebooks.py --only 01,06      # these alone
    python benchmarks/notebooks.py --smoke           # whether it still runs: the first cells of one

What the results hold for the same source and parameters, these versions and this machine is not executed again. `make test`
executes each notebook once, and some of them twice.
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

from machine import HERE, about, commit, parse, parser, write_results

from toolkit.core.display import Table

sys.path.append(str(HERE.parent / "notebooks"))

from execute import claims, execute, read, sources
from other_parameters import AGAIN, PARAMETERS, execute_with_others

FIRST = 5
"""Cells of a smoke test: those that install and import."""


def digest(source: Path) -> str:
    """Digest of what is executed."""
    others = json.dumps([PARAMETERS[source.stem], AGAIN[source.stem]])
    return hashlib.sha256(source.read_bytes() + others.encode()).hexdigest()


def executed(source: Path) -> dict[str, Any]:
    """A row: the claims that held, and the seconds of each time."""
    ends = [time.monotonic()]
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        for _ in execute_with_others(source, Path(folder), 2):
            ends.append(time.monotonic())
    seconds = [round(end - begin) for begin, end in itertools.pairwise(ends)]
    row = {"notebook": source.stem, "digest": digest(source), "claims": len(claims(read(source))), "seconds": seconds}
    return {**row, "date": about()["date"], "commit": commit()}


def before(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of the results for these versions and this machine, by notebook."""
    found, now = json.loads(path.read_text()) if path.exists() else {}, about()
    same = all(found.get(name) == now[name] for name in ("versions", "machine"))
    return {row["notebook"]: row for row in found["runs"]} if same else {}


def publish(folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write the results."""
    runs = [rows[name] for name in sorted(rows)]
    cells = [(row["notebook"], row["claims"], *(f"{each} s" for each in row["seconds"])) for row in runs]
    table = Table(title="Notebooks executed twice", columns=("notebook", "claims", "first", "second"), rows=cells)
    result = {**about(), "commit": ", ".join(sorted({row["commit"] for row in runs})) or commit(), "runs": runs}
    write_results(folder, "notebooks", "Notebooks with other parameters", result, table.text())


def main() -> None:
    """Execute what the results do not hold; write after each notebook."""
    flags = parser(__doc__)
    flags.add_argument("--only", default="", help="beginnings of names, with commas")
    given = parse(flags)
    rows = before(given.results / "notebooks.json")
    chosen = sources(list(filter(None, given.only.split(","))))
    if given.smoke:
        notebook = read(chosen[0])
        notebook.cells = notebook.cells[:FIRST]
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        publish(given.results, {})
        return
    for source in chosen:
        if rows.get(source.stem, {}).get("digest") != digest(source):
            rows[source.stem] = executed(source)
            publish(given.results, rows)
        print(source.stem, rows[source.stem]["claims"], "claims,", *rows[source.stem]["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
