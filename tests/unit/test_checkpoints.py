"""Checkpoints on one rank: what is damaged is named, what does not fit is refused, what is there is never lost."""

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import resume_point
from safetensors.torch import load_file, save_file

from toolkit.checkpoints import (
    CheckpointWriter,
    check_fits,
    checkpoint_writer,
    find_resume_point,
    list_checkpoints,
    quarantine,
    read_manifest,
    restore,
    validate,
)
from toolkit.checkpoints.rank_files import BackgroundWriter, await_ranks, sign_of_life
from toolkit.checkpoints.stored_tensors import opened
from toolkit.core.errors import CheckpointError, StrategyError


def saver(run: dict[str, Any], folder: Path, **options: Any) -> CheckpointWriter:
    return CheckpointWriter(run["ours"], run["schedule"], folder, run["identity"], versions={"torch": "2"}, **options)


def train(run: dict[str, Any]) -> None:
    tokens = torch.arange(16)[None]
    engine = run["ours"].job.engine
    engine.backward(run["ours"], run["ours"].model(input_ids=tokens, labels=tokens).loss, True)
    engine.step(run["ours"])
    run["schedule"].step()


@pytest.fixture
def written(run: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    policy = saver(run, tmp_path / "checkpoints")
    for step in (1, 2):
        train(run)
        policy.save(step)
    policy.wait()
    assert [one.step for one in policy.published()] == [1, 2]
    return tmp_path / "checkpoints"


def test_a_checkpoint_is_a_manifest_and_a_file_a_rank(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == ["step-00000001", "step-00000002"]
    newest = list_checkpoints(written)[0]
    assert sorted(path.name for path in newest.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    manifest = read_manifest(newest)
    assert (manifest.step, manifest.ranks, manifest.global_batch) == (2, 1, 4)
    assert manifest.strategy["sharding"] == "none"
    assert validate(newest) == []
    names = load_file(newest / "rank-00000.safetensors")
    keys = {f"{kind}:lm_head.weight:0+64,0+32:0" for kind in ("weight", "exp_avg", "exp_avg_sq")}
    assert keys <= set(names)
    assert {names[key].shape for key in keys} == {(64, 32)}


def test_what_is_restored_is_what_was_saved(run: dict[str, Any], written: Path) -> None:
    before = {name: p.detach().clone() for name, p in run["ours"].model.named_parameters()}
    rate = run["ours"].optimizer.param_groups[0]["lr"]
    drawn = torch.rand(3)
    torch.manual_seed(99)
    train(run)
    point = resume_point(list_checkpoints(written)[0])
    restore(run["ours"], run["schedule"], point, run["identity"])
    for name, parameter in run["ours"].model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert run["schedule"].get_last_lr() == [run["ours"].optimizer.param_groups[0]["lr"]] == [rate]
    assert {int(state["step"]) for state in run["ours"].optimizer.state.values()} == {point.manifest.counters["steps"]}
    assert torch.equal(torch.rand(3), drawn)


def test_buffers_and_any_strides_are_saved_and_restored(run: dict[str, Any], tmp_path: Path) -> None:
    model = run["ours"].model
    norm, weight = model.model.norm, model.lm_head.weight
    buffers = {
        "mean": torch.randn(3, 4).T,
        "count": torch.tensor(5),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 2),
        "spread": torch.tensor([[1.5, 2.5]]).expand(4, 2),
        "turn": torch.tensor([1 + 2j]),
    }
    for name, buffer in buffers.items():
        norm.register_buffer(name, buffer)
    norm.register_buffer("scratch", torch.zeros(2), persistent=False)
    norm.register_buffer("same", norm.mean)  # two names, one storage
    before, plain = {name: buffer.clone() for name, buffer in buffers.items()}, weight.data
    weight.data = plain.T.contiguous().T
    try:
        policy = saver(run, tmp_path)
        norm.count = torch.tensor(7)  # a module may replace its buffers
        policy.save(1)
        policy.wait()
        weights = weight.detach().clone()
        for tensor in (norm.mean, norm.count, norm.flags, norm.spread[:1], norm.turn, weight.data):
            tensor.zero_()
        manifest = read_manifest(list_checkpoints(tmp_path)[0])
        assert manifest.tensors["model.norm.count"] == {"buffer": {"shape": [], "dtype": "int64"}}
        assert "model.norm.scratch" not in manifest.tensors
        point = resume_point(list_checkpoints(tmp_path)[0])
        restore(run["ours"], run["schedule"], point, run["identity"])
        assert int(norm.count) == 7
        for name in sorted(buffers.keys() - {"count"}):
            assert torch.equal(getattr(norm, name), before[name]), name
        assert torch.equal(weight, weights)
        assert weight.stride() == (1, 64)
        norm.mean = torch.zeros(4, 3, dtype=torch.float64)
        with pytest.raises(StrategyError, match=r"buffer model.norm.mean had shape \[4, 3\] and torch.float32"):
            policy.save(2)
        del norm.mean
        with pytest.raises(CheckpointError, match=r"differ in trained tensors or buffers, first in model\.norm\.mean"):
            restore(run["ours"], run["schedule"], point, run["identity"])
    finally:
        for name in ("mean", "count", "flags", "empty", "spread", "turn", "scratch", "same"):
            norm._buffers.pop(name, None)
        weight.data = plain.copy_(weight.data)


def test_offloaded_states_are_written_from_their_own_memory_and_the_rest_is_copied_in_chunks(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU machine, where moments in host memory have no second copy: the optimizer waits for the file."""
    monkeypatch.setattr(checkpoint_writer, "SNAPSHOT_CHUNK", 4300)
    monkeypatch.setattr(CheckpointWriter, "stays", lambda self, item: item.region.kind.startswith("exp_avg"))
    saved = threading.Event()
    save_tensors = checkpoint_writer.save_tensors

    def slow(path: Path, tensors: Any) -> None:
        time.sleep(0.2)
        save_tensors(path, tensors)
        saved.set()

    monkeypatch.setattr(checkpoint_writer, "save_tensors", slow)
    train(run)
    policy = saver(run, tmp_path)
    moments = [state[kind] for state in run["ours"].optimizer.state.values() for kind in ("exp_avg", "exp_avg_sq")]
    before = [moment.clone() for moment in moments]
    policy.save(1)
    assert saved.is_set()
    for moment in moments:
        moment.add_(1)  # the next step changes them at once
    policy.wait()
    (done,) = policy.published()
    assert done.stall_seconds >= 0.2
    weights = sum(parameter.nbytes for parameter in run["ours"].model.parameters())
    assert weights <= sum(chunk.nbytes for chunk in policy._chunks) < weights + 100 * len(policy.layout.mine)
    sizes = [chunk.nbytes for chunk in policy._chunks]
    assert max(sizes) <= 4300
    assert len(sizes) == -(-sum(sizes) // 4300), "a chunk is filled before another is begun"
    assert max(item.tensor.nbytes for item in policy.layout.mine) <= 4300
    restore(run["ours"], run["schedule"], resume_point(done.path), run["identity"])
    for moment, value in zip(moments, before, strict=True):
        assert moment.equal(value)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_flipped_byte_anywhere_is_named(written: Path, name: str) -> None:
    path = list_checkpoints(written)[0] / name
    data = path.read_bytes()
    format_digit = data.find(b'"format": ') + len(b'"format": ')  # 2 becomes 0: damage, and no other version's
    for at in (*range(0, len(data), max(1, len(data) // 25)), format_digit):
        damaged = bytearray(data)
        damaged[at] ^= 2
        path.write_bytes(damaged)
        assert any(name in problem for problem in validate(path.parent)), at
    path.write_bytes(data)
    assert validate(path.parent) == []


def test_a_truncated_a_missing_an_extra_file_and_a_symlink_are_named(written: Path, tmp_path: Path) -> None:
    newest = list_checkpoints(written)[0]
    path = newest / "rank-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"has {len(data) - 1:,} bytes, expected {len(data):,}" in validate(newest)[0]
    path.unlink()
    assert validate(newest) == ["rank-00000.safetensors is missing"]
    (tmp_path / "elsewhere").write_bytes(data)
    path.symlink_to(tmp_path / "elsewhere")
    assert validate(newest) == ["rank-00000.safetensors is a symlink"]
    path.unlink()
    path.write_bytes(data)
    (newest / "extra").mkdir()
    (newest / "extra" / "file").touch()
    assert validate(newest) == ["extra/file does not belong to it"]


def test_an_older_checkpoint_is_taken_and_the_damaged_one_set_aside(run: dict[str, Any], written: Path) -> None:
    newest, older = list_checkpoints(written)
    with (newest / "rank-00000.safetensors").open("r+b") as file:
        file.write(b"\xff")
    point = find_resume_point(run["accelerator"], written)
    assert point.path == older
    assert point.step == 1
    assert "step-00000002" in point.skipped[0]
    assert "is damaged" in point.skipped[0]
    assert list_checkpoints(written) == [newest, older]  # nothing is renamed before it is clear that the run goes on
    quarantine(run["accelerator"], point)
    assert sorted(path.name for path in written.iterdir()) == ["step-00000001", "step-00000002.damaged"]
    # What goes on saves step 2 again, and what was set aside never counts as a checkpoint to keep.
    policy = saver(run, written, keep=1)
    policy.save(2)
    policy.wait()
    assert [path.name for path in list_checkpoints(written)] == ["step-00000002"]
    assert validate(written / "step-00000002") == []


def test_where_no_checkpoint_can_be_taken_nothing_is_touched(run: dict[str, Any], written: Path) -> None:
    """A run of days does not start again from step 0 because of a broken disk."""
    for checkpoint in list_checkpoints(written):
        (checkpoint / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* rank-00000.safetensors is missing"):
        find_resume_point(run["accelerator"], written)
    assert len(list_checkpoints(written)) == 2


def test_a_newer_toolkits_checkpoint_is_no_damage(run: dict[str, Any], written: Path) -> None:
    for checkpoint in list_checkpoints(written):
        crafted = dataclasses.replace(read_manifest(checkpoint), format=99)
        (checkpoint / "manifest.json").write_bytes(crafted.encode())
    with pytest.raises(CheckpointError, match="of format 99"):
        find_resume_point(run["accelerator"], written)
    assert len(list_checkpoints(written)) == 2


def test_a_file_that_cannot_be_read_is_named(run: dict[str, Any], written: Path) -> None:
    path = list_checkpoints(written)[0] / "rank-00000.safetensors"
    size = path.stat().st_size
    path.unlink()
    with socket.socket(socket.AF_UNIX) as there:  # opening it fails for everybody, root included
        where = os.getcwd()
        os.chdir(path.parent)
        try:
            there.bind(path.name)
        finally:
            os.chdir(where)
        manifest = read_manifest(path.parent)
        files = {path.name: {**manifest.files[path.name], "bytes": 0}}
        (path.parent / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files).encode())
        assert size
        assert "cannot be read" in validate(path.parent)[0]
        with pytest.raises(CheckpointError, match="Resume when its file system answers"):
            find_resume_point(run["accelerator"], written)
    assert len(list_checkpoints(written)) == 2


def test_what_cannot_be_written_is_said_and_not_waited_for(run: dict[str, Any], tmp_path: Path) -> None:
    policy = saver(run, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / ".step-00000001.partial").touch()  # a file where the folder has to be
    policy.save(1)
    with pytest.raises(CheckpointError, match=r"step-00000001.partial cannot be written"):
        policy.wait()
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_behind_a_ranks_note_the_folder_may_be_published_at_once(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 renames the folder as soon as it sees the last note, so the rank that wrote it may not touch it again."""
    one = saver(run, tmp_path)
    one.rank, one.main = 1, False
    replace = os.replace

    def then_publish(draft: Path, path: Path) -> None:
        replace(draft, path)
        if path.name == "rank-00001.json":
            path.parent.rename(tmp_path / "step-00000001")

    monkeypatch.setattr(os, "replace", then_publish)
    one.save(1)
    one.wait()
    assert (tmp_path / "step-00000001" / "rank-00001.safetensors").exists()


def test_a_rank_that_writes_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file of ranks 1, 2 in .* after 0.1 s"):
        await_ranks(tmp_path / "partial", range(1, 3), 0.1, "json")
    (tmp_path / "rank-00001.failed").write_text("its disk is broken")
    with pytest.raises(CheckpointError, match=r"rank 1 could not write its part of .*: its disk is broken"):
        await_ranks(tmp_path, range(1, 2), 0.1, "json")


def test_a_rank_that_takes_long_to_write_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing and hashing change no size in the folder."""
    monkeypatch.setattr("toolkit.engines.rank_calls.BEAT_SECONDS", 0.02)

    def write() -> None:
        with sign_of_life(tmp_path, 1):
            time.sleep(2.2)
        (tmp_path / "rank-00001.json").touch()

    other = threading.Thread(target=write)
    other.start()
    await_ranks(tmp_path, range(1, 2), 1.0, "json")
    other.join()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00001.json"]


def test_what_a_checkpoint_cannot_hold_is_refused(run: dict[str, Any], tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    for optimizer, message in (
        (torch.optim.SGD(weights, lr=0.1, momentum=0.9), "the state of SGD"),
        (torch.optim.AdamW(weights, amsgrad=True), "AdamW with amsgrad"),
    ):
        odd = {**run, "ours": dataclasses.replace(run["ours"], optimizer=optimizer)}
        with pytest.raises(StrategyError, match=message):
            saver(odd, tmp_path)
    adam = torch.optim.AdamW(weights)
    parts = [torch.optim.lr_scheduler.ConstantLR(adam) for _ in range(2)]
    sequence = torch.optim.lr_scheduler.SequentialLR(adam, parts, milestones=[2])
    with pytest.raises(StrategyError, match="the state of SequentialLR"):
        saver({**run, "schedule": sequence}, tmp_path)


@pytest.mark.parametrize(
    ("train_config", "said"),
    [
        ({"seed": 7}, "seed 0, not 7"),
        ({"micro_batch": 2}, "global batch 4, not 2"),
        ({"steps": 1}, "has done 2 already. Give --steps 2 or more"),
    ],
)
def test_another_order_of_the_data_is_refused(
    run: dict[str, Any], written: Path, train_config: dict[str, Any], said: str
) -> None:
    point = resume_point(list_checkpoints(written)[0])
    job = run["ours"].job
    check_fits(point, job, run["identity"])
    with pytest.raises(CheckpointError, match=said):
        check_fits(
            point,
            dataclasses.replace(job, train_config=dataclasses.replace(job.train_config, **train_config)),
            run["identity"],
        )


def test_nothing_to_go_on_from(run: dict[str, Any], tmp_path: Path) -> None:
    point = find_resume_point(run["accelerator"], tmp_path / "checkpoints")
    assert (point.path, point.step) == (None, 0)
    assert "starting from step 0" in str(point)


def test_as_many_are_kept_as_asked_and_what_was_half_written_is_cleared(run: dict[str, Any], tmp_path: Path) -> None:
    half = tmp_path / ".step-00000007.partial"
    half.mkdir()
    (half / "rank-00000.safetensors").touch()
    for name in (".step-notes", ".step-7.partial", ".step-00000007.mine"):
        (tmp_path / name).mkdir()
    policy = saver(run, tmp_path, keep=3)
    assert not half.exists()
    for name in (".step-notes", ".step-7.partial", ".step-00000007.mine"):
        (tmp_path / name).rmdir()  # the user's are there
    for step in range(1, 6):
        policy.save(step)
        policy.wait()
        assert list_checkpoints(tmp_path)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["5", "4", "3"]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "other"}, "other data"),
        ({"parameters": "0" * 64}, "another model"),
        ({"architecture": "T5"}, "another architecture"),
        ({"adapter": {"adapter": "lora", "lora_rank": 16, "lora_targets": "all-linear"}}, "another adapter"),
        ({"config": {"rms_norm_eps": 10.0}}, r"another config .*rms_norm_eps .* → 10\.0"),
        ({"base": {"revision": None, "files": {"model.safetensors": "0" * 64}}}, "another base"),
    ],
)
def test_another_runs_checkpoint_is_refused(
    run: dict[str, Any], written: Path, change: dict[str, Any], said: str
) -> None:
    other = dataclasses.replace(run["identity"], **change)
    point = resume_point(list_checkpoints(written)[0])
    with pytest.raises(CheckpointError, match=said):
        restore(run["ours"], run["schedule"], point, other)


def test_a_renamed_folder_and_a_symlink_are_named_and_set_aside(run: dict[str, Any], written: Path) -> None:
    """Else a copy of an old one would be the newest, and the next one could not be published."""
    newest, older = list_checkpoints(written)
    shutil.copytree(older, written / "step-00000040")
    newest.rename(written / "elsewhere")
    newest.symlink_to("elsewhere")
    assert validate(newest) == validate(written / "step-00000040") == []  # whole they are: an export may name them
    assert newest not in list_checkpoints(written)
    point = find_resume_point(run["accelerator"], written)
    assert point.path == older
    assert "its manifest is of step 1: a copy, or renamed" in point.skipped[0]
    assert "step-00000002: it is a symlink" in point.skipped[1]
    quarantine(run["accelerator"], point)
    assert list_checkpoints(written) == [older]


def test_a_writer_does_one_thing_after_another_whatever_they_raise() -> None:
    """And its thread is there before the first: where memory has run out, none could be started."""
    before = set(threading.enumerate())
    writer = BackgroundWriter()
    (thread,) = set(threading.enumerate()) - before
    done = []
    for number in (1, 0, 2):
        writer.do(lambda number=number: done.append(1 / number))  # type: ignore[misc]
        with contextlib.nullcontext() if number else pytest.raises(ZeroDivisionError):
            writer.wait()
    assert done == [1, 0.5]
    writer.do(threading.current_thread)  # nothing is raised twice
    writer.wait()
    del writer
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("no key", (4,)),
        ("weight:0:lm_head.weight", (4,)),  # format 1
        ("weight:lm_head.weight:0+2,x:0", (4,)),
        ("weight:lm_head.weight:0+2,0:0", (4,)),
        ("weight:lm_head.weight:0+2,0+2+2:0", (4,)),
        ("weight:lm_head.weight:,0+2:0", (4,)),
        ("weight:lm_head.weight:0+2,0+02:0", (2, 2)),
        ("weight:lm_head.weight:0+2,0+٢:0", (2, 2)),
        ("weight:lm_head.weight:-1+2,0+2:0", (2, 2)),
        ("weight:lm_head.weight:0+2,0+2:0", (4,)),  # all of the box, and not of its shape
        ("weight:lm_head.weight:0+2,0+2:1", (2, 2)),
        ("weight:lm_head.weight:0+2,0+2:2", (3,)),
        ("weight:lm_head.weight:0+2,0+2:0", (0,)),
        ("weight:lm_head.weight:0+0,0+2:0", (0, 2)),
        ("weight:lm_head.weight:0+2:0", (2,)),
        ("weight:lm_head.weight:63+2,0+2:0", (2, 2)),
        ("weight:lm_head.weight:0+" + "9" * 30 + ",0+2:0", (2,)),
        ("weight:lm_head.weight:0+" + "9" * 5000 + ",0+2:0", (2,)),
        ("glue:lm_head.weight:0+2,0+2:0", (2, 2)),
        ("weight:unknown:0+2,0+2:0", (2, 2)),
        ("weight::0+2,0+2:0", (2, 2)),
    ],
)
def test_a_key_that_names_no_part_is_refused(written: Path, key: str, shape: tuple[int, ...]) -> None:
    newest = list_checkpoints(written)[0]
    save_file({key: torch.zeros(shape)}, newest / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="names no part of a tensor"), opened(newest, read_manifest(newest)):
        pass
    (newest / "rank-00000.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="is not a safetensors file"), opened(newest, read_manifest(newest)):
        pass


CONTRADICTIONS = [
    ({"dtype": "int8"}, r"is damaged: .*holds float32, and the manifest names int8"),
    ({"dtype": "bfloat16"}, r"is damaged: .*holds float32, and the manifest names bfloat16"),
    ({"shape": [16]}, r"is damaged: .*reaches beyond the shape \[16\]"),
    ({"shape": [4, 8]}, r"is damaged: .*reaches beyond the shape \[4, 8\]"),
    ({"shape": [64]}, r"has no \w+ of model\.norm\.weight of shape \[32\]"),
    ({"shape": [0]}, r"is damaged: .*reaches beyond the shape \[0\]"),
]


def test_a_manifest_that_contradicts_its_files_is_refused(run: dict[str, Any], written: Path) -> None:
    newest = list_checkpoints(written)[0]
    manifest, name = read_manifest(newest), "model.norm.weight"
    for kind in ("weight", "exp_avg"):
        for changes, match in CONTRADICTIONS:
            kinds = {**manifest.tensors[name], kind: {**manifest.tensors[name][kind], **changes}}
            crafted = dataclasses.replace(manifest, tensors={**manifest.tensors, name: kinds})
            (newest / "manifest.json").write_bytes(crafted.encode())
            with pytest.raises(CheckpointError, match=match):
                restore(run["ours"], run["schedule"], resume_point(newest), run["identity"])
    for schedule in ({"last_epoch": "x"}, {"last_epoch": []}):
        (newest / "manifest.json").write_bytes(dataclasses.replace(manifest, schedule=schedule).encode())
        with pytest.raises(CheckpointError, match=r"is damaged: its schedule or its generators"):
            restore(run["ours"], run["schedule"], resume_point(newest), run["identity"])
    (newest / "manifest.json").write_bytes(manifest.encode())
    tensors = load_file(newest / "rank-00000.safetensors")
    for state in ("torch", "python", "numpy"):
        save_file({**tensors, f"generator:{state}": torch.zeros(3)}, newest / "rank-00000.safetensors")
        with pytest.raises(CheckpointError, match=r"is damaged: its schedule or its generators"):
            restore(run["ours"], run["schedule"], resume_point(newest), run["identity"])


ALONE = """
import shutil, subprocess, sys, warnings
from pathlib import Path
disk, tests = map(Path, sys.argv[1:])
sys.path[:0] = [str(tests), str(tests.parent / "dist")]
import conftest
import test_checkpoints as tests
from toolkit.checkpoints import checkpoint_writer, list_checkpoints, validate
from toolkit.core.errors import CheckpointError, StrategyError

class Factory:
    def mktemp(self, name):
        made = disk.parent / name
        made.mkdir()
        return made

run = next(conftest.run.__wrapped__(Factory()))
"""
"""Begins a program for a namespace of mounts."""

IN_USE = """
policy = tests.saver(run, disk / "checkpoints", keep=1)
policy.save(1)
policy.wait()
old = disk / "checkpoints" / "step-00000001"
subprocess.run(["mount", "--bind", old, old], check=True)  # what is mounted cannot be renamed
warnings.simplefilter("always")
policy.save(2)
policy.wait()
print("LEFT", [path.name for path in list_checkpoints(disk / "checkpoints")], [done.step for done in policy.published()])
"""

FULL_DISK = """
size = tests.saver(run, disk / "size", keep=1).layout.total_bytes
try:
    tests.saver(run, disk / "many", keep=1000)
except CheckpointError as error:
    print("BEFORE", error)
policy = tests.saver(run, disk / "checkpoints", keep=1)
policy.save(1)
policy.wait()
def fill(left):
    with open(disk / "filler", "ab") as file:
        file.write(bytes(shutil.disk_usage(disk).free - left))
fill(checkpoint_writer.CHECKPOINT_OVERHEAD // 2)
try:
    policy.save(2)
except CheckpointError as error:
    print("CHECKED", error)
checkpoint_writer.CHECKPOINT_OVERHEAD = 0  # as if the disk had become full after the check
checkpoint_writer.check_space = lambda *told: None
fill(size // 2)
policy.save(2)
try:
    policy.wait()
except CheckpointError as error:
    print("WRITING", error)
print("LEFT", [path.name for path in list_checkpoints(disk / "checkpoints")], validate(list_checkpoints(disk / "checkpoints")[0]))
"""


def in_namespace(program: str, disk: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program where it may mount, after a command of the shell."""
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{before} exec "$@"', "sh"]
    command += [sys.executable, "-c", ALONE + program, str(disk), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path: Path) -> None:
    """The new one is published by then; the old one is named."""
    done = in_namespace(IN_USE, tmp_path)
    assert "LEFT ['step-00000002', 'step-00000001'] [1, 2]" in done.stdout
    assert "step-00000001 cannot be removed" in done.stderr
    assert "Remove it by hand" in done.stderr


def test_a_full_disk_leaves_what_is_there(tmp_path: Path) -> None:
    """On a file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = in_namespace(FULL_DISK, disk, f"mount -t tmpfs -o size=64m tmpfs {disk} &&")
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0].isupper())
    for when in ("BEFORE", "CHECKED", "WRITING"):
        assert "bytes) are needed" in lines[when], when
        assert "bytes) are free" in lines[when], when
    assert "1001 checkpoints" in lines["BEFORE"]
    assert lines["LEFT"] == "['step-00000001'] []"
