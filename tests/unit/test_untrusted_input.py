"""What a stranger's folder, file or data may contain, and what must not come of it. SECURITY.md names these tests."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
from programs import python

import toolkit as tk
from toolkit import cli
from toolkit.checkpoints.importers import restricted_unpickler
from toolkit.checkpoints.manifest import read_manifest
from toolkit.cli.output import write
from toolkit.core import atomic_io
from toolkit.core.display import Table
from toolkit.core.errors import CheckpointError, DataError, ModelError, RunError
from toolkit.core.redaction import redact, visible
from toolkit.data.files import LONGEST_TEXT, documents
from toolkit.data.sources import find_source
from toolkit.exporters.folders import atomic_dir
from toolkit.exporters.results import Checked, finish_export
from toolkit.launcher import Run, restarts, supervisor
from toolkit.launcher.failures import failure
from toolkit.launcher.processes import supervises
from toolkit.launcher.targets import Target, check_target, note_launch, target_of
from toolkit.models import describe, require_weights
from toolkit.models.remote_code import digest_of
from toolkit.notebook import live
from toolkit.run_folder import folder, run_lock

MEASURED = """
import sys
from toolkit import cli
code = cli.main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # `ru_maxrss` is the parent's, too
print(code, int(peak.split()[1]) // 1024)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder to stand in, and one for what this user launched."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user's own that has nothing to do with a run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    assert process.poll() is None, "it was ended"
    process.kill()
    process.wait()


# A run's target --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            {"kind": "module", "name": "timeit", "arguments": ["-n1", "open('ran','w')"]},
            "would run the module 'timeit'",
        ),
        ({"kind": "script", "name": "{run}/evil.py"}, "would run the script"),
        ({"kind": "Function", "name": "evil"}, "kind is 'Function', expected module, script, function"),
        ({"kind": "pickle", "name": "evil"}, "kind is 'pickle'"),
        ({"kind": "function", "name": "evil"}, "would run the function 'evil'"),
        ({"kind": ["module"], "name": "timeit"}, "kind is list, expected str"),
        ({"kind": "module", "name": "timeit", "arguments": "-n1"}, "arguments is -n1, expected list"),
        ({"kind": "module", "name": "timeit", "arguments": [1]}, "are not all words"),
        ({"kind": "module", "name": "timeit", "more": 1}, "its fields are"),
        ({"kind": "module", "name": "evil.py"}, "from here Python finds no such module"),
        ({"kind": "script", "name": "/dev/zero"}, "cannot be read: it is not a regular file"),
    ],
)
@pytest.mark.parametrize("way", ["resume", "train", "python"])
def test_a_folder_alone_runs_no_code(
    target: dict[str, Any], said: str, way: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = f"open({str(here / 'ran')!r}, 'w')"
    run = runs.own(here / "run", target | {"name": target["name"].format(run=here / "run")})
    (run.path / "evil.py").write_text(ran)
    (run.logs / "function.pkl").write_bytes(pickle.dumps(([], pickle.dumps((print, (), {})))))
    if way == "python":
        with pytest.raises(RunError, match=said.replace("(", r"\(")):
            tk.resume(run.path)
    else:
        words = ["resume", str(run.path)] if way == "resume" else ["train", "--resume", "--run-dir", str(run.path)]
        assert cli.main(words) == 2
        assert said in capsys.readouterr().err
    assert not (here / "ran").exists()


def test_what_was_launched_here_goes_on_and_what_changed_does_not(here: Path) -> None:
    script = here / "mine.py"
    script.write_text("pass")
    run = runs.own(here / "run", {"name": str(script)})
    target = target_of(folder.read_run_json(run.path))
    with pytest.raises(
        RunError, match=r"--target [^ ]+mine\.py`\), or read .*mine\.py and add --trust-target [0-9a-f]{64}\."
    ):
        check_target(run, target, None)
    note_launch(run, target)
    assert check_target(run, target, None) == target
    with pytest.raises(RunError, match="which you did not launch in this folder"):
        check_target(folder.run_paths(here / "elsewhere"), target, None)
    with pytest.raises(RunError, match="has changed since you launched it"):
        check_target(run, dataclasses.replace(target, arguments=("--more",)), None)
    script.write_text("pass  # changed")
    with pytest.raises(RunError, match="has changed since you launched it") as refused:
        check_target(run, target, None)
    digest = str(refused.value).rpartition(" ")[2].removesuffix(".")
    assert check_target(run, target, digest) == target
    with pytest.raises(RunError, match="has changed since you launched it"):
        check_target(run, target, digest[:-1])
    assert (here / "state/accelerate-toolkit/launched").stat().st_mode & 0o077 == 0


def test_looking_for_a_module_runs_none(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "evil").mkdir()
    (here / "evil/__init__.py").write_text("open('ran', 'w')")
    (here / "evil/inner.py").touch()
    monkeypatch.syspath_prepend(here)
    with pytest.raises(RunError, match=r"would run the module 'evil\.inner'"):
        check_target(runs.own(here / "run"), Target(kind="module", name="evil.inner"), None)
    assert not (here / "ran").exists()


# Processes that files name ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(run: folder.Folder, by: dict[str, Any]) -> Iterator[Path]:
    """The lock of a run names a process, and one that has nothing to do with it holds the lock."""
    lock = run.path / "lock"
    lock.write_text(json.dumps({"token": "x"}) + "\n" + json.dumps({"role": "supervisor", **by}) + "\n")
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print('in', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "in\n"
        yield lock
        other.communicate("")


def process_of(pid: int) -> dict[str, Any]:
    """A process as a lock names it."""
    return {"pid": pid, "started": run_lock.started(os.getpid()), "host": socket.gethostname()}


@pytest.mark.parametrize("pid", [-1, 0, 1, True, 2.0, "7", None, 2**40])
def test_no_file_names_a_group_or_every_process(pid: Any, here: Path) -> None:
    run = runs.write(here / "run", [])
    with locked(run, process_of(pid)):
        assert run_lock.supervisor_of(run.path) is None
        assert not tk.attach(run.path).alive
        tk.attach(run.path).stop()  # would end this process, or all


@pytest.mark.parametrize("change", [{"started": None}, {"host": None}, {"token": "x"}, {"pid": 2**62}])
def test_a_process_is_named_whole(change: dict[str, Any], here: Path, victim: subprocess.Popen[bytes]) -> None:
    run = runs.write(here / "run", [])
    about = {**process_of(victim.pid), "started": run_lock.started(victim.pid), **change}
    with locked(run, {name: value for name, value in about.items() if value is not None}):
        if "token" not in change:
            assert tk.attach(run.path).status == "failed"
            tk.attach(run.path).stop()


def test_a_process_that_looks_after_no_run_is_not_signalled(here: Path, victim: subprocess.Popen[bytes]) -> None:
    run = runs.write(here / "run", [])
    about = {**process_of(victim.pid), "started": run_lock.started(victim.pid)}
    assert not supervises(about, run.path)
    with locked(run, about), pytest.raises(RunError, match="Stop it on that machine"):
        tk.attach(run.path).stop()


def test_a_lock_that_is_a_link_names_nobody(here: Path) -> None:
    """A process may have any file open, and everybody sees which."""
    theirs = here / "history.sqlite"
    run = runs.write(here / "run", [])
    (run.path / "lock").unlink()
    (run.path / "lock").symlink_to(theirs)
    before = psutil.Process().children()
    with locked(run, {}):
        (other,) = set(psutil.Process().children()) - set(before)
        about = {**process_of(other.pid), "started": run_lock.started(other.pid)}
        theirs.write_text(json.dumps({"token": "x"}) + "\n" + json.dumps({"role": "supervisor", **about}) + "\n")
        assert not supervises(about, run.path)
        with pytest.raises(RunError, match="Stop it on that machine"):
            tk.attach(run.path).stop()
        assert other.is_running()


# What is written, and where --------------------------------------------------------------------------------------------


def test_a_report_leaves_its_folder_by_no_link(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = here / "theirs"
    theirs.write_text("theirs")
    run = runs.write(here / "run", [runs.event(1)])
    (run.path / "report.html").symlink_to(theirs)
    with pytest.raises(RunError, match="is a link that leads out of the run's folder"):
        tk.report(run.path).write()
    (run.path / "report.html").unlink()
    monkeypatch.setattr(atomic_io.secrets, "token_hex", lambda size: "0" * 2 * size)
    (run.path / ".report.html.0000000000000000.tmp").symlink_to(theirs)
    with pytest.raises(RunError, match=r"is a link that leads out|cannot be written"):
        tk.report(run.path).write()
    with pytest.raises(FileExistsError):
        atomic_io.write_whole(run.path / "report.html", b"page")
    assert theirs.read_text() == "theirs"


HEX = "0123456789abcdef"
THEIRS = [
    "logs/notes.txt", "logs/more/x", "accelerate.yaml", "lock", "logs", ".mine.tmp", "x", f".notes.{HEX}.tmp",
    f"logs/.a.{HEX}.tmp", "logs/rank-0.log", f".run.json.{HEX}.tmp",
]  # fmt: skip


@pytest.mark.parametrize("file", THEIRS)
@pytest.mark.parametrize("way", ["enter", "launch", "train"])
def test_a_new_run_leaves_a_users_files_alone(
    file: str, way: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = here / "run" / file
    own.parent.mkdir(parents=True)
    (here / "run/lock").touch()  # empty: no run has signed it
    own.write_text("my notes\n")
    if way == "train":
        assert cli.main(["train", "--run-dir", str(here / "run"), "--steps", "1"]) == 2
        said = capsys.readouterr().err
    else:
        with pytest.raises(RunError) as refused:
            folder.enter(here / "run") if way == "enter" else tk.launch(print, run_dir=here / "run")
        said = str(refused.value)
    assert f"is not empty (it has {'logs/more' if 'more' in file else file})" in said
    assert own.read_text() == "my notes\n"


@pytest.mark.parametrize(
    "file", ["logs/notes.txt", f"logs/.a.{HEX}.tmp", f".notes.{HEX}.tmp", "accelerate.yaml/x", "logs/rank-0.beat/x"]
)
def test_what_came_into_a_new_run_stays_when_it_goes(file: str, here: Path) -> None:
    with folder.enter(here / "run") as run:
        run.logs.mkdir()
        run.log(0).write_text("ours")
        own = run.path / file
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("mine")
        run.discard()
        assert own.read_text() == "mine"
        own.unlink()
        if own.parent not in (run.path, run.logs):
            own.parent.rmdir()
        for draft in (f".run.json.{HEX}.tmp", f"logs/.rank-0.error.json.{HEX}.tmp"):  # of a process that was killed
            (run.path / draft).touch()
        run.discard()
    assert not (here / "run").exists()


def test_a_resumed_run_leaves_a_users_logs_alone(here: Path) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    own = [run.logs / name for name in ("rank-mine.beat", "rank-mine.error.json", "rank-mine.log")]
    for path in own:
        path.write_text("mine")
    run.beat(0).touch()
    supervisor._clear(run, {"num_processes": 2})
    restarts._report(run, "Restart 1 of 1")
    assert [path.read_text() for path in own] == ["mine"] * 3
    assert not run.beat(0).exists()


def test_an_empty_lock_is_no_run(here: Path) -> None:
    (here / "runs/theirs").mkdir(parents=True)
    (here / "runs/theirs/lock").touch()
    assert len(tk.runs()) == 0
    with pytest.raises(RunError, match="holds no run"):
        tk.attach("runs/theirs")


def test_results_replace_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    Path("notes").write_text("mine")
    Path(".out.partial").mkdir()
    Path(".out.partial/mine").touch()
    for words in (["runs", "--json", "notes"], ["report", str(run.path), "-o", "notes"]):
        assert cli.main(words) == 2
        assert "notes" in (said := capsys.readouterr().err)
        assert "exists" in said
    Path("zero3.yaml").write_text("mine")
    assert cli.main(["config", "--all", "."]) == 2
    assert "zero3.yaml exists with other content" in capsys.readouterr().err
    assert Path("zero3.yaml").read_text() == "mine"
    with pytest.raises(tk.ToolkitError, match="cannot be written: File exists"):
        write(Path("notes"), "came meanwhile")
    assert cli.main(["config", "--json", "/dev/null"]) == 0
    with atomic_dir(Path("out")) as draft:
        (draft / "file").touch()
    assert Path("notes").read_text() == "mine"
    assert Path(".out.partial/mine").exists()
    assert Path("out").stat().st_mode & 0o777 == Path("run").stat().st_mode & 0o777
    assert cli.main(["report", str(run.path), "-o", "page.html"]) == 0
    assert cli.main(["report", str(run.path), "-o", "page.html"]) == 0, "a report of the toolkit is rewritten"


@pytest.mark.parametrize("name", ["-x", "--steps", "x" * 300, "a\x1b[31m", "a\nb"])
def test_a_name_that_can_be_no_runs(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", f"--run-dir={name}", "--steps", "1"]) == 2
    assert "can be no run's name" in (said := capsys.readouterr().err)
    assert "\x1b" not in said
    assert os.listdir(here) == []


def test_a_home_is_spelled(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    run = runs.write(here / "home/run", [runs.event(1)])
    assert cli.main(["report", "~/run", "--output=~/page.html"]) == 0
    assert (here / "home/page.html").exists()
    assert tk.attach("~/run").folder == run.path
    assert not (here / "~").exists()
    capsys.readouterr()


# Models ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "deep/er/file", "folder"])
def test_nothing_of_a_model_leads_out_of_its_folder(name: str, here: Path) -> None:
    key = here / "private"
    key.mkdir()
    (key / "key").write_text("secret")
    model = here / "model"
    (model / name).parent.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / name).symlink_to(key if name == "folder" else key / "key")
    with pytest.raises(ModelError, match=r"is a link that leaves its folder, to .*private"):
        describe(model)


def test_links_in_a_circle_and_homes_of_nobody(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    (run.path / "train_config").symlink_to("train_config")
    assert cli.main(["report", str(run.path)]) in (0, 2)
    (here / "model").mkdir()
    (here / "model/config.json").write_text("{}")
    (here / "model/loop").symlink_to("train_config")
    for words in (["describe", str(here / "model")], ["stop", "~nobodys/run"], ["describe", "~nobodys/" + "x" * 5_000]):
        assert cli.main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_hidden_folders_of_a_model_are_not_looked_at(here: Path) -> None:
    """As where the model's folder is the root of a project."""
    (here / ".venv").mkdir()
    (here / ".venv/python").symlink_to(sys.executable)
    (here / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32}))
    assert describe(here).layers == 1


def test_a_subfolder_of_the_hubs_cache_works(here: Path) -> None:
    snapshot = here / "models--x--y/snapshots" / ("0" * 40) / "4bit"
    snapshot.mkdir(parents=True)
    (here / "models--x--y/blobs").mkdir()
    config = json.dumps({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32})
    (here / "models--x--y/blobs/abc").write_text(config)
    (snapshot / "config.json").symlink_to("../../../blobs/abc")
    assert describe(snapshot).layers == 1


def test_no_code_hides_behind_a_link_to_a_folder(here: Path) -> None:
    (here / "model/code").mkdir(parents=True)
    (here / "model/code/mine.py").touch()
    digest_of(here / "model")
    (here / "model/again").symlink_to("code")
    with pytest.raises(ModelError, match="is a link to a folder, which the digest does not cover"):
        digest_of(here / "model")


@pytest.mark.parametrize(
    ("tensors", "size"),
    [
        ({"a": [0, 8], "b": [4, 12]}, 12),
        ({"a": [0, 8], "b": [16, 24]}, 24),
        ({"a": [8, 0]}, 8),
        ({"a": [0, 4]}, 4),
        ({"a": [0, 8], "b": [0, 8]}, 8),
        ({"a": [-8, 8]}, 8),
    ],
)
def test_tensors_that_overlap(tensors: dict[str, list[int]], size: int, here: Path) -> None:
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in tensors.items()}
    text = json.dumps(header).encode()
    (here / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    (here / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32}))
    with pytest.raises(ModelError, match="is not a complete safetensors file"):
        require_weights(describe(here))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", "1000000000", "its config has num_hidden_layers 1000000000, expected at most 2,000"),
        ("text_config", '{"n_layer": 2001}', "its config has n_layer 2001"),
        ("hidden_size", "4.5", "transformers refuses its config"),
        ("hidden_size", "1" + "0" * 4000, "transformers cannot build|transformers refuses"),
        ("x", "[" * 200_000, "is not valid JSON .it is nested too deeply"),
        ("vocab_size", "Infinity", "transformers refuses its config"),
    ],
)
def test_a_config_that_nobody_could_build(field: str, value: str, said: str, here: Path) -> None:
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2}
    (here / "config.json").write_text(json.dumps({**known, field: "HERE"}).replace('"HERE"', value))
    with pytest.raises(ModelError, match=said):
        describe(here)


