"""Documents → rows of equal length: packed where the model keeps documents apart by position, else padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from toolkit.core.errors import DataError
from toolkit.data.tokenization import Encoded

if TYPE_CHECKING:
    import numpy as np

Columns: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
"""The columns of a row, int32 [seq_len] each."""

IGNORED = -100
"""The label that trains nothing: transformers' and torch's own."""

OPEN_ROWS = 64
"""Rows that a prompt or conversation may still be fitted into."""


@dataclass(kw_only=True)
class Counts:
    """Figures of packing documents into rows."""

    documents: int = 0
    tokens: int = 0
    """In the returned rows, without padding."""
    trained_tokens: int = 0
    longest: int = 0
    """Tokens of the longest document; of an encoder-decoder's pair, those of its longer half."""
    truncated: int = 0
    """Prompts and conversations that were longer than a row, and lost their end."""
    dropped: int = 0
    """Rows without a trained label, left out."""
    too_long: int = 0
    """Documents longer than a row, left out."""
    remarks: dict[str, int] = field(default_factory=dict)
    """Key of `chat_template.REMARKS` → documents."""


def pack_rows(
    encoded: Iterable[Encoded],
    counts: Counts,
    *,
    kind: str,
    packed: bool,
    seq_len: int,
    pad: int,
    too_long: str = "cut",
) -> Iterator[Columns]:
    """Yield rows in a fixed order, without those that have no trained label; `counts` counts the documents.

    A text continues from row to row: the rest that does not fit starts the next row as a document of its own.
    Prompts and conversations longer than `seq_len` are truncated, or as `too_long` says. For `seq2seq` the prompt is the input
    and the completion the labels; of a text, each 2 × `seq_len` tokens (or what is left) are a row, the first half the
    input and the second the labels.
    """
    documents = _fitted(encoded, counts, kind == "seq2seq", seq_len, too_long)
    if kind == "seq2seq":
        rows = (_pair_columns(*pair, seq_len, pad) for pair in _seq2seq(documents, seq_len))
    else:
        make = _packed if packed else _padded
        rows = (_row_columns(row, packed, seq_len, pad) for row in make(documents, seq_len))
    for columns, tokens in rows:
        trained = int((columns["labels"] != IGNORED).sum())
        if trained:
            counts.tokens += tokens
            counts.trained_tokens += trained
            yield columns
        else:
            counts.dropped += 1


def _fitted(
    encoded: Iterable[Encoded], counts: Counts, seq2seq: bool, seq_len: int, too_long: str
) -> Iterator[Encoded]:
    """Count documents. Drop, split or refuse those longer than a row. A text goes on in the next row under cut and split."""
    for document in encoded:
        size = len(document.ids)
        longest = max(document.split, size - document.split) if seq2seq else size
        counts.documents += 1
        counts.longest = max(counts.longest, longest)
        for remark in document.remarks:
            counts.remarks[remark] = counts.remarks.get(remark, 0) + 1
        goes_on = not document.atomic and too_long in ("cut", "split")
        if longest <= seq_len or goes_on or too_long == "cut":
            counts.truncated += longest > seq_len and not goes_on
            yield document
        elif too_long == "drop":
            counts.too_long += 1
        elif too_long == "split" and not document.split:
            for start in range(0, size, seq_len):
                piece = slice(start, start + seq_len)
                yield replace(document, ids=document.ids[piece], trained=document.trained[piece])
        else:
            raise DataError(
                f"{document.where}: has {longest:,} tokens, expected at most {seq_len:,} (--seq-len) under --too-long"
                f" {too_long}. Shorten it, raise --seq-len, or use --too-long cut or drop."
            )


@dataclass(eq=False)
class _Row:
    """A row that is being filled."""

    left: int
    pieces: list[Encoded] = field(default_factory=list)

    def put(self, document: Encoded, start: int = 0) -> int:
        """Put in as much of the document, from `start`, as there is room for. Return how much."""
        end = min(start + self.left, len(document.ids))
        self.pieces.append(Encoded(ids=document.ids[start:end], trained=document.trained[start:end]))
        self.left -= end - start
        return end - start


def _packed(documents: Iterable[Encoded], seq_len: int) -> Iterator[_Row]:
    text, waiting = _Row(seq_len), list[_Row]()
    for document in documents:
        at, size, need = 0, len(document.ids), min(len(document.ids), seq_len)
        while not document.atomic and at < size:
            at += text.put(document, at)
            if not text.left:
                yield text
                text = _Row(seq_len)
        if document.atomic:
            row = next((row for row in waiting if row.left >= need), None)
            if row is None:
                if len(waiting) == OPEN_ROWS:
                    yield waiting.pop(waiting.index(min(waiting, key=attrgetter("left"))))
                row = _Row(seq_len)
                waiting.append(row)
            row.put(document)
            if not row.left:
                waiting.remove(row)
                yield row
    yield from (row for row in (text, *waiting) if row.pieces)


def _padded(documents: Iterable[Encoded], seq_len: int) -> Iterator[_Row]:
    for document in documents:
        for start in range(0, 1 if document.atomic else len(document.ids), seq_len):
            row = _Row(seq_len)
            row.put(document, start)
            yield row


def _seq2seq(documents: Iterable[Encoded], seq_len: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield an encoder's inputs and a decoder's labels."""
    for document in documents:
        ids = document.ids
        if document.atomic:
            yield ids[: document.split][:seq_len], ids[document.split :][:seq_len]
            continue
        for start in range(0, len(ids), 2 * seq_len):
            piece = ids[start : start + 2 * seq_len]
            half = (len(piece) + 1) // 2
            yield piece[:half], piece[half:]


def _row_columns(row: _Row, packed: bool, seq_len: int, pad: int) -> tuple[Columns, int]:
    """Return a causal model's row and its tokens. The first token of a document is predicted by none: it has no label."""
    import numpy as np

    steps = np.arange(seq_len, dtype=np.int32) if packed else np.ones(seq_len, np.int32)
    ids, labels, last = (np.full(seq_len, value, np.int32) for value in (pad, IGNORED, 0))
    end = 0
    for piece in row.pieces:
        start, end = end, end + len(piece.ids)
        ids[start:end], last[start:end] = piece.ids, steps[: end - start]
        labels[start + 1 : end] = np.where(piece.trained[1:], ids[start + 1 : end], IGNORED)
    if packed:  # what is left of the row counts as one more document
        last[end:] = steps[: row.left]
    return {"input_ids": ids, "labels": labels, "position_ids" if packed else "attention_mask": last}, end


def _pair_columns(source: Sequence[int], target: Sequence[int], seq_len: int, pad: int) -> tuple[Columns, int]:
    """Return an encoder-decoder's row and its tokens. The model shifts the labels, so the first one is trained."""
    columns = {
        "input_ids": _filled(source, seq_len, pad),
        "labels": _filled(target, seq_len, IGNORED),
        "attention_mask": _filled([1] * len(source), seq_len, 0),
    }
    return columns, len(source) + len(target)


def _filled(values: Sequence[int] | np.ndarray[Any, Any], size: int, rest: int) -> np.ndarray[Any, Any]:
    import numpy as np

    row = np.full(size, rest, np.int32)
    row[: len(values)] = values
    return row
