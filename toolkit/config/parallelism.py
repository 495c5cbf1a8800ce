"""`Parallelism`: how many ranks lie along each dimension, and where each rank is. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.config.strategy import SHARDINGS, Strategy
from toolkit.core.errors import StrategyError
from toolkit.core.units import ceil_div

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Dimensions of the mesh, the outermost first. Ranks of one `tp` group are neighbours, on one node where they can be."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """A rank's place on every dimension, each from 0."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    dp_rank: int
    """Its place among all `dp_size` data-parallel ranks: which rows it reads."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Ranks along every dimension: `ranks = pp × dp_replicate × dp_shard × cp × tp`."""

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Groups that each hold a whole copy."""
    dp_shard: int = 1
    """Ranks that share one copy."""
    cp: int = 1
    """Ranks that share a sequence."""
    tp: int = 1
    """Ranks that share each matrix product."""
    ep: int = 1
    """Ranks that share the experts, over the same ranks as `dp_shard × cp × tp`."""

    @property
    def ranks(self) -> int:
        """The world size."""
        return math.prod(getattr(self, name) for name in ORDER)

    @property
    def dp_size(self) -> int:
        """Ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_size(self) -> int:
        """Ranks over which FSDP and ZeRO shard."""
        return self.dp_shard * self.cp

    @property
    def loss_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.dp_size * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank.

        Raises:
            ValueError: for a rank that does not exist.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank}: expected 0 to {self.ranks - 1}")
        place, rest = {}, rank
        for name in reversed(ORDER):
            rest, place[name] = divmod(rest, getattr(self, name))
        return Coordinates(**place, dp_rank=place["dp_replicate"] * self.dp_shard + place["dp_shard"])

    def first_rank(self, dp_rank: int) -> int:
        """Return the first rank that reads the rows of a data-parallel rank."""
        return dp_rank * self.cp * self.tp

    def loss_ranks(self) -> range:
        """Return one rank of each `tp` and `pp` group, of the last stage: together they have every token's loss once."""
        return range(self.ranks - self.ranks // self.pp, self.ranks, self.tp)


def resolve_parallelism(strategy: Strategy, ranks: int) -> Parallelism:
    """Divide the ranks among the dimensions: ranks that the strategy does not assign are data parallel.

    Raises:
        StrategyError: for a number of ranks that the strategy cannot divide.
    """
    fixed = {"pp": strategy.pp, "cp": strategy.cp, "tp": strategy.tp}
    product = math.prod(fixed.values())
    _check_experts(strategy, ranks)
    if ranks % product:
        named = ", ".join(f"{name} {size}" for name, size in fixed.items() if size > 1)
        raise StrategyError(f"{named} does not divide {count_ranks(ranks)}. Choose a multiple of {product} processes.")
    data = ranks // product
    kind = SHARDINGS[strategy.sharding].data_parallel
    _check_data_parallel(strategy, kind, data, product)
    replicate = data if kind == "replicate" else strategy.dp_replicate
    return Parallelism(**fixed, ep=strategy.ep, dp_replicate=replicate, dp_shard=data // replicate)


def _check_experts(strategy: Strategy, ranks: int) -> None:
    """Refuse groups of experts that the ranks of one copy of the model cannot be divided into."""
    ep, tp, copy = strategy.ep, strategy.tp, ranks // strategy.dp_replicate
    if ep == 1:
        return
    if strategy.pp > 1:
        raise StrategyError(f"--ep does not run with pp {strategy.pp} yet. Leave --ep out, or choose --pp 1.")
    if ep % tp:
        raise StrategyError(f"ep {ep} is no multiple of tp {tp}. Choose --ep {ceil_div(ep, tp) * tp}, or --tp 1.")
    if copy % ep:
        raise StrategyError(
            f"ep {ep} does not divide the {count_ranks(copy)} of a copy of the model. Choose a multiple of {ep} processes."
        )
    if SHARDINGS[strategy.sharding].data_parallel == "none" and ep != tp:
        raise StrategyError(
            f"ep {ep} with sharding 'none' needs tp {ep}; got tp {tp}. Choose --tp {ep}, or sharding 'fsdp'."
        )


def _check_data_parallel(strategy: Strategy, kind: str, data: int, product: int) -> None:
    """Refuse a number of data-parallel ranks that the sharding cannot divide; `product`: ranks of each of them."""
    groups, alone = strategy.dp_replicate, product == 1
    one = "is one process" if alone else f"is {count_ranks(product)}"
    many = f"with dp_replicate {groups} needs groups of at least 2 ranks each"
    rules = {
        "none": (data == 1, one, product, "ddp" if alone else "fsdp"),
        "replicate": (data > 1 or not alone, "needs at least 2 ranks", 2, "none"),  # with tp its engine refuses
        # FSDP shards over the ranks of a sequence, too.
        "hybrid": (
            data * strategy.cp >= 2 * groups and data % groups == 0,
            many,
            ceil_div(2, strategy.cp) * groups * product,
            "fsdp",
        ),
        "shard": (True, "", 0, ""),
    }
    divides, rule, processes, other = rules[kind]
    if not divides:
        raise StrategyError(
            f"sharding {strategy.sharding!r} {rule}; got {count_ranks(data * product)}. Choose sharding {other!r}, "
            f"or {'1 process' if processes == 1 else f'{processes} processes'}."
        )


def count_ranks(ranks: int) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
