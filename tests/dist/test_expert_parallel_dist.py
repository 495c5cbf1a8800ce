"""Expert parallelism on real ranks: losses and norms of one process, checkpoints under other strategies, exports, the forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from programs import python
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from toolkit import Strategy, TrainConfig, forecast
from toolkit.config.fields import from_dict

pytestmark = pytest.mark.dist

FULL, NONE = ({"activation_checkpointing": word} for word in ("full", "none"))
LORA = {"adapter": "lora", "lora_rank": 4, "lora_dropout": 0.1}

Cell = tuple[str, dict[str, Any]]
"""A model, and a strategy."""

TWO: dict[str, Cell] = {
    "mixtral, fsdp": ("mixtral", {"sharding": "fsdp", "ep": 2, **NONE}),
    "qwen3, fsdp": ("qwen3_moe", {"sharding": "fsdp", "ep": 2, **FULL}),
    "qwen2, fsdp": ("qwen2_moe", {"sharding": "fsdp", "ep": 2, **NONE}),
    "gpt-oss, fsdp": ("gpt_oss", {"sharding": "fsdp", "ep": 2, **NONE}),
    "deepseek, fsdp": ("deepseek", {"sharding": "fsdp", "ep": 2, **FULL}),
    "glm4, fsdp": ("glm4_moe", {"sharding": "fsdp", "ep": 2, **FULL}),
    "balanced, none": ("balanced", {"sharding": "none", "tp": 2, "ep": 2, **NONE}),
    "mixtral, none": ("mixtral", {"sharding": "none", "tp": 2, "ep": 2, **FULL}),
    "qwen3, none": ("qwen3_moe", {"sharding": "none", "tp": 2, "ep": 2, **NONE}),
    "mixtral, inside": ("mixtral", {"sharding": "none", "tp": 2, **NONE}),
    "qwen2, inside": ("qwen2_moe", {"sharding": "none", "tp": 2, **FULL}),
    "glm4, inside": ("glm4_moe", {"sharding": "none", "tp": 2, **NONE}),
    "deepseek, inside": ("deepseek", {"sharding": "none", "tp": 2, **FULL}),
    "nemotron, inside": ("nemotron_h", {"sharding": "none", "tp": 2, **FULL}),
    "one expert a token": ("top one", {"sharding": "fsdp", "ep": 2, **NONE}),
    "a rank without tokens, fsdp": ("idle", {"sharding": "fsdp", "ep": 2, **NONE}),
    "a rank without tokens, none": ("idle", {"sharding": "none", "tp": 2, "ep": 2, **FULL}),
    "lora, fsdp": ("mixtral", {"sharding": "fsdp", "ep": 2, **FULL, **LORA, "lora_dropout": 0.0}),
    "lora, none": ("qwen3_moe", {"sharding": "none", "tp": 2, "ep": 2, **NONE, **LORA}),
}
FOUR: dict[str, Cell] = {
    "mixtral, two copies": ("mixtral", {"sharding": "fsdp", "ep": 2, **FULL}),
    "qwen3, one expert a rank": ("qwen3_moe", {"sharding": "fsdp_grad_op", "ep": 4, **NONE}),
    "qwen3, replicas": ("qwen3_moe", {"sharding": "hsdp", "dp_replicate": 2, "ep": 2, **NONE}),
    "mixtral, in tp": ("mixtral", {"sharding": "fsdp", "tp": 2, "ep": 2, **NONE}),
    "lora, in tp": ("mixtral", {"sharding": "fsdp", "tp": 2, "ep": 2, **NONE, **LORA, "lora_dropout": 0.0}),
    "mixtral, inside ddp": ("mixtral", {"sharding": "ddp", "tp": 2, **FULL}),
    "qwen3, inside fsdp": ("qwen3_moe", {"sharding": "fsdp", "tp": 2, **FULL}),
    "lora, inside fsdp": ("mixtral", {"sharding": "fsdp", "tp": 2, **NONE, **LORA, "lora_dropout": 0.0}),
    "qwen3, over tp": ("qwen3_moe", {"sharding": "fsdp", "tp": 2, "ep": 4, **FULL}),
}

SPLIT_INSIDE = [name for name in TWO if name.endswith("inside")]
RESUMED = ("qwen3, one expert a rank", "qwen3, replicas", "qwen3, inside fsdp")

Gave = dict[tuple[int, str], dict[str, Any]]
ALONE: dict[str, Cell] = {
    model: (model, {})
    for model in (
        "mixtral",
        "balanced",
        "qwen3_moe",
        "qwen2_moe",
        "gpt_oss",
        "deepseek",
        "glm4_moe",
        "nemotron_h",
        "idle",
        "top one",
    )
}
ALONE |= {"mixtral lora": ("mixtral", {**LORA, "lora_dropout": 0.0}), "qwen3_moe lora": ("qwen3_moe", LORA)}


def alone(count: int, name: str) -> str:
    """The run in one process that computes the same."""
    model, strategy = {2: TWO, 4: FOUR}[count][name]
    return f"{model} lora" if "adapter" in strategy else model


def change_routing(folder: Path, embedding: float, first: float) -> Path:
    """Let more tokens of a Mixtral choose the first two of four experts.

    `embedding` is added to every input of a router, so that all have a part that is the same, and `first` to these two's weights.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] += embedding
    for name, tensor in tensors.items():
        if name.endswith("gate.weight"):
            tensor[:2] += first
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ep")
    tiny.mixtral(root / "mixtral")
    tiny.mixtral(root / "balanced", output_router_logits=True, router_aux_loss_coef=0.1)
    tiny.qwen3_moe(root / "top one", num_experts_per_tok=1)  # Mixtral normalizes its one weight to 1: no gradient
    change_routing(tiny.mixtral(root / "idle"), embedding=0.5, first=1.0)
    tiny.qwen3_moe(root / "qwen3_moe")
    tiny.qwen2_moe(root / "qwen2_moe")
    tiny.gpt_oss(root / "gpt_oss")
    tiny.deepseek(root / "deepseek")
    tiny.glm4_moe(root / "glm4_moe")
    tiny.nemotron_h(root / "nemotron_h")
    return root


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    def cell(name: str, given: Cell, **more: Any) -> dict[str, Any]:
        model, strategy = given
        more = {key: str(root / value) if key in ("from", "into", "export") else value for key, value in more.items()}
        return {"name": name, "folder": str(root / model), "strategy": strategy, **{"upto": 4, "planned": 12, **more}}

    two = {
        "mixtral, fsdp": {"into": "ep", "saves": [2], "export": "mixtral-two"},
        "qwen3, none": {"export": "qwen3_moe-two"},
        "a rank without tokens, fsdp": {"counts": True},
        "lora, fsdp": {"into": "lora", "saves": [2], "export": "lora-two"},
        **{name: {"counts": True} for name in SPLIT_INSIDE},
        "mixtral, inside": {"into": "inside", "saves": [2], "export": "mixtral-inside", "counts": True},
    }
    four = {name: {"into": name, "saves": [3]} for name in RESUMED}
    groups = [
        (
            1,
            [
                *(cell(name, given) for name, given in ALONE.items()),
                cell("twelve", ("mixtral", {}), upto=12),
                cell("own", ("mixtral", {}), own=True),
            ],
        ),
        (
            2,
            [
                *(cell(name, given, **two.get(name, {})) for name, given in TWO.items()),
                cell("balanced, fsdp alone", ("balanced", {"sharding": "fsdp"})),
                cell("balanced, fsdp", ("balanced", {"sharding": "fsdp", "ep": 2})),
                cell("own", ("mixtral", {"sharding": "fsdp", "ep": 2}), own=True),
                cell(
                    "to zero3",
                    ("mixtral", {"sharding": "zero3"}),
                    **{"from": "ep/step-00000002"},
                    into="z",
                    saves=[2, 3],
                    upto=12,
                ),
                cell("to fsdp", ("mixtral", {"sharding": "fsdp"}), **{"from": "ep/step-00000002"}),
                cell(
                    "lora to fsdp",
                    ("mixtral", {**ALONE["mixtral lora"][1], "sharding": "fsdp"}),
                    **{"from": "lora/step-00000002"},
                ),
                cell(
                    "and back",
                    ("mixtral", {"sharding": "none", "tp": 2, "ep": 2}),
                    **{"from": "z/step-00000003"},
                    into="back",
                    saves=[3],
                ),
                cell(
                    "inside to fsdp",
                    ("mixtral", {"sharding": "fsdp"}),
                    **{"from": "inside/step-00000002"},
                    into="out",
                    saves=[2],
                    upto=12,
                ),
                cell(
                    "and inside",
                    ("mixtral", {"sharding": "none", "tp": 2}),
                    **{"from": "z/step-00000003"},
                    into="in",
                    saves=[3],
                ),
            ],
        ),
        (
            4,
            [
                *(cell(name, given, export=f"{given[0]}-{name}", **four.get(name, {})) for name, given in FOUR.items()),
                *(cell(f"{name}, resumed", FOUR[name], **{"from": f"{name}/step-00000003"}) for name in four),
                cell("to four", ("mixtral", {"sharding": "fsdp", "tp": 2, "ep": 4}), **{"from": "z/step-00000003"}),
            ],
        ),
    ]
    return tiny.run_meshes(groups, root / "mixtral", root / "scratch")


