"""Every cell of sharding × adapter × precision: it trains and holds what its engine's account says, or a sentence says why not."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import tiny

from toolkit.config.strategy import ADAPTERS, SHARDINGS, Strategy
from toolkit.core.errors import StrategyError
from toolkit.devices.machine import hardware

pytestmark = pytest.mark.dist

PRECISIONS = ("fp32", "bf16", "fp16", "bf16_pure")
RANKS = {"none": 1, "hsdp": 4}
CLOSE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3, "bf16_pure": 2e-3}
"""Largest relative difference between the losses of two engines."""

RARE = {"fp16": ("none", "qlora"), "bf16_pure": ("none", "lora")}
"""The adapters that a precision is tried with, where that is not all."""

Key = tuple[str, str, str]
CELLS: list[Key] = [
    key for key in itertools.product(SHARDINGS, ADAPTERS, PRECISIONS) if key[1] in RARE.get(key[2], ADAPTERS)
]


def words(key: Key) -> dict[str, Any]:
    """A cell as a Strategy spells it."""
    sharding, adapter, precision = key
    # One process computes whole logits, the others compute the loss in chunks.
    loss = "whole" if sharding == "none" else "chunked"
    cell: dict[str, Any] = {"sharding": sharding, "adapter": adapter, "precision": precision, "loss": loss}
    return {**cell, "dp_replicate": 2} if sharding == "hsdp" else cell


def possible(key: Key) -> bool:
    """Whether the table has such a Strategy."""
    try:
        Strategy(**words(key))
    except StrategyError:
        return False
    return True


FOUR: list[Key] = [
    (sharding, "none", precision) for sharding in ("ddp", "zero2", "zero3", "fsdp") for precision in ("fp32", "bf16")
]
"""Cells that four ranks run, too."""

KEYS = {ranks: [key for key in CELLS if RANKS.get(key[0], 2) == ranks and possible(key)] for ranks in (1, 2, 4)}
KEYS[4] += FOUR


PLAIN: dict[str, Any] = {"activation_checkpointing": "none"}
WAYS: list[dict[str, Any]] = [
    *({"activation_checkpointing": policy} for policy in ("attention", "selective", "every:2")),
    {"activation_checkpointing": "none", "mlp_tiles": "5"},
    {"activation_checkpointing": "full", "mlp_tiles": 3},
    {"activation_checkpointing": "full", "activation_offload": True},
]
RECOMPUTED = [
    {"sharding": sharding, "adapter": adapter, "precision": "fp32", **way}
    for (first, sharding), (second, adapter) in itertools.product(
        enumerate(("ddp", "zero2", "zero3", "fsdp")), enumerate(("none", "lora", "qlora"))
    )
    for way in (PLAIN, *(WAYS[(second - first) % 3 :: 3] if adapter != "none" else WAYS))
]
"""Cells of two ranks: of each engine and adapter the first recomputes nothing. Without an adapter each engine meets each way; with
one, each way meets each engine and each adapter."""

Gave = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def gave(tmp_path_factory: pytest.TempPathFactory) -> Gave:
    """What the cells of `KEYS` gave, by the number of ranks that ran them; after those of two ranks, `RECOMPUTED`."""
    root = tmp_path_factory.mktemp("matrix")
    cells = {ranks: [words(key) for key in own] for ranks, own in KEYS.items()}
    cells[2] += RECOMPUTED
    return tiny.run_cells(cells, tiny.llama(root / "llama"), root)


@pytest.fixture(scope="module")
def runs(gave: Gave) -> dict[int, dict[Key, dict[str, Any]]]:
    """What each cell that the table has gave, by the number of ranks that ran it."""
    return {ranks: dict(zip(own, gave[ranks], strict=False)) for ranks, own in KEYS.items()}


def test_recomputed_activations_are_those_that_were_kept(gave: Gave) -> None:
    plain: dict[str, Any] = {}
    for cell, result in zip(RECOMPUTED, gave[2][-len(RECOMPUTED) :], strict=True):
        if cell["activation_checkpointing"] == "none" and "mlp_tiles" not in cell:
            plain = result
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-6), cell
        assert result["norms"] == pytest.approx(plain["norms"], rel=1e-5), cell


@pytest.fixture(scope="module")
def cells(runs: dict[int, dict[Key, dict[str, Any]]]) -> dict[Key, dict[str, Any]]:
    """What each cell gave with the ranks that are its own."""
    return {key: result for ranks, own in runs.items() for key, result in own.items() if RANKS.get(key[0], 2) == ranks}


def trained(cells: dict[Key, dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    return {key: result for key, result in cells.items() if "refused" not in result}


def test_every_cell_is_run_or_refused(cells: dict[Key, dict[str, Any]]) -> None:
    """Only 8 bits outside of none and ddp, and fp16 where this processor cannot compute it, are refused."""
    for key in CELLS:
        sharding, adapter, precision = key
        if adapter == "qlora8" and sharding not in ("none", "ddp"):
            with pytest.raises(StrategyError, match="qlora8' runs with sharding none, ddp"):
                Strategy(**words(key))
            continue
        deepspeed = SHARDINGS[sharding].engine == "deepspeed"
        fp16 = precision == "fp16" and not (deepspeed and "fp16" in hardware().device.dtypes)
        assert ("refused" in cells[key]) == fp16, f"{key}: {cells[key].get('refused')}"
        if fp16:
            assert cells[key]["kind"] == "StrategyError"
            assert "'fp16'" in cells[key]["refused"]
            assert "Choose precision 'bf16'" in cells[key]["refused"]


def test_losses_are_finite_and_fall(cells: dict[Key, dict[str, Any]]) -> None:
    for key, result in trained(cells).items():
        assert all(map(math.isfinite, result["losses"] + result["norms"])) or result["skipped"], (key, result["losses"])
        assert result["losses"][-1] < result["losses"][0] or result["skipped"], (key, result["losses"])
        assert result["training"], key


def test_losses_agree_between_engines(cells: dict[Key, dict[str, Any]]) -> None:
    """All start from one checkpoint and one adapter, see the same rows, and take the same steps."""
    for (sharding, adapter, precision), result in trained(cells).items():
        if result["skipped"]:
            continue
        reference = cells[("none", adapter, "fp32" if precision == "fp16" else precision)]
        cell = (sharding, adapter, precision)
        assert result["losses"] == pytest.approx(reference["losses"], rel=CLOSE[precision]), cell
        if precision == "fp32":
            assert result["norms"] == pytest.approx(reference["norms"], rel=1e-4), cell


def test_bytes_and_dtypes_are_the_accounts(cells: dict[Key, dict[str, Any]]) -> None:
    for key, result in trained(cells).items():
        held, expected = result["measured"], result["expected"]
        for part in ("trainable", "frozen", "master", "optimizer"):
            assert held[part] == pytest.approx(expected[part], rel=0.02), (key, part)
        for part in ("trainable", "master", "optimizer"):
            assert held["dtypes"].get(part) == expected["dtypes"].get(part), (key, part)


def test_masters_are_exactly_the_checkpoints(cells: dict[Key, dict[str, Any]]) -> None:
    """Also where DeepSpeed rounds them at load: they are no bf16 values, as `test_loading_dist.py` asks."""
    exact = {
        key: result["exact"] for key, result in trained(cells).items() if key[1] == "none" and key[2] != "bf16_pure"
    }
    assert len(exact) >= 2 * len(SHARDINGS)
    assert all(exact.values()), exact


@pytest.mark.parametrize(("sharding", "ranks"), [(key[0], 4) for key in FOUR if key[2] == "fp32"])
def test_four_ranks_hold_their_share(runs: dict[int, dict[Key, dict[str, Any]]], sharding: str, ranks: int) -> None:
    for precision in ("fp32", "bf16"):
        key = (sharding, "none", precision)
        result = runs[ranks][key]
        for part in ("trainable", "master", "optimizer"):
            assert result["measured"][part] == pytest.approx(result["expected"][part], rel=0.02), (key, part)
        # FACTS of the libraries, in bytes a parameter and rank: what is sharded is a quarter.
        each = {"ddp": 8, "zero2": 2, "zero3": 2, "fsdp": 2}[sharding]
        total = runs[ranks][("ddp", "none", "fp32")]["measured"]["optimizer"] / 8
        assert result["measured"]["optimizer"] == pytest.approx(each * total, rel=0.02), key
        assert result["losses"] == pytest.approx(
            runs[ranks][("ddp", "none", precision)]["losses"], rel=CLOSE[precision]
        )
