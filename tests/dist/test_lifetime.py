"""Nothing outlives its launcher, and a run that fails says which rank and why. All under real `accelerate launch`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from programs import ROOT, gone, holds, launch_config, living, python, start, until

from toolkit.core.errors import RunError
from toolkit.run_folder import folder

pytestmark = pytest.mark.dist


class Started:
    """A supervisor (or a bare launcher) of `lifetime_worker.py`, its run's folder and its output."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        """`path`: of the run's folder."""
        self.process, self.path = process, path

    def wait(self, seconds: float = 180) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def pids(self, *names: str) -> list[psutil.Process]:
        """The processes that noted their pid under these names, once they have."""
        files = [self.path.with_name(name) for name in names]
        until(lambda: all(file.exists() for file in files), 180, f"{names} of {self.path}")
        return [psutil.Process(int(file.read_text())) for file in files]

    def launcher(self) -> psutil.Process:
        """The process between the supervisor and its ranks."""
        [launcher] = psutil.Process(self.process.pid).children()
        return launcher


def redacting(*parents: subprocess.Popen[str]) -> list[psutil.Process]:
    """The redacting processes below these."""
    family = (child for parent in parents for child in psutil.Process(parent.pid).children(recursive=True))
    return [process for process in family if any(word.endswith("redaction.py") for word in process.cmdline())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """All runs of this file, started together: they wait more than they work, and none gets in another's way."""
    root = tmp_path_factory.mktemp("lifetime")
    (root / "config.yaml").write_text(json.dumps({**launch_config(2), "main_process_port": 0}))
    bare = ["-m", "accelerate.commands.launch", "--config_file", str(root / "config.yaml"), "-m"]
    commands = {
        **{f"{task} bare": [*bare, "lifetime_worker", task, "--run-dir", "FOLDER"] for task in ("import", "late", "waits")},
        **{
            f"{task} {ranks}": ["-m", "lifetime_worker", "supervise", "FOLDER", str(ranks), task]
            for task, ranks in (
                ("sleep", 2), ("watched", 2), ("late", 2), ("killed", 2), ("refuses", 2),
                ("interrupted", 2), ("interrupted", 1), ("stubborn", 1), ("typo", 1),
            )
        },
    }  # fmt: skip
    started = {}
    for name, command in commands.items():
        path = root / name.replace(" ", "-") / "run"
        path.parent.mkdir()
        started[name] = Started(start(*(path if word == "FOLDER" else word for word in command)), path)
    yield started
    for left in psutil.process_iter():  # by a test that failed
        with contextlib.suppress(psutil.Error):
            if str(root) in " ".join(left.cmdline()):
                left.kill()
    for run in started.values():
        run.process.communicate()


def test_ranks_end_with_a_bare_launcher_killed_while_they_import(runs: dict[str, Started]) -> None:
    """Without a supervisor of ours. The first test: later they would have imported all."""
    run = runs["import bare"]
    ranks = run.pids("rank-0", "rank-1")
    os.kill(run.process.pid, signal.SIGKILL)
    gone(ranks)
    assert not list(run.path.parent.glob("imported-*"))


def test_ranks_end_with_a_supervisor_that_is_killed(runs: dict[str, Started]) -> None:
    """Launcher, ranks and their children; meanwhile the folder is held, afterwards it is free."""
    run = runs["sleep 2"]
    ranks = run.pids("rank-0", "rank-1")
    all_of_it = [*ranks, *run.pids("child-0", "child-1"), run.launcher()]
    [redaction] = redacting(run.process)  # one, for both ranks and their launcher
    assert len(living([*all_of_it, redaction])) == 6
    with pytest.raises(RunError) as refused:
        folder.enter(run.path, wait=0.1)
    for pid, role in ((run.process.pid, "supervisor"), (ranks[0].pid, "rank 0"), (ranks[1].pid, "rank 1")):
        assert f"process {pid} ({role}, on " in str(refused.value)
    os.kill(run.process.pid, signal.SIGKILL)
    gone([*all_of_it, redaction])
    folder.enter(run.path, wait=0.5).leave()


