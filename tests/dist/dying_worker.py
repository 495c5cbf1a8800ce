"""A rank that kills itself in a step, loads without end, or sleeps; and its supervisor (`supervise FOLDER [loads|spins]`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from programs import launch_config

from toolkit.core import atomic_io
from toolkit.core.errors import ToolkitError
from toolkit.core.phases import phase
from toolkit.core.process_lifecycle import die_with_parent
from toolkit.core.rank_output import tee_output
from toolkit.launcher import RestartPolicy, Stopped, supervise_with_restarts
from toolkit.run_folder import folder, run_lock
from toolkit.run_folder.heartbeat import Beat

RECORD = {"finished": None, "strategy": {}, "train_config": {}, "run_config": {}, "ranks": 1}

DIES_AT = (3, 5, 4, 4)
"""The step in which an attempt ends."""


def main(path: Path) -> None:
    """One attempt, which leaves the files that the recipe would."""
    die_with_parent()
    run, rank = folder.enter(path, resume="--resume" in sys.argv), int(os.environ.get("RANK", "0"))
    tee_output(run.log(rank), rank=rank, supervised=True, token=run.token)
    if "loads" in sys.argv:
        with Beat(run.beat(0), 0):
            time.sleep(120)
    if "spins" in sys.argv:
        with Beat(run.beat(rank), rank) as beat:
            beat.note("begin", step=7)
            with phase("backward"):
                while rank == 0:
                    pass
                time.sleep(120)
    attempts = len(atomic_io.read_events(run.path / "attempts.jsonl"))
    atomic_io.append_line(run.path / "attempts.jsonl", {"number": attempts})
    atomic_io.write_json(run.run_json, RECORD)
    atomic_io.cut_events(run.events, 0)
    with Beat(run.beat(0), 0) as beat:
        for step in range(1, DIES_AT[attempts]):
            run.append_event({"step": step})
        beat.note("begin", step=DIES_AT[attempts])
        with beat.listening():
            print(f"the last words of attempt {attempts}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def supervisor(path: Path) -> int:
    """As the shell's command is one."""
    several = "spins" in sys.argv
    first = ["--run-dir", str(path), *sys.argv[3:]]
    with folder.enter(path, token=run_lock.new_token()) as run:
        try:
            supervise_with_restarts(
                run,
                "dying_worker",
                first,
                [*first, "--resume"],
                launch_config(2 if several else 1),
                timeout=4 if several else 60,
                restart_policy=RestartPolicy(restarts=0 if several else 5),
            )
        except (ToolkitError, Stopped) as error:
            print(f"toolkit: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        sys.exit(supervisor(Path(sys.argv[2])))
    main(Path(sys.argv[2]))
