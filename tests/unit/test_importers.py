"""Foreign checkpoints: nothing of them is run, nothing outside of them is read, and what is not whole is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as upstream
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoints.importers import open_foreign
from toolkit.checkpoints.importers.restricted_unpickler import DEEPSPEED, load, load_metadata
from toolkit.core.errors import CheckpointError


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def refused(folder: Path, *words: str) -> None:
    """Opening it, or reading what it holds, is refused by a sentence with these words."""

    def take() -> None:
        weights = open_foreign(folder)
        for name in weights.shapes:
            weights.tensor(name)

    with pytest.raises(CheckpointError) as error:
        take()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def save(path: Path, value: Any, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path, **options)


def dcp(folder: Path, state: dict[str, Any] | None = None) -> Path:
    """A folder of torch.distributed.checkpoint, written by one process."""
    state = state or {"model": {"model.a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}}
    writer = upstream.FileSystemWriter(folder, thread_count=1)
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        upstream.save(state, storage_writer=writer, no_dist=True)
    return folder


def change(folder: Path, edit: Callable[[Any], Any]) -> Path:
    """Write `.metadata` again, otherwise."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def zero(folder: Path, *, stage: int = 2, counts: tuple[int, ...] = (2, 2), **more: Any) -> Path:
    """Two parameters of 3 and 4 elements over two ranks, under ZeRO-1 or 2."""
    row = torch.arange(7.0)
    for rank, part in enumerate((row[:4], row[4:])[: len(counts)]):
        state = {
            "zero_stage": stage,
            "partition_count": [counts[rank]],
            "single_partition_of_fp32_groups": [part],
            **more,
        }
        save(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    shapes = [{"a": torch.Size([3]), "b": torch.Size([2, 2])}]
    module = {"a": row[:3].bfloat16(), "b": row[3:].bfloat16().view(2, 2), "frozen": torch.ones(2).bfloat16()}
    model = {"module": module, "param_shapes": shapes, "shared_params": {"tied": "a"}, "global_steps": 1200}
    save(folder / "mp_rank_00_model_states.pt", model)
    return folder


# What is read


def test_nothing_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("latest")
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert open_foreign(tmp_path) is None
    assert open_foreign(tmp_path / "nowhere") is None
    assert open_foreign(tmp_path / "notes.txt") is None


def test_zero_2_by_hand(tmp_path: Path) -> None:
    weights = open_foreign(zero(tmp_path / "step"))
    assert weights.kind == "DeepSpeed ZeRO-2 checkpoint, step 1,200, 2 ranks"
    assert weights.shapes == {"a": (3,), "b": (2, 2), "frozen": (2,), "tied": (3,)}
    assert weights.dtypes == {"a": "float32", "b": "float32", "frozen": "bfloat16", "tied": "float32"}
    assert weights.tensor("tied").tolist() == [0, 1, 2]
    assert weights.tensor("b").tolist() == [[3, 4], [5, 6]]


def test_zero_with_padding_after_every_parameter(tmp_path: Path) -> None:
    """What round-robin alignment writes: here one element after the first parameter."""
    folder = zero(tmp_path / "step", param_alignment_paddings=[[1, 0]])
    state = {"zero_stage": 2, "partition_count": [2], "param_alignment_paddings": [[1, 0]]}
    for rank, part in enumerate(([0.0, 1, 2, 99], [3.0, 4, 5, 6])):
        groups = {"single_partition_of_fp32_groups": [torch.tensor(part)]}
        save(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state | groups})
    assert open_foreign(folder).tensor("a").tolist() == [0, 1, 2]
    assert open_foreign(folder).tensor("b").tolist() == [[3, 4], [5, 6]]


@pytest.mark.parametrize("place", ["the folder itself", "one level down"])
def test_dcp_folders(tmp_path: Path, place: str) -> None:
    folder = dcp(tmp_path / "pytorch_model_fsdp_0")
    dcp(tmp_path / "optimizer_0", {"optimizer": {"state": torch.ones(2)}})
    weights = open_foreign(folder if place == "the folder itself" else tmp_path)
    assert weights.shapes == {"model.a": (3, 4), "b": (5,)}
    assert weights.tensor("model.a").tolist() == torch.arange(12.0).view(3, 4).tolist()
    refused(tmp_path / "optimizer_0", "has no tensors of a model")