def test_ranks_end_with_a_launcher_that_is_killed(runs: dict[str, Started]) -> None:
    """And the supervisor says so."""
    run = runs["watched 2"]
    processes = run.pids("rank-0", "rank-1", "child-0", "child-1")
    run.launcher().kill()
    gone(processes)
    code, _, err = run.wait(10)
    assert code == 1
    assert "RankDied: accelerate launch was killed by SIGKILL" in err


@pytest.mark.parametrize("name", ["late 2", "late bare"])
def test_ranks_whose_launcher_was_gone_before_they_asked(runs: dict[str, Started], name: str) -> None:
    """No signal comes for what happened earlier: they look, and end."""
    run = runs[name]
    ranks = run.pids("rank-0", "rank-1")
    (psutil.Process(run.process.pid) if name == "late bare" else run.launcher()).kill()
    gone(ranks)
    run.wait(10)
    assert not list(run.path.parent.glob("outlived-*"))


def test_a_killed_rank_ends_the_run_and_is_named(runs: dict[str, Started]) -> None:
    """Not the rank that lost its connection because of it. Rank 0 is shown, rank 1 is in its log."""
    run = runs["killed 2"]
    code, out, err = run.wait()
    assert code == 1
    assert "RankDied: rank 1 was killed by SIGKILL" in err
    assert f"Its last lines ({run.path / 'logs' / 'rank-1.log'}):" in err
    assert "    the last words of rank 1\n" in err
    assert "rank 0 begins\nrank 0 says so on stderr\n" in out
    assert "rank 1" not in out
    assert "ChildFailedError" not in out + err
    assert (run.path / "logs" / "rank-0.log").read_text() in out
    died = (run.path / "logs" / "rank-1.log").stat().st_mtime
    assert 0 < float(run.path.with_name("ended").read_text()) - died < 60


def test_ranks_wait_for_rank_0_and_end_when_it_dies(runs: dict[str, Started]) -> None:
    """Longer than the time limit of a collective, and without a supervisor of ours."""
    run = runs["waits bare"]
    code, _, _ = run.wait()
    assert code != 0
    for rank in (0, 1):
        assert run.path.with_name(f"waited-{rank}").read_text() == "longer than a collective may take"
        assert not psutil.pid_exists(int(run.path.with_name(f"rank-{rank}").read_text()))


def test_a_users_mistake_comes_through_as_itself(runs: dict[str, Started]) -> None:
    """One clear message, exit status 2, and nothing half-written."""
    run = runs["refuses 2"]
    code, _, err = run.wait()
    assert (code, err) == (2, "DataError: rows.jsonl, line 3: no column 'text'.\n")
    assert not run.path.exists()


def test_a_rank_that_fails_before_its_log_is_explained(runs: dict[str, Started]) -> None:
    """Here by a module that does not exist, and without torch elastic."""
    code, _, err = runs["typo 1"].wait()
    assert code == 1
    assert "RankDied: rank 0 ended with exit status 1." in err
    assert "No module named no_such_module" in err


@pytest.mark.parametrize(
    ("name", "number", "expected"), [("interrupted 2", signal.SIGINT, 130), ("interrupted 1", signal.SIGTERM, 143)]
)
def test_a_signal_stops_the_run_in_peace(runs: dict[str, Started], name: str, number: int, expected: int) -> None:
    """The ranks get it once and may end by themselves, under torch elastic and without."""
    run = runs[name]
    ranks = [f"rank-{rank}" for rank in range(int(name[-1]))]
    processes = run.pids(*ranks)
    run.process.send_signal(number)
    code, _, err = run.wait()
    assert (code, err) == (expected, "")
    assert not living(processes)
    for rank in ranks:
        assert "stops in peace" in (run.path / "logs" / f"{rank}.log").read_text()


