"""The commands of the site that belong to a run: it is trained, stopped, resumed, watched, reported, exported and asked."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from programs import ROOT, environment, start, until
from site_commands import CHATS, OF_A_RUN, PARSED, TEMPLATE, make_reader_folder, words_of

from toolkit.cli import main
from toolkit.launcher import attach

pytestmark = pytest.mark.dist


def test_commands_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_reader_folder(tmp_path, words=400_000)
    monkeypatch.chdir(tmp_path)
    train, *others = OF_A_RUN
    process = start("-m", "toolkit", *words_of(train), cwd=tmp_path)
    until(lambda: list(tmp_path.glob("runs/*/events.jsonl")), what="a step", alive=process)
    run = next(tmp_path.glob("runs/*"))
    for line in others:
        done = main(words_of(line, run.name))
        shown = capsys.readouterr()
        assert done == 0, (line, shown.err)
        assert shown.out or "-o" in line, line
        if " stop " in line:
            process.communicate(timeout=60)
            assert attach(run).status == "stopped"
    assert attach(run).status == "finished"
    assert (run / "report.html").is_file()
    assert (tmp_path / "my-model-trained" / "config.json").is_file()


SCRIPT = """
import sys
import torch
import toolkit as tk

accelerator = tk.accelerator(train_config=tk.TrainConfig(max_grad_norm=1))
model = torch.nn.Linear(4, 1)
rows = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
for batch in rows:
    accelerator.backward(model(batch).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert sys.argv[1:] in ([], ["--its-own", "flags"])
"""

NOT_HERE = ("two machines", "installs or builds")
"""Words of the reasons of commands that one machine cannot run, or that other tests run for minutes."""


@pytest.mark.skipif(os.environ.get("TOOLKIT_GRID") != "1", reason="in minutes: make grid runs it")
@pytest.mark.timeout(3600)
def test_all_other_commands_run(tmp_path: Path) -> None:
    """As they stand, in their order, by the shell. The models of the Hub are small ones of the same family."""
    make_reader_folder(tmp_path)
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        shutil.rmtree(tmp_path / "Qwen" / name)
        (tiny.qwen3(tmp_path / "Qwen" / name) / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    (tmp_path / "script.py").write_text(SCRIPT)
    chats = [{"messages": [{**message, "content": f"{message['content']} " * 50} for message in CHATS]}] * 400
    for name in ("chat", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    texts = [{"text": f"{number} words of a text. " * 50} for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "b.parquet")
    with (tmp_path / "questions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *[("w1 w2", "w3")] * 400])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = environment(PATH=path, DS_ACCELERATOR="cpu")
    for reason, lines in PARSED.items():
        for line in filter(None, lines.split("\n") if not any(words in reason for words in NOT_HERE) else ()):
            newest = max(tmp_path.glob("runs/*"), default=tmp_path, key=lambda run: run.stat().st_mtime).name
            command = ["bash", "-c", line.replace("runs/NAME", f"runs/{newest}")]
            done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
            print(done.returncode, line, flush=True)
            assert done.returncode == 0, (line, done.stdout[-1000:], done.stderr[-2000:])
