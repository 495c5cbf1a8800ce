"""Runs that are stopped, and runs with a rank that raises, dies, hangs or lacks memory: each ends whole, explained, resumable."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import tiny
from programs import ROOT, environment, gone, python, until

from toolkit import report
from toolkit.checkpoints import list_checkpoints
from toolkit.core.atomic_io import read_events
from toolkit.run_folder.heartbeat import read_beats

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

TIMEOUT = 12
"""Seconds of silence after which these runs' ranks have hung."""

# Read by every interpreter that starts with this folder on its path: faults in rank 1, or in the only rank. «disk»: rank 0
# opens the manifest, the export's draft and the export itself for longer than ranks may wait in a collective; and the
# model that is opened from the export computes a little differently.
FAULT = """
import os, signal, sys, time

def watch():
    from toolkit.core import phases
    limits = []

    def observe(name, begins):
        if name == "step" and not begins:
            time.sleep(0.2)
        if name == "forward" and os.environ["FAULT"] == "limited" and not limits:
            import psutil, resource
            limits.append(psutil.Process().memory_info().vms + 40 * 2**20)
            resource.setrlimit(resource.RLIMIT_AS, (limits[0], limits[0]))

    phases.observe(observe)
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(300))
    signal.signal(signal.SIGUSR2, fail)

def fail(*_):
    raise RuntimeError("a fault in the middle")

def slow_disk():
    slow = {"/.manifest.json.", ".partial/config.json", "/export/config.json"}

    def opens(event, arguments):
        path = str(arguments[0]) if event == "open" else ""
        for name in [name for name in slow if name in path]:
            slow.discard(name)
            time.sleep(12)
            if not slow:
                from torch.nn import functional
                silu = functional.silu
                functional.silu = lambda tensor, inplace=False: 1.01 * silu(tensor)

    sys.addaudithook(opens)

if "toolkit.finetune" in sys.orig_argv:
    if os.environ["FAULT"] == "disk":
        if os.environ.get("RANK") == "0":
            slow_disk()
    elif os.environ.get("RANK", "1") == "1":
        watch()
"""


@dataclass
class Running:
    """A run, from its start to its end."""

    name: str
    path: Path
    process: subprocess.Popen[str]
    code: int = 0
    out: str = ""
    err: str = ""
    left: list[psutil.Process] = field(default_factory=list)

    def preflight(self) -> bool:
        """Whether it has done five steps (and has published what it saved after the second), or has ended."""
        return self.process.poll() is not None or len(self.events) >= 5

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of its steps."""
        return read_events(self.path / "events.jsonl")

    def strike(self, do: Callable[[Running], None]) -> None:
        """Once it is ready."""
        until(self.preflight, 400, self.name)
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        do(self)
        self.out, self.err = self.process.communicate(timeout=300)
        self.code = self.process.returncode
        _, self.left = psutil.wait_procs(family, timeout=2)


def at_all(number: int) -> Callable[[Running], None]:
    """A signal for what was started."""
    return lambda run: run.process.send_signal(number)


def at_rank(number: int) -> Callable[[Running], None]:
    """A signal for rank 1."""
    return lambda run: os.kill(read_beats(run.path / "logs")[1].pid, number)


def hang_then_stop(run: Running) -> None:
    """A rank that is silent; and when the run goes on without it, a stop."""
    at_rank(signal.SIGSTOP)(run)
    until(lambda: any(event["attempt"] == 1 for event in run.events), alive=run.process)
    run.process.send_signal(signal.SIGTERM)


def stop_and_resume(run: Running) -> None:
    """Ctrl-C; the resumed run is stopped, too, after some steps."""
    run.process.send_signal(signal.SIGINT)
    _, said = run.process.communicate(timeout=300)
    assert run.process.returncode == 130, said
    done = len(run.events)
    words = ("-m", "toolkit.cli", "resume", str(run.path))
    run.process = programs.start(*words, env=environment(run.path.parent / "fault", FAULT="slow"))
    until(lambda: len(run.events) >= done + 4, alive=run.process)
    run.process.send_signal(signal.SIGTERM)


def kill_later(run: Running) -> None:
    """Rank 1, after more steps than `stop_and_resume` leaves to a run. Rank 0, which needs it, ends before its time-out."""
    until(lambda: len(run.events) >= 30, alive=run.process)
    waiting = psutil.Process(read_beats(run.path / "logs")[0].pid)
    at_rank(signal.SIGKILL)(run)
    gone([waiting], TIMEOUT)


def until_rank_1_waits(run: Running) -> None:
    """For rank 0, as its heartbeat says."""
    until(lambda: read_beats(run.path / "logs")[1].phase == "wait", 60, alive=run.process)


def nothing(_: Running) -> None:
    """The fault comes from within."""


def start(work: Path, name: str, fault: str, *flags: str, bare: str = "") -> Running:
    """`toolkit train`, or Accelerate's own launcher with the config file named `bare`."""
    things = ["--model", str(work / "llama"), "--data", str(work / "text.jsonl"), "--run-dir", str(work / name)]
    config = ["--main_process_port", "0", "--config_file", str(ROOT / "accelerate_configs" / f"{bare}.yaml")]
    launch = ["accelerate.commands.launch", *config, "-m", "toolkit.finetune"] if bare else ["toolkit.cli", "train"]
    environ = environment(work / "fault", FAULT=fault)
    process = programs.start("-m", *launch, *things, "--no-memory-window", *flags, cwd=work, env=environ)
    return Running(name, work / name, process)


