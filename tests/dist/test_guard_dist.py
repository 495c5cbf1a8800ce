"""The guard: a right cut passes, and each cut that is broken on purpose is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from programs import environment, python

import toolkit as tk

pytestmark = pytest.mark.dist

UPSTREAM = """
import toolkit.engines.mesh
toolkit.engines.mesh.register_summed = lambda: None
"""
"""transformers' own style of Qwen3's norms over local heads adds up the gradients of earlier micro-batches again."""

NO_REDUCTION = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def keep(_, bucket):
    kept = torch.futures.Future()
    kept.set_result(bucket.buffer())
    return kept

made = DDP.__init__

def init(self, *args, **options):
    made(self, *args, **options)
    self.register_comm_hook(None, keep)

DDP.__init__ = init
"""
WRONG_CUT = """
from toolkit.transforms.context_parallel import ContextParallel
right = ContextParallel.split

def split(self, batch, job, rank, masked=None):
    labels = right(self, batch, job, rank, masked)["labels"]
    return {**right(self, batch, job, rank ^ 1, masked), "labels": labels}

ContextParallel.split = split
"""
LOCAL_GRADIENT = """
import torch
from toolkit.transforms import adapters
split = adapters.split_adapters

def unreduced(model):
    split(model)
    for layer in model.modules():
        half = layer.lora_B["default"] if hasattr(layer, "lora_B") else None
        if half is not None and hasattr(half.weight, "device_mesh"):
            half.forward = lambda x, half=half: torch.nn.functional.linear(x, half.weight.to_local())

adapters.split_adapters = unreduced
"""
"""The gradient of an adapter's A is that of this rank's outputs alone."""


NO_AVERAGE = """
from toolkit.engines.pipeline.runtime import Runtime
Runtime._average = lambda self: None
"""
WRONG_STAGE = """
from toolkit.engines.pipeline.stages import Stage
right = Stage.forward

def forward(self, given, number, **options):
    return right(self, given if self.is_first else given.roll(1, dims=1), number, **options)

Stage.forward = forward
"""
"""A stage that reads its neighbour's hidden states one position late."""


def run_guard(folder: Path, *flags: str, plugin: str = "", code: int = 0) -> dict[str, object]:
    """Run `toolkit guard`, in the shell's words, with a module that changes what it imports."""
    (folder / "broken.py").write_text(plugin)
    env = environment(folder, TOOLKIT_ENGINES="broken")
    model = tiny.qwen3(folder / "qwen3")
    ended = python("-m", "toolkit", "guard", model, *flags, "--json", folder / "result.json", code=code, env=env)
    if code:
        return {"message": ended.stderr + ended.stdout}
    result: dict[str, object] = json.loads((folder / "result.json").read_text())
    return result


RIGHT = [
    ("--tp", "2"),
    ("--sharding", "fsdp", "--cp", "2"),
    ("--tp", "2", "--cp", "2"),
    ("--pp", "2", "--adapter", "lora"),
    ("--pp", "2", "--sharding", "ddp"),
    ("--pp", "2", "--sharding", "fsdp"),
]


