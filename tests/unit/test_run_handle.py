"""A run seen through its folder by several processes: who may begin in it, how it ended, and who is stopped."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from programs import python
from transformers import GPT2Config

import toolkit as tk
from toolkit.cli import main
from toolkit.core import atomic_io
from toolkit.core.errors import RunError
from toolkit.core.units import timestamp
from toolkit.launcher import run_handle
from toolkit.launcher.api import without_launchers
from toolkit.launcher.targets import Target, check_target, note_launch, target_of
from toolkit.reports import sections
from toolkit.run_folder import folder, run_lock
from toolkit.run_folder.status import Progress, page, read_progress
from toolkit.training import run_log


def nothing() -> None:
    """A function to launch."""


def own(path: Path, **target: Any) -> folder.Folder:
    """A finished run of a script, with an audit."""
    run = runs.own(path, target, finished=timestamp())
    atomic_io.write_json(run.audit, {"sharding": "ddp", "engine": "DistributedDataParallel", "ranks": 2})
    return run


def test_no_link_leads_a_launch_out_of_its_folder(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    run = runs.write(tmp_path / "run", [])
    run.supervisor_log.symlink_to(victim)
    with pytest.raises(RunError, match="is a link that leads out of the run's folder"):
        tk.resume(run.path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/logs").symlink_to(tmp_path)
    with pytest.raises(RunError, match=r"is a link that leads out of the run's folder|it has logs/"):
        tk.launch(nothing, run_dir=tmp_path / "new")
    assert victim.read_text() == "theirs"
    assert not (tmp_path / "function.pkl").exists()


def test_a_folder_that_is_held_is_left_as_it_is(tmp_path: Path) -> None:
    """Also before its `run.json` is there."""
    path = tmp_path / "run"
    with runs.another(path) as process:
        with pytest.raises(RunError, match=rf"is in use by process {process.pid} \(supervisor"):
            tk.launch(nothing, run_dir=path)
        assert [one["status"] for one in tk.runs(tmp_path).entries] == ["starting"]
        assert sorted(entry.name for entry in path.iterdir()) == ["lock"]
        assert tk.attach(path).stop(timeout=20).status == "failed"
        assert process.wait(20) == -15


def test_a_number_that_came_to_another_process_is_not_meant(tmp_path: Path) -> None:
    mine = {"pid": os.getpid(), "started": run_lock.started(os.getpid()), "host": socket.gethostname()}
    assert run_lock.still(mine)
    assert not run_lock.still(mine | {"started": "1"})


def test_a_refused_resume_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the folder says of the attempt before."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    run = own(tmp_path / "run")
    note_launch(run, Target(kind="script", name="mine.py"))
    again = tk.resume(run.path, steps=7, restarts=2)
    with pytest.raises(
        RunError, match=r"--steps, --restarts: only the recipe takes such flags, and .* is a run of mine"
    ):
        again.wait(60, progress=False)
    assert (again.status, tk.attach(run.path).status) == ("failed", "finished")
    with (run.path / "lock").open("a") as lock:  # as a shell's `toolkit resume` leaves it
        lock.write(json.dumps({"pid": 2, "started": "9" * 15, "host": "here", "role": "supervisor"}) + "\n")
    assert again.status == "finished"
    assert main(["resume", str(run.path), "--trust-target", "0" * 64, "--steps", "3"]) == 2
    assert "--steps: only the recipe" in capsys.readouterr().err


def test_a_run_that_is_stopped_at_once_was_stopped(tmp_path: Path) -> None:
    run = tk.launch(nothing, run_dir=tmp_path / "run")
    assert tk.attach(run.folder).status == "starting", "its supervisor holds the folder from its beginning"
    run.stop(timeout=60)
    assert run.status == "stopped"
    assert "stopped" in run.wait(progress=False).message


def test_a_function_is_for_a_run_of_a_function(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is a run of the script mine\.py\. Give that again"):
        tk.resume(own(tmp_path / "script").path, nothing)
    with pytest.raises(RunError, match="is a run of the recipe, and no code of yours"):
        tk.resume(runs.write(tmp_path / "run_config", []).path, trust_target="0" * 64)


def test_a_secret_is_not_made_up(tmp_path: Path) -> None:
    run = own(tmp_path / "run", arguments=["--key", "hf_" + "a" * 34])
    result = target_of(folder.read_run_json(run.path))
    with pytest.raises(RunError, match=r"has a secret among its arguments, which run\.json does not store: --key"):
        check_target(run, result, None)
    assert "A secret in the command is replaced by" in str(tk.report(run.path))


def test_both_answers_to_how_it_ended_are_one(tmp_path: Path) -> None:
    run = runs.write(tmp_path / "run", [runs.event(1)])
    for how in ("stopped", "failed"):
        run.record_end(how, f"{how} as it went")
        result = tk.attach(run.path)
        assert (result.status, result.message) == (how, f"{how} as it went") == (how, result.report().words)
    run.memory.write_text("{}")
    os.utime(run.memory, (1, 1))
    assert result.memory is None, "it is an older attempt's"


def test_who_goes_elsewhere_still_sees_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own(Path("mine"))
    own(Path("runs/other"))
    assert [tk.attach("other").name, *(run.name for run in tk.runs())] == ["runs/other"] * 2  # as `runs()` names it
    run = tk.attach("mine")
    assert repr(run) == "<Run mine: finished, step 0>"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run.status == "finished"
    assert str(tmp_path / "mine") in repr(run)


def test_a_script_is_listed_under_the_sharding_that_an_audit_found(tmp_path: Path) -> None:
    run = own(tmp_path / "run")
    assert tk.attach(run.path).to_dict()["strategy"]["sharding"] == tk.report(run.path).sharding == "ddp"
    for audit in ('{"sharding": "<b>"}', '{"sharding": []}', "[]", None):  # crafted, or missing
        run.audit.write_text(audit) if audit else run.audit.unlink()
        result = tk.attach(run.path)
        assert result.status == result.report().status == "not audited"
        assert result.to_dict()["strategy"]["sharding"] == result.report().to_dict()["sharding"] == "not audited"
        assert "nothing shows how it was sharded" in result.message
        assert "not audited" in str(tk.runs(tmp_path))


def test_one_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    own(tmp_path / "mine")
    about = runs.about()
    about["strategy"]["of_another_version"] = 1
    runs.write(tmp_path / "other", [], record=about)
    for file in ("run.json", "lock"):
        os.utime(tmp_path / "mine" / file, (1, 1))
    (tmp_path / "mine" / "report.html").touch()  # makes the run no newer
    result = tk.runs(tmp_path)
    assert [(Path(one["folder"]).name, one["status"]) for one in result.entries] == [
        ("other", "unreadable"),
        ("mine", "finished"),
    ]
    assert "of_another_version" in str(result)
    assert {one["status"] for one in json.loads(result.to_json())["entries"]} == {"finished", "unreadable"}


def test_a_new_run_is_not_kept_out_by_one_named_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own(Path("runs/new"))
    folder.check_new(None)
    with pytest.raises(RunError, match="holds a run already"):
        folder.check_new("runs/new")


def test_what_an_accelerator_left_behind_reaches_no_run() -> None:
    left = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "RANK": "1", "MASTER_PORT": "1", "TOOLKIT_RUN_DIR": "x"}
    assert without_launchers({**left, "HOME": "/", "HF_HOME": "/cache"}) == {"HOME": "/", "HF_HOME": "/cache"}


def test_a_model_that_only_this_process_knows_is_not_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tk.StrategyError, match=r"the ranks cannot find .* Save it into a folder"):
        tk.launch(model=tk.describe(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=32)))
    assert not Path("runs").exists()


# Lines of one's own ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rank 0 of a run of one's own; the file that it logs into."""
    monkeypatch.setenv(run_log.RUN_DIR, str(tmp_path))
    monkeypatch.setattr(run_log, "_times", {})
    return tmp_path / "events.jsonl"


