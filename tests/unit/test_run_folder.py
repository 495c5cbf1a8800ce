"""A run's folder: what a new and an old run find in it, its events, and the lock between real processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from programs import environment, python

from toolkit.core import atomic_io
from toolkit.core.errors import RunError
from toolkit.run_folder import folder, run_lock


@contextlib.contextmanager
def holder(path: Path, token: str, wait: float = 5.0) -> Iterator[subprocess.Popen[str]]:
    """Another process of a run, in the folder until its standard input is closed."""
    with runs.hold(path, token=token, wait=wait) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> str:
    """Its first line: `in` once it holds the folder."""
    return process.stdout.readline().strip()


def old_run(path: Path) -> Path:
    """A folder as a run leaves it."""
    with folder.enter(path) as run:
        atomic_io.write_json(run.run_json, {"seed": 0})
    return path


def test_a_new_run_leaves_a_folder_that_it_cannot_take(tmp_path: Path) -> None:
    """One that holds a run, and one that cannot be made."""
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"holds a run already.*--run-dir"):
        folder.enter(tmp_path)
    with pytest.raises(RunError, match=r"cannot be made: Not a directory\. .*--run-dir"):
        folder.enter(tmp_path / "events.jsonl" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_finished_run_is_refused_too(tmp_path: Path) -> None:
    """With its lock file in it, which nobody holds."""
    path = old_run(tmp_path / "run")
    with pytest.raises(RunError, match="holds a run already"):
        folder.enter(path)
    with folder.enter(path, resume=True) as run:
        assert not run.created
        run.discard()
    assert (path / "run.json").exists()


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    """An empty folder is none."""
    with pytest.raises(RunError, match=r"holds no run: .*run\.json does not exist"):
        folder.enter(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def test_a_run_that_failed_at_once_can_be_discarded_or_started_again(tmp_path: Path) -> None:
    """A lock and logs are no run; a folder with a step in it stays."""
    with folder.enter(tmp_path / "run") as run:
        run.logs.mkdir()
        run.log(0).write_text("an error\n")
    with folder.enter(tmp_path / "run") as run:
        run.append_event({"step": 1})
        run.discard()
        assert run.events.exists()
        run.events.unlink()
        run.discard()
    assert not (tmp_path / "run").exists()


def test_new_paths_differ(tmp_path: Path) -> None:
    """Two runs in one minute."""
    paths = [folder.new_path(tmp_path / "runs", "zero3") for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.is_dir() and "-zero3" in path.name for path in paths)
    with folder.enter(paths[0]) as run:
        assert run.created


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A value that JSON cannot hold leaves the old file, and no draft."""
    path = tmp_path / "memory.json"
    atomic_io.write_json(path, {"peak": 1.5, "norms": [float("inf"), (1, float("nan"))]})
    before = path.read_text()
    assert json.loads(before) == {"peak": 1.5, "norms": [None, [1, None]]}
    with pytest.raises(TypeError):
        atomic_io.write_json(path, {"peak": object()})
    path.with_name("folder.json").mkdir()
    with pytest.raises(
        RunError, match=r"folder\.json cannot be written: .* bytes are needed, .* are free\)\. Free some space"
    ):
        atomic_io.write_json(path.with_name("folder.json"), {})
    assert path.read_text() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder.json", "memory.json"]


LAST_WORDS = """
import shutil, sys
from pathlib import Path
from toolkit.run_folder import folder
disk = Path(sys.argv[1])
with folder.enter(disk / "run") as run:
    run.logs.mkdir()
    with run.room_for_error(0):
        for size in (4096, 1):  # to the last byte
            try:
                while True:
                    with open(disk / "filler", "ab", buffering=0) as file:
                        assert file.write(bytes(size))
            except (OSError, AssertionError):
                pass
        try:
            run.append_event({"step": 1})
        except folder.RunError as error:
            run.record_error(0, error)
    print(sorted(path.name for path in run.logs.iterdir()), run.error(0).read_text())
"""


def test_a_rank_has_its_last_words_on_a_full_disk(tmp_path: Path) -> None:
    """On a file system of its own, mounted in a user namespace."""
    command = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}'
    asked = ["unshare", "--map-root-user", "--mount", "sh", "-c", command, "sh", LAST_WORDS]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "['rank-0.error.json']" in done.stdout
    assert '"type": "RunError"' in done.stdout
    assert "Free some space, then run `toolkit resume`" in done.stdout