def test_nobody_waits_for_a_pipe(here: Path) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    for name in ("events.jsonl", "lock", "logs/supervisor.log", "logs/rank-0.log", "logs/end.json"):
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)
    attached = tk.attach(run.path)
    assert attached.status == "failed"
    with pytest.raises(RunError, match="it is not a regular file"):
        attached.logs(0)
    with pytest.raises(RunError, match="it is not a regular file"):
        tk.report(run.path)
    with pytest.raises(RunError, match="is neither a file nor a folder, and a run writes there"):
        tk.resume(run.path)


def test_a_clock_that_is_set_back_blames_nobody_else(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    for rank, clock in ((0, 2_000.0), (1, 1_000.0)):
        monkeypatch.setattr(folder.time, "time", lambda clock=clock: clock)
        run.record_error(rank, ValueError(f"rank {rank}"))
    monkeypatch.undo()
    assert failure(run, 1).args[0].startswith("rank 0 ended with ValueError: rank 0")
    assert tk.report(run.path).words == "Rank 0 ended with ValueError: rank 0"
    run.record_end("failed", "as its supervisor said")
    about = json.loads(run.run_json.read_text())
    about["attempts"][0]["started"] = "2099-01-01T00:00:00+0000"
    atomic_io.write_json(run.run_json, about)
    assert tk.report(run.path).words == "as its supervisor said"


def test_of_two_launches_at_once_one_is_refused(here: Path) -> None:
    def launch(_: int) -> Run | RunError:
        try:
            return tk.launch(time.sleep, run_dir=here / "run", args=(0.5,))
        except RunError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(launch, range(2)))
    (refused,) = [one for one in outcomes if isinstance(one, RunError)]
    (run,) = [one for one in outcomes if isinstance(one, Run)]
    assert "is in use by " in str(refused)
    assert run.wait(120, progress=False).status == "not audited", "it prepares nothing"


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk that has no room left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False, capture_output=True
    ).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_full_disk_is_one_sentence(full: Path) -> None:
    (full / "run").mkdir()
    run = folder.enter(full / "other")
    run.logs.mkdir()
    run.append_event(runs.event(1))
    fill(full)
    with pytest.raises(RunError, match=r"lock cannot be written: No space left on device.*Free some space"):
        folder.enter(full / "run")
    with pytest.raises(RunError, match=r"accelerate\.yaml cannot be written: No space left on device"):
        supervisor._clear(run, {"num_processes": 2})
    with pytest.raises(RunError, match=r"events\.jsonl cannot be written: (the disk is full|No space left)"):
        run.append_event(runs.event(2, samples="a" * 10_000))
    with pytest.raises(RunError, match=r"events\.jsonl cannot be written: No space left"):
        atomic_io.cut_events(run.events, 1)
    assert atomic_io.read_events(run.events)[0]["step"] == 1