def test_lines_of_ones_own(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        tk.log(step, steps=9, loss=torch.tensor(1 / step), tokens=8)
    monkeypatch.setattr(run_log, "_times", {})  # the run goes on in a new process, from what it saved after step 1
    tk.log(2, steps=9, loss=0.25)
    assert [(line["step"], line["loss"]) for line in atomic_io.read_events(rank)] == [(1, 1.0), (2, 0.25)]
    assert read_progress(rank.parent).steps == 9


def test_steps_of_ones_own_loop_are_counted_until_it_logs(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.config.strategy import Strategy
    from toolkit.training.setup import accelerator

    (rank.parent / "logs").mkdir()
    ours, model = accelerator(Strategy(precision="fp32")), torch.nn.Linear(2, 1)
    start = time.perf_counter()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in (1, 2, 3, 4):
        loss = model(torch.ones(1, 2, device=ours.device)).sum()
        ours.backward(loss)
        optimizer.step()
        if step == 3:
            tk.log(step, loss=0.5)
    ours.end_training()
    assert [(line["step"], line["loss"]) for line in atomic_io.read_events(rank)] == [(1, None), (2, None), (3, 0.5)]
    steps = list(atomic_io.read_events(rank))
    assert [sections._is_counted(step) for step in steps] == [True, True, False]
    assert 0 < sum(step["seconds"] for step in steps) < time.perf_counter() - start, (
        "what came before the steps is no part"
    )
    monkeypatch.setattr(run_log, "_times", {})  # a resumed run's first step takes nothing from what was logged
    run_log.count_step()
    assert [line["step"] for line in atomic_io.read_events(rank)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("status", "known"), [("running", False), ("stopped", True), ("finished", True)])
def test_only_what_goes_on_has_a_bar_without_an_end(status: str, known: bool) -> None:
    assert ('value="3" max="3"' in page("mine", status, Progress(step=3), [], "")) == known


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"bytes": 5}, "'bytes' is a name of the toolkit's own"),
        ({"loss": "low"}, "loss='low' is not a number"),
        ({"seconds": None}, "seconds=None is not a number"),
        ({"seconds": float("inf")}, "seconds=inf is not a number"),
        ({"step": 1.5}, r"step 1\.5 is not a whole number"),
    ],
)
def test_what_is_no_figure_is_refused(rank: Path, figures: dict[str, Any], said: str) -> None:
    with pytest.raises(tk.ToolkitError, match=said):
        tk.log(**{"step": 1, **figures})
    assert not rank.exists()


