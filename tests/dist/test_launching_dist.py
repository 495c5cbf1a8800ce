"""Runs in sessions of their own: launched, watched, stopped, found again by another process, and resumed; functions too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from programs import left_of, python, until

import toolkit as tk
from toolkit.core.errors import RunError

pytestmark = pytest.mark.dist

SMALL = {"seq_len": 32, "micro_batch": 1, "memory_window": False, "save": False}


LITTLE_MEMORY = """
import psutil
memory = psutil.virtual_memory
psutil.virtual_memory = lambda: memory()._replace(total=2**27, available=2**27)
"""
"""Read by every interpreter that starts with its folder on its path: a machine with less memory than a rank needs."""


def test_a_run_is_launched_watched_stopped_found_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    # Launched by a process that ends: the run must not end with it.
    program = (
        "import toolkit as tk; "
        f"run = tk.launch('toolkit.finetune', 'ddp', processes=2, run_dir={str(folder)!r}, steps=4000, **{SMALL!r}); "
        "print(run.status)"
    )
    done = python("-c", program, code=0)
    assert done.stdout.split() == ["starting"]

    run = tk.attach(folder)
    until(lambda: run.progress.step >= 5)
    assert run.status == "running"
    assert (run.strategy.sharding, run.strategy.activation_checkpointing) == ("ddp", "none")
    assert "activation checkpointing: none, the fastest that leaves 5%" in run.logs(0)
    assert len(run.metrics) >= 5
    assert run.progress.steps == 4000
    assert len(run.progress.bytes_per_rank) == 2
    assert run.progress.tokens_per_second
    assert "sharding ddp, ranks 2 (cpu)" in run.logs(0)
    assert "running" in run._repr_html_()
    assert [one["status"] for one in tk.runs(tmp_path).entries] == ["running"]
    with pytest.raises(RunError, match="holds a run already"):
        tk.launch("toolkit.finetune", "zero2", processes=2, run_dir=folder, steps=1)
    with pytest.raises(RunError, match=r"still runs after 0.3 s"):
        run.wait(timeout=0.3)

    run.stop()
    assert run.status == "stopped"
    assert "stopped by SIGTERM. Published" in run.message
    assert not left_of(folder)
    steps = run.progress.step
    assert (folder / f"checkpoints/step-{steps:08d}/manifest.json").exists()

    # On a smaller machine, too, it keeps what was chosen before its first step; a new `auto` chooses another.
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "sitecustomize.py").write_text(LITTLE_MEMORY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "small"), prepend=os.pathsep)
    again = tk.resume(run, steps=steps + 1).wait()
    assert (again.status, again.strategy.activation_checkpointing) == ("finished", "none")
    assert "attention: sdpa; activation checkpointing: none;" in again.logs(0)
    again = tk.resume(run, steps=steps + 2, activation_checkpointing="auto").wait()
    assert (again.status, again.strategy.activation_checkpointing) == ("finished", "full")
    assert "activation checkpointing: full, none leaves 5% of a rank's memory by the forecast" in again.logs(0)
    assert list(again.metrics["step"] if hasattr(again.metrics, "columns") else []) == list(range(1, steps + 3))
    assert again.message == ""
    assert tk.attach(folder).status == "finished"


def hosted(words: list[str], *, fail: bool = False, endless: bool = False) -> None:
    """What a cell could define: it makes what it needs, and says how far it is."""

    accelerator = tk.accelerator(None, tk.TrainConfig(micro_batch=1))
    strategy = tk.job(accelerator).strategy
    total = accelerator.reduce(torch.ones(()), reduction="sum").item()
    if fail and accelerator.process_index == 1:
        raise ValueError("rank one does not like it")
    for step in (1, 2, 3):
        tk.log(step, loss=1.0 / step, tokens=8, ranks=total)
    while endless and not tk.should_stop():
        time.sleep(0.05)
    print(" ".join(words), strategy.sharding, strategy.adapter, os.environ.get("TOOLKIT_TIMEOUT"))


def test_a_function_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As an Accelerator under FSDP leaves a notebook's environment.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("RANK", "1")
    strategy = tk.Strategy(sharding="ddp", adapter="lora")
    words = ["shipped", "by", "value"]
    run = tk.launch(
        hosted,
        strategy,
        processes=2,
        run_dir=tmp_path / "run",
        args=(["stopped"],),
        kwargs={"endless": True},
        timeout=99,
    )
    until(lambda: run.progress.step == 3)
    run.stop(timeout=30)
    assert run.status == run.report().status == "stopped"
    assert "stopped ddp lora 99" in run.logs(0), "it was heard between two steps, and the function came to its end"
    assert "toolkit resume" in run.message
    assert "runs it again" in run.message

    run = tk.resume(run, hosted, args=(words,)).wait()
    assert run.status == run.report().status == "not audited", "it prepared nothing"
    assert tk.runs(tmp_path).entries[0]["strategy"]["sharding"] == "not audited"
    assert run.report().command == "tk.launch(hosted, tk.Strategy(sharding='ddp', adapter='lora'), processes=2)"
    assert "not audited" in (tmp_path / "run/report.html").read_text()
    assert "shipped by value ddp lora 99" in run.logs(0), "a resumed run keeps its timeout"
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert about["target"]["name"] == "hosted"
    file = tmp_path / "run/logs/function.pkl"
    assert file.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    steps = [(1, 1.0, 2.0), (2, 0.5, 2.0), (3, 1 / 3, 2.0)]
    assert [(line["step"], line["loss"], line["ranks"]) for line in lines] == steps, "attempt 2 began at step 1"

    # It goes on without the function, for it was launched here; another file, or the folder elsewhere, does not.
    assert tk.resume(run).wait().status == "not audited"
    moved = shutil.copytree(tmp_path / "run", tmp_path / "moved")
    with pytest.raises(RunError, match=r"you did not launch in this folder.*tk\.resume\(run, hosted\)"):
        tk.resume(moved)
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(RunError, match=r"has changed since you launched it.*--trust-target [0-9a-f]{64}\."):
        tk.resume(run)


def test_a_rank_that_fails_is_told_with_its_traceback(tmp_path: Path) -> None:
    run = tk.launch(hosted, "ddp", processes=2, run_dir=tmp_path / "run", args=([],), kwargs={"fail": True})
    with pytest.raises(RunError, match=r"rank 1 ended with ValueError: rank one does not like it[^$]*Traceback"):
        run.wait()
    assert run.status == "failed"
    assert not left_of(tmp_path / "run")
    assert "raise ValueError" in run.logs(1), "what it printed stays"


PLAIN = """
import os, sys
print('words', sys.argv[1:], os.environ['RANK'] if 'RANK' in os.environ else 0)
import torch
from accelerate import Accelerator
accelerator, model = Accelerator(gradient_accumulation_steps=2), torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
for _ in range(6):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""


