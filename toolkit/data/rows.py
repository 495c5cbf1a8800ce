"""Rows of equal length, as they lie in the cache: written once, read by every rank as memory maps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.tables import ATTENTIONS
from toolkit.core.cache import cache_folder
from toolkit.core.display import Result, Table
from toolkit.core.errors import DataError
from toolkit.data.packing import IGNORED
from toolkit.models.varlen import document_bounds

if TYPE_CHECKING:
    import numpy as np

META = "meta.json"


@dataclass(frozen=True, kw_only=True)
class Rows(Result):
    """A data set, ready to train on: rows of `seq_len` tokens. A sample's id is its row's index."""

    folder: Path
    """Where `input_ids.bin` and the other columns lie: little-endian int32 [count, seq_len]."""
    fingerprint: str
    """sha256 of the data's bytes, the tokenizer, the settings and this format: equal fingerprints, equal rows."""
    count: int
    seq_len: int
    documents: int
    tokens: int
    """Without padding."""
    trained_tokens: int
    """Tokens that the model is asked to predict."""
    truncated: int
    """Prompts and conversations longer than a row, which lost their end."""
    dropped: int
    """Rows without a trained token, left out."""
    packed: bool
    """Several documents a row, kept apart by `position_ids`; else one a row, padded, with `attention_mask`."""
    kind: str
    """`causal` or `seq2seq`."""
    pad_token_id: int

    @cached_property
    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """The columns as read-only memory maps, int32 [count, seq_len]."""
        import numpy as np

        shape, names = (self.count, self.seq_len), column_names(self.packed)
        return {name: np.memmap(self.folder / f"{name}.bin", "<i4", "r", shape=shape) for name in names}

    @cached_property
    def one_document(self) -> bool:
        """Whether no row holds a second document, or padding: then attention needs no mask."""
        # A block at a time: most data answer with the first one.
        return self.packed and not any(
            (self.columns["position_ids"][at : at + 1024, 1:] == 0).any() for at in range(0, self.count, 1024)
        )

    def batch(self, ids: Sequence[int], *, attention: str = "sdpa") -> dict[str, Any]:
        """Return the inputs of the model's forward, int64 [len(ids), seq_len]; a row with the id -1 is not trained.

        `input_ids`, `labels` (not shifted; -100 trains nothing) and, packed,
        `position_ids`, else `attention_mask`. Under `flash_attention_*` and `varlen` packed rows are joined into one,
        [1, len(ids) × seq_len], with the documents' bounds: without these, transformers' flash attention keeps documents
        apart in a batch of one only, and silently does not in a larger one (`_is_packed_sequence`). Losses are the same:
        a row's first label is never trained.
        """
        import numpy as np
        import torch

        index = np.asarray(ids, np.int64)
        arrays = {name: column[np.maximum(index, 0)].astype(np.int64) for name, column in self.columns.items()}
        batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
        batch["labels"][torch.from_numpy(index < 0)] = IGNORED
        if self.packed and ATTENTIONS[attention].joins_rows:
            joined = {name: column.reshape(1, -1) for name, column in batch.items()}
            return {**joined, **document_bounds(joined["position_ids"])}
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory maps out: pickle would copy the data."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def tables(self) -> list[Table]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("folder", "pad_token_id")]
        return [Table(title="Data", columns=("field", "value"), rows=[(name, getattr(self, name)) for name in names])]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "folder": str(self.folder)}


def column_names(packed: bool) -> tuple[str, ...]:
    """Return the columns of a row, int32 [seq_len] each."""
    return ("input_ids", "labels", "position_ids" if packed else "attention_mask")


def find_rows(fingerprint: str) -> Rows | None:
    """Open the rows with this fingerprint if the cache has them.

    Raises:
        DataError: for a folder with files that are not as long as it says.
    """
    folder = cache_folder("data") / fingerprint
    if not folder.exists():
        return None
    try:
        rows = Rows(folder=folder, **json.loads((folder / META).read_text(encoding="utf-8")))
        for name in column_names(rows.packed):
            size, expected = (folder / f"{name}.bin").stat().st_size, rows.count * rows.seq_len * 4
            if size != expected:
                raise ValueError(f"{name}.bin has {size:,} bytes, expected {expected:,}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cached data {folder}: damaged ({error}). Delete the folder; it is made again.") from error
    return rows
