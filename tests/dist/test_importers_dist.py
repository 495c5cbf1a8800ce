"""Checkpoints of plain Accelerate on two ranks are read without DeepSpeed or a process group, equal bit by bit to the model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from programs import python
from safetensors.torch import load_file

from toolkit.checkpoints.importers import open_foreign
from toolkit.core.errors import CheckpointError

pytestmark = pytest.mark.dist

CELLS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "ddp pickled": {"engine": "ddp", "safe": False},
    "ddp in several files": {"engine": "ddp", "save": "model"},
    "fsdp sharded": {"engine": "fsdp", "kind": "SHARDED_STATE_DICT", "checkpointing": True},
    "fsdp sharded lora": {"engine": "fsdp", "kind": "SHARDED_STATE_DICT", "lora": True},
    "fsdp full": {"engine": "fsdp", "kind": "FULL_STATE_DICT"},
    "zero1": {"engine": "zero", "stage": 1},
    "zero1 bf16": {"engine": "zero", "stage": 1, "bf16": True, "save": "engine"},
    "zero1 bf16 lora": {"engine": "zero", "stage": 1, "bf16": True, "lora": True},
    "zero2": {"engine": "zero", "stage": 2, "save": "engine"},
    "zero2 bf16": {"engine": "zero", "stage": 2, "bf16": True},
    "zero2 bf16 lora": {"engine": "zero", "stage": 2, "bf16": True, "lora": True},
    "zero3": {"engine": "zero", "stage": 3},
    "zero3 bf16": {"engine": "zero", "stage": 3, "bf16": True, "save": "engine"},
    "zero3 bf16 lora": {"engine": "zero", "stage": 3, "bf16": True, "lora": True},
    "zero3 adapter alone": {"engine": "zero", "stage": 3, "lora": True, "save": "engine", "exclude_frozen": True},
}

KINDS = {
    "ddp": "whole model (safetensors, 1 file)",
    "ddp pickled": "whole model (pickled state dict, 1 file)",
    "ddp in several files": "whole model (safetensors, 2 files)",
    "fsdp sharded": "sharded checkpoint (torch.distributed.checkpoint, 2 files)",
    "fsdp full": "FSDP's full state dict",
    "zero1": "DeepSpeed ZeRO-1 checkpoint, step 2, 2 ranks",
    "zero2 bf16": "DeepSpeed ZeRO-2 checkpoint, step 2, 2 ranks",
    "zero3": "DeepSpeed ZeRO-3 checkpoint, step 2, 2 ranks",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints by name, each with the real weights."""
    root = tmp_path_factory.mktemp("foreign")
    # Odd sizes, so that no parameter of most shapes divides by two ranks.
    odd = {"hidden_size": 9, "intermediate_size": 21, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}
    model = tiny.llama(root / "model", tie_word_embeddings=True, **odd)
    cells = [{"into": str(root / name), **cell} for name, cell in CELLS.items()]
    tiny.run_groups("importers_worker.py", [(2, cells)], model, root / "scratch")
    return root


@pytest.mark.parametrize("name", CELLS)
def test_every_tensor_is_the_model_s_own(made: Path, name: str) -> None:
    weights, real = open_foreign(made / name), load_file(f"{made / name}.safetensors")
    assert weights.kind == KINDS.get(name, weights.kind)
    missing = set(real) - set(weights.shapes)
    if name == "zero3 adapter alone":
        assert {n for n in missing if "lora_" in n} == set()
    else:
        # safetensors keeps one of two tied tensors.
        assert missing <= {"lm_head.weight"}
        assert not missing or name in ("ddp", "ddp in several files")
    assert set(weights.shapes) <= set(real)
    for key, shape in weights.shapes.items():
        tensor = weights.tensor(key)
        assert tuple(tensor.shape) == shape
        assert tensor.is_contiguous()
        assert str(tensor.dtype) == f"torch.{weights.dtypes[key]}" == str(real[key].dtype)
        assert torch.equal(tensor, real[key]), key


@pytest.mark.parametrize("name", [name for name, cell in CELLS.items() if cell.get("bf16")])
def test_masters_are_more_than_what_the_engine_computed_with(made: Path, name: str) -> None:
    weights = open_foreign(made / name)
    trained = [key for key in weights.shapes if not CELLS[name].get("lora") or "lora_B" in key]
    trained = [key for key in trained if not key.endswith("seen")]
    assert {weights.dtypes[key] for key in trained} == {"float32"}
    tensor = weights.tensor(trained[0])
    assert not torch.equal(tensor.bfloat16().float(), tensor)


def test_neither_deepspeed_nor_a_process_group_is_needed(made: Path) -> None:
    script = """
import pathlib, sys
for name in ("deepspeed", "accelerate", "transformers", "peft"):
    sys.modules[name] = None
from toolkit.checkpoints.importers import open_foreign
for name in sys.argv[2:]:
    weights = open_foreign(pathlib.Path(sys.argv[1]) / name)
    print(sum(weights.tensor(key).numel() for key in weights.shapes))
import torch.distributed
assert not torch.distributed.is_initialized()
"""
    names = ["fsdp sharded", "zero1", "zero3"]
    process = python("-c", script, made, *names, code=0)
    assert process.stderr == ""
    assert len(set(process.stdout.split())) == 1


PARTS = {
    "zero2": "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "zero3 bf16": "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt",
    "fsdp sharded": "pytorch_model_fsdp_0/__1_0.distcp",
    "ddp in several files": "model-00002-of-00002.safetensors",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_truncated_a_missing_and_a_linked_file_are_named(made: Path, name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / name, tmp_path / "copy"))
    part, theirs = folder / PARTS[name], tmp_path / "theirs"
    shutil.copy(part, theirs)
    for ruin in (lambda: os.truncate(part, part.stat().st_size // 2), part.unlink):
        ruin()
        with pytest.raises(CheckpointError) as refused:
            open_foreign(folder)
        assert part.name in str(refused.value)
    part.symlink_to(theirs)
    with pytest.raises(CheckpointError, match="leads out of"):
        open_foreign(folder)
