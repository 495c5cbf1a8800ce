"""Out of memory: what is, what is not, and what would take less."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path

import pytest
import torch

from toolkit.cli.parser import build_parser
from toolkit.config.flags import given
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import OutOfMemory, is_out_of_memory
from toolkit.forecasting.memory_advice import changes, halved
from toolkit.launcher import RestartPolicy
from toolkit.run_folder.folder import enter
from toolkit.run_folder.heartbeat import Heartbeat
from toolkit.training import oom
from toolkit.training.oom import advice, killed_for_memory, out_of_memory

BEAT = Heartbeat(
    rank=1, pid=7, step=3, phase="backward", marks=20, listens=True, rss=3 * 2**30, cpu=9.0, time=1_800_000_000.0
)


def too_much() -> BaseException:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    return error.value


def test_what_torch_and_python_and_the_system_raise_is_recognised() -> None:
    wrapped = RuntimeError("a step failed")
    wrapped.__cause__ = too_much()
    on_a_device = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …"
    )
    cuda = RuntimeError("CUDA error: out of memory")
    for error in (too_much(), MemoryError(), OSError(errno.ENOMEM, "no"), wrapped, on_a_device, cuda):
        assert is_out_of_memory(error), error
    for other in (RuntimeError("Connection closed by peer"), OSError(errno.ENOSPC, "disk full"), ValueError("memory")):
        assert not is_out_of_memory(other), other


def test_half_the_micro_batch_keeps_the_global_batch() -> None:
    assert halved(TrainConfig(micro_batch=8, accumulation=3)) == {"micro_batch": 4, "accumulation": 6}
    assert halved(TrainConfig(micro_batch=3, accumulation=2)) == {"micro_batch": 1, "accumulation": 6}
    assert halved(TrainConfig(micro_batch=6, accumulation=1)) == {"micro_batch": 3, "accumulation": 2}
    assert halved(TrainConfig(micro_batch=1, accumulation=4)) == {}


def test_the_smallest_change_comes_first() -> None:
    plain = Strategy(sharding="zero1", activation_checkpointing="none")
    assert list(changes(plain, TrainConfig(micro_batch=4), in_a_step=True)) == [
        {"micro_batch": 2, "accumulation": 2},
        {"micro_batch": 1, "accumulation": 4},
        {"activation_checkpointing": "full"},
        {"sharding": "fsdp"},
        {"sharding": "zero3"},
        {"offload": "optimizer"},
        {"adapter": "lora"},
        {"adapter": "qlora"},
        {"precision": "bf16_pure"},
        {"seq_len": 128},
    ]
    assert next(changes(plain, TrainConfig(), in_a_step=False)) == {"sharding": "fsdp"}
    whole = Strategy(sharding="zero3", offload="optimizer", adapter="lora")
    assert list(changes(whole, TrainConfig(micro_batch=1), in_a_step=True)) == [
        {"offload": "cpu"},
        {"adapter": "qlora"},
        {"seq_len": 128},
    ]


def run_of(path: Path, strategy: dict[str, object], **train_config: int) -> None:
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text(
        json.dumps({"strategy": strategy, "train_config": train_config, "run_config": {}, "ranks": 2})
    )


@pytest.mark.parametrize("kind", ["script", "module", "function"])
def test_what_is_advised_for_a_users_own_code_is_accepted_by_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a strategy reaches it: `resume` refuses a batch for it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with enter(tmp_path / "a run") as folder:
        run_of(folder.path, {"sharding": "ddp"})
        about = json.loads(folder.run_json.read_text())
        about["target"] = {"kind": kind, "name": "mine", "arguments": [], "sha256": ""}
        folder.run_json.write_text(json.dumps(about))
        said = advice(folder, BEAT)
        command = said.split("`")[1]
        if kind == "function":
            assert command == f"tk.resume({str(folder.path)!r}, mine, sharding='fsdp')"
        else:
            flags = build_parser().parse_args(shlex.split(command)[1:])
            assert given(flags, Strategy) == {"sharding": "fsdp"}
            assert not any(given(flags, owner) for owner in (TrainConfig, RunConfig, RestartPolicy))
        about["strategy"] = {"sharding": "zero3"}
        folder.run_json.write_text(json.dumps(about))
        assert advice(folder, BEAT).startswith("Choose a smaller micro-batch in mine")


def test_what_is_advised_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "a run"
    with enter(path) as folder:
        assert "smaller model" in advice(folder, BEAT)
        run_of(path, {"sharding": "ddp"}, micro_batch=4)
        assert f"`toolkit resume '{path}' --micro-batch 2 --accumulation 2`" in advice(folder, BEAT)
        run_of(path, {"sharding": "hsdp", "dp_replicate": 2, "precision": "bf16"}, micro_batch=1)
        assert advice(folder, BEAT).endswith("--sharding fsdp`.")
        run_of(path, {"sharding": "fsdp"}, micro_batch=1)  # CPU ranks have no offload of it
        assert "`toolkit train … --adapter lora`" in advice(folder, BEAT)
        run_of(path, {"sharding": "fsdp", "adapter": "qlora"}, micro_batch=1)
        assert "--seq-len" in advice(folder, BEAT)


def test_the_figures_of_a_failed_allocation_and_of_a_killed_rank(tmp_path: Path) -> None:
    with enter(tmp_path / "run") as folder:
        run_of(folder.path, {"sharding": "ddp"}, micro_batch=4)
        error = out_of_memory(too_much(), folder, BEAT)
        assert (type(error), error.exit_code) == (OutOfMemory, 1)
        said = str(error)
        assert said.startswith(
            "rank 1 ran out of memory in the backward of step 3. It requested 1,073,741,824.00 GiB; it held "
        )
        assert "of the host's" in said
        assert "--micro-batch 2 --accumulation 2" in said
        assert "It requested 2.00 GiB;" in str(out_of_memory(RuntimeError("Tried to allocate 2.00 GiB."), folder, BEAT))
        said = killed_for_memory(folder, 1, BEAT)
    assert said.startswith("rank 1 was killed by the system, which ran out of memory in the backward of step 3.")
    assert "it held 3.00 GiB at its last heartbeat, and the host has " in said


@pytest.mark.parametrize(
    ("group", "name", "text", "expected"),
    [
        ("0::/a/b", "a/b/memory.events", "low 0\noom 4\noom_kill 3\n", 3),
        ("0::/of/the/host", "memory.events", "low 0\noom_kill 2\noom_group_kill 9\n", 2),
        ("4:memory:/a\n0::/", "memory/a/memory.oom_control", "under_oom 0\noom_kill 5\n", 5),
        ("0::/", "elsewhere", "", 8),
    ],
)
def test_kills_for_memory_are_counted(tmp_path: Path, group: str, name: str, text: str, expected: int) -> None:
    (tmp_path / "root" / name).parent.mkdir(parents=True)
    (tmp_path / "root" / name).write_text(text)
    (tmp_path / "cgroup").write_text(group + "\n")
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 8\n")
    assert oom._kills(tmp_path / "root", tmp_path / "cgroup", tmp_path / "vmstat") == expected