# JSON ------------------------------------------------------------------------------------------------------------------

NUMBERS = ["4.0", "Infinity", "-Infinity", "NaN", "1" + "0" * 4000, "true", '"4"', "1e400", "[4]", "-1", "[" * 100_000]


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize(
    "field", ["step", "parallelism", "global_batch", "versions", "tensors", "files", "written", "counters"]
)
def test_a_manifests_fields_have_types(field: str, value: str, here: Path) -> None:
    fields = {**dataclasses.asdict(runs.manifest()), field: "HERE"}
    if field == "written" and value == '"4"':
        return  # a string, as expected
    sha256 = hashlib.sha256(json.dumps(fields).replace('"HERE"', value).encode()).hexdigest()
    text = json.dumps({**fields, "sha256": sha256}, indent=1).replace('"HERE"', value) + "\n"
    (here / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged, or no manifest"):
        read_manifest(here)


@pytest.mark.parametrize(
    "about",
    [
        5, [], {}, {"weight": 5}, {"weight": {}}, {"weight": {"shape": [4]}}, {"weight": {"dtype": "float32"}},
        {"weight": {"shape": [4.0], "dtype": "float32"}}, {"weight": {"shape": [True], "dtype": "float32"}},
        {"weight": {"shape": [-1], "dtype": "float32"}}, {"weight": {"shape": [0, 2**60], "dtype": "float32"}},
        {"weight": {"shape": [2**30, 2**30], "dtype": "float32"}}, {"weight": {"shape": "4", "dtype": "float32"}},
        {"weight": {"shape": [4], "dtype": ["float32"]}}, {"weight": {"shape": [4], "dtype": "load"}},
        {"shape": [4], "dtypes": {"weight": "float32"}}, {"weight": {"shape": [1] * 65, "dtype": "float32"}},
    ],
)  # fmt: skip
def test_a_manifests_tensors_have_shapes_and_dtypes(about: Any, here: Path) -> None:
    (here / "manifest.json").write_bytes(runs.manifest(tensors={"a": about}).encode())
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged, or no manifest"):
        read_manifest(here)
    (here / "manifest.json").write_bytes(runs.manifest().encode())
    assert read_manifest(here) == runs.manifest()


@pytest.mark.parametrize("value", [*NUMBERS, "{}", "null"])
@pytest.mark.parametrize(
    "field", ["ranks", "parallelism", "attempts", "train_config", "strategy", "started", "forecast"]
)
def test_one_broken_run_hides_no_other(field: str, value: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(here / "runs/sound", [runs.event(1)])
    broken = runs.write(here / "runs/broken", [runs.event(1)])
    about = json.dumps({**json.loads(broken.run_json.read_text()), field: "HERE"}).replace('"HERE"', value)
    broken.run_json.write_text(about)
    assert cli.main(["runs"]) == 0
    assert "sound" in capsys.readouterr().out
    for words in (["report", "runs/broken"], ["resume", "runs/broken", "--steps", "0"]):
        assert cli.main(words) in (0, 2), "a sentence, no traceback"
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"train_config": {"steps": "x"}}, {"train_config": {"steps": [1]}}, {"forecast": {"device": "x"}},
        {"forecast": {"device": {"peak_bytes": "x"}}}, {"finished": "2026-11-23T07:00:00+00:00"},
    ],
)  # fmt: skip
def test_no_folder_ends_in_a_traceback(changes: dict[str, Any], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_text()), **changes}))
    for memory in ("", "[]", '"x"', '{"measured": 5}'):
        run.memory.write_text(memory)
        for verb in ("watch", "stop", "runs", "report", "resume"):
            if verb != "resume" or "finished" in changes:
                assert cli.main([verb, str(run.path)]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("run/run.json", ["report", "run"]),
        ("run/run.json", ["resume", "run"]),
        ("run/events.jsonl", ["report", "run"]),
        ("run/events.jsonl", ["runs", "."]),
        ("run/logs/end.json", ["stop", "run"]),
        ("model/config.json", ["describe", "model"]),
        ("row.jsonl", ["train", "--data", "row.jsonl", "--steps", "1", "--sharding", "none"]),
        ("text.txt", ["train", "--data", "text.txt", "--steps", "1", "--sharding", "none"]),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's own peak")
def test_what_is_too_large_takes_little_memory(file: str, words: list[str], here: Path) -> None:
    runs.write(here / "run", [runs.event(1)])
    (here / "model").mkdir()
    with (here / file).open("ab") as large:
        large.truncate(2**31)
    done = python("-c", MEASURED, *words)
    code, mib = map(int, done.stdout.split()[-2:])
    assert code in (0, 2)
    assert "Traceback" not in done.stderr
    assert mib < 512


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 4.0, "loss": 1, "seconds": 1}', '{"step": 1e400, "loss": 1, "seconds": 1}', '{"step": 1, "bytes": [7]}',
        '{"step": 1, "loss": "1", "seconds": 1}', '{"step": 1, "loss": 1}', '{"step": -1}', "[1]", "x" * 2**21,
    ],
)  # fmt: skip
def test_a_line_that_no_run_writes_is_named(line: str, here: Path) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    with run.events.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunError, match=r"events\.jsonl, line 2: "):
        tk.report(run.path)
    assert tk.attach(run.path).progress.step == 1


