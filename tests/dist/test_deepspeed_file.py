"""A DeepSpeed file trains alike through Accelerate's launcher and `toolkit train`; the files of two nodes start one world."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from programs import python

pytestmark = pytest.mark.dist

ARTICLE = Path(__file__).parents[1] / "unit/deepspeed_files/zero2_config_accelerate.json"


def test_launcher_and_flag_train_alike(tmp_path: Path) -> None:
    """The article's file in bf16, which every processor computes, with numbers where it says "auto"."""
    file = json.loads(ARTICLE.read_text())
    del file["fp16"]
    file["bf16"] = {"enabled": "true"}
    file["optimizer"]["params"] |= {"lr": 5e-3, "weight_decay": 0.1, "betas": [0.8, 0.9]}
    file["scheduler"]["params"] |= {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_min_lr": 1e-3}
    file["zero_optimization"] |= {"reduce_bucket_size": 1e5, "allgather_bucket_size": 1e5}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    launcher = {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": {"deepspeed_config_file": str(path), "zero3_init_flag": False},
        "distributed_type": "DEEPSPEED",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
    }
    (tmp_path / "launcher.yaml").write_text(yaml.safe_dump(launcher))
    rows = (json.dumps({"text": f"w{number % 240}"}) for number in range(400))
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    model = tiny.llama(tmp_path / "llama", max_position_embeddings=64)
    words = ["--model", model, "--data", tmp_path / "data.jsonl", "--seq-len", "16", "--micro-batch", "1", "--no-save"]
    words += ["--activation-checkpointing", "full", "--loss", "whole"]  # which Accelerate's launcher does not choose
    ways = {
        "flag": ["toolkit.cli", "train", "--deepspeed-config", path, "--processes", "2"],
        "launcher": [
            *("accelerate.commands.launch", "--main_process_port", "0", "--config_file", tmp_path / "launcher.yaml"),
            *("-m", "toolkit.finetune"),
        ],
    }
    runs = []
    for name, command in ways.items():
        python("-m", *command, *words, "--run-dir", tmp_path / name, code=0)
        runs.append(_record(tmp_path / name))
    assert runs[0] == runs[1]
    settings, events = runs[0]
    assert settings["train_config"]["beta1"] == 0.8
    assert settings["strategy"]["bucket_elements"] == 100_000
    assert [event["lr"] for event in events] == pytest.approx([1e-3, 5e-3, 5e-3, 3e-3])


def test_the_config_files_of_two_nodes_start_one_world(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    nodes = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    for number in range(2):
        file = tmp_path / f"{number}.yaml"
        config = ["config", "--sharding", "zero3", "--processes", "2", "--nodes", "2", "--main-address", address]
        python("-m", "toolkit.cli", *config, "--node-rank", str(number), "-o", file, code=0)
        nodes.append(("-m", "accelerate.commands.launch", "--config_file", file, tmp_path / "rank.py"))
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda words: python(*words, code=0), nodes))
    assert [result.stdout.splitlines()[-1] for result in results] == ["rank 0 of 2", "rank 1 of 2"]


def _record(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The resolved settings, and each step's numbers."""
    about = json.loads((folder / "run.json").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [
        {name: event[name] for name in ("loss", "grad_norm", "lr", "tokens")} for event in events if "loss" in event
    ]
    return {name: about[name] for name in ("strategy", "train_config")}, steps