LONG = ("--steps", "10000")
TWO = ("--processes", "2", "--timeout", str(TIMEOUT), "--seq-len", "32", *LONG)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """All runs of this file, three at a time, the longest first: most of them wait for most of their time."""
    work = tmp_path_factory.mktemp("supervision")
    tiny.llama(work / "llama")
    (work / "text.jsonl").write_text("".join(f'{{"text": "w{index % 240}"}}\n' for index in range(20_000)))
    (work / "fault").mkdir()
    (work / "fault" / "sitecustomize.py").write_text(FAULT)
    memory = ("--seq-len", "512", "--micro-batch", "16", "--steps", "2", "--no-save", "--save-seconds", "0")
    plan: dict[str, tuple[Callable[[Running], None], tuple[str, ...]]] = {
        "silent": (hang_then_stop, ("slow", "--pp", "2", "--no-guard", *TWO, "--save-every", "2", "--restarts", "3")),
        "behind": (at_rank(signal.SIGUSR1), ("slow", "--tp", "2", "--no-guard", *TWO)),
        "stopped": (stop_and_resume, ("slow", "--tp", "2", "--no-guard", *TWO)),
        "killed": (kill_later, ("slow", "--tp", "2", "--no-guard", *TWO)),
        "raised": (at_rank(signal.SIGUSR2), ("slow", "--sharding", "ddp", *TWO)),
        "memory": (nothing, ("limited", "--sharding", "ddp", "--processes", "2", *memory, "--on-oom", "shrink")),
        "alone": (at_all(signal.SIGINT), ("slow", "--processes", "1", "--save-seconds", "0", "--seq-len", "32", *LONG)),
        "bare": (at_all(signal.SIGTERM), ("slow", "--seq-len", "32", *LONG)),
        "disk": (
            until_rank_1_waits,
            ("disk", "--seq-len", "32", "--steps", "5", "--save-every", "2", "--timeout", "10"),
        ),
    }
    running: dict[str, Running] = {}

    def run(name: str) -> None:
        running[name] = start(work, name, *plan[name][1], bare={"bare": "zero2", "disk": "ddp"}.get(name, ""))
        running[name].strike(plan[name][0])

    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, ("disk", "silent", "stopped", "behind", "killed", "memory", "raised", "bare", "alone")))
        yield running
    finally:
        for run in running.values():
            run.process.kill()


def attempts(run: Running) -> list[dict[str, Any]]:
    """As `run.json` has them."""
    records: list[dict[str, Any]] = json.loads((run.path / "run.json").read_text())["attempts"]
    return records


@pytest.mark.parametrize("name", ["silent", "stopped", "behind", "killed", "raised", "memory", "alone", "bare", "disk"])
def test_nothing_is_left_of_a_run(runs: dict[str, Running], name: str) -> None:
    assert runs[name].left == []
    assert not list((runs[name].path / "checkpoints").glob(".step-*"))


def test_a_stop_without_checkpoints(runs: dict[str, Running]) -> None:
    run = runs["alone"]
    assert run.code == 130
    first, second, *_ = run.err.splitlines()
    assert first.startswith(
        "toolkit: stopping after this step, with a checkpoint if the run saves any. A second Ctrl-C "
    )
    assert second.startswith("toolkit: stopped by SIGINT. There is no checkpoint (they are off: ")
    assert run.err.endswith(f"`toolkit resume {run.path}` starts again from step 0.\n")