def test_a_script_is_a_run(tmp_path: Path) -> None:
    """The steps of its plain Accelerator are counted."""
    script = tmp_path / "mine.py"
    script.write_text(PLAIN)
    run = tk.launch(str(script), "none", run_dir=tmp_path / "run", args=("--epochs", 1)).wait()
    assert "words ['--epochs', '1']" in run.logs(0)
    assert run.memory is None
    assert run.progress.step == 3
    assert os.path.exists(tmp_path / "run/run.json")


def test_trls_trainer_is_sharded_as_launched(tmp_path: Path) -> None:
    """It makes its own Accelerator, which Accelerate does not distribute on CPU ranks. Its figures are the run's."""
    script = Path(__file__).with_name("scripts") / "sft.py"
    words = (str(tiny.llama(tmp_path / "llama")), str(tmp_path / "out"))
    run = tk.launch(str(script), "fsdp", processes=2, run_dir=tmp_path / "run", args=words).wait()
    assert run.status == "finished"
    assert run.to_dict()["strategy"]["sharding"] == "fsdp"
    assert "trained FSDPLlamaForCausalLM" in run.logs(0)
    assert run.progress.step == run.progress.steps == 2


def test_a_call_on_one_rank_ends_with_the_line_to_write(tmp_path: Path) -> None:
    """Within `timeout`."""

    def generate_on_one(folder: str) -> None:
        import transformers

        accelerator = tk.accelerator(spec=tk.describe(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        if accelerator.is_main_process:
            model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2)
        accelerator.wait_for_everyone()

    args = (str(tiny.llama(tmp_path / "llama")),)
    run = tk.launch(generate_on_one, "fsdp", processes=2, run_dir=tmp_path / "run", args=args, timeout=4)
    with pytest.raises(RunError, match=r"generate was called on 1 of 2 ranks.* in 3.* s\. .*Generate on all of them"):
        run.wait()


HOSTILE = "import os; open(os.environ['RAN'], 'a').write(__file__)\n"
MINE = """
import os

import beside
import psutil
import torch

import toolkit as tk

accelerator = tk.accelerator()
assert accelerator.reduce(torch.ones(()), reduction="sum").item() == 2
mine = psutil.Process().net_connections("inet")
# torch's store, which SECURITY.md tells of, listens everywhere.
open_to_all = [one.laddr.port for one in mine if one.status == "LISTEN" and one.laddr.ip not in ("127.0.0.1", "::1")]
assert open_to_all in ([], [int(os.environ["MASTER_PORT"])]), mine
talking = {one.raddr.ip.removeprefix("::ffff:") for one in mine if one.status == "ESTABLISHED"}
assert talking <= {"127.0.0.1", "::1"}, mine
print("safe path", os.environ.get("PYTHONSAFEPATH"), beside.__name__, os.environ["GLOO_SOCKET_IFNAME"])
"""


def test_files_of_the_folder_take_no_librarys_place_and_ranks_talk_over_the_loopback(tmp_path: Path) -> None:
    here = tmp_path / "model"
    (here / "toolkit").mkdir(parents=True)
    for name in ("psutil.py", "torch.py", "accelerate.py", "json.py", "yaml.py", "toolkit/__init__.py"):
        (here / name).write_text(HOSTILE)
    (here / "beside.py").touch()
    (here / "mine.py").write_text(MINE)
    ours = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONSAFEPATH")
    environ = {name: value for name, value in os.environ.items() if name not in ours} | {"RAN": str(tmp_path / "ran")}
    words = ["launch", "--sharding", "ddp", "--processes", "2", "--run-dir", str(tmp_path / "run"), "mine"]
    toolkit = Path(sys.executable).with_name("toolkit")
    done = subprocess.run([toolkit, *words], cwd=here, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert "safe path None beside lo" in (tmp_path / "run/logs/rank-1.log").read_text()
    again = [toolkit, "resume", str(tmp_path / "run")]
    assert subprocess.run(again, cwd=here, env=environ, capture_output=True, check=False).returncode == 0
    (here / "mine.py").write_text(MINE + HOSTILE)
    refused = subprocess.run(again, cwd=here, env=environ, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "which has changed since you launched it" in refused.stderr