@pytest.mark.parametrize(("count", "name"), [*((2, name) for name in TWO), *((4, name) for name in FOUR)])
def test_losses_and_norms_are_those_of_one_process(gave: Gave, count: int, name: str) -> None:
    expected = gave[1, alone(count, name)]
    assert len(gave[count, name]["steps"]) == 4
    assert gave[count, name]["exact"] or "lora" in name
    tiny.assert_same(gave[count, name]["steps"], expected["steps"])
    assert gave[count, name]["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)


def test_each_rank_counts_an_optimizers_steps_once(gave: Gave) -> None:
    """Where its shard of several parameters is empty, too: of the gates of shared experts, which have one row."""
    assert gave[2, "qwen2, fsdp"]["counted"] == [4, 4]


@pytest.mark.parametrize(
    ("words", "figure"),
    [
        (("none",), ""),
        (("none", "--adapter", "lora", "--lora-rank", "4"), "imbalance"),
        (("full",), "layer_imbalance"),
    ],
    ids=["even", "uneven, lora", "uneven, recomputed"],
)
def test_a_run_is_forecast(root: Path, words: tuple[str, ...], figure: str) -> None:
    """The even one from the shell, with a report. Ten layers: a rank's share of the tokens differs little in sum.

    Where it differs much, the measured imbalance gives the peak of the rank with the most tokens: that of all layers where the
    activations of all are kept, and that of the fullest layer where one at a time is computed again.
    """
    model = tiny.mixtral(root / f"ten layers {figure}", num_hidden_layers=10)
    if figure:  # most tokens
        change_routing(model, embedding=0.02, first=0.01)
    texts = [" ".join(f"w{(line * 7 + word * 3) % 200}" for word in range(40)) for line in range(200)]
    (root / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    size = ("--seq-len", "128", "--micro-batch", "4", "--accumulation", "2", "--steps", "2", "--no-save", "--no-guard")
    way = ("--sharding", "fsdp", "--ep", "2", "--activation-checkpointing", *words)
    folder = root / f"run {model.name}"
    command = ("--model", str(model), "--data", root / "text.jsonl", *way, *size, "--run-dir", folder)
    if figure:
        tiny.run_recipe(2, command, root / "scratch")
    else:
        python("-m", "toolkit.cli", "train", "--processes", "2", *command, cwd=root, code=0)
        assert "Load of the experts" in (folder / "report.html").read_text()
    memory, run = (json.loads((folder / name).read_text()) for name in ("memory.json", "run.json"))
    loads = [json.loads(line)["experts"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [load["tokens"] for load in loads] == [[2 * 2 * 4 * 128 * 2 / 4] * 10] * 2
    assert all(1 <= most <= 4 for load in loads for most in load["most"])
    peaks, limit = [rank["peak_bytes"] for rank in memory["measured"]["per_rank"]], 0.03 if figure else 0.04
    given = memory["forecast"]["device"]["peak_bytes"]
    if figure:
        assert given < 0.95 * max(peaks)
        assert min(load[figure] for load in loads) > 1.2
        given = forecast(
            str(model),
            from_dict(Strategy, run["strategy"]),
            "2x cpu",
            from_dict(TrainConfig, run["train_config"]),
            expert_imbalance=max(load[figure] for load in loads),
            save=False,
            num_checkpoints=0,
        ).peak_bytes
        peaks = [max(peaks)]
    for peak in peaks:
        assert given == pytest.approx(peak, rel=limit)


@pytest.mark.parametrize(("count", "name"), [*((2, name) for name in TWO), *((4, name) for name in FOUR)])
def test_tokens_of_each_expert_are_counted_once(gave: Gave, count: int, name: str) -> None:
    """Recomputed layers, evaluation and ranks with the same rows add none."""
    expected, result = (run["experts"][0] for run in (gave[1, alone(count, name)], gave[count, name]))
    assert {each: result[each] for each in expected} == expected
    assert expected["tokens"][0] == 8 * 24 * (1 if name == "one expert a token" else 2) / 4
    if "inside" in name:  # all ranks have the same tokens of every expert
        assert not {"imbalance", "layer_imbalance"} & result.keys()
    else:
        assert 1 <= result["imbalance"] <= result["layer_imbalance"] <= max(expected["most"]) + 1e-3


@pytest.mark.parametrize("name", ["a rank without tokens, fsdp", "a rank without tokens, none"])
def test_experts_without_tokens_hold_no_rank_up(gave: Gave, name: str) -> None:
    """All tokens of both ranks choose the first rank's two experts, in every layer and step; losses are compared above."""
    assert [load["idle"] for load in gave[2, name]["experts"]] == [[0.5, 0.5]] * 4
    assert gave[2, name]["experts"][0]["layer_imbalance"] == 2


def test_collectives_of_a_step_are_those_of_the_forecast(gave: Gave) -> None:
    """In number, kind and bytes. To the experts and back in both passes of two layers; four steps of two micro-batches.

    Where all tokens go to one rank, each rank sends as many in one direction as it sends of equal parts in two. Before them
    ranks exchange how many will come, a number an expert.
    """
    result = gave[2, "a rank without tokens, fsdp"]
    assert result["calls"] == {"all_to_all_single": 4 * 2 * 2 * 2 * 2, "c10d::alltoall_base_": 4 * 2 * 2}
    (exchanged,) = [size for what, size in result["transfers"] if what == "tokens, exchanged in the ep group"]
    assert result["sent"] == {"all_to_all_single": 4 * exchanged}


@pytest.mark.parametrize("name", SPLIT_INSIDE)
def test_experts_split_inside_send_what_the_forecast_says(gave: Gave, name: str) -> None:
    """In bytes, with recomputation, shared experts and experts without a gate, too."""
    result = gave[2, name]
    assert sum(result["sent"].values()) == 4 * sum(size for _, size in result["transfers"])


def test_experts_split_inside_call_what_the_forecast_says(gave: Gave) -> None:
    """In number and kind. Of each of two layers experts' outputs are all-reduced, and gradients of tokens and weights."""
    result = gave[2, "mixtral, inside"]
    reduced = sum(size for what, size in result["transfers"] if "all-reduced" in what)
    assert result["calls"] == {"all_reduce": 4 * 2 * (1 + 1 + 2 * (2 + 3)), "all_gather_into_tensor": 4 * 2}
    assert result["sent"]["all_reduce"] == 4 * reduced


def test_the_auxiliary_loss_is_that_of_the_same_micro_batches(gave: Gave) -> None:
    """It depends on how rows are divided into micro-batches, which other ranks alone change: FSDP without `ep` has the same."""
    tiny.assert_same(gave[2, "balanced, fsdp"]["steps"], gave[2, "balanced, fsdp alone"]["steps"])
    assert gave[1, "balanced"]["steps"][0][0] > gave[1, "mixtral"]["steps"][0][0] + 0.1


def test_the_norm_is_clipped(gave: Gave) -> None:
    assert min(norm for _, norm, _ in gave[1, "mixtral"]["steps"]) > 1


@pytest.mark.parametrize(
    ("count", "name"),
    [
        (2, "to zero3"),
        (2, "to fsdp"),
        (2, "lora to fsdp"),
        (2, "and back"),
        (4, "to four"),
        (2, "inside to fsdp"),
        (2, "and inside"),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy(gave: Gave, count: int, name: str) -> None:
    """To ZeRO, and from experts that are split inside, for ten steps."""
    steps, start = gave[count, name]["steps"], int(gave[count, name]["cell"]["from"][-8:])
    expected = gave[1, "mixtral lora" if "lora" in name else "twelve"]["steps"][start : start + len(steps)]
    assert len(steps) == {"to zero3": 10, "to fsdp": 2, "lora to fsdp": 2, "inside to fsdp": 10}.get(name, 1)
    tiny.assert_same(steps, expected)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(gave: Gave, name: str) -> None:
    assert gave[4, f"{name}, resumed"]["steps"] == gave[4, name]["steps"][3:]


@pytest.mark.parametrize("name", ["mixtral, none", "mixtral, fsdp", "gpt-oss, fsdp", "mixtral, inside"])
def test_a_rank_reads_its_part_alone(gave: Gave, root: Path, name: str) -> None:
    """Experts with a tensor each, and joined ones."""
    size = (root / TWO[name][0] / "model.safetensors").stat().st_size
    assert all(0.45 * size < read <= 0.55 * size for read in gave[2, name]["read"])


def test_an_own_loop_computes_what_one_process_does(gave: Gave) -> None:
    result, expected = (gave[count, "own"]["steps"] for count in (2, 1))
    assert len(expected) == 4
    for ours, theirs in zip(result, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("one", "other", "step"), [("ep", "z", 2), ("z", "back", 3), ("inside", "out", 2), ("z", "in", 3)]
)
def test_weights_and_moments_are_read_bit_for_bit_under_another_strategy(
    gave: Gave, root: Path, one: str, other: str, step: int
) -> None:
    """From experts over two ranks to ZeRO, and from there to a Mixtral over tp 2, whole experts a rank or a part of each."""
    assert gave
    assert not tiny.differing(root / one / f"step-{step:08d}", root / other / f"step-{step:08d}")


@pytest.mark.parametrize(
    ("count", "name", "folder"),
    [
        (2, "mixtral, fsdp", "mixtral-two"),
        (2, "qwen3, none", "qwen3_moe-two"),
        (2, "lora, fsdp", "lora-two"),
        (2, "mixtral, inside", "mixtral-inside"),
        *((4, name, f"{FOUR[name][0]}-{name}") for name in FOUR),
    ],
)
def test_the_export_is_the_trained_model(gave: Gave, root: Path, count: int, name: str, folder: str) -> None:
    assert gave[count, name]["logits_error"] <= 1e-6
    _, info = AutoModelForCausalLM.from_pretrained(root / folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