def test_what_is_logged_can_be_read(rank: Path) -> None:
    tk.log(1, loss=float("nan"), tokens=2.0, good=True)
    assert [(line["loss"], line["good"]) for line in atomic_io.read_events(rank)] == [(None, 1)]


def test_outside_of_a_run_nothing_stops_and_no_signal_is_taken() -> None:
    program = (
        "import signal, toolkit as tk; print(tk.should_stop(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    assert python("-c", program, code=0).stdout.split() == ["False", "True"]


def test_an_interrupted_watch_says_that_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with runs.another(tmp_path / "run"):
        monkeypatch.setattr(run_handle.time, "sleep", interrupt)
        assert main(["watch", str(tmp_path / "run")]) == 130
        monkeypatch.undo()
    assert "waiting has ended; the run in" in capsys.readouterr().err


def test_a_resumed_run_starts_again(tmp_path: Path) -> None:
    """Steps of an older attempt are not those that it does."""
    run = runs.write(tmp_path / "run", [runs.event(1, bytes=[{"rss": 5}, {"rss": 7}])])
    os.utime(run.events, (1, 1))
    with runs.another(run.path):
        result = tk.attach(run.path)
        assert (result.status, result.progress.step, list(result.metrics["bytes"])) == ("starting", 1, [7])
        os.utime(run.events)
        assert result.status == "running"
