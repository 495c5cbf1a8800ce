"""Flags and results that every benchmark has: where, when, and with which code it ran."""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.core.units import format_bytes
from toolkit.devices.machine import hardware
from toolkit.training.preflight import versions

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NO_COMMIT = "not recorded"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a benchmark's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse(flags: argparse.ArgumentParser, **smoke: object) -> argparse.Namespace:
    """Parse the command line, with two flags more.

    `smoke`: what `--smoke` sets the other flags to. Results, and what `--work` names, are then in a temporary folder.
    """
    flags.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    flags.add_argument(
        "--smoke", action="store_true", help="a tiny run of everything, with results in a temporary folder"
    )
    if "--smoke" in sys.argv[1:]:
        scratch = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        flags.set_defaults(results=scratch / "results", work=scratch / "work", **smoke)
    commit()  # now: it may change while the benchmark runs
    return flags.parse_args()


@functools.cache
def commit() -> str:
    """The commit of the code that runs, marked if files other than results differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=True).stdout

    try:
        head = git("rev-parse", "HEAD").strip()
        excluded = [f":(exclude){place}" for place in (RESULTS.relative_to(HERE.parent), "docs/results")]
        changed = git("status", "--porcelain", "--", ".", *excluded)
    except (OSError, subprocess.CalledProcessError):
        return NO_COMMIT
    return f"{head} + uncommitted changes" if changed else head


def about() -> dict[str, Any]:
    """Commit, versions, machine and date."""
    here = hardware()
    return {
        "commit": commit(),
        "versions": versions(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {format_bytes(here.host_bytes)}; {here.device.name}",
        "date": time.strftime("%Y-%m-%d"),
    }


def stored(path: Path) -> dict[str, Any]:
    """The results that lie there, if they are of these versions and this machine; else nothing."""
    now, found = about(), json.loads(path.read_text()) if path.exists() else {}
    return found if all(found.get(name) == now[name] for name in ("versions", "machine")) else {}


def write_results(
    folder: Path, name: str, title: str, result: Mapping[str, Any], tables: str, remarks: str = ""
) -> None:
    """Write `NAME.json` and `NAME.md`, both with what `about()` says, which `result` holds."""
    head = f"{result['date']}, {result['machine']}\n{json.dumps(result['versions'])}\ncommit {result['commit']}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    end = f"\n{remarks}\n" if remarks else ""
    (folder / f"{name}.md").write_text(f"# {title}\n\n{head}\n\n```\n{tables}\n```\n{end}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