def test_dcp_without_the_level_of_a_model(tmp_path: Path) -> None:
    scalar = torch.tensor(3.5, dtype=torch.float64)
    weights = open_foreign(
        dcp(tmp_path / "bare", {"model.a": torch.ones(2, 2).bfloat16(), "scalar": scalar, "step": 7})
    )
    assert weights.shapes == {"model.a": (2, 2), "scalar": ()}
    assert weights.dtypes == {"model.a": "bfloat16", "scalar": "float64"}
    assert weights.tensor("scalar").item() == 3.5
    nested = open_foreign(
        dcp(tmp_path / "nested", {"app": {"model": {"a": scalar}, "optimizer": {"a": scalar}}, "n": scalar})
    )
    assert nested.shapes == {"a": ()}


def test_names_without_their_wrappers(tmp_path: Path) -> None:
    names = {
        "module._orig_mod.layers.0._checkpoint_wrapped_module.module.weight": "layers.0.module.weight",
        "module._fsdp_wrapped_module.head.weight": "head.weight",
    }
    save(tmp_path / "pytorch_model_fsdp.bin", {name: torch.ones(2) for name in names})
    assert set(open_foreign(tmp_path).shapes) == set(names.values())
    save(tmp_path / "pytorch_model_fsdp.bin", {"a._orig_mod.b": torch.ones(2), "a.b": torch.ones(2)})
    refused(tmp_path, "'a.b' twice")
    (tmp_path / "pytorch_model_fsdp.bin").unlink()
    save(tmp_path / "pytorch_model.bin", {"module.a": torch.ones(2), "head": torch.ones(2)})
    assert set(open_foreign(tmp_path).shapes) == {"module.a", "head"}, "this module is a part of the model"


# What is never run


ENTRIES = {
    "a state dict": "pytorch_model.bin",
    "FSDP's state dict": "pytorch_model_fsdp.bin",
    "DeepSpeed's optimizer": "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "DeepSpeed's model": "mp_rank_00_model_states.pt",
}


@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle"])
@pytest.mark.parametrize("name", ENTRIES.values(), ids=ENTRIES.keys())
def test_a_crafted_pickle(tmp_path: Path, canary: Path, name: str, form: str) -> None:
    folder = tmp_path / "step"
    if name.endswith("states.pt"):
        zero(folder)
    value = {"module": {}, "optimizer_state_dict": Evil(canary)}
    if form == "plain pickle":
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(value, protocol=2))
        refused(folder, name)
    else:
        save(folder / name, value, _use_new_zipfile_serialization=form == "zip")
        refused(folder, name, "mkdir", "not on the list")


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_later_protocol_of_pickle_is_refused_with_its_instruction(
    tmp_path: Path, canary: Path, protocol: int
) -> None:
    path = tmp_path / "model.pt"
    save(path, {"module": Evil(canary)}, pickle_protocol=protocol)
    said = r"holds pickle's instruction 1\d\d, .* No code of it was run"
    with pytest.warns(UserWarning, match="Detected pickle protocol"), pytest.raises(CheckpointError, match=said):
        load(path)


def test_a_program_of_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    save(path, {"a": torch.ones(2)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("pytorch_model/constants.pkl", b"")
    with pytest.raises(CheckpointError, match="TorchScript") as error:
        open_foreign(tmp_path)
    assert "arbitrary code" not in str(error.value)


@pytest.mark.parametrize("protocol", range(6))
def test_a_crafted_metadata(tmp_path: Path, canary: Path, protocol: int) -> None:
    folder = dcp(tmp_path / "step")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(canary), protocol=protocol))
    refused(folder, str(folder / ".metadata"), "mkdir", "not on the list")


