"""Rows of equal length, as they lie in the cache: written once, read by every rank as memory maps."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.tables import ATTENTIONS
from toolkit.core.cache import cache_folder
from toolkit.core.display import Result, Table
from toolkit.core.errors import DataError
from toolkit.data.packing import IGNORED, PACKED, PADDED, Counts

if TYPE_CHECKING:
    import numpy as np
    import torch

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

        names, shape = PACKED if self.packed else PADDED, (self.count, self.seq_len)
        return {name: np.memmap(self.folder / f"{name}.bin", "<i4", "r", shape=shape) for name in names}

    @cached_property
    def one_document(self) -> bool:
        """Whether no row holds a second document, or padding: then attention needs no mask."""
        if not self.packed:
            return False
        starts = self.columns["position_ids"]
        # A block at a time: most data answer with the first one.
        return not any((starts[at : at + 1024, 1:] == 0).any() for at in range(0, self.count, 1024))

    def batch(self, ids: Sequence[int], *, attention: str = "sdpa") -> dict[str, torch.Tensor]:
        """Return the inputs of the model's forward, int64 [len(ids), seq_len]; a row with the id -1 is not trained.

        `input_ids`, `labels` (not shifted; -100 trains nothing) and, packed,
        `position_ids`, else `attention_mask`. Under `attention` `flash_attention_*` packed rows are joined into one,
        [1, len(ids) × seq_len]: it keeps documents apart in a batch of one only, and silently does not in a larger one
        (transformers `modeling_flash_attention_utils._is_packed_sequence`). Losses are the same: a row's first label is
        never trained.
        """
        import numpy as np
        import torch

        index = np.asarray(ids, np.int64)
        arrays = {name: column[np.maximum(index, 0)].astype(np.int64) for name, column in self.columns.items()}
        batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
        batch["labels"][torch.from_numpy(index < 0)] = IGNORED
        if self.packed and ATTENTIONS[attention].joins_rows:
            return {name: column.reshape(1, -1) for name, column in batch.items()}
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory maps out: pickle would copy the data."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def tables(self) -> list[Table]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("folder", "pad_token_id")]
        return [Table(title="Data", columns=("field", "value"), rows=[(name, getattr(self, name)) for name in names])]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "folder": str(self.folder)}


def find_rows(fingerprint: str) -> Rows | None:
    """Return the rows with this fingerprint if the cache has them."""
    folder = cache_folder("data") / fingerprint
    return open_rows(folder) if folder.exists() else None


def open_rows(folder: Path) -> Rows:
    """Open the rows in a cache folder.

    Raises:
        DataError: for a folder that is not one, or whose files are not as long as it says.
    """
    try:
        rows = Rows(folder=folder, **json.loads((folder / META).read_text(encoding="utf-8")))
        for name in PACKED if rows.packed else PADDED:
            size, expected = (folder / f"{name}.bin").stat().st_size, rows.count * rows.seq_len * 4
            if size != expected:
                raise ValueError(f"{name}.bin has {size:,} bytes, expected {expected:,}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cached data {folder}: damaged ({error}). Delete the folder; it is made again.") from error
    return rows


def write_rows(
    folder: Path, rows: Iterable[dict[str, np.ndarray[Any, Any]]], counts: Counts, about: dict[str, Any]
) -> None:
    """Write rows as `folder`, whole or not at all; `counts` is complete once `rows` is used up; `about` is the rest."""
    names = PACKED if about["packed"] else PADDED
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:16]}-"))
    try:
        files = {name: (fresh / f"{name}.bin").open("wb") for name in names}
        count = 0
        try:
            for row in rows:
                for name, file in files.items():
                    file.write(row[name].astype("<i4").tobytes())
                count += 1
        finally:
            for file in files.values():
                file.close()
        meta = {**about, **dataclasses.asdict(counts), "count": count}
        if not count:
            raise DataError(
                f"data: no token to train on: {counts.documents} documents gave {counts.dropped} rows, none with a"
                f" trained label. Give more text, a --seq-len above {about['seq_len']} where prompts fill it, or"
                " --no-mask-prompts."
            )
        (fresh / META).write_text(json.dumps(meta, indent=2), encoding="utf-8")
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
