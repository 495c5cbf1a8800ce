"""Whether a training script ends, with exit code 0, under every sharding, launcher and ending.

    python benchmarks/script_exit.py                   # 640 runs; results into benchmarks/results/script_exit.json and .md
    python benchmarks/script_exit.py --smoke           # each engine, launcher and ending once

Stopped or killed, the same command goes on: every run is a line in `script_exit.jsonl` in the folder of the results.
Remove that file to measure again.

A run starts `exit_loop.py` (its last calls are collectives) on gloo ranks: by `accelerate launch` with the file in
`accelerate_configs/`, or by `toolkit launch`, with `accelerator.end_training()` as its last call or without. A run that has not
ended after `--limit` seconds hangs, and its processes are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from machine import HERE, about, commit, parse, parser, write_results

from toolkit.config.strategy import SHARDINGS
from toolkit.core.atomic_io import append_line, read_events
from toolkit.core.display import Table

LAUNCHERS = ("accelerate launch", "toolkit launch")
ENDINGS = ("end_training", "nothing")
"""The script's last call; `nothing`: the interpreter just ends."""

CELL = ("sharding", "launcher", "ending")
SMOKE = (("ddp", LAUNCHERS[0], ENDINGS[0]), ("zero3", LAUNCHERS[1], ENDINGS[1]), ("fsdp", LAUNCHERS[0], ENDINGS[1]))
"""Cells of a smoke test: each engine, launcher and ending."""
RANKS = {"none": 1, "hsdp": 4}
SCRIPT = str(HERE / "exit_loop.py")
COMPILE_SECONDS = 900.0
"""For a first run, which is not counted: DeepSpeed compiles an operator, once for all."""

DONE = "trained: "
"""What the script prints before it ends."""


def command(case: dict[str, Any], folder: str) -> list[str]:
    """The command line of a run, which leaves its files in `folder`."""
    sharding, script = case["sharding"], [SCRIPT, case["ending"]]
    if case["launcher"] == "accelerate launch":
        config = str(HERE.parent / "accelerate_configs" / f"{sharding}.yaml")
        launch = ["accelerate.commands.launch", "--main_process_port", "0", "--config_file", config]
    else:
        launch = ["toolkit.cli", "launch", "--sharding", sharding, "--processes", str(RANKS.get(sharding, 2))]
        launch += ["--run-dir", str(Path(folder, "run")), *(["--dp-replicate", "2"] if sharding == "hsdp" else [])]
    return [sys.executable, "-m", *launch, *script]


def end_all(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and its ranks, which have sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for rank in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    process.kill()


def measure(case: dict[str, Any], limit: float) -> dict[str, Any]:
    """One run: `ok`, `hang`, `exit N`, or `output lost`."""
    began = time.monotonic()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output"), "w+") as output:
        process = subprocess.Popen(
            command(case, folder), cwd=folder, env=environ, stdout=output, stderr=output, text=True
        )
        try:
            code = process.wait(limit)
            result = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            end_all(process)
            process.wait()
            result = "hang"
        output.seek(0)
        text = output.read()
    if result == "ok" and DONE not in text:
        result = "output lost"
    why = {} if result == "ok" else {"output": text[-2000:]}
    return {**case, "result": result, "seconds": round(time.monotonic() - began, 2), "commit": commit(), **why}


def plan(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs, so that a part of them covers all cells."""
    chosen = SMOKE if given.smoke else product(SHARDINGS, LAUNCHERS, ENDINGS)
    cells = [dict(zip(CELL, cell, strict=True)) for cell in chosen]
    return [{**cell, "trial": trial} for trial in range(given.trials) for cell in cells]


def table(runs: list[dict[str, Any]]) -> Table:
    """A row a sharding, launcher and ending."""
    rows = []
    for cell in dict.fromkeys(tuple(run[name] for name in CELL) for run in runs):
        mine = [run for run in runs if tuple(run[name] for name in CELL) == cell]
        ends = Counter(run["result"] for run in mine)
        wrong = ", ".join(f"{count} x {result}" for result, count in ends.items() if result not in ("ok", "hang"))
        seconds = statistics.median(run["seconds"] for run in mine)
        rows.append((*cell, f"{ends['ok']} of {len(mine)}", ends["hang"], wrong or "-", f"{seconds:.1f}"))
    title = f"Scripts that ended with exit code 0: {sum(run['result'] == 'ok' for run in runs)} of {len(runs)}"
    return Table(title=title, columns=(*CELL, "ok", "hangs", "wrong", "median s"), rows=sorted(rows))


def main() -> None:
    """Start what has not run yet, and write both files."""
    flags = parser(__doc__)
    flags.add_argument("--trials", type=int, default=20, help="runs of each sharding, launcher and ending")
    flags.add_argument("--jobs", type=int, default=2, help="runs at a time")
    flags.add_argument("--limit", type=float, default=120.0, help="seconds after which a run hangs")
    given = parse(flags, trials=1, limit=COMPILE_SECONDS)
    given.results.mkdir(parents=True, exist_ok=True)
    lines = given.results / "script_exit.jsonl"
    names = (*CELL, "trial")
    done = {tuple(run[name] for name in names) for run in read_events(lines)}
    todo = [case for case in plan(given) if tuple(case[name] for name in names) not in done]
    if todo and not given.smoke:
        measure({"sharding": "zero1", "launcher": LAUNCHERS[0], "ending": ENDINGS[0]}, COMPILE_SECONDS)
    with ThreadPoolExecutor(given.jobs) as pool:
        for number, future in enumerate(as_completed([pool.submit(measure, case, given.limit) for case in todo]), 1):
            run = future.result()
            append_line(lines, run)
            print(f"{number} of {len(todo)}:", *(run[name] for name in (*names, "result", "seconds")), flush=True)
    runs = read_events(lines)
    text = table(runs).text()
    commits = Counter(run["commit"] for run in runs)
    remarks = "\n".join(f"- {count} runs at commit {name}" for name, count in commits.items())
    cells = [{name: value for name, value in run.items() if name != "output"} for run in runs]
    write_results(given.results, "script_exit", "How scripts end", {**about(), "runs": cells}, text, remarks)
    print(text)
    sys.exit(any(run["result"] != "ok" for run in runs))


if __name__ == "__main__":
    main()