def test_a_stop_under_accelerate_launch_itself(runs: dict[str, Running]) -> None:
    run = runs["bare"]
    done = run.events[-1]["step"]
    assert list_checkpoints(run.path / "checkpoints")[0].name == f"step-{done:08d}"
    assert f"stopped after step {done}, as requested. Published: " in run.out
    assert f"`toolkit resume {run.path}` continues from it." in run.out


def test_a_slow_disk_ends_no_run(runs: dict[str, Running]) -> None:
    """Rank 0 publishes, writes and checks for longer than `--timeout` each, and the other rank waits."""
    run = runs["disk"]
    assert run.code == 0, run.err
    assert [event["step"] for event in run.events] == [1, 2, 3, 4, 5]
    assert "== The trained model ==" in str(report(run.path))


def test_logits_alone_that_differ_end_no_run(runs: dict[str, Running]) -> None:
    """The saved bytes are the trained ones: terminal, card and report say by how much the opened model differs."""
    run = runs["disk"]
    error = json.loads((run.path / "run.json").read_text())["export"]["logits_error"]
    assert error > 1e-4
    card = (run.path / "export" / "README.md").read_text()
    for place in (run.out, card, str(report(run.path))):
        said = " ".join(place.split())
        assert f"The saved bytes are the trained ones, but logits differ by {error:.1e} relative" in said
        assert "Do not use it" not in said


def test_a_silent_rank_is_named_and_the_run_goes_on(runs: dict[str, Running]) -> None:
    """A stage of a pipeline, by its stage. The run continues from the newest checkpoint, in a new attempt."""
    run = runs["silent"]
    assert "\ntoolkit: rank 1 (pipeline stage 1) hung: " in run.err
    assert re.search(r"(no|without a) heartbeat for \d+\.\d s", run.err)
    assert f"longer than {TIMEOUT} s (--timeout)" in run.err
    assert str(run.path / "logs" / "rank-1.log") in run.err
    first, second = attempts(run)
    step = second["from_step"]
    assert first["from_step"] == 0
    assert step >= 2
    assert f"\nRestart 1 of 3, from {run.path / 'checkpoints' / f'step-{step:08d}'}.\n" in run.err
    done = run.events[-1]["step"]
    assert [event["step"] for event in run.events] == list(range(1, done + 1))
    assert [event["attempt"] for event in run.events] == [0] * step + [1] * (done - step)


def test_a_stop_publishes_the_step_that_was_done(runs: dict[str, Running]) -> None:
    """And no restart follows it."""
    run = runs["silent"]
    done = run.events[-1]["step"]
    newest = list_checkpoints(run.path / "checkpoints")[0]
    assert newest.name == f"step-{done:08d}"
    said = f"\ntoolkit: stopped by SIGTERM. Published: {newest}. `toolkit resume {run.path}` continues from it.\n"
    assert run.err.endswith(said)
    assert run.code == 143
    assert f"stopped after step {done}, as requested\n" in run.out


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("silent", "stopped"),
        ("stopped", "stopped"),
        ("bare", "stopped"),
        ("behind", "failed"),
        ("killed", "failed"),
        ("raised", "failed"),
        ("memory", "finished"),
    ],
)
def test_the_report_says_how_a_run_ended(runs: dict[str, Running], name: str, status: str) -> None:
    """Accelerate's own launcher leaves no page, and its folder makes one."""
    run = runs[name]
    shown = report(run.path)
    assert shown.status == status
    assert (run.path / "report.html").exists() == (name != "bare")
    assert shown.to_dict()["attempts"] == attempts(run)
    if status == "failed" or name == "silent":
        hint = f"There is no checkpoint. `toolkit resume {run.path}` starts again from step 0.\n"
        assert run.err.endswith(f"toolkit: {shown.words}\n" + (hint if status == "failed" else ""))


def test_a_rank_that_others_wait_for_is_named(runs: dict[str, Running]) -> None:
    """Not the rank with the collective that timed out."""
    run = runs["behind"]
    assert run.code == 1
    assert run.err.startswith(f"toolkit: rank 1 hung: the others waited for it longer than {TIMEOUT} s (--timeout). ")
    assert str(run.path / "logs" / "rank-1.log") in run.err
    said = json.loads((run.path / "logs" / "rank-0.error.json").read_text())["message"]
    assert re.search("Timed out waiting|Application timeout", said), said  # whichever of gloo's waits is first


