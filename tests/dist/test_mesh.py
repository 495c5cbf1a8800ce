"""Tensor parallelism on real ranks: the losses of one process, the forecast, checkpoints under other engines, the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from programs import python
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.dist

SHAPE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2}
TP = {"tp": 2, "loss": "chunked"}
BOTH = {**TP, "sharding": "fsdp"}
SELECTIVE, ATTENTION, SECOND = ({"activation_checkpointing": word} for word in ("selective", "attention", "every:2"))

MODELS = ("llama", "qwen3", "gpt_neox", "phi3")
"""The third has biases after row-wise products; the fourth joins matrices, and its products take a whole input."""

Gave = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a vocabulary that two ranks cannot share evenly, and a Qwen3 with tied embeddings and norms over heads."""
    root = tmp_path_factory.mktemp("mesh")
    tiny.llama(root / "llama", vocab_size=257, tie_word_embeddings=False, **SHAPE)
    tiny.qwen3(root / "qwen3", tie_word_embeddings=True, **SHAPE)
    tiny.gpt_neox(root / "gpt_neox")
    tiny.phi3(root / "phi3")
    # On a busy machine gloo's threads keep up to three tensors longer than the step needs: little of a deep model's peak.
    tiny.llama(root / "deep llama", vocab_size=257, tie_word_embeddings=False, **{**SHAPE, "num_hidden_layers": 10})
    tiny.qwen3(root / "deep qwen3", tie_word_embeddings=True, **{**SHAPE, "num_hidden_layers": 10})
    return root


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    """What each run gave, by its number of ranks and its name."""

    def cell(name: str, model: str, strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
        more = {key: str(root / value) if key in ("from", "into", "export") else value for key, value in more.items()}
        return {"name": name, "folder": str(root / model), "strategy": strategy, "upto": 4, **more}

    groups = [
        (1, [cell(model, model, {}) for model in MODELS]),
        (
            2,
            [
                cell("llama", "llama", TP, into="tp", saves=[2], export="llama-tp"),
                cell("qwen3", "qwen3", {**TP, **SELECTIVE}, export="qwen3-tp"),
                cell("gpt_neox", "gpt_neox", TP, export="gpt_neox-tp"),
                cell("phi3", "phi3", TP, export="phi3-tp"),
                cell("to fsdp", "llama", {"sharding": "fsdp"}, **{"from": "tp/step-00000002"}, into="fsdp", saves=[3]),
                cell("and back", "llama", {**TP, **ATTENTION}, **{"from": "fsdp/step-00000003"}),
            ],
        ),
        (
            4,
            [
                cell("llama", "llama", {**BOTH, **SELECTIVE}, export="llama-both"),
                cell("qwen3", "qwen3", {**BOTH, "sharding": "fsdp_grad_op"}, export="qwen3-both"),
                cell("gpt_neox", "gpt_neox", BOTH, export="gpt_neox-both"),
                cell("phi3", "phi3", BOTH, export="phi3-both"),
                cell("to both", "llama", {**BOTH, **SECOND}, **{"from": "fsdp/step-00000003"}),
            ],
        ),
    ]
    given = tiny.run_groups("mesh_worker.py", groups, root / "llama", root / "scratch")
    return {
        (count, result["cell"]["name"]): result
        for (count, _), results in zip(groups, given, strict=True)
        for result in results
    }


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_norms_are_those_of_one_process(gave: Gave, model: str, count: int) -> None:
    reference, result = gave[1, model], gave[count, model]
    assert len(result["steps"]) == 4
    for ours, theirs in zip(result["steps"], reference["steps"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == pytest.approx(theirs[1], rel=5e-5)
        assert ours[2] == theirs[2]
    assert result["evaluated"] == pytest.approx(reference["evaluated"], rel=1e-5)


def test_each_rank_holds_exactly_its_part_of_the_checkpoint(gave: Gave) -> None:
    assert all(result["exact"] for (count, name), result in gave.items() if count > 1 and " " not in name)


@pytest.mark.parametrize(("count", "name"), [(2, "to fsdp"), (2, "and back"), (4, "to both")])
def test_a_checkpoint_goes_on_under_another_layout(gave: Gave, count: int, name: str) -> None:
    result = gave[count, name]["steps"]
    for ours, theirs in zip(result, gave[1, "llama"]["steps"][-len(result) :], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == pytest.approx(theirs[1], rel=5e-5)


def test_every_second_layer_is_recomputed(gave: Gave) -> None:
    """FSDP shards a model with `tp` as it is read, which gives its layers another class."""
    assert gave[4, "to both"]["recomputed"] == [True, False]


@pytest.mark.parametrize("name", [f"{model}-{way}" for model in MODELS for way in ("tp", "both")])
def test_the_export_is_the_trained_model(gave: Gave, root: Path, name: str) -> None:
    model, way = name.split("-")
    assert gave[{"tp": 2, "both": 4}[way], model]["logits_error"] <= 1e-6
    _, info = AutoModelForCausalLM.from_pretrained(root / name, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("deep llama", ()),
        ("deep qwen3", ("--sharding", "fsdp", "--save-every", "1", "--tp-sequence")),
    ],
)
def test_a_run_is_forecast_and_its_report_says_so(root: Path, model: str, words: tuple[str, ...]) -> None:
    """Two ranks from the shell: a forecast made in a child process, against the peaks of all ranks."""
    texts = [" ".join(f"w{(line * 7 + word * 3) % 200}" for word in range(40)) for line in range(200)]
    (root / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    size = ("--seq-len", "128", "--micro-batch", "4", "--accumulation", "2", "--steps", "3")
    plain = ("--activation-checkpointing", "none", "--no-save", "--run-dir", root / f"run-{model}")
    command = ("--model", root / model, "--data", root / "text.jsonl", "--tp", "2", "--no-guard", *words, *size, *plain)
    if words:
        tiny.run_recipe(4, command, root / "scratch")
    else:
        python("-m", "toolkit.cli", "train", "--processes", "2", *command, cwd=root, code=0)
    memory = json.loads((root / f"run-{model}" / "memory.json").read_text())
    forecast = memory["forecast"]["device"]["peak_bytes"]
    assert forecast == pytest.approx(memory["measured"]["peak_bytes"], rel=0.04)
    for rank in memory["measured"]["per_rank"]:
        assert forecast == pytest.approx(rank["peak_bytes"], rel=0.04)
    if not words:  # alone, which a launch environment does not tell from DDP
        python("-m", "toolkit.cli", "resume", f"run-{model}", "--steps", "4", cwd=root, code=0)
        about = json.loads((root / f"run-{model}" / "run.json").read_text())
        assert (about["strategy"]["sharding"], about["strategy"]["tp"]) == ("none", 2)
