"""Context parallelism on real ranks: losses and norms of one process, checkpoints under other strategies, exports, forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from programs import python

from toolkit import Strategy, TrainConfig, describe, forecast

pytestmark = pytest.mark.dist

SHAPE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 4}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
GATHER = {"cp_attention": "gather"}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
LORA, DORA, QLORA = ({"adapter": adapter, "lora_rank": 4} for adapter in ("lora", "dora", "qlora"))

Cell = tuple[str, dict[str, Any], str]
"""A model, a strategy, and what rows hold."""

TWO: dict[str, Cell] = {
    "none": ("llama", {"sharding": "none"}, "whole"),
    "ddp, gather, documents": ("llama", {"sharding": "ddp", **GATHER}, "documents"),
    "none, odd rows": ("llama", {"sharding": "none"}, "odd"),
    "zero1, padded": ("llama", {"sharding": "zero1"}, "padded"),
    "zero2, gather, padded": ("llama", {"sharding": "zero2", **GATHER}, "padded"),
    "zero3, window, documents": ("qwen3", {"sharding": "zero3"}, "documents"),
    "fsdp, window, gather": ("qwen3", {"sharding": "fsdp", **GATHER}, "whole"),
    "fsdp_grad_op, eager, selective": (
        "qwen3", {"sharding": "fsdp_grad_op", "attention": "eager", "activation_checkpointing": "selective"}, "documents",
    ),
    "zero3, cpu, whole loss": ("llama", {"sharding": "zero3", "offload": "cpu", "loss": "whole"}, "whole"),
    "ddp, lora": ("llama", {"sharding": "ddp", **LORA}, "documents"),
    "zero3, learned positions": ("gpt2", {"sharding": "zero3"}, "documents"),
    "ddp, soft caps": ("gemma2", {"sharding": "ddp", "attention": "eager"}, "documents"),
    "fsdp, soft caps, gather": ("gemma2", {"sharding": "fsdp", "attention": "eager", **GATHER}, "padded"),
    "fsdp, lora, gather": ("llama", {"sharding": "fsdp", **LORA, **GATHER}, "documents"),
    "fsdp, dora": ("llama", {"sharding": "fsdp", **DORA}, "documents"),
    "zero2, qlora, gather": ("llama", {"sharding": "zero2", **QLORA, **GATHER}, "whole"),
    "fsdp, qlora": ("llama", {"sharding": "fsdp", **QLORA}, "whole"),
    "zero2, optimizer": ("llama", {"sharding": "zero2", "offload": "optimizer"}, "whole"),
}  # fmt: skip
FOUR: dict[str, Cell] = {
    "cp4 of two key heads": ("llama", {"sharding": "ddp", "cp": 4}, "documents"),
    "cp2 in fsdp": ("qwen3", {"sharding": "fsdp"}, "documents"),
    "cp2 in zero2": ("llama", {"sharding": "zero2"}, "whole"),
    "cp2 in hsdp": ("llama", {"sharding": "hsdp", "dp_replicate": 2}, "padded"),
    "cp2 over tp2": ("llama", {"sharding": "none", "tp": 2}, "documents"),
    "cp2 over tp2 in fsdp": ("qwen3", {"sharding": "fsdp", "tp": 2, **GATHER}, "whole"),
    "cp2 over tp2, its tokens divided": ("llama", {"sharding": "none", "tp": 2, "tp_sequence": True}, "odd"),
    "cp2 over tp2, lora": ("llama", {"sharding": "fsdp", "tp": 2, **LORA}, "documents"),
    "cp2 over tp2 in ep4": ("mixtral", {"sharding": "fsdp", "tp": 2, "ep": 4}, "whole"),
}

SAVED = {
    2: (
        *("ddp, lora", "fsdp, dora", "fsdp, qlora", "zero3, cpu, whole loss", "zero1, padded", "zero2, gather, padded"),
        *("zero2, optimizer", "fsdp_grad_op, eager, selective"),
    ),
    4: ("cp2 in hsdp", "cp2 over tp2", "cp2 over tp2 in fsdp", "cp2 over tp2 in ep4"),
}
"""Ranks → cells that save, export and are resumed."""
RESUMED = [(ranks, name) for ranks, names in SAVED.items() for name in names]

COUNTED = {"none": 4 * 2 * 3, "ddp, gather, documents": 2 * 2 * 3}
"""Cells of two ranks and the all-to-alls of a micro-batch: of queries, keys, values and outputs, or of keys and values.