def test_a_rank_of_a_tp_group_that_is_killed_ends_the_whole_run(runs: dict[str, Running]) -> None:
    """In time: see `kill_later`."""
    run = runs["killed"]
    assert run.code == 1
    assert re.match(r"toolkit: rank 1 was killed by SIGKILL .* It was .* step \d+\.", run.err), run.err


def test_a_stopped_run_under_tp_resumes_to_the_same_losses(runs: dict[str, Running]) -> None:
    """As those of the run that was killed later, which was never stopped."""
    run = runs["stopped"]
    first, second = attempts(run)
    step = second["from_step"]
    assert (first["from_step"], run.code) == (0, 143)
    losses, expected = ({event["step"]: event["loss"] for event in each.events} for each in (run, runs["killed"]))
    assert [event["attempt"] for event in run.events] == [0] * step + [1] * (len(losses) - step)
    compared = sorted(losses.keys() & expected.keys())
    assert compared[-1] >= step + 3
    assert [losses[number] for number in compared] == [expected[number] for number in compared]


def test_a_rank_that_raises_ends_the_whole_run(runs: dict[str, Running]) -> None:
    run = runs["raised"]
    assert run.code == 1
    assert not (run.path / "export").exists()
    first, _, last_lines = run.err.partition(" Its last lines (")
    assert re.fullmatch(r"toolkit: rank 1 ended with RuntimeError: a fault in the middle. It was .* step \d+\.", first)
    assert last_lines.startswith(str(run.path / "logs" / "rank-1.log"))
    hint = f"There is no checkpoint. `toolkit resume {run.path}` starts again from step 0.\n"
    assert last_lines.endswith(f"RuntimeError: a fault in the middle\n{hint}")
    assert "rank 1 " in (run.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("config", "flags", "sentence"),
    [
        (
            "zero3",
            ["--sharding", "fsdp"],
            "sharding 'fsdp' was requested, but the Accelerate launch environment has 'zero3'",
        ),
        ("ddp", ["--data", "nothing.jsonl"], "data nothing.jsonl: no such file or folder"),
    ],
)
def test_a_mistake_under_accelerate_launch_is_said_once(
    config: str, flags: list[str], sentence: str, tmp_path: Path
) -> None:
    file = ROOT / "accelerate_configs" / f"{config}.yaml"
    launch = ["accelerate.commands.launch", "--main_process_port", "0", "--config_file", file]
    done = python("-m", *launch, "-m", "toolkit.finetune", *flags, cwd=tmp_path)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count(sentence) == 1, done.stderr
    assert "toolkit/" not in done.stderr, "a traceback through our own files"
    assert list(tmp_path.iterdir()) == []


COUNTING = """
import os, sys
def hook(event, about):
    if event == "open" and str(about[0]).endswith(("text.jsonl", "held.jsonl")):
        log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, os.path.basename(about[0]).encode() + b"\\n")
        os.close(log)
sys.addaudithook(hook)
"""
"""Every process writes down which data file it opens."""


