"""How ranks are divided among the dimensions, and where each one is."""

from __future__ import annotations

import dataclasses

import pytest

from toolkit.config.parallelism import ORDER, Parallelism, resolve_parallelism
from toolkit.config.strategy import SHARDINGS, Strategy

MESH = Parallelism(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=2)


def test_ranks_are_the_product_and_tp_is_innermost() -> None:
    assert MESH.ranks == 48
    places = [MESH.coordinates(rank) for rank in range(48)]
    assert len(set(places)) == 48
    assert [place.tp for place in places[:4]] == [0, 1, 0, 1]
    assert [place.cp for place in places[:4]] == [0, 0, 1, 1]
    assert [place.pp for place in places] == [0] * 24 + [1] * 24
    # In mixed radix the coordinates are the rank.
    for rank, place in enumerate(places):
        number = 0
        for name in ORDER:
            number = number * getattr(MESH, name) + getattr(place, name)
        assert number == rank


def test_ranks_of_one_group_read_the_same_rows() -> None:
    rows: dict[int, list[int]] = {}
    for rank in range(MESH.ranks):
        rows.setdefault(MESH.coordinates(rank).dp_rank, []).append(rank)
    assert len(rows) == MESH.dp_size == 6
    assert all(len(ranks) == 8 for ranks in rows.values())
    assert [MESH.first_rank(dp_rank) for dp_rank in rows] == [ranks[0] for ranks in rows.values()]


def test_tokens_are_counted_once() -> None:
    counted = list(MESH.loss_ranks())
    assert len(counted) == MESH.loss_size == MESH.dp_size * MESH.cp == 12
    places = [MESH.coordinates(rank) for rank in counted]
    assert len({(place.dp_rank, place.cp) for place in places}) == 12


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 48: expected 0 to 47"):
        MESH.coordinates(48)


@pytest.mark.parametrize("word", SHARDINGS)
def test_what_is_not_fixed_is_data_parallel(word: str) -> None:
    strategy = Strategy(sharding=word, dp_replicate=2 if SHARDINGS[word].hybrid else 1)
    ranks = 1 if strategy.single_process else 8
    made = resolve_parallelism(strategy, ranks)
    expected = {"none": (1, 1), "ddp": (8, 1), "hsdp": (2, 4)}.get(word, (1, 8))
    assert (made.dp_replicate, made.dp_shard) == expected
    assert made.ranks == ranks
    assert dataclasses.asdict(made) == {
        **dict.fromkeys((*ORDER, "ep"), 1),
        **dict(zip(("dp_replicate", "dp_shard"), expected, strict=True)),
    }