def test_a_crafted_tensor_of_dcp(tmp_path: Path, canary: Path) -> None:
    folder = dcp(tmp_path / "step")
    bad = io.BytesIO()
    torch.save(Evil(canary), bad)
    data = bad.getvalue()
    (folder / "bad.distcp").write_bytes(data)

    def edit(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path, place.offset, place.length = "bad.distcp", 0, len(data)

    refused(change(folder, edit), "bad.distcp", "mkdir", "not on the list")


def test_what_is_no_tensor_of_the_model_is_not_read(tmp_path: Path, canary: Path) -> None:
    folder = dcp(tmp_path / "step", {"model": {"a": torch.ones(2), "extra": Evil(canary)}, "other": Evil(canary)})
    weights = open_foreign(folder)
    assert weights.shapes == {"a": (2,)}
    assert weights.tensor("a").tolist() == [1, 1]


@pytest.mark.parametrize("path", sorted(DEEPSPEED))
def test_an_allowed_class_of_deepspeed_is_not_run_either(
    tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """What bears an allowed name builds a stand-in, even where that class is imported and would do something."""

    class Theirs:
        def __init__(self) -> None:
            self.path = str(canary)

        def __setstate__(self, state: dict[str, str]) -> None:
            os.mkdir(state["path"])

    place, _, name = path.rpartition(".")
    Theirs.__module__, Theirs.__name__, Theirs.__qualname__ = place, name, name
    parts = place.split(".")
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(sys.modules[place], name, Theirs, raising=False)
    save(tmp_path / "a.pt", {"theirs": Theirs()})
    value = load(tmp_path / "a.pt")["theirs"]
    assert type(value) is not Theirs
    assert value.state == {"path": str(canary)}


def test_what_this_process_allowed_before_counts_for_nothing(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model.bin", {"a": torch.ones(2), "when": Path("now")})
    with torch.serialization.safe_globals([type(Path("now"))]):
        before = set(torch.serialization.get_safe_globals())
        refused(tmp_path, "pathlib.PosixPath", "not on the list")
        assert set(torch.serialization.get_safe_globals()) == before


def test_metadata_cannot_reach_into_torch_s_classes(tmp_path: Path) -> None:
    """The opcode BUILD sets attributes of whatever is on the stack, classes too."""
    crafted = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'version'\nS'mine'\nstb."
    path = tmp_path / ".metadata"
    path.write_bytes(crafted)
    with pytest.raises(CheckpointError):
        load_metadata(path)
    refused(tmp_path, ".metadata")
    assert Metadata.version is None


# What is never left, and what is not whole


@pytest.mark.parametrize("name", ["../outside.distcp", "{folder}/outside.distcp", "inner/../../outside.distcp"])
def test_names_in_metadata_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = dcp(tmp_path / "step")
    (folder / "__0_0.distcp").rename(tmp_path / "outside.distcp")

    def edit(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name.format(folder=tmp_path)

    refused(change(folder, edit), "outside of its folder", "outside.distcp")


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("name", ["../outside", "/outside", "a/b"])
def test_names_in_an_index_stay_in_the_folder(tmp_path: Path, index: str, name: str) -> None:
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(tmp_path, index, repr(name), "in the same folder")


@pytest.mark.parametrize("tag", ["../step", "/", "", "missing", ".."])
def test_latest_names_a_folder_next_to_it(tmp_path: Path, tag: str) -> None:
    zero(tmp_path / "step")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "latest").write_text(tag)
    refused(tmp_path / "inner", "latest", repr(tag), "expected a folder next to it")


def test_latest(tmp_path: Path) -> None:
    zero(tmp_path / "global_step1")
    zero(tmp_path / "global_step2")
    refused(tmp_path, "several", "global_step1, global_step2")
    (tmp_path / "latest").write_text("global_step2\n")
    assert open_foreign(tmp_path).shapes["a"] == (3,)


def test_links(tmp_path: Path) -> None:
    """A link within is followed; one that leads out is refused, whether it is a file, a folder or of no use."""
    folder, outside = tmp_path / "inner", tmp_path / "outside"
    save(outside / "pytorch_model.bin", {"a": torch.ones(2)})
    save(folder / "real" / "weights", {"a": torch.ones(2)})
    link = folder / "one" / "pytorch_model.bin"
    link.parent.mkdir()
    link.symlink_to("../real/weights")
    assert open_foreign(folder).shapes == {"a": (2,)}
    (link.parent / "other").symlink_to(outside / "pytorch_model.bin")
    refused(folder, "leads out of", str(outside))
    (link.parent / "other").unlink()
    link.unlink()
    link.symlink_to(outside / "pytorch_model.bin")
    refused(folder, "leads out of", str(outside))
    link.unlink()
    (folder / "two").symlink_to(outside)
    refused(folder, "leads out of", str(outside))


def test_a_step_without_all_of_its_ranks(tmp_path: Path) -> None:
    lacking = zero(tmp_path / "one", counts=(2,))
    refused(lacking, "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing", "one of 2")
    (lacking / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    refused(lacking, "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused(zero(tmp_path / "two", counts=(1, 1)), "2 ranks", "one of 1")
    hole = zero(tmp_path / "three")
    (hole / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    refused(hole, "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    headless = zero(tmp_path / "four")
    (headless / "mp_rank_00_model_states.pt").unlink()
    refused(headless, "mp_rank_00_model_states.pt")


def test_ranks_that_hold_too_little(tmp_path: Path) -> None:
    folder = zero(tmp_path / "step")
    state = {"zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": [torch.ones(1)]}
    save(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    refused(folder, "holds 5 elements, expected 7")


@pytest.mark.parametrize(
    "name",
    ["mp_rank_01_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt", "layer_01-model_00-model_states.pt"],
)
def test_other_parallelisms_are_refused(tmp_path: Path, name: str) -> None:
    folder = zero(tmp_path / "step")
    save(folder / name, {})
    refused(folder, name, "pure data parallelism")


def test_tensors_without_values(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.empty(0)}, tmp_path / "model.safetensors")
    refused(tmp_path, "size zero: b")
    save(tmp_path / "pytorch_model_fsdp.bin", {"a": torch.ones(2), "b": torch.empty(0, 3)})
    refused(tmp_path, "size zero: b")
    save(tmp_path / "pytorch_model_fsdp.bin", {"a": torch.empty(2, device="meta")})
    refused(tmp_path, "pytorch_model_fsdp.bin", "expected a plain tensor")


def test_chunks_that_do_not_make_up_a_tensor(tmp_path: Path) -> None:
    def smaller(metadata: Any) -> None:
        metadata.state_dict_metadata["model.model.a"].chunks[0].sizes = torch.Size([2, 4])

    refused(change(dcp(tmp_path / "one"), smaller), "chunks of model.model.a do not make up (3, 4)")

    def doubled(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["model.b"].chunks[0]
        metadata.state_dict_metadata["model.b"].size = torch.Size([10])
        metadata.state_dict_metadata["model.b"].chunks += [chunk]

    refused(change(dcp(tmp_path / "two"), doubled), "chunks of model.b do not make up (10,)")

    def huge(metadata: Any) -> None:
        record = metadata.state_dict_metadata["model.b"]
        record.size = record.chunks[0].sizes = torch.Size([2**50])

    refused(change(dcp(tmp_path / "three"), huge), "model.b", "bytes", "expected at least")

    def other(metadata: Any) -> None:
        properties = metadata.state_dict_metadata["model.b"].properties
        metadata.state_dict_metadata["model.b"].properties = dataclasses.replace(properties, dtype=torch.int8)

    refused(change(dcp(tmp_path / "five"), other), "model.b", "holds torch.float32, and .metadata names torch.int8")

    def shapeless(metadata: Any) -> None:
        metadata.state_dict_metadata["model.b"].size = torch.float32

    refused(
        change(dcp(tmp_path / "four"), shapeless), ".metadata", "is not the metadata of a DCP checkpoint: TypeError"
    )


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    (tmp_path / "plain").mkdir()
    save_file({"a": torch.ones(200)}, tmp_path / "plain" / "model.safetensors")
    save(tmp_path / "pickled" / "pytorch_model.bin", {"a": torch.ones(200)})
    zero(tmp_path / "zero")
    dcp(tmp_path / "dcp")
    dcp(tmp_path / "metadata")
    for file in (
        "plain/model.safetensors",
        "pickled/pytorch_model.bin",
        "zero/mp_rank_00_model_states.pt",
        "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "dcp/__0_0.distcp",
        "metadata/.metadata",
    ):
        path = tmp_path / file
        whole = path.read_bytes()
        path.write_bytes(whole[:keep])
        refused(path.parent, str(path))
        path.write_bytes(whole)


def test_several_models_and_parts_without_a_plan(tmp_path: Path) -> None:
    save(tmp_path / "one" / "pytorch_model.bin", {"a": torch.ones(2)})
    save(tmp_path / "one" / "pytorch_model_1.bin", {"a": torch.ones(2)})
    refused(tmp_path / "one", "several models", "pytorch_model_1.bin")
    save(tmp_path / "two" / "pytorch_model_fsdp_0_rank1.bin", {"a": torch.ones(2)})
    refused(tmp_path / "two", "pytorch_model_fsdp_0_rank1.bin", "one rank's part")
    dcp(tmp_path / "three" / "pytorch_model_fsdp_0")
    dcp(tmp_path / "three" / "pytorch_model_fsdp_1")
    refused(tmp_path / "three", "several", "pytorch_model_fsdp_0, pytorch_model_fsdp_1")
    zero(tmp_path / "four" / "pytorch_model")
    zero(tmp_path / "four" / "pytorch_model_1")
    (tmp_path / "four" / "latest").write_text("pytorch_model_1")
    refused(tmp_path / "four", "several models", "pytorch_model_1")


def test_a_file_that_changed_meanwhile(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    weights = open_foreign(tmp_path)
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"shape \(3,\)"):
        weights.tensor("a")