def test_an_evaluation_that_a_stop_cuts_short_is_made_up_for(tmp_path: Path) -> None:
    """A signal in its midst ends the run within its 30 s; who goes on with it begins with the evaluation."""
    tiny.llama(tmp_path / "llama")
    for name, count in (("text", 2_000), ("held", 40_000)):
        lines = (f'{{"text": "w{index % 240}"}}\n' for index in range(count))
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jsonl").write_text("".join(lines))
        (tmp_path / name / "README.md").write_text("# Words")
    (tmp_path / "counting").mkdir()
    (tmp_path / "counting" / "sitecustomize.py").write_text(COUNTING.format(log=str(tmp_path / "opened")))
    run, steps = tmp_path / "run", 4  # the heartbeat is a second old: the first evaluation may be over
    places = {"model": tmp_path / "llama", "data": tmp_path / "text", "eval-data": tmp_path / "held", "run-dir": run}
    flags = {**places, "steps": steps, "seq-len": 32, "eval-every": 1, "processes": 1}
    command = ["train", "--no-memory-window", "--no-save", *(f"--{name}={value}" for name, value in flags.items())]

    def toolkit(*words: str) -> subprocess.Popen[str]:
        return programs.start("-m", "toolkit.cli", *words, cwd=tmp_path, env=environment(tmp_path / "counting"))

    def evaluations() -> list[tuple[int, bool]]:
        return [(event["step"], "eval_loss" in event) for event in read_events(run / "events.jsonl")]

    first = toolkit(*command)
    until(lambda: any(beat.phase == "evaluate" for beat in read_beats(run / "logs").values()), alive=first)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=300)
    assert first.returncode == 143, err
    [cut] = map(int, re.findall(r"step (\d): evaluation left out because the run stops\n", out))
    lines = [(step, evaluated) for step in range(1, steps + 1) for evaluated in (False, True)]
    assert evaluations() == lines[: 2 * cut - 1]
    assert list_checkpoints(run / "checkpoints")[0].name == f"step-{cut:08d}"
    for name in ("data: 1 file (text.jsonl)", "eval_data: 1 file (held.jsonl)"):
        assert f"\n{name}; left out: README.md; format text (text)\n" in out
    opened = (tmp_path / "opened").read_text().split()
    assert sorted(opened) == ["held.jsonl", "text.jsonl"], "read once by all processes"
    python("-m", "toolkit.cli", "resume", run, cwd=tmp_path, env=environment(tmp_path / "counting"), code=0)
    assert len((tmp_path / "opened").read_text().split()) == 2, "unchanged data are read again"
    assert evaluations() == lines
    assert all(0 < event["eval_loss"] < 10 for event in read_events(run / "events.jsonl")[1::2])


def test_restarts_in_vain_come_to_an_end(tmp_path: Path) -> None:
    """The first makes two new steps; the others, which end before, none. Without a checkpoint each begins at step 0."""
    done = python("-m", "dying_worker", "supervise", tmp_path / "run", code=1)
    assert done.stderr.count("toolkit: rank 0 was killed by SIGKILL") == 4
    for number in (1, 2, 3):
        assert f"\nRestart {number} of 5, from step 0, since there is no checkpoint yet.\n" in done.stderr
    for step in (3, 5, 4):
        assert f"It was in step {step}. Its last lines" in done.stderr
    last = f"There is no checkpoint. `toolkit resume {tmp_path / 'run'}` starts again from step 0."
    assert done.stderr.endswith(f"\n2 restarts in a row made no new step, so no further restart follows.\n{last}\n")


def test_a_rank_without_memory_is_named_and_the_micro_batch_shrinks(runs: dict[str, Running]) -> None:
    run = runs["memory"]
    assert run.code == 0, run.err
    first, _, rest = run.err.partition("\n")
    assert first.startswith("toolkit: rank 1 ran out of memory in the ")
    for word in (" of step 1. It requested ", " MiB; it held ", "`ulimit -v` allows", "of the host's"):
        assert word in first
    assert f"`toolkit resume {run.path} --micro-batch 8 --accumulation 2`" in first
    again = "Continuing with --micro-batch 8 --accumulation 2, the same global batch, from step 0"
    assert rest.startswith(again)
    train_config = json.loads((run.path / "run.json").read_text())["train_config"]
    assert train_config["micro_batch"] < 16
    assert train_config["micro_batch"] * train_config["accumulation"] == 16
    assert [event["step"] for event in run.events] == [1, 2]
    assert len(attempts(run)) >= 2


def test_of_ranks_that_came_equally_far_the_idle_one_is_named(tmp_path: Path) -> None:
    """Where no collective times out: the other one waits for it in a busy loop, as DeepSpeed's shared memory does."""
    done = python("-m", "dying_worker", "supervise", tmp_path / "run", "spins", code=1)
    said = (
        "toolkit: rank 1 hung: the others waited for it longer than 4 s (--timeout). It was in the backward of step 7. "
    )
    assert done.stderr.startswith(said)


def test_a_stop_before_the_first_step(tmp_path: Path) -> None:
    """Nobody waits for a rank that loads."""
    with programs.start("-m", "dying_worker", "supervise", tmp_path / "run", "loads", stdout=None) as process:
        until(lambda: read_beats(tmp_path / "run" / "logs"), alive=process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert err == "toolkit: stopped by SIGTERM. It had not begun, and there is nothing to continue.\n"
    assert psutil.wait_procs(family, timeout=2)[1] == []