def test_a_second_interrupt_does_not_wait(runs: dict[str, Started]) -> None:
    """For ranks that will not end."""
    run = runs["stubborn 1"]
    ranks = run.pids("rank-0")
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert living(ranks)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(10)[0] == 130
    assert not living(ranks)


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
child.wait()
"""

CHILD = """
import os, sys, threading, time
from toolkit.core import process_lifecycle as lifetime
{system}
lifetime.die_with_parent(int(sys.argv[1]))
forked = []
def fork():
    forked.append(os.fork())
    if forked[0] == 0:
        time.sleep({seconds})
        os._exit(0)
thread = threading.Thread(target=fork)
thread.start()
thread.join()
print(forked[0], flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("system", ["", "lifetime._ask_kernel = lambda: False"])
def test_a_system_without_prctl_and_a_child_of_another_thread(system: str) -> None:
    """A poll does the same. What another thread forked must not end with that thread."""
    code = CHILD.format(system=system, seconds=3)
    with start("-c", PARENT, code, stderr=None) as parent:
        child, forked = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
        time.sleep(0.5)
        assert len(living([child, forked])) == 2
        parent.kill()
        gone([child])
    until(lambda: not living([forked]), 10, "the end of the forked child")


PRINT = """
import os, sys
from pathlib import Path
from toolkit.core.rank_output import tee_output
tee_output(Path(sys.argv[1]), rank=int(sys.argv[2]), supervised=sys.argv[3] == "supervised", token=sys.argv[1])
print("said", flush=True)
if sys.argv[4] == "crash":
    os.abort()
"""


@pytest.mark.parametrize("how", ["supervised", "bare"])
@pytest.mark.parametrize("end", ["return", "crash"])
def test_a_crash_is_in_the_log(tmp_path: Path, how: str, end: str) -> None:
    """As the rest of what a rank prints, which `tests/unit/test_security.py` follows to its places."""
    log = tmp_path / "logs" / "rank.log"
    done = python("-c", PRINT, log, 1, how, end)
    assert done.stdout == ("said\n" if how == "bare" else "")
    lines = log.read_text().splitlines()
    assert "said" in lines
    assert ("Fatal Python error: Aborted" in lines) == (end == "crash")
    assert end == "crash" or (done.returncode, len(lines)) == (0, 1)


SHARE = """
import sys
from pathlib import Path
from toolkit.core.rank_output import tee_output
tee_output(Path(sys.argv[1]), rank=1, supervised=True, token=sys.argv[2])
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def test_ranks_that_come_at_once_share_one_redacting_process(tmp_path: Path) -> None:
    """It outlives the rank that started it, keeps their streams apart, and ends with the last of them."""
    logs = [tmp_path / f"{rank}.log" for rank in range(4)]
    ranks = [start("-c", SHARE, log, tmp_path, stdin=subprocess.PIPE) for log in logs]

    def say(words: str) -> None:
        for number, (rank, log) in enumerate(zip(ranks, logs, strict=True)):
            if rank.poll() is None:
                rank.stdin.write(f"{words} of {number}\n")
                rank.stdin.flush()
                until(partial(holds, log, f"{words} of {number}\n"), 60, words)

    say("first words")
    [redaction] = redacting(*ranks)
    starter = next(rank for rank in ranks if rank.pid == redaction.ppid())
    starter.kill()
    starter.wait()
    say("last words")
    for rank in ranks:
        rank.kill()
    for number, (rank, log) in enumerate(zip(ranks, logs, strict=True)):
        rank.communicate()
        words = ["first", "last"] if rank is not starter else ["first"]
        assert log.read_text().splitlines() == [f"{word} words of {number}" for word in words]
    gone([redaction])


def test_a_script_keeps_its_exit_code(tmp_path: Path) -> None:
    """Its last calls are collectives on gloo."""
    words = ["launch", "--sharding", "ddp", "--processes", "2", "--run-dir", tmp_path / "run"]
    done = python(
        "-m", "toolkit.cli", *words, ROOT / "benchmarks" / "exit_loop.py", "nothing", "3", cwd=tmp_path, code=1
    )
    assert "ended with exit status 3" in done.stderr, done.stderr
    assert "trained: 3 steps" in done.stdout
