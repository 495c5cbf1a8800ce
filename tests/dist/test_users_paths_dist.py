"""What people bring: an Accelerate script, a TRL script, a folder as the Hub caches it, and chats as TRL writes them."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

import pytest
import tiny
from programs import HERE, ROOT, python

import toolkit as tk

pytestmark = pytest.mark.dist

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(3, 250, (16, 16), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(ids, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    loss = model(input_ids=rows, labels=rows).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.gather(loss).mean().item():.4f}")
accelerator.print(f"prepared {type(model).__name__}")
"""
"""In the manner of Accelerate's documentation."""


def under(config: str, *words: object, cwd: Path, code: int | None = 0) -> str:
    """What a script prints under Accelerate's launcher, with a file of ours."""
    launch = ["accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2", "--config_file"]
    done = python("-m", *launch, ROOT / "accelerate_configs" / f"{config}.yaml", *words, cwd=cwd, code=code)
    return done.stdout + done.stderr


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("loss")]


def test_an_accelerate_script_shards_with_one_changed_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the guide says: on CPU ranks Accelerate starts two runs of one process without its variable, each with all rows."""
    changed = SCRIPT.replace("from accelerate import Accelerator", "from toolkit import accelerator as Accelerator")
    lines = [line for line in difflib.ndiff(SCRIPT.splitlines(), changed.splitlines()) if line.startswith("+ ")]
    assert len(lines) == 1
    model = tiny.llama(tmp_path / "llama")
    for name, text in (("plain.py", SCRIPT), ("changed.py", changed)):
        (tmp_path / name).write_text(text)
    sharded = under("zero2", tmp_path / "changed.py", model, cwd=tmp_path)
    apart = under("ddp", tmp_path / "plain.py", model, cwd=tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    plain = under("ddp", tmp_path / "plain.py", model, cwd=tmp_path)
    # Two processes print into one pipe: their lines may join.
    assert (apart.count("prepared LlamaForCausalLM"), apart.count("loss ")) == (2, 8)
    assert plain.count("prepared DistributedDataParallel") == 1
    assert "prepared DeepSpeedEngine" in sharded
    assert len(losses(plain)) == 2
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-3)


def test_trls_script_under_our_config_is_audited_and_forecast(tmp_path: Path) -> None:
    """Without a GPU Accelerate makes two runs of one process of it. The audit stops them; `toolkit launch` distributes it."""
    model = tiny.llama(tmp_path / "llama")
    trains = "trainer.train()"
    script = (HERE / "scripts" / "sft.py").read_text()
    (tmp_path / "sft.py").write_text(
        script.replace(trains, f"import toolkit as tk\ntrainer.add_callback(tk.AuditCallback())\n{trains}")
    )
    printed = under("ddp", tmp_path / "sft.py", model, tmp_path / "out", cwd=tmp_path, code=1)
    assert "StrategyMismatch: sharding 'ddp' was requested, and something else was prepared" in printed
    assert "world size is 1, expected 2. Nothing was trained" in printed
    words = ("forecast", model, "--sharding", "ddp", "--hardware", "2x cpu", "--seq-len", 16, "--micro-batch", 4)
    forecast = json.loads(python("-m", "toolkit.cli", *words, "--json", "-", code=0).stdout)
    args = (str(model), str(tmp_path / "out"))
    run = tk.launch(str(tmp_path / "sft.py"), "ddp", processes=2, run_dir=tmp_path / "run", args=args).wait()
    assert "trained DistributedDataParallel" in run.logs(0)
    assert forecast["device"]["parts"]["parameters"] == 4 * tk.describe(str(model)).elements


def test_a_folder_of_the_hubs_cache_trains_on_chats_of_trl(tmp_path: Path) -> None:
    """Its files are links into `blobs`; the chats are `messages`, and pairs of prompt and completion."""
    cache = tmp_path / "models--somebody--tiny"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(tiny.llama(tmp_path / "llama").iterdir())):
        blob = cache / "blobs" / f"{number:040x}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    sets = {"messages": {"messages": turns}, "pairs": {"prompt": turns[:1], "completion": turns[1:]}}
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    words = ["--model", snapshot, "--chat-template", template, "--steps", "1", "--seq-len", "16", "--micro-batch", "1"]
    for name, row in sets.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text((json.dumps(row) + "\n") * 20)
        python("-m", "toolkit.cli", "train", *words, "--data", data, "--run-dir", tmp_path / f"run-{name}", code=0)
        run = tk.attach(tmp_path / f"run-{name}")
        assert run.status == "finished"
        assert run.memory is not None
        assert run.memory["forecast"]["device"]["peak_bytes"] > 0
    first, second = (tk.attach(tmp_path / f"run-{name}").metrics["loss"][0] for name in sets)
    assert first == second, "the same chat"
