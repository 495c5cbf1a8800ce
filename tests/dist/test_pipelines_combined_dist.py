"""Pipelines with adapters, data and tensor parallelism on real ranks: losses and norms of one process, checkpoints, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from programs import gone, left_of, python, start, until
from transformers import AutoModelForCausalLM

from toolkit.core.atomic_io import read_events

pytestmark = pytest.mark.dist

Gave = dict[tuple[int, str], dict[str, Any]]

LORA, BF16 = {"adapter": "lora"}, {"precision": "bf16"}
FSDP, DDP = {"sharding": "fsdp"}, {"sharding": "ddp"}
INTERLEAVED, ZERO_BUBBLE = {"pp_schedule": "interleaved"}, {"pp_schedule": "InterleavedZeroBubble"}
CHUNKED, PLAIN = {"loss": "chunked"}, {"activation_checkpointing": "none"}

CELLS: dict[str, tuple[int, str, str, dict[str, Any], dict[str, str]]] = {
    "lora": (2, "lora", "llama", LORA, {"into": "two", "export": "lora-exported"}),
    "dora, interleaved": (2, "dora", "llama", {"adapter": "dora", **INTERLEAVED}, {}),
    "lora in bf16": (2, "lora in bf16", "llama", LORA | BF16, {}),
    "zero bubble, tied": (2, "tied", "qwen3", ZERO_BUBBLE | PLAIN, {}),
    "looped bfs": (2, "tied", "qwen3", {"pp_schedule": "looped_bfs", **PLAIN}, {}),
    "fsdp, tied": (4, "tied", "qwen3", FSDP | CHUNKED, {"from": "one/step-00000002", "into": "four"}),
    "fsdp, zero bubble": (4, "tied", "qwen3", FSDP | ZERO_BUBBLE | PLAIN, {}),
    "fsdp, lora, interleaved": (4, "lora", "llama", FSDP | LORA | INTERLEAVED, {"from": "two/step-00000002"}),
    "ddp, tied": (4, "tied", "qwen3", DDP, {"from": "four/step-00000003", "export": "ddp-exported"}),
    "tp, windows": (4, "windows", "gemma3", {"tp": 2}, {}),
    "tp, lora": (4, "lora", "llama", LORA | {"tp": 2}, {"from": "two/step-00000002", "export": "tp-lora-exported"}),
    "tp and ddp": (8, "tied", "qwen3", DDP | {"tp": 2}, {"from": "four/step-00000003"}),
    "tp and fsdp": (
        8,
        "tied",
        "qwen3",
        FSDP | {"tp": 2},
        {"from": "four/step-00000003", "into": "eight", "export": "eight-exported"},
    ),
}
"""Ranks, the reference, the model, the strategy besides --pp 2, and folders of checkpoints of each cell."""

OWN: dict[str, tuple[int, dict[str, Any]]] = {
    "own, alone": (1, {"pp": 1}),
    "own, ddp": (2, {"pp": 1, **DDP}),
    **{
        f"own, {word}": (2, {"pp": 1, "sharding": word}) for word in ("zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op")
    },
    "own, hsdp": (4, {"pp": 1, "sharding": "hsdp", "dp_replicate": 2}),
    "own, tp": (2, {"pp": 1, "tp": 2}),
    "own, cp": (2, {"pp": 1, "cp": 2}),
    "own, pp": (2, INTERLEAVED),
    "own, pp and fsdp": (4, FSDP),
}
"""Ranks and strategies of a user's own loop."""