@pytest.mark.parametrize("flags", RIGHT)
def test_a_right_cut_is_certified(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = run_guard(tmp_path, *flags)
    assert result["agrees"]
    assert result["ranks"] == (2 if len(flags) == 2 or "lora" in flags else 4)
    assert result["gradient"] is None


def test_shared_experts_are_certified(tmp_path: Path) -> None:
    result = tk.guard(tiny.mixtral(tmp_path / "mixtral"), tk.Strategy(sharding="fsdp", ep=2))
    assert (result.agrees, result.ranks, result.gradient) == (True, 2, None)


def test_parameters_of_an_activation_get_the_gradients_of_all_ranks(tmp_path: Path) -> None:
    """Apertus has them between the two products of its MLP, and transformers' plan has no rule for them."""
    assert tk.guard(tiny.apertus(tmp_path / "apertus"), tk.Strategy(tp=2)).agrees


@pytest.mark.parametrize(
    ("family", "degree"), [("gemma4_text", "tp"), ("mimo_v2_flash", "tp"), ("glm4_moe_lite", "tp"), ("falcon", "pp")]
)
def test_odd_models_have_a_small_copy_and_agree(family: str, degree: str) -> None:
    """Wider heads in layers with full attention; shared sinks of attention; latent attention; a derived head_dim."""
    from transformers import AutoConfig

    assert tk.guard(tk.describe(AutoConfig.for_model(family)), tk.Strategy(**{degree: 2})).agrees


def test_joined_matrices_are_refused_where_ranks_would_read_wrong_rows(tmp_path: Path) -> None:
    """HRM's files join gate and up. transformers divides a rank's slice of both into two matrices."""
    with pytest.raises(
        tk.StrategyError, match=r"hold model\.\w+\.layers\.0\.self_attn\.q_proj\.weight in another layout"
    ):
        tk.guard(tiny.hrm(tmp_path / "hrm"), tk.Strategy(tp=2))


def test_an_own_plan_is_guarded(tmp_path: Path) -> None:
    """OPT's attention counts all heads on each rank, so a plan may not split them. Its keys' biases have no gradient at all."""
    right = {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"}
    heads = {f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    wrong = {**heads, "model.decoder.layers.*.self_attn.out_proj": "rowwise"}
    model, strategy = tiny.opt(tmp_path / "opt"), tk.Strategy(tp=2)
    assert tk.guard(tk.describe(model, tp_plan=right), strategy).agrees
    assert tk.guard(tk.describe(model, tp_plan=wrong), strategy).loss_difference > 1e-4


@pytest.mark.parametrize(
    ("plugin", "flags", "word"),
    [
        (UPSTREAM, ("--tp", "2"), "norm.weight"),
        (NO_REDUCTION, ("--sharding", "ddp", "--cp", "2"), "model.embed_tokens.weight"),
        (WRONG_CUT, ("--sharding", "ddp", "--cp", "2"), "model.embed_tokens.weight"),
        (NO_AVERAGE, ("--sharding", "ddp", "--pp", "2"), "model.embed_tokens.weight"),
        (WRONG_STAGE, ("--pp", "2"), "model.embed_tokens.weight"),
        (LOCAL_GRADIENT, ("--tp", "2", "--adapter", "lora"), "lora_A.default.weight"),
    ],
    ids=["upstream", "no reduction", "wrong cut", "no average", "wrong stage", "local gradient"],
)
def test_a_broken_cut_is_refused(tmp_path: Path, plugin: str, flags: tuple[str, ...], word: str) -> None:
    message = str(run_guard(tmp_path, *flags, plugin=plugin, code=2)["message"])
    assert "NOT as one process" in message
    assert word in message


def test_a_run_is_guarded_and_records_it(tmp_path: Path) -> None:
    """A broken cut is refused before a folder is made; a right one is trained, and `run.json` has the certificate."""
    (tmp_path / "broken.py").write_text(UPSTREAM)
    model, text, run = tiny.qwen3(tmp_path / "qwen3"), tmp_path / "text.txt", tmp_path / "run"
    text.write_text("one two three four five six seven eight nine ten " * 200)
    words = ("-m", "toolkit", "train", "--model", model, "--data", text, "--tp", 2, "--steps", 2, "--seq-len", 16)
    words = (*words, "--no-save", "--processes", 2, "--run-dir", run)
    ended = python(*words, code=2, env=environment(tmp_path, TOOLKIT_ENGINES="broken"))
    assert "guard: the cut of" in ended.stderr
    assert re.search(
        r"the first parameter with another gradient is model\.layers\.0\.self_attn\.[qk]_norm\.weight", ended.stderr
    )
    assert not run.exists()
    python(*words, code=0)
    assert json.loads((run / "run.json").read_text())["guard"]["agrees"]