In each of two layers, in the forward, its recomputation and the backward."""

Gave = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cp")
    tiny.llama(root / "llama", vocab_size=257, tie_word_embeddings=False, num_key_value_heads=2, **SHAPE)
    tiny.qwen3(root / "qwen3", tie_word_embeddings=True, **{**SHAPE, **WINDOW})
    config = json.loads((tiny.gpt2(root / "gpt2").parent / "gpt2" / "config.json").read_text())
    # Each rank draws masks of its own, as data-parallel ranks do: without dropout losses are comparable.
    (root / "gpt2" / "config.json").write_text(json.dumps({**config, **dict.fromkeys(DROPOUTS, 0.0)}))
    tiny.gemma2(root / "gemma2", attn_logit_softcapping=5.0, sliding_window=8)
    tiny.mixtral(root / "mixtral")
    return root


def reference(cell: Cell) -> str:
    """The name of the cell in one process."""
    model, strategy, rows = cell
    return ", ".join((model, rows, *filter(None, [strategy.get("adapter")])))


@pytest.fixture(scope="module")
def gave(root: Path) -> Gave:
    def cell(name: str, given: Cell, **more: Any) -> dict[str, Any]:
        model, strategy, rows = given
        more = {key: str(root / value) if key in ("from", "into", "export") else value for key, value in more.items()}
        strategy = {"loss": "chunked", **strategy}
        return {
            "name": name,
            "folder": str(root / model),
            "strategy": strategy,
            "rows": rows,
            **{"upto": 4, "planned": 12, **more},
        }

    def split(cells: dict[str, Cell], ranks: int) -> list[dict[str, Any]]:
        made = []
        for name, (model, strategy, rows) in cells.items():
            given, saves = (model, {"cp": 2, **strategy}, rows), name in SAVED[ranks]
            more: dict[str, Any] = {"into": name, "saves": [2], "export": f"{name}, exported"} if saves else {}
            made.append(cell(name, given, counts=ranks == 2 and name in COUNTED, **more))
            made += [cell(f"{name}, resumed", given, **{"from": f"{name}/step-00000002"})] if saves else []
        return made

    alone = {reference(given): given for given in (*TWO.values(), *FOUR.values())}
    saved: dict[str, Any] = {"into": "cp", "saves": [2], "export": "exported"}
    groups = [
        (
            1,
            [
                cell(name, (model, {key: way[key] for key in LORA if key in way}, rows))
                for name, (model, way, rows) in alone.items()
            ]
            + [
                cell("own", ("llama", {}, "whole"), own=True),
                cell("twenty", ("qwen3", {}, "documents"), upto=20),
                cell("twelve", ("llama", {}, "whole"), upto=12),
            ],
        ),
        (
            2,
            [
                *split(TWO, 2),
                cell("own", ("llama", {"sharding": "fsdp", "cp": 2}, "whole"), own=True),
                cell("saved", ("llama", {"sharding": "ddp", "cp": 2}, "whole"), **saved),
                cell(
                    "to zero3",
                    ("llama", {"sharding": "zero3"}, "whole"),
                    **{"from": "cp/step-00000002"},
                    into="z",
                    saves=[3],
                    upto=12,
                ),
                cell("and back", ("llama", {"sharding": "fsdp", "cp": 2}, "whole"), **{"from": "z/step-00000003"}),
            ],
        ),
        (
            4,
            [
                *split(FOUR, 4),
                cell("own", ("llama", {"sharding": "ddp", "cp": 2}, "whole"), own=True),
                cell("twenty", ("qwen3", {"sharding": "ddp", "cp": 2}, "documents"), upto=20),
            ],
        ),
        (
            1,
            [
                cell(
                    "of tp2",
                    ("llama", {}, "documents"),
                    **{"from": "cp2 over tp2/step-00000002"},
                    into="one",
                    saves=[3],
                )
            ],
        ),
        (
            4,
            [
                cell(
                    "and back",
                    ("llama", {"sharding": "fsdp", "cp": 2, "tp": 2}, "documents"),
                    **{"from": "one/step-00000003"},
                )
            ],
        ),
    ]
    return tiny.run_meshes(groups, root / "llama", root / "scratch")


@pytest.mark.parametrize(("count", "name"), [*((2, name) for name in TWO), *((4, name) for name in FOUR)])
def test_losses_and_norms_are_those_of_one_process(gave: Gave, count: int, name: str) -> None:
    expected = gave[1, reference({2: TWO, 4: FOUR}[count][name])]
    assert len(gave[count, name]["steps"]) == 4
    tiny.assert_same(gave[count, name]["steps"], expected["steps"])
    assert gave[count, name]["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "name", "reference", "count"),
    [
        (2, "to zero3", "twelve", 10),
        (2, "and back", "twelve", 1),
        (1, "of tp2", "llama, documents", 2),
        (4, "and back", "llama, documents", 1),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy(
    gave: Gave, ranks: int, name: str, reference: str, count: int
) -> None:
    steps, start = gave[ranks, name]["steps"], int(gave[ranks, name]["cell"]["from"][-8:])
    assert len(steps) == count
    tiny.assert_same(steps, gave[1, reference]["steps"][start : start + count])


def test_twenty_steps_are_those_of_one_process(gave: Gave) -> None:
    """With accumulation, uneven labels, a norm that is clipped, and a tied head."""
    expected = gave[1, "twenty"]["steps"]
    assert len(expected) == 20
    assert max(norm for _, norm, _ in expected) > 1
    tiny.assert_same(gave[4, "twenty"]["steps"], expected)


@pytest.mark.parametrize("name", COUNTED)
def test_collectives_of_a_step_are_those_of_the_forecast(gave: Gave, name: str) -> None:
    """In number, kind and bytes. Four steps of two micro-batches."""
    result = gave[2, name]
    assert result["calls"] == {"all_to_all_single": 4 * 2 * COUNTED[name]}
    exchanged = [
        size for what, size in result["transfers"] if what in ("heads, exchanged", "keys and values, gathered")
    ]
    assert sum(result["sent"].values()) == 4 * sum(exchanged)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_own_loop_divides_rows_in_one_call(gave: Gave, ranks: int) -> None:
    result = gave[ranks, "own"]
    for ours, theirs in zip(result["steps"], gave[1, "own"]["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    rows, *calls = result["refused"]
    assert "other rows on rank 1 than on rank 0" in rows
    assert len(calls) == 2
    assert all("tk.forward_backward(accelerator, model, micro_batches)" in sentence for sentence in calls)


@pytest.mark.parametrize(("ranks", "name"), RESUMED)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(gave: Gave, ranks: int, name: str) -> None:
    assert gave[ranks, f"{name}, resumed"]["steps"] == gave[ranks, name]["steps"][2:]


@pytest.mark.parametrize(("ranks", "name"), [(2, "saved"), *RESUMED])
def test_the_export_is_the_trained_model(gave: Gave, ranks: int, name: str) -> None:
    assert gave[ranks, name]["logits_error"] <= 1e-6


@pytest.mark.parametrize(("kind", "tp", "precision"), [("ulysses", 1, "bf16"), ("gather", 2, "fp32")])
def test_a_run_is_forecast_and_holds_a_share_of_the_activations(
    tmp_path: Path, kind: str, tp: int, precision: str
) -> None:
    """Two ranks from the shell; no row is padded, so that no mask of s × s hides the activations. In bf16 FSDP2 copies the rows."""
    (tmp_path / "text.txt").write_text(" ".join(f"w{number * 7 % 2000}" for number in range(20_000)))
    size = (
        "--seq-len",
        "1024",
        "--micro-batch",
        "1",
        "--steps",
        "1",
        "--activation-checkpointing",
        "none",
        "--no-save",
    )
    way = ("--sharding", "fsdp", "--cp", "2", "--tp", str(tp), "--cp-attention", kind, "--precision", precision)
    command = ("--data", tmp_path / "text.txt", *way, *size, "--no-guard", "--run-dir", tmp_path / "run")
    if tp == 1:
        python("-m", "toolkit.cli", "train", "--processes", "2", *command, cwd=tmp_path, code=0)
    else:
        tiny.run_recipe(2 * tp, command, tmp_path / "scratch")
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    for rank in memory["measured"]["per_rank"]:
        assert memory["forecast"]["device"]["peak_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.04)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    alone = Strategy(**{**run["strategy"], "cp": 1, "cp_attention": "auto"})
    whole = forecast(describe(None), alone, f"{2 * tp}x cpu", TrainConfig(**run["train_config"]), one_document=True)
    # Keys and values are whole under gather.
    limit = {"ulysses": 0.6, "gather": 0.75}[kind]
    assert memory["forecast"]["device"]["parts"]["activations"] < limit * whole.parts["activations"]