ALONE = {
    "tied": ("qwen3", {}),
    "windows": ("gemma3", {}),
    "lora": ("llama", LORA),
    "lora in bf16": ("llama", LORA | BF16),
}
ALONE |= {"dora": ("llama", {"adapter": "dora"})}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("combined")
    tiny.llama(root / "llama", num_hidden_layers=4, tie_word_embeddings=False)
    tiny.qwen3(root / "qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    kinds = ["sliding_attention", "full_attention"] * 2
    gemma3 = {**tiny.TEXT, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8}
    tiny._save("Gemma3ForCausalLM", root / "gemma3", **gemma3)
    tiny.mixtral(root / "mixtral", num_hidden_layers=4)
    return root


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    def cell(name: str, model: str, strategy: dict[str, Any], saves: int = 2, **folders: str) -> dict[str, Any]:
        paths = {key: str(root / value) for key, value in folders.items()}
        common = {"upto": 4, "accumulation": 4, "rows": "whole", "saves": [saves]}
        return {"name": name, "folder": str(root / model), "strategy": strategy, **common, **paths}

    def cells(count: int) -> list[dict[str, Any]]:
        saves = {2: 2, 4: 3, 8: 4}[count]
        return [
            cell(name, model, {"pp": 2, **words}, saves, **folders)
            for name, (ranks, _, model, words, folders) in CELLS.items()
            if ranks == count
        ] + own(count)

    def own(count: int) -> list[dict[str, Any]]:
        return [
            cell(name, "qwen3", {"pp": 2, **words}) | {"own": True} | ({"accumulation": 2} if "hsdp" in name else {})
            for name, (ranks, words) in OWN.items()
            if ranks == count
        ]

    steps = "step-00000002"
    moves = [
        cell("mixture, pp", "mixtral", {"pp": 2}, into="mixture, pp"),
        cell("mixture, ep", "mixtral", FSDP | {"ep": 2}, **{"from": f"mixture, pp/{steps}"}, into="mixture, ep"),
        cell("mixture, back", "mixtral", {"pp": 2}, **{"from": f"mixture, ep/{steps}"}, into="mixture, back"),
    ]
    one = [cell(name, *rest, **({"into": "one"} if name == "tied" else {})) for name, rest in ALONE.items()]
    # The last step of eight ranks, evaluated and exported by one process.
    last = cell("after eight", "qwen3", {}, **{"from": "eight/step-00000004"})
    groups = [(1, [*one, *own(1)]), (2, [*cells(2), *moves]), (4, cells(4)), (8, cells(8)), (1, [last])]
    return tiny.run_meshes(groups, root / "llama", root / "scratch")


@pytest.mark.parametrize("name", CELLS)
def test_losses_and_norms_are_those_of_one_process(gave: Gave, name: str) -> None:
    count, reference, _, words, folders = CELLS[name]
    result, alone = gave[count, name], gave[1, reference]
    done = {"one": 2, "two": 2, "four": 3}.get(folders.get("from", "").partition("/")[0], 0)
    tiny.assert_same(result["steps"], alone["steps"][done:])
    assert len(result["steps"]) == 4 - done
    assert result["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
    assert result["exact"] or "adapter" in words


@pytest.mark.parametrize("name", OWN)
def test_a_loop_of_ones_own_computes_the_same_on_every_engine(gave: Gave, name: str) -> None:
    for ours, theirs in zip(gave[OWN[name][0], name]["steps"], gave[1, "tied"]["steps"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == pytest.approx(theirs[1], rel=5e-5)


def test_what_a_loop_of_ones_own_cannot_do_is_refused_in_a_sentence(gave: Gave) -> None:
    rows, shapes, backward, save_state, prepare = gave[2, "own, pp"]["refused"]
    assert "other rows on rank 1 than on rank 0" in rows
    assert "have shapes (1, 23), (1, 24)" in shapes
    assert "Give rows of one length" in shapes
    assert "tk.forward_backward(accelerator, model, batches)" in backward
    assert "tk.save" in save_state
    assert "without its optimizer" in prepare


def test_an_audit_says_what_is_whole_within_a_step(gave: Gave) -> None:
    said = {name: gave[4, name]["audits"] for name in ("fsdp, tied", "ddp, tied")}
    assert all("whole within a step (ZeRO-1)" in " ".join(audit.split()) for audit in said["fsdp, tied"])
    assert not any("ZeRO-1" in audit for audit in said["ddp, tied"])


def test_experts_move_between_stages_and_ranks_bit_for_bit(gave: Gave, root: Path) -> None:
    """Of a mixture, from pp 2 to ep 2 and back: weights, moments, and the steps that follow."""
    for name in ("mixture, ep", "mixture, back"):
        tiny.assert_same(gave[2, name]["steps"], gave[2, "mixture, pp"]["steps"][2:])
        assert not tiny.differing(root / "mixture, pp" / "step-00000002", root / name / "step-00000002")


def test_a_checkpoint_of_three_dimensions_is_whole(gave: Gave) -> None:
    assert gave[1, "after eight"]["evaluated"] == pytest.approx(gave[1, "tied"]["evaluated"], rel=1e-5)


@pytest.mark.parametrize("name", [name for name, (*_, folders) in CELLS.items() if "export" in folders])
def test_the_export_is_the_trained_model(gave: Gave, root: Path, name: str) -> None:
    count, _, _, words, folders = CELLS[name]
    assert gave[count, name]["logits_error"] <= 1e-6
    if "adapter" not in words:
        _, info = AutoModelForCausalLM.from_pretrained(root / folders["export"], output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]


def test_a_stage_that_is_killed_ends_all_ranks_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    """Steps after the last checkpoint are computed again, with the same numbers."""
    run, numbers = tmp_path / "run", ("step", "loss", "grad_norm", "lr", "tokens")
    options = ("--pp", 2, "--steps", 16, "--save-every", 2, "--seq-len", 64, "--no-guard", "--timeout", 60)
    process = start("-m", "toolkit", "train", *options, "--run-dir", run, cwd=tmp_path)

    def steps() -> list[list[float]]:
        events = read_events(run / "events.jsonl") if (run / "events.jsonl").exists() else []
        return [[event[name] for name in numbers] for event in events if "grad_norm" in event]

    until(lambda: len(steps()) >= 3 and (run / "checkpoints/step-00000002/manifest.json").exists(), alive=process)
    ranks = {each.environ().get("RANK"): each for each in left_of(run)}
    ranks["1"].kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 (pipeline stage 1) was killed by SIGKILL" in said
    gone(list(ranks.values()))
    before = steps()
    python("-m", "toolkit", "resume", run, code=0, cwd=tmp_path)
    after = steps()
    assert [step for step, *_ in after] == list(range(1, 17))
    assert after[: len(before)] == before
