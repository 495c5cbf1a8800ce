"""The order of rows, which does not depend on the ranks, and each rank's share of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import DataError, value_or
from toolkit.core.units import ceil_div
from toolkit.data.rows import Rows, column_names

SHOWN_ROWS, ROW_TOKENS, LISTED_ROWS = 8, 12, 32
"""In a message on a step's samples: the rows with text, the tokens of each text, and the rows with a number."""

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.utils.data import DataLoader

    Loader = DataLoader[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Order:
    """An endless sequence of row ids: every epoch holds each row once, in an order drawn from seed and epoch alone.

    Without a seed every row once, in order, then -1.
    """

    rows: int
    seed: int | None

    def ids(self, start: int, count: int) -> list[int]:
        """Return the row ids at positions `start` to `start + count` of the whole training."""
        if self.seed is None:
            return [at if at < self.rows else -1 for at in range(start, start + count)]
        ids: list[int] = []
        while len(ids) < count:
            epoch, at = divmod(start + len(ids), self.rows)
            ids += _epoch(self.rows, self.seed, epoch)[at : at + count - len(ids)].tolist()
        return ids


@lru_cache(maxsize=2)
def _epoch(rows: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    import numpy as np

    # RandomState's stream is frozen by numpy's policy (NEP 19), so that a run can be resumed after an upgrade.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch)))).permutation(rows)


def _global_batch(train_config: TrainConfig, dp_size: int) -> int:
    return train_config.micro_batch * train_config.accumulation * dp_size


def sample_ids(rows: Rows, train_config: TrainConfig, *, dp_size: int, step: int) -> list[int]:
    """Return the row ids of the global batch of step `step` (from 0), in the order of training."""
    size = _global_batch(train_config, dp_size)
    return Order(rows=rows.count, seed=train_config.seed).ids(step * size, size)


def one_document(rows: Rows, train_config: TrainConfig, *, dp_size: int) -> bool:
    """Return whether no row of the training holds a second document, or padding: then attention needs no mask."""
    import numpy as np

    count = train_config.total_steps * _global_batch(train_config, dp_size)  # of the first epoch, if it is not all
    taken = np.sort(_epoch(rows.count, train_config.seed, 0)[:count]) if count < rows.count else np.arange(rows.count)
    column = rows.columns[column_names(rows.packed)[-1]]  # a document's first position is 0, padding is masked with it
    # A block at a time: most data answer with the first one.
    return not any((column[taken[at : at + 1024], 1:] == 0).any() for at in range(0, len(taken), 1024))


def hash_ids(ids: Sequence[int]) -> str:
    """Return 16 hexadecimal digits of the ids' sha256, which `events.jsonl` records for a global batch."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def spell_samples(rows: Rows, tokenizer: Any, ids: Sequence[int]) -> str:
    """Return a text with these rows for a message: their numbers, and for the first ones the start of their text.

    Never raises: a missing detail of a message must not prevent the save that follows.
    """

    def row_text(at: int) -> str:
        text = tokenizer.decode(rows.batch([at])["input_ids"][0][:ROW_TOKENS])
        return f"row {at} ({text!r} …)"

    parts = [value_or(f"row {at}", row_text, at) for at in ids[:SHOWN_ROWS]]  # a tokenizer may run anybody's code
    parts += map(str, ids[SHOWN_ROWS:LISTED_ROWS])
    if len(ids) > LISTED_ROWS:
        parts.append(f"{len(ids) - LISTED_ROWS:,} more")
    return f"{', '.join(parts)} of the rows in {rows.folder}"


def check_batch(rows: Rows, train_config: TrainConfig, *, dp_size: int) -> None:
    """Refuse data that are too few for one global batch.

    Raises:
        DataError: with both sizes, and what to make smaller.
    """
    size = _global_batch(train_config, dp_size)
    if rows.count < size:
        raise DataError(
            f"too little data: {rows.documents} documents with {rows.tokens:,} tokens make {rows.count} rows of"
            f" {rows.seq_len}, and one global batch takes {size} (micro_batch {train_config.micro_batch} × accumulation"
            f" {train_config.accumulation} × {dp_size} data-parallel ranks)."
            " Give more, or lower --micro-batch, --accumulation or --seq-len."
            + " With --no-packing each document is a row."
            * (rows.documents > rows.count)
        )


def batches(
    rows: Rows,
    train_config: TrainConfig,
    *,
    dp_rank: int,
    dp_size: int,
    start_step: int = 0,
    attention: str = "sdpa",
    workers: int = 0,
) -> Loader:
    """Return this rank's micro-batches from `start_step` to `train_config.total_steps`, `accumulation` of them a step.

    A step takes the next micro_batch × accumulation × dp_size samples of `Order`, whichever way these three split it. Of
    them, the first micro_batch × dp_size belong to the first micro-step, and so on; of a micro-step the first
    `micro_batch` belong to data-parallel rank 0, and so on. So the global batch depends on its size alone, and a run resumes
    anywhere with `start_step`, also on another number of ranks.

    `workers` processes load ahead where there are any; a batch depends on its index alone, so they change nothing.

    The loader is sharded by rank already: `accelerator.prepare` hands it back as it is, and tensors stay on the CPU.

    Raises:
        DataError: for fewer rows than one global batch.
    """
    check_batch(rows, train_config, dp_size=dp_size)
    first, last = (step * train_config.accumulation for step in (start_step, train_config.total_steps))
    order, indices = Order(rows=rows.count, seed=train_config.seed), range(first, max(first, last))
    return _loader(_Batches(rows, attention, order, train_config.micro_batch, dp_rank, dp_size, indices), workers)


def eval_batches(rows: Rows, *, micro_batch: int, dp_rank: int, dp_size: int, attention: str = "sdpa") -> Loader:
    """Return every row once over all ranks, in order, split over the ranks as in `batches`.

    All ranks get equally many batches of equal shape: what is missing at the end is rows without a trained label. So a
    batch may have no trained label at all, and its mean loss is then not a number: add up sums and counts.
    """
    order, indices = Order(rows=rows.count, seed=None), range(ceil_div(rows.count, micro_batch * dp_size))
    return _loader(_Batches(rows, attention, order, micro_batch, dp_rank, dp_size, indices))


@dataclass(frozen=True)
class _Batches:
    """A torch map-style dataset of whole batches. It can be pickled, for workers that are spawned."""

    rows: Rows
    attention: str
    order: Order
    micro_batch: int
    dp_rank: int
    dp_size: int
    indices: range
    """The micro-batches, counted from the training's beginning."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = (self.indices[index] * self.dp_size + self.dp_rank) * self.micro_batch
        return self.rows.batch(self.order.ids(start, self.micro_batch), attention=self.attention)


def _loader(dataset: _Batches, workers: int = 0) -> Loader:
    import torch
    from torch.utils.data import DataLoader

    # A generator of its own: without one, every pass over the loader draws from torch's global generator, and so moves
    # dropout.
    options: dict[str, Any] = {"batch_size": None, "generator": torch.Generator(), "num_workers": workers}
    loader: Loader = DataLoader(dataset, **options)  # type: ignore[arg-type]
    # Accelerate's mark of a loader that it has sharded. It would shard this one again.
    loader._is_accelerate_prepared = True
    return loader