WORDS = """rank 1 ended. Its last lines:
    Traceback (most recent call last):
      File "it's.py", line 3, in <module>
    raise ValueError('a  b' + "c")  # over
    toolkit train --model 'a  b' --data "it's"""


def views(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What every view shows of a run."""
    run = tk.attach(path)
    shown = [
        str(run),
        run._repr_html_(),
        live._page(run, last=True),
        repr(run),
        run.to_json(),
        str(tk.runs(path.parent)),
    ]
    result = tk.report(path)
    shown += [str(result), result._repr_html_(), result.page(), result.to_json()]
    for verb in ("watch", "stop", "runs", "report"):
        assert cli.main([verb, str(path.parent if verb == "runs" else path)]) in (0, 2)
        shown.append("".join(capsys.readouterr()))
    assert not [
        text for text in shown if "Traceback (most recent call last):\n  File" in text or "cannot be shown" in text
    ]
    return shown


def test_words_of_a_log_are_no_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    run.record_end("failed", WORDS)
    shown = views(run.path, capsys)
    for text in (shown[0], shown[10], shown[11]):  # printed, watched and stopped
        assert all(line in text for line in WORDS.splitlines()[1:-1]), "line by line, as it was"
    long = Table(
        columns=("a",), rows=[], title="    toolkit train --model 'a  b' --data \"it's" + " --word x" * 9
    ).text(40)
    assert long.replace(" \\\n        ", " ").startswith("    toolkit train --model 'a  b' --data \"it's --word x")


MANY = "".join(f'"{number}": "1", ' for number in range(9_999))
HUGE = [
    ("events.jsonl", lambda text: text + json.dumps(runs.event(2, bytes=[{"rss": 2**30}] * 5_000)) + "\n"),
    ("events.jsonl", lambda text: text + json.dumps(runs.event(2, **{f"x{i}": 1 for i in range(20_000)})) + "\n"),
    ("events.jsonl", lambda text: text + "".join(json.dumps(runs.event(i)) + "\n" for i in range(2, 5_000))),
    ("events.jsonl", lambda text: text.replace("7.9", "-1e308") + text.replace("7.9", "1.7e308")),
    ("events.jsonl", lambda text: text + json.dumps(runs.event(2**64 - 1, tokens=2**63, seconds=1e308)) + "\n"),
    ("events.jsonl", lambda text: text + json.dumps(runs.event(2, tokens=2**63, seconds=1e-308)) + "\n"),
    ("logs/end.json", lambda _: json.dumps({"how": "failed", "attempt": 1, "message": "a 'b c\n" * 2**20})),
    ("logs/end.json", lambda _: json.dumps({"how": "<b>burnt</b>", "attempt": 1, "message": "x"})),
    ("logs/end.json", lambda _: '{"how": "failed", "attempt": 1, "message": "x", "y": ' + "[" * 900 + "]" * 900 + "}"),
    ("run.json", lambda text: text.replace('"versions": {', '"versions": {' + MANY)),
    ("run.json", lambda text: text.replace('"ranks": 2', '"ranks": 1048576')),
    ("memory.json", lambda text: text.replace('"parts": {\n', '"parts": {\n' + MANY.replace(': "1"', ": 1"))),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change"), HUGE)
def test_a_view_is_bounded(
    file: str, change: Callable[[str], str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(here / "run", [runs.event(1)], memory=runs.memory())
    place = run.path / file
    place.write_text(change(place.read_text() if place.exists() else ""))
    shown = views(run.path, capsys)
    assert max(map(len, shown[:9] + shown[10:])) < 200_000, "no view grows with its folder"
    for number in (4, 9):
        json.loads(shown[number], parse_constant=pytest.fail)
    assert "<b>burnt" not in "".join(shown)


@pytest.mark.parametrize("file", ["run.json", "memory.json", "events.jsonl"])
def test_nesting_is_a_sentence(file: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.write(here / "run", [runs.event(1), runs.event(2)], memory=runs.memory())
    place = run.path / file
    lines = place.read_text().rstrip().removesuffix("}")
    place.write_text(lines + ', "x": ' + "[" * 900 + "]" * 900 + "}\n")
    assert "toolkit-run" in tk.attach(run.path)._repr_html_()
    assert cli.main(["report", str(run.path)]) == 2
    assert "it is nested too deeply" in capsys.readouterr().err


def test_of_many_ranks_the_fullest_are_shown(here: Path) -> None:
    record = runs.about(ranks=4_096, parallelism={"dp_shard": 4_096})
    run = runs.write(here / "run", [runs.event(1, bytes=[{"rss": 2**20 + i} for i in range(4_096)])], record=record)
    shown = tk.attach(run.path)
    assert len(shown.progress.bytes_per_rank) == 4_096
    for text in (str(shown), shown._repr_html_()):
        assert "rank 4095" in text
        assert "rank 4000" not in text
    assert "4,064 more ranks have less memory" in str(shown)
    about = runs.about()
    atomic_io.write_json(run.run_json, about)
    assert len(tk.attach(run.path).progress.bytes_per_rank) == about["ranks"]


# Terminals, cards and secrets ------------------------------------------------------------------------------------------

HOSTILE = "a\x1b]52;c;c2VjcmV0\x07b\u202ec\x9b31md\r\x7f"


def test_no_terminal_obeys_a_stranger(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.write(here / "run", [runs.event(1)])
    about = json.loads(run.run_json.read_text())
    about["run_config"]["model"] = HOSTILE
    run.run_json.write_text(json.dumps(about))
    assert cli.main(["report", str(run.path)]) == 0
    assert cli.main(["describe", HOSTILE]) == 2
    said = capsys.readouterr()
    shown = [
        said.out,
        said.err,
        str(tk.report(run.path)),
        str(RunError(HOSTILE)),
        Table(columns=("a",), rows=[(HOSTILE,)]).text(),
    ]
    for text in shown:
        assert not set(HOSTILE) - set("abc52;mdVjcmV031]c2") & set(text), text
        assert "\\x1b" in text
    assert "\n" not in Table(columns=("a",), rows=[("x\ny",)]).text().splitlines()[-1]


def test_a_progress_bar_still_moves() -> None:
    bar = "\x1b[A\r\x1b[31m5%\x1b[0m\x1b[K\tdone\n"
    assert visible(bar, moves=True) == bar
    assert visible("\x1b]0;title\x07\x1b[2J", moves=True) == "\\x1b]0;title\\x07\\x1b[2J"
    assert visible("\udc9b\udcff", moves=True) == "\\udc9b\udcff"


PARTS = [
    "?",
    "?a",
    "&a",
    "?token",
    "://a:",
    "https://",
    "://:",
    "authorization ",
    "bearer \t",
    "key",
    "TOKEN=",
    "a",
    "@:/",
]


@pytest.mark.parametrize("part", PARTS)
def test_no_text_takes_the_redactor_long(part: str) -> None:
    """A square of its length would be hours."""
    text = part + "a" * 3_000_000 + part * (3_000_000 // len(part))
    assert len(redact(text)) <= len(text) + 1000


def test_no_cell_ends_a_cards_block(here: Path) -> None:
    rows = {"data": "```\n# A heading of a stranger's\n<script>"}
    checked = Checked(what="model", tensors={}, error=None)
    finish_export(here, describe(), checked, trained="none", rows=rows, folder=here)
    lines = (here / "README.md").read_text().splitlines()
    fence = next(line.removesuffix("text") for line in lines if line.endswith("`text"))
    assert len(fence) > 3
    assert not any(line.startswith("# A heading") for line in lines)


# Pickles ---------------------------------------------------------------------------------------------------------------

TUPLES = {
    "deep": b"\x80\x02})" + b"\x85" * 3_000_000 + b"K\x01s.",
    "wide": b"\x80\x02})q\x00" + b"0h\x00h\x00\x86q\x00" * 60 + b"K\x01s.",
    "long": b"\x80\x02})q\x00" + (b"0(" + b"h\x00" * 9 + b"tq\x00") * 10 + b"K\x01s.",
}  # fmt: skip


@pytest.mark.parametrize("how", list(TUPLES))
@pytest.mark.parametrize("kind", ["dcp", "zip", "legacy"])
def test_no_tuple_takes_for_ever_or_the_stack(how: str, kind: str, here: Path) -> None:
    file = here / "file.pt"
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", TUPLES[how])
            archive.writestr("archive/version", "3\n")
    elif kind == "legacy":
        beginning = [pickle.dumps(one, protocol=2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        file.write_bytes(b"".join([*beginning, TUPLES[how], pickle.dumps([], protocol=2)]))
    else:
        file.write_bytes(TUPLES[how])
    read = restricted_unpickler.load_metadata if kind == "dcp" else restricted_unpickler.load
    with pytest.raises(CheckpointError, match=r"nests more than 10,000 tuples"):
        read(file)


# Data ------------------------------------------------------------------------------------------------------------------


def test_no_data_lead_out_of_their_folder(here: Path) -> None:
    (here / "key").write_text("private")
    (here / "data/deep").mkdir(parents=True)
    (here / "data/a.txt").write_text("text")
    find_source(here / "data")
    (here / "data/b.txt").symlink_to("a.txt")
    find_source(here / "data")
    (here / "data/deep/c.txt").symlink_to(here / "key")
    with pytest.raises(DataError, match=r"deep/c\.txt is a link that leaves its folder, to .*key"):
        find_source(here / "data")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", "{" + ", ".join(f'"{i}": 1' for i in range(300_000)) + ', "7": 2}', "the name '7' stands twice"),
        ("a.jsonl", '{"text": "a", "text": "b"}', "the name 'text' stands twice"),
        ("a.jsonl", '{"text": "' + "a" * (LONGEST_TEXT + 1) + '"}', "the text has more than"),
        ("a.txt", "a" * (LONGEST_TEXT + 1), "the text has more than"),
    ],
)
def test_rows_that_mean_two_things_or_take_all_memory(name: str, content: str, said: str, here: Path) -> None:
    (here / name).write_text(content)
    with pytest.raises(DataError, match=said):
        list(documents(find_source(str(here / name))))