def test_events_are_read_and_cut(tmp_path: Path) -> None:
    """A torn last line does not count, and the cut removes it."""
    with folder.enter(tmp_path / "run") as run:
        assert atomic_io.read_events(run.events) == []
        assert atomic_io.cut_events(run.events, 2) == []
        for step in range(1, 5):
            run.append_event({"step": step, "loss": 7.0 / step, "seconds": 0.5})
        run.append_event({"step": 4, "eval_loss": float("nan")})
        with open(run.events, "ab") as file:
            file.write(b'{"step": 5, "lo')
        read = atomic_io.read_events(run.events)
        assert [event["step"] for event in read] == [1, 2, 3, 4, 4]
        assert read[1] == {"step": 2, "loss": 3.5, "seconds": 0.5}
        assert read[-1] == {"step": 4, "eval_loss": None}
        assert atomic_io.cut_events(run.events, 3) == read[:3]
        run.append_event({"step": 4, "attempt": 2})
        assert run.events.read_bytes().count(b"\n") == 4
        assert atomic_io.read_events(run.events) == [*read[:3], {"step": 4, "attempt": 2}]


def test_processes_of_one_run_share_the_folder_and_others_do_not(tmp_path: Path) -> None:
    """While one of them lives, the first or not, another run is refused with its pid; then it is let in."""
    path = old_run(tmp_path / "run")
    with holder(path, "one") as first, holder(path, "one") as second:
        assert told(first) == told(second) == "in"
        with pytest.raises(RunError, match=rf"in use by .*process {first.pid} \(supervisor, on "):
            folder.enter(path, resume=True, token="two", wait=0.2)
        first.kill()
        first.wait()
        with pytest.raises(RunError) as caught:
            folder.enter(path, resume=True, token="two", wait=0.2)
        assert f"process {second.pid} " in str(caught.value)
        assert f"process {first.pid} " not in str(caught.value)
        with holder(path, "two", wait=10) as waiting:
            time.sleep(0.3)
            second.kill()
            assert told(waiting) == "in"
            with pytest.raises(RunError, match=f"process {waiting.pid} "):
                folder.enter(path, resume=True, token="one", wait=0.2)
    with folder.enter(path, resume=True, token="two", wait=0.2) as run:
        assert run.token == "two"


def test_of_two_runs_at_once_one_is_let_in(tmp_path: Path) -> None:
    """Four processes of two runs come at the same time: both of one run get in, none of the other."""
    path = old_run(tmp_path / "run")
    with contextlib.ExitStack() as stack:
        come = [(token, stack.enter_context(holder(path, token, wait=2))) for token in ("a", "b", "a", "b")]
        let_in = [token for token, process in come if told(process) == "in"]
        assert let_in in (["a", "a"], ["b", "b"])
        refused = [process for token, process in come if token not in let_in]
        for process in refused:
            assert "in use by" in process.communicate(timeout=10)[1]


def test_a_line_that_a_full_disk_cuts_is_taken_back(tmp_path: Path) -> None:
    """What comes later would be glued to it, and no line behind it could be read."""
    path = tmp_path / "events.jsonl"
    code = (
        "import resource, signal, sys; from pathlib import Path; from toolkit.core.atomic_io import append_line\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); path = Path(sys.argv[1]); append_line(path, {'step': 1})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5,) * 2)\n"
        "append_line(path, {'step': 2})"
    )
    done = python("-c", code, path)
    assert f"RunError: {path} cannot be written: " in done.stderr
    assert atomic_io.read_events(path) == [{"step": 1}]
    assert path.read_bytes().endswith(b"}\n")


def test_ranks_of_one_launcher_agree_on_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a supervisor: what they share is the launcher; a process started by hand is a run of its own."""
    monkeypatch.delenv(run_lock.TOKEN, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert not run_lock.supervised()
    assert run_lock.run_token() != run_lock.run_token()
    code = "from toolkit.run_folder import run_lock as locking; print(locking.run_token())"
    first, second = (python("-c", code, env=environment(LOCAL_RANK=rank)).stdout for rank in ("0", "1"))
    assert first == second
    assert str(os.getpid()) in first
    monkeypatch.setenv(run_lock.TOKEN, "the supervisor's")
    assert run_lock.supervised()
    assert run_lock.run_token() == "the supervisor's"


SHORT = """
import resource, sys
from pathlib import Path
from toolkit.core.atomic_io import read_json
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 8 * 2**20,) * 2)
print(read_json(Path(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps this limit")
def test_json_is_read_where_memory_has_run_out(tmp_path: Path) -> None:
    """As by the rank that says what to change: not a byte more than the file has is asked for."""
    atomic_io.write_json(tmp_path / "run.json", {"a": 1})
    assert python("-c", SHORT, tmp_path / "run.json", code=0).stdout == "{'a': 1}\n"
